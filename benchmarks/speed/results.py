"""What a benchmark measures: timed training steps, and single figures."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """A timed training step. Times are per bag and model: those of the step divided by `models` x `bags`.

    instances       per bag (the mean, where bags differ)
    ms              median over `rounds` rounds, with the fastest and the slowest; None if not measured: `note` says why
    tflops          floating-point operations, counted as `counted_by` says, over the median
    floor_ms        time of the same operations at the speed of this machine's large matrix product
    memory_mib      peak of weights, optimizer, activations and the bags at hand together
    """

    section: str
    what: str
    model: str
    models: int
    bags: int
    instances: int
    ours: bool
    ms: float | None = None
    fastest_ms: float | None = None
    slowest_ms: float | None = None
    rounds: int = 0
    tflops: float | None = None
    floor_ms: float | None = None
    memory_mib: float | None = None
    counted_by: str = ""
    note: str = ""

    @property
    def slides_per_second(self) -> float | None:
        """Bags per second that a model is trained on, times models."""
        return None if self.ms is None else 1000 / self.ms

    @property
    def group(self) -> tuple[str, str, int]:
        """Measurements of one group are comparable. The one-bag loops belong to the section `population`."""
        section = "population" if self.section == "one-bag" else self.section
        return section, self.model if section == "models" else "", self.instances


@dataclass(frozen=True)
class Fact:
    """A single figure; `value` is None if it was not measured: `note` says why."""

    section: str
    what: str
    value: float | None
    unit: str
    note: str = ""


Record = Measurement | Fact


@dataclass
class Results:
    """Everything that one run measured, and the machine and device it was measured on."""

    machine: str
    device: str
    settings: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)

    @property
    def measurements(self) -> list[Measurement]:
        return [record for record in self.records if isinstance(record, Measurement)]

    @property
    def facts(self) -> list[Fact]:
        return [record for record in self.records if isinstance(record, Fact)]


@dataclass(frozen=True)
class Ratio:
    """Speed of carmil over that of another on the same bags, per bag and model.

    times      by the medians
    at_best    by the fastest rounds, which other processes on the machine disturb less
    """

    ours: Measurement
    other: Measurement
    times: float
    at_best: float

    def as_json(self) -> dict[str, Any]:
        names = ("section", "what", "models", "bags")
        ours, other = ({name: asdict(side)[name] for name in names} for side in (self.ours, self.other))
        figures = {"times": self.times, "at_best": self.at_best}
        return {"model": self.ours.model, "instances": self.ours.instances, **figures, "ours": ours, "other": other}


def ratios(measurements: list[Measurement]) -> list[Ratio]:
    """Compare each figure of carmil with each figure of others on the same bags; torchmil's ABMIL with our CAR-ABMIL too."""
    timed = [(one, one.ms, one.fastest_ms) for one in measurements if one.ms is not None and one.fastest_ms is not None]
    return [
        Ratio(ours, other, other_ms / ms, other_fastest / fastest)
        for ours, ms, fastest in timed
        for other, other_ms, other_fastest in timed
        if ours.ours and not other.ours and ours.group == other.group
    ]
