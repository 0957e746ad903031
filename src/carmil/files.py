"""Atomic writing of files and folders (under a temporary name, then renamed), and safe file names.

The temporary name is .carmil-MACHINE-PROCESS-RANDOM. A killed process leaves such files behind; the next process that writes into
the same folder removes them.
"""

import errno
import hashlib
import os
import re
import shutil
import socket
import tempfile
import time
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from carmil.errors import CarmilError


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, which is renamed to `path` if the block raises nothing."""
    with name_write_errors(path):
        if path.is_dir():
            raise CarmilError(f"{path} is a folder: expected the name of a file; choose another name")
        if path.exists() and not path.is_file():
            raise CarmilError(f"{path} is a pipe, socket or device: expected a file, or a new name")
    with _beside(path) as names:
        handle, name = tempfile.mkstemp(prefix=names, suffix=path.suffix, dir=path.parent)
    os.close(handle)
    aside = Path(name)
    try:
        with name_write_errors(path, aside):
            yield aside
            os.chmod(aside, 0o666 & ~_UMASK)
            os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty temporary folder to fill, which replaces `path` if the block raises nothing."""
    with name_write_errors(path):
        if path.exists() and not path.is_dir():
            raise CarmilError(f"{path} is not a folder: expected a folder, or a new name")
    with _beside(path) as names:
        aside = Path(tempfile.mkdtemp(prefix=names, dir=path.parent))
    try:
        with name_write_errors(path, aside):
            yield aside
            os.chmod(aside, 0o777 & ~_UMASK)
            old = Path(tempfile.mkdtemp(prefix=names, dir=path.parent))
            try:
                if path.exists():
                    os.replace(path, old)  # onto an empty folder, so that `path` is never half written
                os.replace(aside, path)
            finally:
                shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder in `folder` that is removed after the block."""
    with _beside(folder / "passing") as names:
        aside = Path(tempfile.mkdtemp(prefix=names, dir=folder))
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file. Characters that UTF-8 cannot encode (from file names of other systems) are written as escapes."""
    with atomic_file(path) as aside:
        aside.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


@contextmanager
def name_write_errors(path: Path, aside: Path | None = None) -> Iterator[None]:
    """Turn a failure to write in the block into a CarmilError that names `path`. aside: its temporary path.

    Errors about other files are raised unchanged.
    """
    try:
        yield
    except Exception as error:
        if (named := _failed(error, path, aside)) is None:
            raise
        raise CarmilError(f"{named} cannot be written ({_reason(error)}): {_remedy(error)}") from error


def _failed(error: Exception, path: Path, aside: Path | None) -> Path | None:
    """Return the file that could not be written; None if the error is about something else."""
    if not isinstance(error, OSError):
        # safetensors, torch and HDF5 report a full disk by exceptions of their own
        return path if not isinstance(error, CarmilError) and _FULL.search(str(error)) else None
    if error.filename is None:
        return path
    named = Path(os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(error.filename))
    if aside is not None and (named == aside or aside in named.parents):
        return path / named.relative_to(aside)
    return path if named == path else None


_FULL = re.compile(
    r"No space left|File too large|[Qq]uota exceeded|Read-only file system|failed writing|write failed|unexpected pos \d"
)


def _reason(error: Exception) -> str:
    """Return the message of the operating system if the error contains it, else its first line."""
    if match := re.search(
        "No space left on device|File too large|Disk quota exceeded|Read-only file system", str(error)
    ):
        return match[0]
    words = (error.strerror if isinstance(error, OSError) else None) or str(error).strip() or type(error).__name__
    return words.splitlines()[0]


def _remedy(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EACCES, errno.EPERM, errno.EROFS) or "Read-only" in str(error):
        return "choose a writable folder"
    if number == errno.EFBIG or "File too large" in str(error):
        return "the file system or a limit (`ulimit -f`) allows no larger file; raise it or choose another folder"
    return "check that there is room on the disk, or choose another folder"


@contextmanager
def _beside(path: Path) -> Iterator[str]:
    """Yield the prefix of temporary names next to `path`; create the folder and remove files that killed processes left
    in it.
    """
    with name_write_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _sweep(path.parent)
            yield f".carmil-{MACHINE}-{os.getpid()}-"
        except OSError as error:
            error.filename = str(path)  # replaces the temporary file in the message
            raise


def _sweep(folder: Path) -> None:
    """Remove files that killed processes left in the folder; once per process and folder.

    Files of other machines, whose processes cannot be checked, are removed a week after their last change.
    """
    place = os.path.abspath(folder)
    if place in _SWEPT:
        return
    _SWEPT.add(place)
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if (match := _ASIDE.match(entry.name)) is None:
                continue
            with suppress(OSError):
                old = time.time() - entry.stat(follow_symlinks=False).st_mtime > _WEEK
                if not is_process_alive(int(match["process"])) if match["machine"] == MACHINE else old:
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path, ignore_errors=True)
                    else:
                        os.unlink(entry.path)


def is_process_alive(process: int) -> bool:
    """Return whether a process of this machine is running; True if that cannot be determined."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def safe_name(text: str, *, taken: Collection[str] = ()) -> str:
    """Return a file name for any text, short enough for an extension. Ordinary text is returned unchanged.

    Characters that a file system, a shell or a web page could misread become _. A name that was changed, or is `taken` (ignoring
    case), ends in ~ and a checksum of the text. No unchanged name contains ~, so no two texts get the same name.
    """
    plain = "".join(
        letter if letter in " ._-()[]+,=@" or unicodedata.category(letter)[0] in "LNM" else "_"
        for letter in unicodedata.normalize("NFC", text)
    ).strip(". ")
    while len(plain.encode()) > _LONGEST:
        plain = plain[:-1]
    plain = plain.rstrip(". ") or "_"
    plain = f"_{plain}" if _DEVICES.fullmatch(plain) else plain
    if plain == text and plain.casefold() not in {name.casefold() for name in taken}:
        return plain
    return f"{plain}~{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:12]}"


def safe_names(texts: Iterable[str], *, taken: Collection[str] = ()) -> dict[str, str]:
    """Return the file name of each text. No two differ only in case, which some file systems ignore."""
    texts = list(dict.fromkeys(texts))
    alike = Counter(text.casefold() for text in texts)
    return {text: safe_name(text, taken=[*taken, *([text] if alike[text.casefold()] > 1 else [])]) for text in texts}


_LONGEST = 150  # bytes; file systems allow 255, and the remainder is for the checksum and extensions
_DEVICES = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?")  # reserved by Windows, with any extension
_WEEK = 7 * 24 * 3600
_SWEPT: set[str] = set()
_ASIDE = re.compile(r"\.carmil-(?P<machine>[A-Za-z0-9.]+)-(?P<process>\d+)-")


def _read_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _machine() -> str:
    """Return the host name and the namespace of its process ids, which differs between containers with the same name."""
    space = os.stat("/proc/self/ns/pid").st_ino if os.path.exists("/proc/self/ns/pid") else 0
    return f"{re.sub('[^A-Za-z0-9]', '', socket.gethostname())[:32]}.{space}"


_UMASK = _read_umask()  # read once, since reading the umask sets it, which would affect threads that write files
MACHINE = _machine()
