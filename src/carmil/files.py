"""Files and folders that appear whole or not at all: written aside, then renamed."""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives a path to write to; what was written there takes `path`'s name when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    aside = Path(name)
    try:
        yield aside
        os.chmod(aside, 0o666 & ~_UMASK)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Gives an empty folder to fill; it takes `path`'s name, and the place of what was there, when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield aside
        os.chmod(aside, 0o777 & ~_UMASK)
        old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            if path.exists():
                os.replace(path, old)  # onto an empty folder: the old one steps aside, and is never half there
            os.replace(aside, path)
        finally:
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    with whole_file(path) as aside:
        aside.write_text(text, encoding="utf-8")


def safe_name(text: str, *, taken: Collection[str] = ()) -> str:
    """A file's name for any text. What is unusual there becomes _; a changed or taken name gets a checksum."""
    plain = re.sub(r"[^A-Za-z0-9._ -]", "_", text)[:100].strip(". ") or "_"
    if plain == text and plain not in taken:
        return plain
    return f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _read_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


_UMASK = _read_umask()  # once: it can be read by setting it only, which threads that write files would see
