"""A cache of bounded size, and lanes of work with a bounded queue."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class BoundedCache(Generic[Value]):
    """The most recently used values, with a total `weigh` of at most `room`. Thread-safe."""

    def __init__(self, room: int, weigh: Callable[[Value], int]) -> None:
        self.room, self.weigh, self.weight = room, weigh, 0
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Value | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Hashable, value: Value) -> None:
        """Store a value and drop the least recently used ones; a value that is too large by itself is not stored."""
        weight = self.weigh(value)
        if weight > self.room:
            return
        with self._lock:
            if key in self._values:
                self.weight -= self.weigh(self._values.pop(key))
            self._values[key] = value
            self.weight += weight
            while self.weight > self.room:
                self.weight -= self.weigh(self._values.popitem(last=False)[1])


class BusyError(Exception):
    """Raised if the queue of a lane is full."""


class Lane:
    """A few threads for one kind of work, with a bounded queue. Equal requests at the same time are computed once."""

    def __init__(self, name: str, *, threads: int, waiting: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._most = threads + waiting
        self._under_way: dict[Hashable, asyncio.Future[Any]] = {}

    async def run(self, key: Hashable, work: Callable[[], Value]) -> Value:
        """Return the result of `work`; raise BusyError if the queue is full."""
        if key not in self._under_way and len(self._under_way) >= self._most:
            raise BusyError
        # A client may disconnect while others still wait for the result.
        return await asyncio.shield(self._begun(key, work))

    def begin(self, key: Hashable, work: Callable[[], Value]) -> None:
        """Start work that will be requested soon, unless the queue is half full."""
        if len(self._under_way) < self._most // 2:
            self._begun(key, work)

    def _begun(self, key: Hashable, work: Callable[[], Value]) -> "asyncio.Future[Any]":
        future = self._under_way.get(key)
        if future is None:
            future = asyncio.get_running_loop().run_in_executor(self._threads, work)
            self._under_way[key] = future
            future.add_done_callback(lambda done: self._ended(key, done))
        return future

    def _ended(self, key: Hashable, done: "asyncio.Future[Any]") -> None:
        del self._under_way[key]
        if not done.cancelled():
            done.exception()  # marks it as retrieved, even if every client has disconnected

    def close(self) -> None:
        """Drop queued work; work that has started finishes by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)
