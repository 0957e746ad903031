"""The slide files of a run's cases: located once at the start, opened when needed, and only a few open at a time.

A request names a case, never a file: only files that were located inside the folder, or recorded with the answers, are ever
opened.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from carmil.errors import CarmilError
from carmil.progress import Log
from carmil.runs.answers import RecordedSlide
from carmil.slides.dicom_series import slide_name
from carmil.slides.mpp_table import read_mpps
from carmil.slides.opening import SUFFIXES, open_slide, slides_in
from carmil.slides.slide import Slide
from carmil.words import plural

OPEN = 4  # slides open at a time; each caches some decoded tiles


@dataclass
class _Open:
    slide: Slide
    users: int = 0
    unwanted: bool = False


@dataclass(frozen=True)
class _Located:
    """A file inside a resolved folder. mpp: micrometres per level-0 pixel, in place of the file's value; missing_mpp:
    used only if the file has none.
    """

    path: Path
    inside: Path
    mpp: float | None = None
    missing_mpp: float | None = None


class OpenSlides:
    """The slides that are open, at most `room` besides those in use: one of each file, for all runs. Thread-safe."""

    def __init__(self, room: int = OPEN) -> None:
        self._room, self._lock, self._open = room, threading.Lock(), OrderedDict[_Located, _Open]()

    @contextmanager
    def opened(self, file: _Located) -> Iterator[Slide]:
        """Open the slide, and keep it open at least until the end of the block."""
        used = self._taken(file)
        try:
            yield used.slide
        finally:
            with self._lock:
                used.users -= 1
                closing = [used] if used.unwanted and not used.users else []
            _close(closing)

    def close(self) -> None:
        with self._lock:
            _close(self._dropped(0))

    def _taken(self, file: _Located) -> _Open:
        with self._lock:
            if file in self._open:
                self._open.move_to_end(file)
                self._open[file].users += 1
                return self._open[file]
        # May be slow, so the lock is not held.
        slide = open_slide(file.path, mpp=file.mpp, missing_mpp=file.missing_mpp)
        with self._lock:
            spare = [_Open(slide)] if file in self._open else []
            if not spare:
                self._open[file] = _Open(slide)
            used = self._open[file]
            used.users += 1
            self._open.move_to_end(file)
            closing = [*spare, *self._dropped(self._room)]
        _close(closing)
        return used

    def _dropped(self, room: int) -> list[_Open]:
        """Drop the least recently used slides; return those that are not in use."""
        dropped = [self._open.popitem(last=False)[1] for _ in range(len(self._open) - room)]
        for one in dropped:
            one.unwanted = True
        return [one for one in dropped if not one.users]


class SlideFiles:
    """The slides in `folder` by the names of the cases, and for others the recorded files that exist. Thread-safe.

    Micrometres per pixel recorded with the answers are used, if there are any. For slides in the folder, `mpp` is used
    if the file records none, and values of `slides_table` replace that of the file (see `read_mpps`).
    """

    def __init__(
        self,
        folder: Path | None,
        names: Sequence[str],
        *,
        recorded: Mapping[str, RecordedSlide] | None = None,
        mpp: float | None = None,
        slides_table: Path | None = None,
        opened: OpenSlides | None = None,
        log: Log = lambda line: None,
    ) -> None:
        self._open = opened or OpenSlides()
        recorded = recorded or {}
        located = _recorded_files(recorded)
        if folder is not None:
            inside = folder.resolve()
            wanted = [name for name in names if name not in located]
            own = _find_files(folder, names, log if wanted else lambda line: None)
            cut_with = {name: one.mpp for name, one in recorded.items()}
            given = {} if slides_table is None or not own else read_mpps(slides_table, list(own.values()))
            located |= {
                name: _Located(path, inside, given.get(path, cut_with.get(name)), mpp) for name, path in own.items()
            }
        self._files = located

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @contextmanager
    def opened(self, name: str) -> Iterator[Slide]:
        """Open the slide, and keep it open at least until the end of the block."""
        one = self._files[name]
        # Checked again, since a file may have become a link after the viewer started.
        if not one.path.resolve().is_relative_to(one.inside):
            raise CarmilError(f"{one.path.name} is outside the folder of slides")
        try:
            with self._open.opened(one) as slide:
                yield slide
        except CarmilError as error:
            raise self._nameless(name, error) from None

    def path(self, name: str) -> Path | None:
        """Return the file of a slide; None if there is none."""
        return self._files[name].path.resolve() if name in self._files else None

    def close(self) -> None:
        """Close the slides, also those of other runs that share them."""
        self._open.close()

    def _nameless(self, name: str, error: CarmilError) -> CarmilError:
        """Return the error without the folder, which must not appear on the page."""
        path = self._files[name].path
        return CarmilError(str(error).replace(str(path), path.name))


def _recorded_files(recorded: Mapping[str, RecordedSlide]) -> dict[str, _Located]:
    """Return the recorded files that exist and have not become links to elsewhere."""
    paths = {name: (Path(slide.path), slide.mpp) for name, slide in recorded.items()}
    return {
        name: _Located(path, path.parent, own)
        for name, (path, own) in paths.items()
        if path.is_file() and path.resolve() == path
    }


def _close(slides: list[_Open]) -> None:
    for one in slides:
        one.slide.close()


def _find_files(folder: Path, names: Sequence[str], log: Log) -> dict[str, Path]:
    """Return files with the name of a case, with or without suffix. Links out of the folder are left out."""
    if not folder.is_dir():
        raise CarmilError(f"--slides {folder} is not a folder: expected a folder with the slides of the run")
    inside = folder.resolve()
    wanted, files, outside = set(names), dict[str, Path](), 0
    for path in slides_in(folder, log=log):
        name = next((name for name in (path.name, slide_name(path)) if name in wanted), None)
        if name is None:
            continue
        if not path.resolve().is_relative_to(inside):
            outside += 1
        elif files.setdefault(name, path) != path:
            raise CarmilError(f"two slides are named {name!r} ({files[name]}, {path}): remove one of them")
    if outside:
        log(
            f"{folder} has {plural(outside, 'link')} to slides outside it that are not shown: name the folder the slides are in"
        )
    if not files:
        log(
            f"{folder} holds none of the run's {plural(len(wanted), 'slide')} (files like {next(iter(names))}{SUFFIXES[0]})"
        )
    elif len(files) < len(wanted):
        log(
            f"{folder} holds {len(files)} of the run's {plural(len(wanted), 'slide')}; the others are shown without their picture"
        )
    return files
