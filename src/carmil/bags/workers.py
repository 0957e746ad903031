"""Files read by several processes at once."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import parent_process
from typing import Any

from carmil.bags.sources import READERS, Source
from carmil.errors import CarmilError

_PATIENCE = 300  # seconds without a single bag


def worker_count(workers: int | None, sources: Sequence[Source]) -> int:
    """As many as there are cores; one, in this very process, for a cohort that is read in a moment or by a reader of one's own."""
    if any(source.layout in READERS for source in sources):
        return 1
    if workers is not None:
        return max(1, workers)
    size = sum(path.stat().st_size for path in {source.path for source in sources} if path.exists())
    return 1 if size < 2**28 else min(os.cpu_count() or 1, 16)


def in_parallel(
    work: Callable[..., Any], jobs: Iterable[tuple[Source, tuple[Any, ...]]], workers: int
) -> Iterator[tuple[Source, Any]]:
    """(source, work(*arguments)) of every job, in the order in which they are finished."""
    if workers == 1:
        for source, arguments in jobs:
            yield source, work(*arguments)
        return
    with ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with_parent
    ) as pool:
        waiting: dict[Future[Any], Source] = {}
        try:
            for source, arguments in jobs:
                waiting[pool.submit(work, *arguments)] = source
                if len(waiting) >= 2 * workers:
                    yield from _finished(waiting)
            while waiting:
                yield from _finished(waiting)
        except BrokenProcessPool:
            raise CarmilError(
                f"a process that reads files died: too little memory, or one of these is damaged: {_names(waiting)}; what is "
                "packed is kept. In a script of one's own the call must stand below if __name__ == '__main__':"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _finished(waiting: dict[Future[Any], Source]) -> Iterator[tuple[Source, Any]]:
    done, _ = wait(waiting, timeout=_PATIENCE, return_when=FIRST_COMPLETED)
    if not done:  # a damaged h5 can make its library turn in circles
        for process in multiprocessing.active_children():
            process.kill()
        raise CarmilError(
            f"no file could be read for {_PATIENCE} s; one of these is damaged: {_names(waiting)}; what is packed is kept"
        )
    for future in done:
        result = future.result()
        yield waiting.pop(future), result


def _names(waiting: dict[Future[Any], Source]) -> str:
    return ", ".join(str(source.path) for source in list(waiting.values())[:4])


def _end_with_parent() -> None:
    """A worker whose parent was killed must not wait for work for ever."""

    def watch() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
