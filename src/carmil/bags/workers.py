"""Files read by several processes at once. They are started as a module of ours: none of them imports the caller's script."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from carmil.bags.sources import READERS, Source
from carmil.bags.worker import MODULE, READY, as_line, of_line
from carmil.errors import CarmilError

_PATIENCE = 300  # seconds without a single bag


def worker_count(workers: int | None, sources: Sequence[Source]) -> int:
    """As many as there are cores; one, in this very process, for a cohort that is read in a moment or by a reader of one's own."""
    if any(source.layout in READERS for source in sources) or getattr(sys, "frozen", False) or not sys.executable:
        return 1
    if workers is not None:
        return max(1, workers)
    size = sum(path.stat().st_size for path in {source.path for source in sources} if path.exists())
    return 1 if size < 2**28 else min(os.cpu_count() or 1, 16)


def in_parallel(
    work: Callable[..., Any], jobs: Iterable[tuple[Source, tuple[Any, ...]]], workers: int
) -> Iterator[tuple[Source, Any]]:
    """(source, work(*arguments)) of every job, in the order in which they are finished. `work` is a function of a module."""
    if workers == 1:
        for source, arguments in jobs:
            yield source, work(*arguments)
        return
    processes = _Processes()
    with ThreadPoolExecutor(workers) as threads:  # each waits for a process of its own
        waiting: dict[Future[Any], Source] = {}
        try:
            for source, arguments in jobs:
                waiting[threads.submit(processes.ask, source.path, work, arguments)] = source
                if len(waiting) >= 2 * workers:
                    yield from _finished(waiting)
            while waiting:
                yield from _finished(waiting)
        finally:
            processes.kill()  # the threads' reads end
            threads.shutdown(cancel_futures=True)
            processes.close()


def _finished(waiting: dict[Future[Any], Source]) -> Iterator[tuple[Source, Any]]:
    done, _ = wait(waiting, timeout=_PATIENCE, return_when=FIRST_COMPLETED)
    if not done:  # a damaged h5 can make its library turn in circles
        names = ", ".join(str(source.path) for source in list(waiting.values())[:4])
        raise CarmilError(
            f"no file could be read for {_PATIENCE} s; one of these is damaged: {names}; what is packed is kept"
        )
    for future in done:
        result = future.result()
        yield waiting.pop(future), result


class _Processes:
    """One worker process for each thread that asks; all of them end together."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._lock = threading.Lock()
        self._started: list[subprocess.Popen[str]] = []
        self._ended = False

    def ask(self, path: Path, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """What the work gives in this thread's process. path: the file it is about, for messages."""
        process = getattr(self._own, "process", None)
        if process is None:
            process = self._own.process = self._start()
        result = _answered(process, as_line((work, arguments)))
        if result is None:
            raise CarmilError(
                f"a process that reads files died at {path}: too little memory, or the file is damaged; what is packed is kept"
            )
        return of_line(result)

    def kill(self) -> None:
        with self._lock:
            self._ended = True
            for process in self._started:
                process.kill()

    def close(self) -> None:
        for process in self._started:
            with suppress(BrokenPipeError), process:
                pass

    def _start(self) -> subprocess.Popen[str]:
        # Modules are found where this process finds them, and not in the folder that happens to be the current one.
        path = os.pathsep.join(os.path.abspath(place) for place in sys.path)
        with self._lock:
            if self._ended:
                raise CarmilError("interrupted")
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", MODULE],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    encoding="utf-8",
                    env={**os.environ, "PYTHONPATH": path},
                    process_group=0,  # Ctrl-C reaches this process, which ends them
                )
            except OSError as error:
                raise CarmilError(
                    f"no process that reads files can be started ({error}): use fewer --workers"
                ) from error
            self._started.append(process)
        if _answered(process, "") != as_line(READY):
            raise CarmilError(
                f"a process that reads files could not be started ({sys.executable} -m {MODULE}): use --workers 1"
            )
        return process


def _answered(process: subprocess.Popen[str], request: str) -> str | None:
    """The process's next line; None if it died."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(request)
        process.stdin.flush()
    except (BrokenPipeError, ValueError):
        return None
    return process.stdout.readline() or None
