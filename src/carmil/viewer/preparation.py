"""Work before there is anything to show, in a thread: the page shows its progress, then its result or why it failed."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from carmil.errors import CarmilError
from carmil.progress import Log, Progressed, watched
from carmil.viewer.responses import Responses

AT_ONCE = (
    0.5  # seconds at the start of a stage in which an earlier call's results are read, which say nothing of the pace
)
PATIENCE = 60  # seconds that a step which cannot be interrupted, such as a batch, may take at the end

log = logging.getLogger("carmil.viewer")


@dataclass(frozen=True)
class PreparationState:
    """done: number of completed things of the `total` of the stage; seconds_left of the stage, None if unknown; failed:
    the reason, in one line.
    """

    stage: str = "starting"
    done: int = 0
    total: int = 0
    things: str = ""
    seconds_left: float | None = None
    failed: str = ""


class StoppedError(Exception):
    """Raised in the thread when the viewer is closed."""


class Preparation:
    """`work` returns what is shown, in a thread. hidden: paths that must not appear on the page, and the names shown
    instead.
    """

    def __init__(
        self, work: Callable[[], Sequence[Responses]], *, hidden: Mapping[str, str] | None = None, say: Log
    ) -> None:
        self.result: Sequence[Responses] = ()
        self.state = PreparationState()
        self._work, self._hidden, self._say = work, dict(hidden or {}), say
        self._stopped, self._since = threading.Event(), (0.0, 0)
        self._thread = threading.Thread(target=self._run, name="preparation", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> bool:
        """Stop at the next report of progress, and return whether anything was left to do."""
        unfinished = self._thread.is_alive()
        self._stopped.set()
        if unfinished:
            self._thread.join(PATIENCE)
        return unfinished

    def _run(self) -> None:
        try:
            with watched(self._on_progress):
                self.result = self._work()
        except StoppedError:
            pass
        except CarmilError as error:
            self._say(str(error))
            self.state = PreparationState(failed=without_folders(str(error), self._hidden))
        except Exception:
            log.exception("preparation")
            self.state = PreparationState(failed="internal error; see the terminal for details")

    def _on_progress(self, now: Progressed) -> None:
        if self._stopped.is_set():
            raise StoppedError
        at = time.monotonic()
        if now.title != self.state.stage or at - self._since[0] < AT_ONCE:
            self._since = at, now.done
        began, first = self._since
        pace = (at - began) / (now.done - first) if now.done > first else None
        left = None if pace is None else pace * (now.total - now.done)
        self.state = PreparationState(now.title, now.done, now.total, now.things, left)


def without_folders(text: str, hidden: Mapping[str, str]) -> str:
    """Return the text with paths replaced, the longest first."""
    for path in sorted(hidden, key=len, reverse=True):
        text = text.replace(path, hidden[path])
    return text
