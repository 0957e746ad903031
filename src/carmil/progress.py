"""Progress bars on stderr with the remaining time, or periodic lines if stderr is not a terminal, as in the log of a job."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    track,
)

from carmil.words import plural

console = Console(stderr=True)
Log = Callable[[str], None]  # called with one line for the user
EVERY = 30.0  # seconds between two lines


@dataclass(frozen=True)
class Progressed:
    """The progress of a stage of the work: `done` of `total` things."""

    title: str
    done: int
    total: int
    things: str


_watcher: ContextVar[Callable[[Progressed], None]] = ContextVar("watcher", default=lambda progressed: None)


@contextmanager
def watched(on_progress: Callable[[Progressed], None]) -> Iterator[None]:
    """Also report the progress of counted things and of encoding to `on_progress`, which may raise to stop the work."""
    token = _watcher.set(on_progress)
    try:
        yield
    finally:
        _watcher.reset(token)


class _PeriodicLine:
    """A line printed every half minute, if there is no bar."""

    def __init__(self, title: str, things: str, *, left: str = "about") -> None:
        self.title, self.things, self.left = title, things, left
        self._since: tuple[float, int] | None = None

    def __call__(self, done: int, total: int, more: str = "") -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now, done
            return
        before, start = self._since
        if not console.is_terminal and now - before >= EVERY and done > start:
            # from the pace of the last half minute, since resumed parts took no time
            seconds = (now - before) / (done - start) * (total - done)
            line = f"{self.title}: {done:,} of {total:,} {self.things}{more}, {self.left} {_clock(seconds)} left"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            self._since = now, done


def _clock(seconds: float) -> str:
    """Format a duration: 40 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


class _Trainings:
    """One display for all running trainings, which may run in several threads."""

    def __init__(self) -> None:
        self._lock, self.running = threading.Lock(), 0
        self.interrupted = False

    @contextmanager
    def display(self) -> Iterator[Progress]:
        with self._lock:
            if self.running == 0:
                self._progress = Progress(*_COLUMNS, console=console, transient=True, disable=not console.is_terminal)
                self._progress.start()
            self.running += 1
        try:
            yield self._progress
        finally:
            with self._lock:
                self.running -= 1
                if self.running == 0:
                    self._progress.stop()
                    self.interrupted = False


_COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(bar_width=24),
    TextColumn("epoch"),
    MofNCompleteColumn(),
    TextColumn("{task.fields[losses]}", style="dim"),
    TextColumn("{task.fields[running]}"),
    TimeElapsedColumn(),
    TextColumn("at most"),
    TimeRemainingColumn(),
    TextColumn("left"),
)
_trainings = _Trainings()


@contextmanager
def training_progress(title: str, epochs: int, models: int) -> Iterator[Callable[[int, dict[str, float], int], None]]:
    """Yield an `on_epoch` for carmil.training.fit. Models may stop early, so the remaining time is an upper bound."""
    with _trainings.display() as progress:
        task = progress.add_task(title, total=epochs, losses="", running=f"{plural(models, 'model')} running")
        line = _PeriodicLine(title, "epochs", left="at most")

        def on_epoch(epoch: int, losses: dict[str, float], running: int) -> None:
            if _trainings.interrupted:
                raise KeyboardInterrupt
            terms = "  ".join(f"{name} {value:.3f}" for name, value in losses.items())
            of = f"{running} of {plural(models, 'model')} running"
            progress.update(task, completed=epoch + 1, losses=terms, running=of)
            line(epoch + 1, epochs, f", {of}")

        try:
            yield on_epoch
        finally:
            progress.remove_task(task)


def interrupt_trainings() -> None:
    """Stop all displayed trainings, each after its current epoch."""
    _trainings.interrupted = _trainings.running > 0


def progress_bar(steps: Iterable[int], title: str) -> Iterable[int]:
    """Iterate over `steps` with a progress bar."""
    return track(steps, title, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def count_progress(title: str, things: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function to call with (done, total) after each thing."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn(things),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task, line, watcher = progress.add_task(title, total=None), _PeriodicLine(title, things), _watcher.get()

        def on_thing(done: int, total: int) -> None:
            watcher(Progressed(title, done, total, things))
            progress.update(task, completed=done, total=total)
            line(done, total)

        yield on_thing


@contextmanager
def encoding_progress(slides: int, tiles: int) -> Iterator[tuple[Callable[[str, int], None], Callable[[int], None]]]:
    """Yield two functions: one to call with (name, number) when a slide begins, one with the number of tiles just encoded."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("tiles{task.fields[speed]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task, line, done = progress.add_task("encoding", total=tiles, speed=""), _PeriodicLine("encoding", "tiles"), 0
        watcher = _watcher.get()

        def on_slide(name: str, number: int) -> None:
            progress.update(task, description=f"slide {number}/{slides} {name[:16]}")
            line.title = f"slide {number} of {slides}, {name}"
            watcher(Progressed("encoding", done, tiles, "tiles"))

        def on_tiles(more: int) -> None:
            nonlocal done
            done += more
            watcher(Progressed("encoding", done, tiles, "tiles"))
            line(done, tiles)
            progress.advance(task, more)
            speed = progress.tasks[0].speed
            progress.update(task, speed=f", {speed:,.0f}/s" if speed else "")

        yield on_slide, on_tiles
