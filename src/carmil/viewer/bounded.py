"""Work and memory with bounds: whatever is asked, only so much is kept, done at once, or waited for."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class BoundedCache(Generic[Value]):
    """The values that were used last, as far as they fit into `room` by what `weigh` says of each. For several threads."""

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
        """Keeps the value, and lets go of the ones not used for longest; one that is too large alone is not kept."""
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
    """So much is waiting already that nothing more is taken on."""


class Lane:
    """A few threads for one kind of work. What is asked twice at once is done once; what may wait is bounded."""

    def __init__(self, name: str, *, threads: int, waiting: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._most = threads + waiting
        self._under_way: dict[Hashable, asyncio.Future[Any]] = {}

    async def run(self, key: Hashable, work: Callable[[], Value]) -> Value:
        """What `work` gives; raises BusyError where too much is waiting."""
        if key not in self._under_way and len(self._under_way) >= self._most:
            raise BusyError
        # One who asked may leave; the others still want the answer.
        return await asyncio.shield(self._begun(key, work))

    def begin(self, key: Hashable, work: Callable[[], Value]) -> None:
        """Does what will be asked for soon, unless much is waiting."""
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
            done.exception()  # has been looked at, even if everyone who asked has left

    def close(self) -> None:
        """What waits is dropped; what is under way ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)
