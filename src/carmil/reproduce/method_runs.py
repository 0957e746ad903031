"""Methods on cohorts as ordinary runs of `carmil train`, in folders shared by all recipes.

A recipe names cohorts and methods; missing runs are trained by `studies.train`, and every figure is computed from the
runs.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from carmil.bags.bags import Bags
from carmil.datasets.study_cohort import Protocol, StudyCohort
from carmil.evidence.branch_outputs import TestedModel
from carmil.files import safe_name
from carmil.parallel import run_parallel
from carmil.reproduce.recipes import Request
from carmil.runs.facts import FoldFigures
from carmil.runs.run import Run, finished
from carmil.runs.settings import Settings
from carmil.studies.cautions import answer_cautions, readings
from carmil.studies.cohort import open_bags, open_material
from carmil.studies.compare import ComparedRun, each_fold
from carmil.studies.figures import mean_over_seeds
from carmil.studies.point_selection import Choice, choose
from carmil.studies.predictions import outcomes, predicted
from carmil.studies.subjects import open_run_store, own_subjects
from carmil.studies.train import PER_MODEL_SETTINGS, check, check_fit, run_study, run_together
from carmil.training.checkpoint import Checkpoint

if TYPE_CHECKING:
    import pandas as pd

LONG = ("transmil", "rrt", "weno")  # the slowest models start first, so that nothing waits for them at the end
# Models that take minutes on a CPU, reduced in size for a quick trial.
FAST_OPTIONS: dict[str, dict[str, Any]] = {
    "transmil": {"hidden": 128, "landmarks": 16},
    "rrt": {"hidden": 128},
    "weno": {"student": 128, "teacher": 128},
}
PROTOCOL = tuple(one.name for one in fields(Protocol) if one.name not in ("fast_epochs", "of_model"))


@dataclass(frozen=True)
class Method:
    """A row of a table. settings: those of `carmil train` that differ from the cohort's protocol."""

    title: str
    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def figure(self, measure: str) -> str:
        """Return the figure of a measure for this model: as in the paper, the map of TransMIL is its rollout."""
        rolled = measure == "auprc_attention" and self.model.endswith("transmil")
        return "auprc_rollout" if rolled else measure


@dataclass(frozen=True, eq=False)
class MethodRun:
    """A method on a cohort: its run, its predictions for the test cases, and the figures of each fold and seed."""

    cohort: StudyCohort
    method: Method
    run: Run
    predictions: "pd.DataFrame"
    by_fold: Sequence[FoldFigures]

    @classmethod
    def of(cls, cohort: StudyCohort, method: Method, run: Run) -> "MethodRun":
        return cls(cohort, method, run, run.predictions(), run.metrics.by_fold)

    @cached_property
    def cautions(self) -> list[str]:
        """Return one line if the probabilities, averaged over seeds, are no better than always predicting the class frequencies."""
        target = self.run.target
        together = mean_over_seeds(self.predictions, target)
        measurements = readings(target, predicted(together, target), outcomes(together, target))
        return answer_cautions(target, measurements, None, "test slides")

    def values(self, measure: str) -> list[float]:
        """Return the figure of each fold, or of each seed if there is one split; empty if the method has no such figure."""
        name = self.method.figure(measure)
        return list(each_fold(self.by_fold, name).values()) if self.has(measure) else []

    def has(self, measure: str) -> bool:
        return self.method.figure(measure) in self.by_fold[0].figures

    def judged(self, measure: str) -> ComparedRun:
        return ComparedRun(self.method.title, self.method.figure(measure), self.run, self.predictions, self.by_fold)


def train_methods(cohorts: Sequence[StudyCohort], methods: Sequence[Method], request: Request) -> list[MethodRun]:
    """Train every method on every cohort, cohort by cohort. On a GPU several small populations are trained at once."""
    populations = [(cohort, together) for cohort in cohorts for together in _populations(methods)]
    populations.sort(key=lambda pair: not pair[1][0].model.endswith(LONG))
    jobs = [
        partial(train_together, cohort, together[0].model, [method.settings for method in together], request)
        for cohort, together in populations
    ]
    small = all(cohort.stand_in for cohort in cohorts)  # a cohort of the paper fills a GPU's memory by itself
    trained = run_parallel(jobs, request.device, None if small else 1)
    runs = {
        (cohort.name, method.title): run
        for (cohort, together), ended in zip(populations, trained, strict=True)
        for method, run in zip(together, ended, strict=True)
    }
    return [MethodRun.of(cohort, method, runs[cohort.name, method.title]) for cohort in cohorts for method in methods]


def _populations(methods: Sequence[Method]) -> list[list[Method]]:
    """Group methods that can be trained as one population: with the same model, and different loss weights, distance
    or rate only.
    """
    groups: dict[tuple[str, str], list[Method]] = {}
    for method in methods:
        others = {name: value for name, value in method.settings.items() if name not in PER_MODEL_SETTINGS}
        groups.setdefault((method.model, repr(others)), []).append(method)
    return list(groups.values())


def select_by_fold(alternatives: Sequence[MethodRun], title: str) -> tuple[MethodRun, Choice]:
    """Merge several rows into one: each fold and seed takes the alternative with its lowest validation loss."""
    import pandas as pd

    choice = choose([row.run for row in alternatives])
    predictions, by_fold = [], []
    for (fold, seed), i in choice.taken.items():
        frame, figures = alternatives[i].predictions, alternatives[i].by_fold
        predictions.append(frame[(frame["fold"] == fold) & (frame["seed"] == seed)])
        by_fold += [line for line in figures if (line.fold, line.seed) == (fold, seed)]
    first = alternatives[0]
    row = Method(title, first.method.model)
    return MethodRun(first.cohort, row, first.run, pd.concat(predictions, ignore_index=True), by_fold), choice


def train_model(cohort: StudyCohort, model: str, request: Request, **settings: Any) -> Run:
    """Train the model on the cohort, or read the existing run.

    settings: those of `carmil train` that differ from the cohort's protocol; they are part of the run's name.
    """
    (run,) = train_together(cohort, model, [settings], request)
    return run


def train_together(
    cohort: StudyCohort, model: str, variants: Sequence[Mapping[str, Any]], request: Request
) -> list[Run]:
    """Return one run per variant of settings that differ in PER_MODEL_SETTINGS; missing runs are trained as one population."""
    studies = []
    for settings in variants:
        name = "-".join([model.replace("/", "-"), *(f"{key.rstrip('_')}_{value}" for key, value in settings.items())])
        given = study_settings(cohort, model, request, name, **settings)
        studies.append(Settings.of(given, where=f"{cohort.name}, {model}"))
    missing = sum(not finished(study.out) for study in studies)
    checkpoint = studies[0].out.with_name(f"{'-and-'.join(study.out.name for study in studies)}.checkpoint.safetensors")
    left = Checkpoint(checkpoint, key="")
    if missing > 1 or (missing and left.begun()):
        material = open_material(studies[0], log=quietly)
        for study in studies:
            check(study)
            check_fit(study, material)
        run_together(studies, material, checkpoint=checkpoint, log=quietly)
    left.remove()  # interrupted after all runs were complete
    return [run_study(study, log=quietly) for study in studies]


def study_settings(cohort: StudyCohort, model: str, request: Request, name: str, **settings: Any) -> dict[str, Any]:
    """Return the settings of `carmil train` for a model on the cohort, with this folder name among the cohort's runs."""
    protocol = cohort.protocol.fast if request.fast else cohort.protocol
    fixed = protocol.of_model(model)
    options = {**fixed.options, **(FAST_OPTIONS.get(model.rpartition("/")[2], {}) if request.fast else {})}
    return {
        "bags": store_of(cohort, request),
        "labels": cohort.labels,
        "out": runs_folder(cohort, request) / name,
        "model": model,
        "seed": request.seed,
        "device": request.device,
        **{setting: getattr(protocol, setting) for setting in PROTOCOL},
        **({"optimizer": fixed.optimizer} if fixed.optimizer else {}),
        "options": options or None,
        **settings,
    }


def store_of(cohort: StudyCohort, request: Request) -> Path:
    """Return the store of a cohort's features; a folder of files is packed once, for all methods and recipes."""
    home = request.shared / "cohorts" / safe_name(f"{cohort.name}-{cohort.encoder}")
    with _PACKING:  # parallel trainings need the same store
        return open_bags(cohort.bags, home, dtype="float16", truth=None, log=quietly).path


_PACKING = threading.Lock()


def runs_folder(cohort: StudyCohort, request: Request) -> Path:
    """Return the folder of the runs on a cohort. Quick trials and other seeds have folders of their own."""
    kind = "fast_runs" if request.fast else "runs"
    return request.shared / kind / (cohort.folder or safe_name(f"{cohort.name}-{cohort.encoder}-seed{request.seed}"))


def models_of_run(run: Run, device: str) -> tuple[Bags, Iterator[TestedModel]]:
    """Return the cohort of a run, and an iterator over its models with the slides that each was tested on."""
    store = open_run_store(run)
    subjects, population = own_subjects(run, store), run.population(device)

    def each() -> Iterator[TestedModel]:
        for row, model in enumerate(run.models):
            mine = [one for one in subjects if row in one.models]
            yield TestedModel(
                population.member(row),
                model.fold,
                model.seed,
                torch.tensor([one.place for one in mine], dtype=torch.long),
                torch.tensor([run.outputs.index(str(one.label)) for one in mine], dtype=torch.long),
            )

    return store.bags(), each()


def measured_on(runs: Sequence[Run]) -> str:
    machines = (", ".join(f"{name} {value}" for name, value in run.machine.items()) for run in runs)
    return f"measured on {'; and on '.join(dict.fromkeys(machines))}"


def quietly(line: str) -> None:
    """Discard a log line, since guesses are recorded in the run's card."""
