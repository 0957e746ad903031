"""Progress bars with time left, on stderr; silent when nobody watches."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

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

console = Console(stderr=True)


@contextmanager
def training_progress(title: str, epochs: int, models: int) -> Iterator[Callable[[int, dict[str, float], int], None]]:
    """Gives an `on_epoch` for carmil.training.fit. Models stop early, so the time left is the most it can be."""
    columns = (
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
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=epochs, losses="", running=f"{models} models running")

        def on_epoch(epoch: int, losses: dict[str, float], running: int) -> None:
            shown = "  ".join(f"{name} {value:.3f}" for name, value in losses.items())
            progress.update(task, completed=epoch + 1, losses=shown, running=f"{running} of {models} models running")

        yield on_epoch


def tracked(steps: Iterable[int], title: str) -> Iterable[int]:
    """`steps`, with a bar."""
    return track(steps, title, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def counted(title: str, things: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to be told (done, in all) of things that are done one by one."""
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
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
