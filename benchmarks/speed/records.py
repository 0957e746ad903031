"""What a benchmark finds: steps that were timed, and single facts."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """A training step, timed. Times are of one bag and model: those of the step over `models` x `bags`.

    instances       of a bag (their mean, where bags differ)
    ms              median of `rounds` rounds, with the fastest and the slowest; None if it was not measured: `note` says why
    tflops          floating-point operations, counted as `counted_by` says, over the median
    floor_ms        what the same operations would take at the speed of the machine's large matrix product
    memory_mib      the most that weights, optimizer, activations and the bags at hand held together
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
        """Bags that a model is trained on in a second, times models."""
        return None if self.ms is None else 1000 / self.ms


@dataclass(frozen=True)
class Fact:
    """A figure by itself; None if it was not measured: `note` says why."""

    section: str
    what: str
    value: float | None
    unit: str
    note: str = ""


Record = Measurement | Fact


@dataclass
class Results:
    """Everything one run found, and the machine and device it was found on."""

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
    """How many times as fast, for a bag and model, ours was as another on the same bags: by the medians, and by the fastest
    rounds, which a neighbour on the machine disturbs less."""

    ours: Measurement
    other: Measurement
    times: float
    at_best: float

    def plain(self) -> dict[str, Any]:
        kept = ("section", "what", "models", "bags")
        ours, other = ({name: asdict(side)[name] for name in kept} for side in (self.ours, self.other))
        shared = {
            "model": self.ours.model,
            "instances": self.ours.instances,
            "times": self.times,
            "at_best": self.at_best,
        }
        return {**shared, "ours": ours, "other": other}


def ratios(measurements: list[Measurement]) -> list[Ratio]:
    """Every figure of ours beside every figure of others for the same bags; torchmil's ABMIL beside our CAR-ABMIL too."""
    found = []
    for ours in measurements:
        for other in measurements:
            if ours.ours and not other.ours and _group(ours) == _group(other):
                times, at_best = _over(other.ms, ours.ms), _over(other.fastest_ms, ours.fastest_ms)
                if times is not None and at_best is not None:
                    found.append(Ratio(ours, other, times, at_best))
    return found


def _over(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def _group(measurement: Measurement) -> tuple[str, str, int]:
    """What may be compared: the one-bag loops are there for the population; all other sections have their own."""
    section = "population" if measurement.section == "one-bag" else measurement.section
    model = measurement.model if section == "models" else ""
    return section, model, measurement.instances
