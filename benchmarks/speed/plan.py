"""What to measure, and how much of it, on each kind of device."""

from dataclasses import dataclass
from pathlib import Path

from carmil.counterfactual import list_models
from carmil.errors import CarmilError, unknown

SECTIONS = ("population", "one-bag", "agreement", "trained", "models", "linearity", "crc", "store", "study")
MODELS = (
    *("mean", "max", "abmil", "abmil.gated", "car/abmil.gated", "targeted/abmil.gated", "clam.sb", "clam.mb"),
    *("dsmil", "car/dsmil", "acmil", "additive", "rrt", "transmil", "car/transmil", "weno"),
)
FEW_MODELS = ("abmil.gated", "car/abmil.gated", "clam.sb")


@dataclass(frozen=True)
class Study:
    """A study that is trained as one population: folds x seeds x grid models, on this many slides."""

    folds: int = 5
    seeds: int = 5
    grid: int = 9
    slides: int = 300
    epochs: int = 20

    @property
    def models(self) -> int:
        return self.folds * self.seeds * self.grid


@dataclass(frozen=True)
class Plan:
    """Sizes of the measurements; by default, those of a full run on a GPU."""

    sections: tuple[str, ...] = SECTIONS
    models: tuple[str, ...] = MODELS
    instances: tuple[int, ...] = (1_000, 10_000, 50_000)  # per bag, in the section `models`
    members: int = 10  # models trained at once in the section `models`
    bag: int = 10_000  # instances per bag in the other sections
    population: int = 50  # models trained at once
    together: int = 16  # bags per step when one model is trained
    through_fit: bool = True  # also time whole epochs of `fit`, with bookkeeping and validation
    lengths: tuple[int, ...] = (1_000, 3_000, 10_000, 30_000, 100_000)
    counts: tuple[int, ...] = (1, 2, 5, 10, 25, 50)
    crc: Path | None = None
    crc_models: int = 25
    crc_every: int = 1  # use every n-th bag of crc
    linear_models: int = 10  # models trained at once while bags grow
    linear_bag: int = 10_000  # instances per bag while the population grows
    store_bags: int = 16
    study: Study = Study()
    seconds: float = 0.5  # of timing per figure

    def __post_init__(self) -> None:
        for kind, names, known in (("section", self.sections, SECTIONS), ("model", self.models, list_models())):
            for name in names:
                if name not in known:
                    raise CarmilError(unknown(kind, name, known))
        if not self.sections or not self.models or not self.instances:
            raise CarmilError(
                "nothing to measure: expected at least one section, one model and one number of instances"
            )
        if min(self.instances) < 1:
            raise CarmilError(f"bags of {min(self.instances)} instances: expected at least 1")
        if self.crc is not None and not (self.crc / "features.npy").is_file():
            raise CarmilError(f"--crc {self.crc} has no features.npy: expected the folder with crc's features")


FULL_GPU = Plan()
QUICK_GPU = Plan(
    models=FEW_MODELS,
    instances=(1_000, 10_000),
    lengths=(1_000, 10_000, 100_000),
    counts=(1, 10, 50),
    crc_every=4,
    study=Study(slides=30, epochs=2),
    seconds=0.3,
)
# A CPU is a thousand times slower: smaller populations, and a sample of the study.
FULL_CPU = Plan(
    members=2,
    population=25,
    through_fit=False,
    linear_models=1,
    linear_bag=1_000,
    counts=(1, 2, 5, 10, 25),
    study=Study(seeds=1, grid=1, slides=10, epochs=2),
    seconds=5.0,
)
QUICK_CPU = Plan(
    models=FEW_MODELS,
    instances=(1_000, 10_000),
    members=2,
    population=4,
    together=4,
    through_fit=False,
    linear_models=1,
    linear_bag=1_000,
    lengths=(1_000, 3_000, 10_000),
    counts=(1, 2, 5),
    crc_every=8,
    store_bags=8,
    study=Study(seeds=1, grid=1, slides=5, epochs=1),
    seconds=1.0,
)


def default_plan(device: str, *, quick: bool) -> Plan:
    if device == "cuda":
        return QUICK_GPU if quick else FULL_GPU
    return QUICK_CPU if quick else FULL_CPU
