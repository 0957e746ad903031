"""A small study with slide files, a client that passes every byte of the address to the viewer unchanged, and a browser."""

import asyncio
import json
import shutil
import socket
import subprocess
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from urllib.parse import unquote

import numpy as np
import pytest
import tifffile
from tools.small_study import train_small_study

from carmil.files import atomic_file
from carmil.viewer.app import PAGE, guarded_app
from carmil.viewer.cases import read_cases
from carmil.viewer.guard import known_hosts
from carmil.viewer.responses import Responses
from carmil.viewer.slide_files import SlideFiles

from .fake_server import serving
from .target_studies import train_study

SECRET = "nobody may read this"
AXE = "axe-core@4.14.0"


@dataclass
class ViewerResponse:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


class Client:
    """Sends requests to an ASGI application, one by one or concurrently, in one event loop."""

    def __init__(self, app, runner):
        self.app, self.runner = app, runner

    def __call__(self, target, method="GET", headers=(), body=b"", host="localhost:8765"):
        return self.runner.run(self.one(target, method, headers, body, host))

    def post(self, target, request, **others):
        return self(target, "POST", [("content-type", "application/json")], json.dumps(request).encode(), **others)

    def many(self, targets):
        async def together():
            return await asyncio.gather(*(self.one(target) for target in targets))

        return self.runner.run(together())

    async def one(self, target, method="GET", headers=(), body=b"", host="localhost:8765", cut=False):
        """Send one request; with `cut`, the connection ends before the body does."""
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
        messages = []

        async def receive():
            if not parts:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts) or cut}

        async def send(message):
            messages.append(message)

        await self.app(scope, receive, send)
        result = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
        return ViewerResponse(messages[0]["status"], result, b"".join(part.get("body", b"") for part in messages[1:]))


def write_slide(path, *, width=1000, height=700):
    """Write a tiled TIFF with 0.5 um/px in which red increases to the right and green downwards."""
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
    """Return a run and a folder with two of its slides, a link to a file outside, and a text file."""
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
    result = SlideFiles(study_folder / "slides", [case.slide for case in run.cases])
    yield result
    result.close()


@pytest.fixture(scope="session")
def answers(run, files, study_folder):
    return Responses(run, files, annotations=study_folder / "annotations")


@pytest.fixture(scope="session")
def ask(answers, runner):
    return Client(guarded_app(answers, is_known=known_hosts([], any_address=False)), runner)


@pytest.fixture(scope="session")
def ask_with_token(answers, runner):
    app = guarded_app(answers, is_known=known_hosts([], any_address=False), token="t" * 32, port=8765)
    return Client(app, runner)


@pytest.fixture(scope="session")
def run_of_kind(tmp_path_factory):
    """Return a function that trains a small run of a kind of target, once, and returns its folder."""
    return cache(lambda kind: train_study(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture
def number_of(run):
    """Return the case number of every slide."""
    return {case.slide: number for number, case in enumerate(run.cases)}


@pytest.fixture
def asking(runner):
    """Return a function that creates a client for another application."""
    return lambda app: Client(app, runner)


# The page in a real browser. Pages are closed before the server they ask: `opened` needs `serve`.


@pytest.fixture(scope="module")
def browser():
    """Yield Debian's chromium."""
    driver = pytest.importorskip("playwright.sync_api", reason="needs playwright, from the dev group")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs chromium (apt-get install chromium)")
    if not (PAGE / "openseadragon.min.js").is_file():
        pytest.skip("needs OpenSeadragon (python tools/fetch_openseadragon.py)")
    with driver.sync_playwright() as playwright:
        one = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield one
        one.close()


@pytest.fixture(scope="module")
def made_up():
    """Yield the address of a server of made-up cases."""
    with serving() as address:
        yield address


@contextmanager
def running(app):
    """Yield the address of a server of an application on a free port."""
    uvicorn = pytest.importorskip("uvicorn")
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@pytest.fixture
def serve():
    """Return a function that serves an application until the end of the test, and returns its address."""
    with ExitStack() as servers:
        yield lambda app: servers.enter_context(running(app))


@pytest.fixture
def opened(browser, serve):
    """Return a function that opens an address; the page must log no errors. With `refused`, failed requests are expected."""
    from .pages import DESK, PATIENCE, settled, troubles_of

    troubles = []
    with ExitStack() as contexts:

        def go(address, *, refused=False, **look):
            context = browser.new_context(**{"viewport": DESK, "reduced_motion": "reduce", **look})
            contexts.callback(context.close)
            context.set_default_timeout(1000 * PATIENCE)
            page = context.new_page()
            troubles.append(troubles_of(page, refused=refused))
            page.goto(address)
            settled(page)
            return page

        yield go
    assert not any(troubles), troubles


@pytest.fixture(scope="session")
def axe(pytestconfig, tmp_path_factory):
    """Return the script of axe-core, downloaded once into the cache of pytest."""
    if not pytestconfig.pluginmanager.hasplugin("cacheprovider"):
        pytest.skip("needs the cache of pytest")
    kept = pytestconfig.cache.mkdir("axe") / f"{AXE}.js"
    if not kept.is_file():
        npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("axe")
        if npm is None:
            pytest.skip("needs npm to fetch axe-core")
        pack = [npm, "pack", "--silent", "--fetch-retries=1", AXE]
        done = subprocess.run(pack, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"npm could not fetch {AXE}")
        shutil.unpack_archive(folder / done.stdout.strip().splitlines()[-1], folder, filter="data")
        with atomic_file(kept) as aside:  # other processes may read it
            shutil.copy(folder / "package" / "axe.min.js", aside)
    return kept.read_text()
