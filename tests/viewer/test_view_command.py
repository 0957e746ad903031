"""The real command on a free port: its output, its responses and its exit."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

PATIENCE = 300  # seconds until a test fails


class Viewing:
    """`carmil view` in a separate process."""

    def __init__(self, *words):
        command = [sys.executable, "-m", "carmil", "view", *map(str, words), "--port", "0", "--no-browser"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)

    def open(self):
        """Wait for the printed address."""
        line = self.process.stdout.readline()
        result = re.search(r"http://[^:/]+:(\d+)/(?:\?token=(\S+))?", line)
        assert result, line + self.process.stderr.read()
        self.port, self.token = int(result[1]), result[2]
        return self

    def ask(self, target, method="GET", body=None, headers=()):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.request(method, target, body=body, headers=dict(headers))
        answer = connection.getresponse()
        response = answer.status, dict(answer.getheaders()), answer.read()
        connection.close()
        return response

    def raw(self, text):
        """Send these bytes and return the response."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as line:
            line.sendall(text)
            line.shutdown(socket.SHUT_WR)
            parts = b""
            while part := line.recv(2**16):
                parts += part
        return parts

    def end(self):
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err


@pytest.fixture
def viewing():
    started = []

    def start(*words):
        started.append(Viewing(*words))
        return started[-1].open()

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()


def test_view_serves_a_run_with_its_slides(viewing, study_folder):
    server = viewing(study_folder / "run", "--slides", study_folder / "slides")
    status, headers, body = server.ask("/api/cohort")
    assert status == 200 and len(json.loads(body)["cases"]) == 9 and "server" not in headers
    number = next(case["number"] for case in json.loads(body)["cases"] if case["slide"] == "s0")
    assert server.ask(f"/api/case/{number}/zoom/10/0_0.jpeg")[2][:2] == b"\xff\xd8"
    posted = server.ask(
        f"/api/case/{number}/whatif", "POST", json.dumps({"remove": [0]}), {"content-type": "application/json"}.items()
    )
    assert posted[0] == 200 and json.loads(posted[2])["removed"] == [0]
    assert server.ask("/")[0] == 200
    for request in (
        b"GET /page/../../app.py HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /page/%2e%2e%2fapp.py HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /api/cohort HTTP/1.1\r\nHost: elsewhere.example\r\nConnection: close\r\n\r\n",
        b"GET http://elsewhere.example/api/cohort HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /api/cohort HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"GET /api/cohort HTTP/1.1\r\nHost: localhost\r\nHost: elsewhere\r\n\r\n",
        b"GET /api/cohort HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"\0\0\0\0nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ):
        answer = server.raw(request)
        assert re.match(rb"HTTP/1\.1 4\d\d ", answer) or answer == b"", answer[:200]
        assert b"Traceback" not in answer and b"starlette" not in answer
    code, _, err = server.end()
    assert code in (0, -signal.SIGINT, 130) and "Traceback" not in err
    assert "1 link to slides outside it" in err


def test_view_on_another_host_requires_a_generated_token(viewing, study_folder):
    server = viewing(study_folder / "run", "--host", "0.0.0.0")
    assert len(server.token) >= 40
    assert server.ask("/api/cohort")[0] == 401
    status, headers, _ = server.ask(f"/?token={server.token}")
    assert (status, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"].partition(";")[0]
    assert server.ask("/api/cohort", headers={"cookie": cookie}.items())[0] == 200
    server.end()


def test_view_opens_the_folder_of_a_demo(viewing, demo_folder):
    server = viewing(demo_folder)
    assert json.loads(server.ask("/api/cohort")[2])["run"] == "car-abmil"
    assert server.ask("/api/case/0/instance/0.jpeg")[2][:2] == b"\xff\xd8"
    _, _, err = server.end()
    assert "there is also" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["RUN", "--slides", "nowhere"], "--slides nowhere is not a folder"),
        (["RUN", "--token", "short"], "--token: expected 16 to 128"),
        (["RUN", "--host", "no.such.host.invalid"], "is not an address of this machine"),
        (["RUN", "--port", "TAKEN"], "choose another with --port"),
        (["RUN", "--port", "70000"], "'--port': Input should be less"),
    ],
)
def test_invalid_view_options_exit_with_one_line(run_cli, study_folder, words, expected):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        named = {"RUN": str(study_folder / "run"), "TAKEN": str(taken.getsockname()[1])}
        code, _, err = run_cli("view", *[named.get(word, word) for word in words], "--no-browser")
    assert code == 2 and expected in err and err.count("\n") == 1


def test_view_of_a_folder_without_a_run_exits_with_an_error(run_cli, tmp_path):
    code, _, err = run_cli("view", str(tmp_path), "--no-browser")
    assert code == 2 and "is not a run" in err


def test_demo_prints_the_view_command_or_opens_the_viewer(run_cli, demo_folder, monkeypatch):
    from carmil.cli import machine

    opened = []
    monkeypatch.setattr(machine, "serve_run", opened.append)
    words = ["demo", "--fast", "--device", "cpu", "--out", str(demo_folder)]
    code, out, _ = run_cli(*words)
    assert code == 0 and out.endswith(f"carmil view {demo_folder}\n") and opened == []
    code, _, _ = run_cli(*words, "--view")
    assert code == 0 and opened == [demo_folder]


def test_view_without_the_viewer_extra_names_the_install_command(study_folder):
    words = ["carmil", "view", str(study_folder / "run"), "--no-browser"]
    code = f"import sys; sys.modules['starlette'] = None; sys.argv = {words!r}; from carmil.cli import main; main()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 2
    assert ended.stderr == "carmil: the viewer needs starlette and uvicorn: pip install 'carmil[viewer]'\n"
