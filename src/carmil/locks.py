"""Locks that let only one process at a time write into a folder."""

import errno
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from carmil.errors import CarmilError
from carmil.files import MACHINE, is_process_alive, name_write_errors


@contextmanager
def folder_lock(path: Path, what: Path) -> Iterator[None]:
    """Hold the lock file `path` while the block writes `what`; a second process gets a CarmilError.

    The system releases the lock when the process ends, is killed, or the machine restarts: a leftover file is not a
    lock. On a file system without locks, the folder counts as locked while the process named in the file runs.
    """
    with name_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _acquire(path, what)
    try:
        with name_write_errors(path):
            file.truncate(0)
            holder = {"process": os.getpid(), "machine": MACHINE, "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            file.write(json.dumps(holder))
            file.flush()
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


def _acquire(path: Path, what: Path) -> IO[str]:
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            if not _lock(file) and _is_alive(holder := _holder(path)):
                raise _busy(what, holder)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BlockingIOError:
            file.close()
            raise _busy(what, _holder(path)) from None
        except BaseException:
            file.close()
            raise
        file.close()  # the other process removed it between opening and locking: try again


def _lock(file: IO[str]) -> bool:
    """Lock the file. Return False if locks are not supported; raise BlockingIOError if another process holds the lock."""
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            return False
        raise
    return True


def _holder(path: Path) -> dict[str, object]:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _is_alive(holder: dict[str, object]) -> bool:
    process = holder.get("process")
    return holder.get("machine") == MACHINE and isinstance(process, int) and is_process_alive(process)


def _busy(what: Path, holder: dict[str, object]) -> CarmilError:
    words = (
        f"process {holder['process']} ({holder.get('machine')}, since {holder.get('since')})"
        if holder.get("process")
        else ""
    )
    return CarmilError(
        f"{what} is being written by {words or 'another process'}: wait until it ends, or choose another --out"
    )
