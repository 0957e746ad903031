"""Incomplete requests against the real command, under a limit of 200 open files."""

import http.client
import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing

import pytest

pytest.importorskip("uvicorn")

from carmil.viewer import connections

FILES, HELD = 200, 230
PATIENCE = 300  # seconds until a test fails
QUICK = """
import sys
import carmil.viewer.connections as connections
connections.REQUEST_SECONDS = float(sys.argv.pop(1))
from carmil.cli import main
main()
"""


class Server:
    """`carmil view` with another request deadline, in a separate process that may open few files."""

    def __init__(self, folder, seconds):
        words = [sys.executable, "-c", QUICK, str(seconds), "view", str(folder), "--port", "0", "--no-browser"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
        )
        line = self.process.stdout.readline()
        result = re.search(r"http://[^:/]+:(\d+)/", line)
        assert result, line + self.process.stderr.read()
        self.port = int(result[1])

    def connect(self, start=b""):
        line = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        line.sendall(start)
        return line

    def cohort(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.request("GET", "/api/cohort")
        answer = connection.getresponse()
        body = json.loads(answer.read())
        connection.close()
        return answer.status, len(body["cases"])


def _running(folder, seconds):
    server = Server(folder, seconds)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


@pytest.fixture(scope="module")
def patient(study_folder):
    """Yield a server whose request deadline never expires, so that only the connection limit protects it."""
    yield from _running(study_folder / "run", 600)


@pytest.fixture(scope="module")
def impatient(study_folder):
    yield from _running(study_folder / "run", 2)


def is_closed(line):
    """Return True once the server closes the connection; fail after a timeout."""
    line.settimeout(PATIENCE)
    try:
        while line.recv(2**16):
            pass
    except ConnectionError:
        return True
    return True


@pytest.mark.finding(n=15)
def test_incomplete_requests_do_not_block_other_requests(patient):
    with ExitStack() as held:
        lines = [
            held.enter_context(patient.connect(b"GET /api/cohort HTTP/1.1\r\nHost: localhost\r\nX: "))
            for _ in range(HELD)
        ]
        assert patient.cohort() == (200, 9)
        assert is_closed(lines[0])  # above the limit, the oldest connection is closed
        assert patient.cohort() == (200, 9)
    assert patient.cohort() == (200, 9)


@pytest.mark.finding(n=15)
@pytest.mark.parametrize(
    "half",
    [
        b"",
        b"GET /api/coh",
        b"GET /api/cohort HTTP/1.1\r\nHost: localhost\r\n",
        b"POST /api/case/0/whatif HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{",
        b"GET /api/cohort HTTP/1.1\r\nHost: localhost\r\n\r\nGET /api/coh",
    ],
    ids=["nothing", "half a line", "half a head", "half a body", "half a second request"],
)
def test_incomplete_request_is_closed_after_the_deadline(impatient, half):
    with impatient.connect(half) as line:
        assert is_closed(line)
    assert impatient.cohort() == (200, 9)


@pytest.mark.finding(n=15)
def test_request_sent_byte_by_byte_is_closed_after_the_deadline(impatient):
    end = time.monotonic() + PATIENCE
    with (
        impatient.connect(b"GET /api/cohort HTTP/1.1\r\nHost: localhost\r\nX: ") as line,
        pytest.raises(ConnectionError),
    ):
        while time.monotonic() < end:
            line.sendall(b"x")
            time.sleep(0.05)


@pytest.mark.finding(n=15)
def test_reused_connection_stays_open(patient):
    with closing(http.client.HTTPConnection("127.0.0.1", patient.port, timeout=PATIENCE)) as connection:
        connection.connect()
        line = connection.sock
        for _ in range(5):
            connection.request("GET", "/api/cohort")
            assert connection.getresponse().read() and connection.sock is line


@pytest.mark.finding(n=15)
@pytest.mark.parametrize(("files", "expected"), [(200, 100), (1024, 512), (10**6, 512), (10, 8), (-1, 512)])
def test_connection_limit_is_half_of_the_file_limit(monkeypatch, files, expected):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (files, files))
    assert connections.connection_limit() == expected
