"""Connections with deadlines and an upper bound: incomplete requests and unread responses cannot block the viewer.

A connection that waits for the rest of a request, or for its client to read, is closed after some seconds. The number
of connections is below the number of files that the process may open, so that slides can always be opened; at the
limit, a new connection replaces the one that has waited longest for its request.
"""

import asyncio
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 15  # from the start of a connection, or the last response, until a request has arrived completely
READING_SECONDS = 30  # until a client must have read a response
MOST = 512  # simultaneous connections; the lanes bound their work
LEAST = 8
BACKLOG = 16  # connections accepted at once, before the bound can be applied


def connection_limit() -> int:
    """Return the largest number of connections: at most half of the files that this process may open."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return MOST
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else max(LEAST, min(MOST, soft // 2))


class BoundedConnection(H11Protocol):
    """uvicorn's connection, with deadlines for the client."""

    request_deadline: asyncio.TimerHandle | None = None
    reading_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_request()
        if len(self.connections) > connection_limit():
            self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.reading_deadline = self.loop.call_later(READING_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.reading_deadline is not None:
            self.reading_deadline.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadlines()
        super().connection_lost(exc)

    def _watch_request(self) -> None:
        """Start the deadline when waiting for a request, and cancel it when the request has arrived completely."""
        arrived = self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        if arrived and self.request_deadline is not None:
            self.request_deadline.cancel()
            self.request_deadline = None
        elif not arrived and self.request_deadline is None:
            self.request_deadline = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def _make_room(self) -> None:
        """Close the connection that has waited longest for its request; if all others are being answered, this one."""
        others = (cast("BoundedConnection", other) for other in self.connections if other is not self)
        waiting = {other: other.request_deadline.when() for other in others if other.request_deadline is not None}
        oldest = min(waiting, key=waiting.__getitem__, default=self)
        oldest._cancel_deadlines()
        self.connections.discard(oldest)  # immediately, since its transport reports the loss later
        oldest.transport.abort()

    def _cancel_deadlines(self) -> None:
        for deadline in (self.request_deadline, self.reading_deadline):
            if deadline is not None:
                deadline.cancel()
        self.request_deadline = None
