"""A small study with slide files, and a way to ask the viewer as a server would: every byte of the address as it is."""

import asyncio
import json
from dataclasses import dataclass
from urllib.parse import unquote

import numpy as np
import pytest
import tifffile
from tools.small_study import train_small_study

from carmil.viewer.app import guarded_app
from carmil.viewer.guard import known_hosts
from carmil.viewer.responses import Responses
from carmil.viewer.run_cases import read_cases
from carmil.viewer.slide_files import SlideFiles

SECRET = "nobody may read this"


@dataclass
class Said:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


class Asking:
    """Asks an ASGI application, one after the other or many at once, in one loop."""

    def __init__(self, app, runner):
        self.app, self.runner = app, runner

    def __call__(self, target, method="GET", headers=(), body=b"", host="localhost:8765"):
        return self.runner.run(self.one(target, method, headers, body, host))

    def post(self, target, asked, **others):
        return self(target, "POST", [("content-type", "application/json")], json.dumps(asked).encode(), **others)

    def many(self, targets):
        async def together():
            return await asyncio.gather(*(self.one(target) for target in targets))

        return self.runner.run(together())

    async def one(self, target, method="GET", headers=(), body=b"", host="localhost:8765", cut=False):
        """cut: the connection ends before the body does."""
        raw, _, query = target.encode("latin-1").partition(b"?")
        pairs = [(b"host", host.encode("latin-1"))] if host is not None else []
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(raw.decode("latin-1")),
            "raw_path": raw,
            "query_string": query,
            "headers": [*pairs, *((name.encode(), value.encode("latin-1")) for name, value in headers)],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8765),
        }
        parts = [body[i : i + 2**16] for i in range(0, len(body), 2**16)] or [b""]
        said = []

        async def receive():
            if not parts:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts) or cut}

        async def send(message):
            said.append(message)

        await self.app(scope, receive, send)
        found = {name.decode(): value.decode() for name, value in said[0]["headers"]}
        return Said(said[0]["status"], found, b"".join(part.get("body", b"") for part in said[1:]))


def write_slide(path, *, width=1000, height=700):
    """A plain tiled TIFF of half a micrometre a pixel; red grows to the right, green downwards."""
    picture = np.zeros((height, width, 3), np.uint8)
    picture[..., 0] = np.linspace(0, 255, width).astype(np.uint8)
    picture[..., 1] = np.linspace(0, 255, height).astype(np.uint8)[:, None]
    tifffile.imwrite(
        path,
        picture,
        tile=(256, 256),
        photometric="rgb",
        resolution=(20_000, 20_000),
        resolutionunit="CENTIMETER",
        metadata=None,
    )


@pytest.fixture(scope="session")
def study_folder(tmp_path_factory):
    """A study's run, and a folder with two of its slides, a link that leads out and a text that is no slide."""
    folder = tmp_path_factory.mktemp("viewed")
    train_small_study(folder, tiles=30)
    (folder / "slides").mkdir()
    for name in ("s0", "s1"):
        write_slide(folder / "slides" / f"{name}.tif")
    write_slide(folder / "elsewhere.tif")
    (folder / "slides" / "s2.tif").symlink_to(folder / "elsewhere.tif")
    (folder / "slides" / "secret.txt").write_text(SECRET)
    return folder


@pytest.fixture(scope="session")
def run(study_folder):
    return read_cases(study_folder / "run")


@pytest.fixture(scope="session")
def runner():
    with asyncio.Runner() as one:
        yield one


@pytest.fixture(scope="session")
def files(study_folder, run):
    found = SlideFiles(study_folder / "slides", [case.slide for case in run.cases])
    yield found
    found.close()


@pytest.fixture(scope="session")
def answers(run, files):
    return Responses(run, files)


@pytest.fixture(scope="session")
def ask(answers, runner):
    return Asking(guarded_app(answers, is_known=known_hosts([], any_address=False)), runner)


@pytest.fixture(scope="session")
def ask_with_token(answers, runner):
    app = guarded_app(answers, is_known=known_hosts([], any_address=False), token="t" * 32, port=8765)
    return Asking(app, runner)


@pytest.fixture
def number_of(run):
    """The number of the case of a slide."""
    return {case.slide: number for number, case in enumerate(run.cases)}


@pytest.fixture
def asking(runner):
    """Asks another application."""
    return lambda app: Asking(app, runner)
