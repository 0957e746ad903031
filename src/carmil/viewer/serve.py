"""Serve the viewer on this machine or, with a token, to others."""

import ipaddress
import re
import secrets
import socket
import webbrowser
from collections.abc import Callable
from pathlib import Path

import uvicorn

from carmil.errors import CarmilError
from carmil.progress import Log
from carmil.viewer.app import PAGE, guarded_app
from carmil.viewer.connections import BACKLOG, BoundedConnection
from carmil.viewer.guard import is_address, known_hosts
from carmil.viewer.responses import Responses
from carmil.viewer.run_cases import read_cases
from carmil.viewer.slide_files import SlideFiles

WILD = ("0.0.0.0", "::")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,128}")


def serve(
    folder: Path,
    *,
    slides: Path | None,
    mpp: float | None,
    host: str,
    port: int,
    token: str | None,
    browser: bool,
    log: Log,
    announce: Callable[[str], None],
) -> None:
    """Read the run, then serve until interrupted. `announce` gets the address to open."""
    token = checked_token(token, host)
    listening = bound(host, port)
    try:
        run = read_cases(folder, log=log)
        files = SlideFiles(slides, [case.slide for case in run.cases], mpp=mpp, log=log)
        remarks = missing()
        for line in remarks:
            log(line)
        port = listening.getsockname()[1]
        answers = Responses(run, files, remarks=remarks, log=log)
        app = guarded_app(answers, is_known=hosts_of(host), token=token, port=port)
        config = uvicorn.Config(
            app,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            http=BoundedConnection,
            backlog=BACKLOG,
            h11_max_incomplete_event_size=2**14,
            timeout_graceful_shutdown=2,
        )
        address = address_of(host, port, token)
        announce(address)
        if browser:
            webbrowser.open(address)
        try:
            uvicorn.Server(config).run(sockets=[listening])
        finally:
            files.close()
    finally:
        listening.close()


def checked_token(token: str | None, host: str) -> str | None:
    """The token that requests need: the given one; a new one where others can reach the machine; else none."""
    if token is not None and not _TOKEN.fullmatch(token):
        raise CarmilError("--token: expected 16 to 128 letters, digits, - and _; without it one is made")
    return token if token is not None or is_loopback(host) else secrets.token_urlsafe(32)


def is_loopback(host: str) -> bool:
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def bound(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any free port."""
    plain = host.strip("[]")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(plain, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise CarmilError(f"--host {host} is not an address of this machine ({error})") from None
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise CarmilError(
            f"cannot listen on {host}, port {port} ({error.strerror}): choose another with --port, or --port 0 for a free one"
        ) from None
    return listening


def hosts_of(host: str) -> Callable[[str], bool]:
    """A test for the hosts that a request may name. On all addresses of the machine: its names, and any IP address."""
    plain = host.strip("[]")
    if plain in WILD:
        return known_hosts([socket.gethostname(), socket.getfqdn()], any_address=True)
    return known_hosts([f"[{plain}]" if is_address(plain) and ":" in plain else plain], any_address=False)


def address_of(host: str, port: int, token: str | None) -> str:
    plain = host.strip("[]")
    name = socket.gethostname() if plain in WILD else f"[{plain}]" if ":" in plain else plain
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def missing() -> list[str]:
    """Lines about parts of the page that are not installed."""
    if (PAGE / "openseadragon.min.js").is_file():
        return []
    return [
        "OpenSeadragon is missing, so slides cannot be zoomed: run `python tools/fetch_openseadragon.py` (it needs npm)"
    ]
