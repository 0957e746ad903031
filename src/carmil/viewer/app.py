"""The routes of the viewer. Requests are read and checked here; work that takes time runs in lanes, which are bounded."""

import asyncio
import json
import re
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from carmil.errors import CarmilError
from carmil.viewer.guard import Guard, RefusedError, refusal
from carmil.viewer.limits import BusyError, Lane
from carmil.viewer.responses import Responses

PAGE = Path(__file__).parent / "page"
KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
LARGEST_BODY = 2**20  # bytes
PATIENCE = 10  # seconds for a body to arrive
MOST_TOP = 100
_TILE = re.compile(r"([0-9]{1,7})_([0-9]{1,7})\.jpeg")
_INSTANCE = re.compile(r"([0-9]{1,9})\.jpeg")
_NUMBER = re.compile(r"[0-9]{1,6}")


def guarded_app(
    answers: Responses, *, is_known: Callable[[str], bool], token: str | None = None, port: int = 0
) -> ASGIApp:
    """The whole viewer. The name of its cookie has the port, since cookies are shared between ports."""
    return Guard(Viewer(answers).app(), is_known=is_known, token=token, cookie=f"carmil_{port}")


class Viewer:
    def __init__(self, answers: Responses) -> None:
        self.answers = answers
        self.stamp = secrets.token_hex(8)  # changes with every start: nothing cached before is valid
        self.pictures = Lane("pictures", threads=2, waiting=512)
        self.quick = Lane("answers", threads=2, waiting=64)
        self.slow = Lane("curves", threads=1, waiting=16)

    def app(self) -> Starlette:
        case = "/api/case/{number:int}"
        routes = [
            Route("/", self.index),
            Route("/page/{name}", self.page),
            Route("/api/cohort", self.cohort),
            Route(case, self.case),
            Route(f"{case}/places", self.places),
            Route(f"{case}/map/{{name}}", self.map),
            Route(f"{case}/top", self.top),
            Route(f"{case}/deletion", self.deletion),
            Route(f"{case}/whatif", self.without, methods=["POST"]),
            Route(f"{case}/zoom/{{level:int}}/{{tile}}", self.tile),
            Route(f"{case}/instance/{{name}}", self.instance),
        ]
        handlers: dict[Any, Any] = {
            HTTPException: lambda request, error: _with(refusal(error.status_code, _WORDS[error.status_code]), error),
            RefusedError: lambda request, error: refusal(error.status, error.line),
            CarmilError: lambda request, error: refusal(422, str(error)),
            BusyError: lambda request, error: refusal(503, "the server is busy: try again in a moment"),
            Exception: lambda request, error: refusal(500, "internal error; see the terminal for details"),
        }
        app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)
        app.router.redirect_slashes = False
        return app

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        for lane in (self.pictures, self.quick, self.slow):
            lane.close()

    async def index(self, request: Request) -> Response:
        _only(request, "token")
        return _file("index.html")

    async def page(self, request: Request) -> Response:
        _only(request)
        return _file(request.path_params["name"])

    async def cohort(self, request: Request) -> Response:
        _only(request)
        return _said(await self.quick.run("cohort", self.answers.cohort))

    async def case(self, request: Request) -> Response:
        number = self._number(request)
        _only(request)
        return _said(await self.quick.run(("case", number), lambda: self.answers.case(number)))

    async def places(self, request: Request) -> Response:
        number = self._number(request)
        _only(request)
        return _said(await self.quick.run(("places", number), lambda: self.answers.places(number)))

    async def map(self, request: Request) -> Response:
        number, name = self._number(request), request.path_params["name"]
        of = self._class(request, number)
        _only(request, "class")
        if name not in self.answers.maps.kinds:
            raise RefusedError(404, f"there is no such map; there is: {', '.join(self.answers.maps.kinds)}")
        await self._explained(number)
        text = await self.quick.run(("map", number, name, of), lambda: self.answers.map(number, name, of))
        self.quick.begin(("prepared", number), lambda: self.answers.whatif.prepare(number))  # a what-if may come next
        return _said(text)

    async def top(self, request: Request) -> Response:
        number = self._number(request)
        of, count = self._class(request, number), _whole(request, "count", 8, 1, MOST_TOP)
        _only(request, "class", "count")
        await self._explained(number)
        return _said(await self.quick.run(("top", number, of, count), lambda: self.answers.top(number, of, count)))

    async def deletion(self, request: Request) -> Response:
        number = self._number(request)
        of = self._class(request, number)
        _only(request, "class")
        await self._explained(number)
        return _said(await self.slow.run(("deletion", number, of), lambda: self.answers.deletion(number, of)))

    async def without(self, request: Request) -> Response:
        number = self._number(request)
        _only(request)
        asked = self.answers.checked(number, _parsed(await _body(request)))
        if "top" in asked:
            await self._explained(number)
        await self.quick.run(("prepared", number), lambda: self.answers.whatif.prepare(number))
        return _said(await self.quick.run(object(), lambda: self.answers.without(number, asked)))

    async def tile(self, request: Request) -> Response:
        number, level = self._number(request), request.path_params["level"]
        found = _TILE.fullmatch(request.path_params["tile"])
        _only(request)
        if found is None or level > 64:
            raise RefusedError(404, "there is no such tile")
        key = ("tile", number, level, int(found[1]), int(found[2]))
        return await self._picture(request, key, lambda: self.answers.pictures.tile(*key[1:]))

    async def instance(self, request: Request) -> Response:
        number = self._number(request)
        found = _INSTANCE.fullmatch(request.path_params["name"])
        _only(request)
        if found is None or int(found[1]) >= self.answers.run.size(number):
            raise RefusedError(404, "there is no such instance")
        key = ("instance", number, int(found[1]))
        return await self._picture(request, key, lambda: self.answers.pictures.instance(*key[1:]))

    async def _picture(self, request: Request, key: tuple[Any, ...], make: Callable[[], bytes | None]) -> Response:
        told = {"etag": f'"{self.stamp}{request.url.path}"', "cache-control": "private, no-cache"}
        if request.headers.get("if-none-match") == told["etag"]:
            return Response(status_code=304, headers=told)
        jpeg = self.answers.pictures.kept(*key) or await self.pictures.run(key, make)
        if jpeg is None:
            raise RefusedError(404, "there is no such picture")
        return Response(jpeg, media_type="image/jpeg", headers=told)

    async def _explained(self, number: int) -> None:
        """Explain a case once, however many requests need it."""
        await self.quick.run(("explained", number), lambda: self.answers.maps.evidence_of(number))

    def _number(self, request: Request) -> int:
        number: int = request.path_params["number"]
        if number >= len(self.answers.run):
            raise RefusedError(404, f"there is no such case: expected 0 to {len(self.answers.run) - 1}")
        return number

    def _class(self, request: Request, number: int) -> int:
        """The requested class; by default the answer."""
        return _whole(request, "class", self.answers.run.cases[number].leading, 0, len(self.answers.run.classes) - 1)


_WORDS = {404: "there is nothing here", 405: "this method is not allowed here"}


def _with(response: Response, error: HTTPException) -> Response:
    response.headers.update(error.headers or {})
    return response


def _said(text: bytes) -> Response:
    return Response(text, media_type="application/json", headers={"cache-control": "no-store"})


def _file(name: str) -> Response:
    """A file of the page: only plain files that lie in its folder."""
    path, kind = PAGE / name, KINDS.get(Path(name).suffix)
    if kind is None or not path.is_file() or path.resolve().parent != PAGE.resolve():
        raise RefusedError(404, "there is nothing here")
    return Response(path.read_bytes(), media_type=kind, headers={"cache-control": "no-cache"})


def _only(request: Request, *names: str) -> None:
    surplus = set(request.query_params) - set(names)
    if surplus:
        raise RefusedError(400, f"unknown parameter; expected {' and '.join(names) or 'none'}")


def _whole(request: Request, name: str, otherwise: int, least: int, most: int) -> int:
    given = request.query_params.get(name)
    if given is None:
        return otherwise
    if not _NUMBER.fullmatch(given) or not least <= int(given) <= most:
        raise RefusedError(400, f"{name}: expected a whole number from {least} to {most}")
    return int(given)


async def _body(request: Request) -> bytes:
    """The body, if it is not too large and arrives in time."""
    body = b""
    try:
        async with asyncio.timeout(PATIENCE):
            async for part in request.stream():
                body += part
                if len(body) > LARGEST_BODY:
                    raise RefusedError(413, f"too much: expected at most {LARGEST_BODY:,} bytes")
    except TimeoutError:
        raise RefusedError(408, "the request did not arrive in time") from None
    except ClientDisconnect:  # nobody reads the answer; no traceback in the log
        raise RefusedError(400, "the request did not arrive whole") from None
    return body


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise RefusedError(400, "this is not JSON") from None
