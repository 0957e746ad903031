"""The routes of the viewer. Requests are read and validated by the routes; slow work runs in lanes with bounded queues."""

import asyncio
import json
import re
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from carmil.errors import CarmilError
from carmil.viewer.guard import Guard, RefusedError, refusal
from carmil.viewer.limits import BusyError, Lane
from carmil.viewer.preparation import Preparation
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
PATIENCE = 10  # seconds until a body must have arrived
MOST_TOP = 100
_TILE = re.compile(r"([0-9]{1,7})_([0-9]{1,7})\.jpeg")
_INSTANCE = re.compile(r"([0-9]{1,9})\.jpeg")
_NUMBER = re.compile(r"[0-9]{1,6}")


def guarded_app(
    *runs: Responses,
    preparation: Preparation | None = None,
    is_known: Callable[[str], bool],
    token: str | None = None,
    port: int = 0,
) -> ASGIApp:
    """Build the whole viewer. The name of its cookie contains the port, since browsers share cookies between ports.

    preparation: opens the runs, if they are not given.
    """
    return Guard(Viewer(runs, preparation).app(), is_known=is_known, token=token, cookie=f"carmil_{port}")


@dataclass(frozen=True)
class CaseOf:
    """A case, by its number among those of its run."""

    answers: Responses
    number: int


class Viewer:
    """`runs` are numbered in their order, and their cases one run after another."""

    def __init__(self, runs: Sequence[Responses], preparation: Preparation | None = None) -> None:
        self._runs, self.preparation = tuple(runs), preparation
        self.stamp = secrets.token_hex(8)  # changes with every start, so that no earlier response in a cache is valid
        self.pictures = Lane("pictures", threads=2, waiting=512)
        self.thumbnails = Lane(
            "thumbnails", threads=1, waiting=512
        )  # a whole slide each: tiles in view do not wait for them
        self.quick = Lane("answers", threads=2, waiting=64)
        self.slow = Lane("curves", threads=1, waiting=16)

    @property
    def runs(self) -> Sequence[Responses]:
        """Return the runs; none while they are prepared."""
        return self._runs if self.preparation is None else self.preparation.result

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
            Route(f"{case}/annotations", self.annotations),
            Route(f"{case}/annotations", self.annotate, methods=["POST"]),
            Route(f"{case}/annotations.geojson", self.geojson),
            Route(f"{case}/tiles.csv", self.tile_table),
            Route(f"{case}/zoom/{{level:int}}/{{tile}}", self.tile),
            Route(f"{case}/instance/{{name}}", self.instance),
            Route(f"{case}/thumbnail.jpeg", self.thumbnail),
        ]
        handlers: dict[Any, Any] = {
            HTTPException: lambda request, error: refusal(error.status_code, _WORDS[error.status_code], error.headers),
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
        for lane in (self.pictures, self.thumbnails, self.quick, self.slow):
            lane.close()

    async def index(self, request: Request) -> Response:
        _only(request, "token")
        return _file("index.html")

    async def page(self, request: Request) -> Response:
        _only(request)
        return _file(request.path_params["name"])

    async def cohort(self, request: Request) -> Response:
        runs = self.runs
        run = _whole(request, "run", 0, 0, max(0, len(runs) - 1))
        _only(request, "run")
        if self.preparation is not None and not runs:
            return _json_response(json.dumps({"preparing": asdict(self.preparation.state)}).encode())
        names = [answers.run.name for answers in runs]
        return _json_response(await self.quick.run(("cohort", run), lambda: runs[run].cohort(names)))

    async def case(self, request: Request) -> Response:
        case = self._case(request)
        _only(request)
        return _json_response(await self.quick.run(("case", case), lambda: case.answers.case(case.number)))

    async def places(self, request: Request) -> Response:
        case = self._case(request)
        _only(request)
        return _json_response(await self.quick.run(("places", case), lambda: case.answers.places(case.number)))

    async def map(self, request: Request) -> Response:
        case, name = self._case(request), request.path_params["name"]
        of = _class(request, case)
        _only(request, "class")
        if name not in case.answers.maps.kinds:
            raise RefusedError(404, f"there is no such map; expected one of {', '.join(case.answers.maps.kinds)}")
        await self._explained(case)
        text = await self.quick.run(("map", case, name, of), lambda: case.answers.map(case.number, name, of))
        self.quick.begin(
            ("prepared", case), lambda: case.answers.whatif.prepare(case.number)
        )  # a what-if may come next
        return _json_response(text)

    async def top(self, request: Request) -> Response:
        case = self._case(request)
        of, count = _class(request, case), _whole(request, "count", 8, 1, MOST_TOP)
        _only(request, "class", "count")
        await self._explained(case)
        return _json_response(
            await self.quick.run(("top", case, of, count), lambda: case.answers.top(case.number, of, count))
        )

    async def deletion(self, request: Request) -> Response:
        case = self._case(request)
        of = _class(request, case)
        _only(request, "class")
        await self._explained(case)
        return _json_response(
            await self.slow.run(("deletion", case, of), lambda: case.answers.deletion(case.number, of))
        )

    async def without(self, request: Request) -> Response:
        case = self._case(request)
        _only(request)
        asked = case.answers.checked(case.number, await _body(request))
        if "top" in asked:
            await self._explained(case)
        await self.quick.run(("prepared", case), lambda: case.answers.whatif.prepare(case.number))
        return _json_response(await self.quick.run(object(), lambda: case.answers.without(case.number, asked)))

    async def annotations(self, request: Request) -> Response:
        case = self._case(request)
        _only(request)
        return _json_response(await self.slow.run(("annotations", case), lambda: case.answers.annotations(case.number)))

    async def annotate(self, request: Request) -> Response:
        case = self._case(request)
        _only(request)
        asked = await _body(request)
        return _json_response(await self.slow.run(object(), lambda: case.answers.annotate(case.number, asked)))

    async def geojson(self, request: Request) -> Response:
        case = self._case(request)
        _only(request)
        regions = case.answers.regions
        content = await self.slow.run(object(), lambda: regions.geojson(case.number))
        return _download(content, regions.file_name(case.number, ".geojson"), "application/geo+json")

    async def tile_table(self, request: Request) -> Response:
        case = self._case(request)
        _only(request)
        await self._explained(case)
        content = await self.slow.run(("tiles.csv", case), lambda: case.answers.tile_table(case.number))
        return _download(content, case.answers.regions.file_name(case.number, "_tiles.csv"), "text/csv")

    async def tile(self, request: Request) -> Response:
        case, level = self._case(request), request.path_params["level"]
        found = _TILE.fullmatch(request.path_params["tile"])
        _only(request)
        if found is None or level > 64:
            raise RefusedError(404, "there is no such tile")
        place = level, int(found[1]), int(found[2])
        return await self._picture(
            request, case, ("tile", case.number, *place), lambda: case.answers.pictures.tile(case.number, *place)
        )

    async def instance(self, request: Request) -> Response:
        case = self._case(request)
        found = _INSTANCE.fullmatch(request.path_params["name"])
        _only(request)
        if found is None or int(found[1]) >= case.answers.run.size(case.number):
            raise RefusedError(404, "there is no such instance")
        j = int(found[1])
        return await self._picture(
            request, case, ("instance", case.number, j), lambda: case.answers.pictures.instance(case.number, j)
        )

    async def thumbnail(self, request: Request) -> Response:
        case = self._case(request)
        _only(request)
        key, make = ("thumbnail", case.number), lambda: case.answers.pictures.thumbnail(case.number)
        return await self._picture(request, case, key, make, self.thumbnails)

    async def _picture(
        self,
        request: Request,
        case: CaseOf,
        key: tuple[Any, ...],
        make: Callable[[], bytes | None],
        lane: Lane | None = None,
    ) -> Response:
        told = {"etag": f'"{self.stamp}{request.url.path}"', "cache-control": "private, no-cache"}
        if request.headers.get("if-none-match") == told["etag"]:
            return Response(status_code=304, headers=told)
        jpeg = case.answers.pictures.kept(*key) or await (lane or self.pictures).run((case, key), make)
        if jpeg is None:
            raise RefusedError(404, "there is no such picture")
        return Response(jpeg, media_type="image/jpeg", headers=told)

    async def _explained(self, case: CaseOf) -> None:
        """Explain a case once for all concurrent requests."""
        await self.quick.run(("explained", case), lambda: case.answers.maps.evidence_of(case.number))

    def _case(self, request: Request) -> CaseOf:
        number: int = request.path_params["number"]
        for answers in self.runs:
            if answers.first <= number < answers.first + len(answers.run):
                return CaseOf(answers, number - answers.first)
        count = sum(len(answers.run) for answers in self.runs)
        expected = f"expected 0 to {count - 1}" if count else "the slides are not ready yet"
        raise RefusedError(404, f"there is no such case: {expected}")


_WORDS = {404: "there is nothing here", 405: "this method is not allowed here"}


def _json_response(text: bytes) -> Response:
    return Response(text, media_type="application/json", headers={"cache-control": "no-store"})


def _download(content: bytes, name: str, kind: str) -> Response:
    headers = {"cache-control": "no-store", "content-disposition": f"attachment; filename*=UTF-8''{quote(name)}"}
    return Response(content, media_type=kind, headers=headers)


def _file(name: str) -> Response:
    """Return a file of the page: only plain files in its folder."""
    path, kind = PAGE / name, KINDS.get(Path(name).suffix)
    if kind is None or not path.is_file() or path.resolve().parent != PAGE.resolve():
        raise RefusedError(404, "there is nothing here")
    return Response(path.read_bytes(), media_type=kind, headers={"cache-control": "no-cache"})


def _class(request: Request, case: CaseOf) -> int:
    """Return the requested class; by default the answer."""
    run = case.answers.run
    return _whole(request, "class", run.leading(case.number), 0, len(run.outputs) - 1)


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


async def _body(request: Request) -> Any:
    """Return the JSON body, unless it is too large or too slow."""
    body = b""
    try:
        async with asyncio.timeout(PATIENCE):
            async for part in request.stream():
                body += part
                if len(body) > LARGEST_BODY:
                    raise RefusedError(413, f"too much: expected at most {LARGEST_BODY:,} bytes")
        return json.loads(body)
    except TimeoutError:
        raise RefusedError(408, "the request did not arrive in time") from None
    except ClientDisconnect:  # the client has disconnected; avoids a traceback in the log
        raise RefusedError(400, "the request did not arrive whole") from None
    except (ValueError, RecursionError):
        raise RefusedError(400, "this is not JSON") from None
