"""The slide files of a run's cases: located once at the start, opened when needed, only a few at a time.

A request names a case, never a file: only files that were located inside the folder are ever opened.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from carmil.errors import CarmilError
from carmil.progress import Log
from carmil.slides.opening import SUFFIXES, is_slide, open_slide
from carmil.slides.slide import Slide
from carmil.words import plural

OPEN = 4  # slides at a time; each keeps some decoded tiles


@dataclass
class _Open:
    slide: Slide
    users: int = 0
    unwanted: bool = False


class SlideFiles:
    """The slides in `folder` (or none) by the names of the cases. Thread-safe."""

    def __init__(
        self, folder: Path | None, names: Sequence[str], *, mpp: float | None = None, log: Log = lambda line: None
    ) -> None:
        self._mpp, self._lock, self._open = mpp, threading.Lock(), OrderedDict[str, _Open]()
        self._folder = None if folder is None else folder.resolve()
        self._paths = {} if folder is None else _found(folder, names, log)

    def __contains__(self, name: str) -> bool:
        return name in self._paths

    @contextmanager
    def opened(self, name: str) -> Iterator[Slide]:
        """The slide, which stays open at least as long as the block."""
        used = self._taken(name)
        try:
            yield used.slide
        except CarmilError as error:
            raise self._nameless(name, error) from None
        finally:
            with self._lock:
                used.users -= 1
                closing = [used] if used.unwanted and not used.users else []
            _close(closing)

    def close(self) -> None:
        with self._lock:
            _close(self._dropped(0))

    def _taken(self, name: str) -> _Open:
        with self._lock:
            if name in self._open:
                self._open.move_to_end(name)
                self._open[name].users += 1
                return self._open[name]
        slide = self._slide(name)  # may take a while: the lock is not held
        with self._lock:
            spare = [_Open(slide)] if name in self._open else []
            if not spare:
                self._open[name] = _Open(slide)
            used = self._open[name]
            used.users += 1
            self._open.move_to_end(name)
            closing = [*spare, *self._dropped(OPEN)]
        _close(closing)
        return used

    def _dropped(self, room: int) -> list[_Open]:
        """Drop the least recently used slides; return those that are not in use."""
        dropped = [self._open.popitem(last=False)[1] for _ in range(len(self._open) - room)]
        for one in dropped:
            one.unwanted = True
        return [one for one in dropped if not one.users]

    def _slide(self, name: str) -> Slide:
        path = self._paths[name]
        # Checked again, since a file may have become a link after the viewer started.
        if self._folder is None or not path.resolve().is_relative_to(self._folder):
            raise CarmilError(f"{path.name} is outside the folder of slides")
        try:
            return open_slide(path, mpp=self._mpp)
        except CarmilError as error:
            raise self._nameless(name, error) from None

    def _nameless(self, name: str, error: CarmilError) -> CarmilError:
        """The same message without the folder, which the page does not show."""
        return CarmilError(str(error).replace(str(self._paths[name]), self._paths[name].name))


def _close(slides: list[_Open]) -> None:
    for one in slides:
        one.slide.close()


def _found(folder: Path, names: Sequence[str], log: Log) -> dict[str, Path]:
    """Files with the name of a case, with suffix or without. Links out of the folder are left out."""
    if not folder.is_dir():
        raise CarmilError(f"--slides {folder} is not a folder: expected one with the slides of the run")
    inside = folder.resolve()
    wanted, found, outside = set(names), dict[str, Path](), 0
    for path in sorted(folder.rglob("*")):
        name = next((name for name in (path.name, path.stem) if name in wanted), None)
        if name is None or not is_slide(path):
            continue
        if not path.resolve().is_relative_to(inside):
            outside += 1
        elif found.setdefault(name, path) != path:
            raise CarmilError(f"two slides are called {name!r} ({found[name]}, {path}): remove one of them")
    if outside:
        log(
            f"{folder} has {plural(outside, 'link')} to slides outside it that are not shown: name the folder the slides are in"
        )
    if not found:
        log(
            f"{folder} holds none of the run's {plural(len(wanted), 'slide')} (files like {next(iter(names))}{SUFFIXES[0]})"
        )
    elif len(found) < len(wanted):
        log(
            f"{folder} holds {len(found)} of the run's {plural(len(wanted), 'slide')}; the others are shown without their picture"
        )
    return found
