"""Work distributed over several processes. A worker process imports this package and never the caller's script.

It receives functions with their arguments and returns the results, pickled, through the pipes of its standard input
and output. It ends when its input ends, so that no worker outlives the process that started it.
"""

import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from multiprocessing.connection import wait
from typing import Any, TypeVar

from carmil.errors import CarmilError
from carmil.untrusted import short_message

Key = TypeVar("Key")

_PATIENCE = 300  # seconds without a single result
_READY = "ready"
_COMMAND = ("-P", "-c", "from carmil.processes import serve; serve()")
_Process = subprocess.Popen[bytes]


def in_parallel(
    work: Callable[..., Any], jobs: Iterable[tuple[Key, tuple[Any, ...]]], workers: int
) -> Iterator[tuple[Key, Any]]:
    """Yield (key, work(*arguments)) for every job (key, arguments), in the order of completion.

    `work` is a function of a module. The keys are the names of the files that are read, for messages.
    If the work raises an error in another process, the result is that error as a `CarmilError`.
    """
    if workers == 1:
        yield from ((key, work(*arguments)) for key, arguments in jobs)
        return
    remaining, processes = iter(jobs), list[_Process]()
    running: dict[_Process, Key] = {}
    try:
        first = list(islice(remaining, workers))
        processes += (_start() for _ in first)
        for process, (key, arguments) in zip(processes, first, strict=True):
            if _receive(process) != _READY:
                raise CarmilError(f"a process to read files could not be started ({sys.executable}): use --workers 1")
            running[process] = key
            _send(process, (work, arguments))
        while running:
            for process in _finished(running):
                key, result = running.pop(process), _receive(process)
                if result is _DIED:
                    raise CarmilError(
                        f"a process died while it read {key}: it ran out of memory, or the file is damaged; "
                        "slides packed so far are kept"
                    )
                if (job := next(remaining, None)) is not None:
                    running[process] = job[0]
                    _send(process, (work, job[1]))
                yield key, result
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()


def serve() -> None:
    """Run the jobs from standard input until it ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not be mixed with results
    requests: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    result: object = _READY
    while True:
        try:
            pickle.dump(result, answers)
            answers.flush()
        except BrokenPipeError:  # the caller has ended
            os._exit(1)
        work, arguments = requests.get()
        try:
            result = work(*arguments)
        except Exception as error:
            result = error if isinstance(error, CarmilError) else CarmilError(short_message(error))


def _listen(requests: "queue.SimpleQueue[Any]") -> None:
    """Queue incoming jobs. When the caller has ended, end the process even during a job."""
    try:
        while True:
            requests.put(pickle.load(sys.stdin.buffer))
    finally:
        os._exit(0)


_DIED = object()


def _start() -> _Process:
    # Modules are found on the path of this process, not in the current folder.
    path = os.pathsep.join(os.path.abspath(place) for place in sys.path)
    try:
        return subprocess.Popen(
            [sys.executable, *_COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            process_group=0,  # Ctrl-C reaches this process only, which then ends the others
        )
    except OSError as error:
        raise CarmilError(f"no further process to read files can be started ({error}): use fewer --workers") from error


def _send(process: _Process, request: object) -> None:
    assert process.stdin is not None
    try:
        pickle.dump(request, process.stdin)
        process.stdin.flush()
    except BrokenPipeError:
        pass  # the process has died, which its answer will show


def _receive(process: _Process) -> Any:
    """Return the next answer of the process; _DIED if there will be none."""
    assert process.stdout is not None
    try:
        return pickle.load(process.stdout)
    except (EOFError, pickle.UnpicklingError):
        return _DIED


def _finished(running: dict[_Process, Key]) -> list[_Process]:
    """Wait for processes until at least one answers."""
    answers = {process.stdout.fileno(): process for process in running if process.stdout is not None}
    ready = wait(list(answers), timeout=_PATIENCE)
    if not ready:  # a damaged h5 file can send its library into an endless loop
        names = ", ".join(str(key) for key in list(running.values())[:4])
        raise CarmilError(
            f"no file was read within {_PATIENCE} s; one of these is damaged: {names}; slides packed so far are kept"
        )
    return [process for file, process in answers.items() if file in ready]
