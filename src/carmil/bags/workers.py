"""Files read by several processes at once. A process imports this package and never the caller's script.

A process receives functions with their arguments and returns the results, pickled, through the pipes of its standard input and
output. It ends when its input does, so that none outlives the process that started it.
"""

import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from multiprocessing.connection import wait
from typing import Any

from carmil.bags.sources import READERS, Source
from carmil.errors import CarmilError
from carmil.untrusted import short_message

_PATIENCE = 300  # seconds without a single result
_READY = "ready"
_COMMAND = ("-P", "-c", "from carmil.bags.workers import serve; serve()")
_Process = subprocess.Popen[bytes]


def worker_count(workers: int | None, sources: Sequence[Source]) -> int:
    """One process per core. A small cohort, or one that a registered reader reads, is read by this process alone."""
    if any(source.layout in READERS for source in sources) or getattr(sys, "frozen", False) or not sys.executable:
        return 1
    if workers is not None:
        return max(1, workers)
    size = sum(path.stat().st_size for path in {source.path for source in sources} if path.exists())
    return 1 if size < 2**28 else min(os.cpu_count() or 1, 16)


def in_parallel(
    work: Callable[..., Any], jobs: Iterable[tuple[Source, tuple[Any, ...]]], workers: int
) -> Iterator[tuple[Source, Any]]:
    """Yield (source, work(*arguments)) for every job, in the order in which they finish. `work` is a module's function.

    Where the work raises an error in another process, the result is that error as a `CarmilError`.
    """
    if workers == 1:
        yield from ((source, work(*arguments)) for source, arguments in jobs)
        return
    remaining, processes = iter(jobs), list[_Process]()
    running: dict[_Process, Source] = {}
    try:
        first = list(islice(remaining, workers))
        processes += (_start() for _ in first)
        for process, (source, arguments) in zip(processes, first, strict=True):
            if _receive(process) != _READY:
                raise CarmilError(f"a process to read files could not be started ({sys.executable}): use --workers 1")
            running[process] = source
            _send(process, (work, arguments))
        while running:
            for process in _finished(running):
                source, result = running.pop(process), _receive(process)
                if result is _DIED:
                    raise CarmilError(
                        f"a process died while it read {source.path}: it ran out of memory, or the file is damaged; "
                        "the slides packed so far are kept"
                    )
                if (job := next(remaining, None)) is not None:
                    running[process] = job[0]
                    _send(process, (work, job[1]))
                yield source, result
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()


def serve() -> None:
    """Run the work that arrives on standard input until it ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not come between answers
    requests: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    result: object = _READY
    while True:
        try:
            pickle.dump(result, answers)
            answers.flush()
        except BrokenPipeError:  # the caller has gone
            os._exit(1)
        work, arguments = requests.get()
        try:
            result = work(*arguments)
        except Exception as error:
            result = error if isinstance(error, CarmilError) else CarmilError(short_message(error))


def _listen(requests: "queue.SimpleQueue[Any]") -> None:
    """Queue what arrives. When the caller has gone, end the process even in the middle of its work."""
    try:
        while True:
            requests.put(pickle.load(sys.stdin.buffer))
    finally:
        os._exit(0)


_DIED = object()


def _start() -> _Process:
    # Modules are found where this process finds them, not in the current folder.
    path = os.pathsep.join(os.path.abspath(place) for place in sys.path)
    try:
        return subprocess.Popen(
            [sys.executable, *_COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            process_group=0,  # Ctrl-C reaches this process alone, which then ends the others
        )
    except OSError as error:
        raise CarmilError(f"no further process to read files can be started ({error}): use fewer --workers") from error


def _send(process: _Process, request: object) -> None:
    assert process.stdin is not None
    try:
        pickle.dump(request, process.stdin)
        process.stdin.flush()
    except BrokenPipeError:
        pass  # the process has died, which its answer tells


def _receive(process: _Process) -> Any:
    """The process's next answer; _DIED if there will be none."""
    assert process.stdout is not None
    try:
        return pickle.load(process.stdout)
    except (EOFError, pickle.UnpicklingError):
        return _DIED


def _finished(running: dict[_Process, Source]) -> list[_Process]:
    """Wait for the processes that answer next."""
    answers = {process.stdout.fileno(): process for process in running if process.stdout is not None}
    ready = wait(list(answers), timeout=_PATIENCE)
    if not ready:  # a damaged h5 file can make its library loop for ever
        names = ", ".join(str(source.path) for source in list(running.values())[:4])
        raise CarmilError(
            f"no file was read within {_PATIENCE} s; one of these is damaged: {names}; the slides packed so far are kept"
        )
    return [process for file, process in answers.items() if file in ready]
