"""Where a section measures, and how what it times becomes a record."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from .arithmetic import work
from .measure import DoesNotFitError, Step, Timing, measured, release, room
from .plan import Plan
from .records import Measurement

TOO_LARGE = "did not fit in memory"


@dataclass(frozen=True)
class Bench:
    """Where and what is measured; `peak` is the speed of the machine's large matrix product, in operations a second."""

    plan: Plan
    device: str
    peak: float
    out: Path

    def measurement(self, empty: Measurement, timing: Timing) -> Measurement:
        """What a timing of one step says about one bag and model."""
        parts = empty.models * empty.bags
        cost = work(empty.model, empty.instances)
        return replace(
            empty,
            ms=1000 * timing.seconds / parts,
            fastest_ms=1000 * timing.fastest / parts,
            slowest_ms=1000 * timing.slowest / parts,
            rounds=timing.rounds,
            tflops=cost.operations * parts / timing.seconds / 1e12,
            floor_ms=1000 * cost.operations / self.peak,
            memory_mib=timing.memory / 2**20,
            counted_by=cost.counted_by,
        )

    def step(self, empty: Measurement, build: Callable[[], Step]) -> Measurement:
        """Times the step that `build` builds, if it fits."""
        needed = 2 * empty.models * empty.bags * work(empty.model, empty.instances).kept
        if self.device == "cpu" and needed > 0.9 * room(self.device):  # a CPU's memory ends without an error to catch
            return replace(empty, note=f"would not fit: about {needed / 2**30:.0f} GiB")
        try:
            return self.measurement(empty, measured(build, device=self.device, seconds=self.plan.seconds))
        except DoesNotFitError:
            return replace(empty, note=TOO_LARGE)
        finally:
            release(self.device)
