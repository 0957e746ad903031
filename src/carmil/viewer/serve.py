"""Serve the viewer on this machine or, with a token, to other machines."""

import ipaddress
import re
import secrets
import socket
import webbrowser
from collections.abc import Callable, Sequence

import uvicorn

from carmil.errors import CarmilError
from carmil.progress import Log
from carmil.viewer.app import guarded_app
from carmil.viewer.connections import BACKLOG, BoundedConnection
from carmil.viewer.guard import is_address, known_hosts
from carmil.viewer.preparation import Preparation
from carmil.viewer.responses import Responses

WILD = ("0.0.0.0", "::")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,128}")


def serve(
    open_runs: Callable[[], Sequence[Responses]],
    *,
    preparation: Preparation | None = None,
    shown: str = "",
    host: str,
    port: int,
    token: str | None,
    browser: bool,
    log: Log,
    announce: Callable[[str], None],
) -> None:
    """Open the runs, then serve them until interrupted.

    preparation: opens the runs instead, and is shown on the page meanwhile. shown: the part of the address that names
    the view shown first. announce: called with the address to open.
    """
    token = checked_token(token, host)
    listening = bound(host, port)
    runs: Sequence[Responses] = ()
    try:
        if preparation is None:
            runs = open_runs()
        port = listening.getsockname()[1]
        app = guarded_app(*runs, preparation=preparation, is_known=hosts_of(host), token=token, port=port)
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
        address = address_of(host, port, token) + shown
        announce(address)
        if browser:
            webbrowser.open(address)
        if preparation is not None:
            preparation.start()
        try:
            uvicorn.Server(config).run(sockets=[listening])
        finally:
            if preparation is not None and preparation.stop():
                log("interrupted: run the same command again to resume")
            for answers in preparation.result if preparation is not None else runs:
                answers.pictures.slides.close()
    finally:
        listening.close()


def checked_token(token: str | None, host: str) -> str | None:
    """Return the token that requests need: the given one, a new one if other machines can reach the viewer, else None."""
    if token is not None and not _TOKEN.fullmatch(token):
        raise CarmilError("--token: expected 16 to 128 letters, digits, - and _; leave it out to generate one")
    return token if token is not None or is_loopback(host) else secrets.token_urlsafe(32)


def is_loopback(host: str) -> bool:
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def bound(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 selects any free port."""
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
    """Return a test for the hosts that a request may name; if the viewer listens on all addresses, its names and any IP address."""
    plain = host.strip("[]")
    if plain in WILD:
        return known_hosts([socket.gethostname(), socket.getfqdn()], any_address=True)
    return known_hosts([f"[{plain}]" if is_address(plain) and ":" in plain else plain], any_address=False)


def address_of(host: str, port: int, token: str | None) -> str:
    plain = host.strip("[]")
    name = socket.gethostname() if plain in WILD else f"[{plain}]" if ":" in plain else plain
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")
