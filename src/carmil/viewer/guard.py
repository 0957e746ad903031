"""Security checks that every request must pass before it is read by any other code.

These are hosts (against DNS rebinding), a token if the viewer can be reached from other machines, origins (against
other pages in the same browser), and the length and alphabet of the address; headers on every response forbid
framing, foreign scripts and content sniffing.
"""

import hmac
import ipaddress
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
LONGEST_PATH, LONGEST_QUERY, LONGEST_HEADER = 200, 400, 8192  # bytes
_PLAIN_PATH = re.compile(rb"/(?:[A-Za-z0-9_-][A-Za-z0-9._-]*/)*(?:[A-Za-z0-9_-][A-Za-z0-9._-]*)?")
_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "font-src 'self'; worker-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}

log = logging.getLogger("carmil.viewer")


class RefusedError(Exception):
    """Raised to answer a request with this status and line of text."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status, self.line = status, line


def refusal(status: int, line: str, headers: Mapping[str, str] | None = None) -> Response:
    retry = {"retry-after": "1"} if status == 503 else {}
    return JSONResponse({"error": line}, status, headers={"cache-control": "no-store", **retry, **(headers or {})})


class Guard:
    """Middleware in front of `app`. `is_known` tests for the viewer's hosts; every request needs the `token`, if there is one."""

    def __init__(self, app: ASGIApp, *, is_known: Callable[[str], bool], token: str | None, cookie: str) -> None:
        self.app, self.is_known, self.token, self.cookie = app, is_known, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        begun = False

        async def answer(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                own = {name.encode(): value.encode() for name, value in HEADERS.items()}
                message["headers"] = [*(pair for pair in message["headers"] if pair[0] not in own), *own.items()]
            await send(message)

        try:
            response = self._looked_at(scope)
            await (response or self.app)(scope, receive, answer)
        except RefusedError as refused:
            await refusal(refused.status, refused.line)(scope, receive, answer)
        except Exception:
            log.exception("%s %s", scope["method"], scope["path"])
            if not begun:
                await refusal(500, "internal error; see the terminal for details")(scope, receive, answer)

    def _looked_at(self, scope: Scope) -> Response | None:
        """Refuse a request that fails a check. Return a response if the request only delivers the token."""
        headers = _single(scope["headers"])
        host = headers.get("host", "")
        match = _HOST.fullmatch(host)
        if match is None or not self.is_known(match[1].lower()):
            raise RefusedError(421, "this is not the host you asked for: open the address that `carmil view` printed")
        _check_path(scope)
        query = _query(scope["query_string"])
        entered = self._check_token(scope, headers, query)
        _check_origin(scope, headers, host)
        return entered

    def _check_token(self, scope: Scope, headers: dict[str, str], asked: dict[str, str]) -> Response | None:
        given = asked.get("token")
        if given is not None and scope["path"] != "/":
            raise RefusedError(400, "the token belongs to the first address only")
        if self.token is None:
            return None
        if given is not None and _same(given, self.token):
            response = Response(status_code=303, headers={"location": "/", "cache-control": "no-store"})
            response.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", path="/")
            return response
        if given is not None or not _same(_cookie(headers, self.cookie), self.token):
            raise RefusedError(401, "a token is needed: open the address that `carmil view` printed")
        return None


def known_hosts(names: Iterable[str], *, any_address: bool) -> Callable[[str], bool]:
    """Return a test for the viewer's hosts. any_address: accept every IP address (DNS rebinding needs a name)."""
    own_hosts = {*LOOPBACK, *(name.lower() for name in names)}

    def is_known(host: str) -> bool:
        return host in own_hosts or (any_address and is_address(host.strip("[]")))

    return is_known


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _single(pairs: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return headers by name; those used by a check may occur only once."""
    headers: dict[str, str] = {}
    for raw, value in pairs:
        name = raw.decode("latin-1").lower()
        if len(value) > LONGEST_HEADER:
            raise RefusedError(431, f"the header {name[:40]} is too long")
        if name in headers and name in ("host", "origin", "cookie", "content-type", "content-length", "sec-fetch-site"):
            raise RefusedError(400, f"the header {name} is there twice")
        headers[name] = value.decode("latin-1")
    return headers


def _check_path(scope: Scope) -> None:
    """Refuse addresses with escapes, or with a part that is empty or begins with a dot."""
    raw = scope.get("raw_path") or scope["path"].encode()
    if len(raw) > LONGEST_PATH:
        raise RefusedError(414, "the address is too long")
    if not _PLAIN_PATH.fullmatch(raw) or raw.decode("ascii") != scope["path"]:
        raise RefusedError(404, "there is nothing here")


def _query(raw: bytes) -> dict[str, str]:
    if len(raw) > LONGEST_QUERY:
        raise RefusedError(414, "the address is too long")
    try:
        pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, strict_parsing=bool(raw), max_num_fields=8)
    except ValueError:
        raise RefusedError(400, "the query string cannot be read") from None
    if len({name for name, _ in pairs}) < len(pairs):
        raise RefusedError(400, "a parameter is given twice")
    return dict(pairs)


def _check_origin(scope: Scope, headers: dict[str, str], host: str) -> None:
    """Refuse requests from another page in the same browser, except for links to the viewer."""
    site = headers.get("sec-fetch-site", "none")
    if site not in ("same-origin", "none") and not (scope["method"] == "GET" and scope["path"] == "/"):
        raise RefusedError(403, "requests from another page are refused")
    if "origin" in headers and headers["origin"].lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
        raise RefusedError(403, "requests from another page are refused")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if scope["method"] == "POST" and kind != "application/json":
        raise RefusedError(415, "expected JSON (content-type: application/json)")


def _cookie(headers: dict[str, str], name: str) -> str:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return "" if morsel is None else morsel.value


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())
