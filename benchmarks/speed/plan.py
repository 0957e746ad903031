"""What to measure, and how much of it: enough for a figure to mean something, little enough to wait for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from carmil.counterfactual import list_models
from carmil.errors import CarmilError, unknown

SECTIONS = ("population", "one-bag", "agreement", "trained", "models", "linearity", "crc", "store", "study")
MODELS = (
    "mean",
    "max",
    "abmil",
    "abmil.gated",
    "car/abmil.gated",
    "targeted/abmil.gated",
    "clam.sb",
    "clam.mb",
    "dsmil",
    "car/dsmil",
    "acmil",
    "additive",
    "rrt",
    "transmil",
    "car/transmil",
    "weno",
)
WHOLE_BAG = 10_000  # instances a slide of the study that is asked about
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
    """seconds: of timing for each figure. bag: instances of the large bags. population: models trained at once."""

    sections: tuple[str, ...] = SECTIONS
    models: tuple[str, ...] = MODELS
    instances: tuple[int, ...] = (1_000, 10_000, 50_000)
    members: int = 10  # models at once when all architectures are measured
    bag: int = 10_000
    population: int = 50
    together: int = 16  # bags a step when one model is trained
    through_fit: bool = True  # the same once more as a whole training, bookkeeping and validation included
    lengths: tuple[int, ...] = (1_000, 3_000, 10_000, 30_000, 100_000)
    counts: tuple[int, ...] = (1, 2, 5, 10, 25, 50)
    crc: Path | None = None
    crc_models: int = 25
    linear_models: int = 10  # models at once while bags grow
    linear_bag: int = 10_000  # instances a bag while the population grows
    crc_every: int = 1  # each how many-th of its bags
    store_bags: int = 16
    study: Study = Study()
    seconds: float = 0.5

    def __post_init__(self) -> None:
        for section in self.sections:
            if section not in SECTIONS:
                raise CarmilError(unknown("section", section, SECTIONS))
        known = list_models()
        for model in self.models:
            if model not in known:
                raise CarmilError(unknown("model", model, known))
        if not self.sections or not self.models or not self.instances:
            raise CarmilError(
                "nothing to measure: expected at least one section, one model and one number of instances"
            )
        for name in ("bag", "population", "together", "members"):
            if getattr(self, name) < 1:
                raise CarmilError(f"{name} is {getattr(self, name)}: expected at least 1")
        if min(self.instances) < 1:
            raise CarmilError(f"bags of {min(self.instances)} instances: expected at least 1")
        if self.crc is not None and not (self.crc / "features.npy").is_file():
            raise CarmilError(f"--crc {self.crc} has no features.npy: expected the folder with crc's features")
        if self.study.epochs < 1:
            raise CarmilError(f"a study of {self.study.epochs} epochs: expected at least 1")


def planned(device: str, *, quick: bool) -> Plan:
    """The usual plan for a device. A CPU is a thousand times slower: populations are smaller there, the study a sample."""
    match device, quick:
        case "cuda", False:
            return Plan()
        case "cuda", True:
            return Plan(
                models=FEW_MODELS,
                instances=(1_000, 10_000),
                lengths=(1_000, 10_000, 100_000),
                counts=(1, 10, 50),
                crc_every=4,
                study=Study(slides=30, epochs=2),
                seconds=0.3,
            )
        case _, False:
            return Plan(
                members=2,
                population=25,
                through_fit=False,
                linear_models=1,
                linear_bag=1_000,
                counts=(1, 2, 5, 10, 25),
                study=Study(seeds=1, grid=1, slides=10, epochs=2),
                seconds=5.0,
            )
    return Plan(
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


def changed(plan: Plan, given: Mapping[str, Any]) -> Plan:
    """The plan with what a user asked for; `study_epochs` is the study's."""
    own = dict(given)
    epochs = own.pop("study_epochs", plan.study.epochs)
    return replace(plan, study=replace(plan.study, epochs=epochs), **own)
