"""Models trained on cohorts of slides: ordinary runs of `carmil train`, kept where all recipes find them."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carmil.datasets.slide_cohort import SlideCohort
from carmil.files import safe_name
from carmil.reproduce.recipes import Asked
from carmil.reproduce.side_by_side import side_by_side
from carmil.runs.facts import FoldFigures
from carmil.runs.run import Run, finished
from carmil.runs.settings import Settings
from carmil.statistics.calibration import cross_entropies
from carmil.studies.cautions import informed
from carmil.studies.cohort import open_bags, open_material
from carmil.studies.compare import ComparedRun, each_fold
from carmil.studies.figures import mean_over_seeds
from carmil.studies.point_selection import Choice, choose
from carmil.studies.predictions import class_numbers, probabilities
from carmil.studies.train import EACH_ITS_OWN, check, check_fit, run_study, run_together
from carmil.training.checkpoint import Checkpoint

if TYPE_CHECKING:
    import pandas as pd

EPOCHS, FAST_EPOCHS = 100, 3
FAST_FOLDS = 3
PATIENCE = 20
LONG = ("transmil", "rrt", "weno")  # what takes longest begins first, so that nobody waits for it alone
# What takes minutes on a CPU, made small where only the machinery is looked at.
FAST_OPTIONS: dict[str, dict[str, Any]] = {
    "transmil": {"hidden": 128, "landmarks": 16},
    "rrt": {"hidden": 128},
    "weno": {"student": 128, "teacher": 128},
}


@dataclass(frozen=True)
class Method:
    """A row of a table. settings: of `carmil train`, where they differ from the paper's."""

    title: str
    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def figure(self, measure: str) -> str:
        """The figure that a measure means for this model: the map of TransMIL is its rollout, as in the paper."""
        rolled = measure == "auprc_attention" and self.model.endswith("transmil")
        return "auprc_rollout" if rolled else measure


@dataclass(frozen=True, eq=False)
class Answered:
    """A method on a cohort: what it answered for the test cases, and the figures of each fold and seed."""

    cohort: SlideCohort
    method: Method
    run: Run
    answers: "pd.DataFrame"
    by_fold: Sequence[FoldFigures]

    @classmethod
    def of(cls, cohort: SlideCohort, method: Method, run: Run) -> "Answered":
        return cls(cohort, method, run, run.predictions(), run.metrics.by_fold)

    @cached_property
    def _cross_entropies(self) -> tuple[float, float]:
        together = mean_over_seeds(self.answers, self.run.classes)
        return cross_entropies(probabilities(together, self.run.classes), class_numbers(together, self.run.classes))

    @property
    def informed(self) -> bool:
        """Whether its probabilities, the mean over runs, are closer to the truth of the test cases than their classes' shares."""
        return informed(*self._cross_entropies)

    @property
    def chance(self) -> float:
        """The cross-entropy of always answering how common each class is among the test cases."""
        return self._cross_entropies[1]

    def each(self, measure: str) -> list[float]:
        """The figure of each fold, or of each run where there is one division; nothing if the method has no such figure."""
        name = self.method.figure(measure)
        return list(each_fold(self.by_fold, name).values()) if self.has(measure) else []

    def has(self, measure: str) -> bool:
        return self.method.figure(measure) in self.by_fold[0].figures

    def judged(self, measure: str) -> ComparedRun:
        return ComparedRun(self.method.title, self.method.figure(measure), self.run, self.answers, self.by_fold)


def answered(cohorts: Sequence[SlideCohort], methods: Sequence[Method], asked: Asked) -> list[Answered]:
    """Every method on every cohort, cohort by cohort. On a GPU several small populations are trained at once."""
    populations = [(cohort, several) for cohort in cohorts for several in _together(methods)]
    populations.sort(key=lambda one: not one[1][0].model.endswith(LONG))
    jobs = [
        partial(runs_on, cohort, several[0].model, [one.settings for one in several], asked)
        for cohort, several in populations
    ]
    small = all(cohort.stand_in for cohort in cohorts)  # each of the paper's fills a GPU's memory
    trained = side_by_side(jobs, asked.device, None if small else 1)
    runs = {
        (cohort.name, method.title): run
        for (cohort, several), ended in zip(populations, trained, strict=True)
        for method, run in zip(several, ended, strict=True)
    }
    found = ((cohort, method, runs[cohort.name, method.title]) for cohort in cohorts for method in methods)
    return [Answered.of(*one) for one in found]


def _together(methods: Sequence[Method]) -> list[list[Method]]:
    """The methods that can be trained as one population: the same model, of which only loss weights, distance or rate differ."""
    found: dict[tuple[str, str], list[Method]] = {}
    for method in methods:
        others = {name: value for name, value in method.settings.items() if name not in EACH_ITS_OWN}
        found.setdefault((method.model, repr(others)), []).append(method)
    return list(found.values())


def chosen(alternatives: Sequence[Answered], title: str) -> tuple[Answered, Choice]:
    """One row of several: every fold and seed takes the alternative of its own lowest validation loss."""
    import pandas as pd

    choice = choose([one.run for one in alternatives])
    answers, by_fold = [], []
    for (fold, seed), i in choice.taken.items():
        frame, lines = alternatives[i].answers, alternatives[i].by_fold
        answers.append(frame[(frame["fold"] == fold) & (frame["seed"] == seed)])
        by_fold += [line for line in lines if (line.fold, line.seed) == (fold, seed)]
    first = alternatives[0]
    row = Method(title, first.method.model)
    return Answered(first.cohort, row, first.run, pd.concat(answers, ignore_index=True), by_fold), choice


def run_on(cohort: SlideCohort, model: str, asked: Asked, **settings: Any) -> Run:
    """Trains the model on the cohort, or reads the run that is there. settings: of `carmil train`, where they differ from the
    paper's; they are part of the run's name."""
    (run,) = runs_on(cohort, model, [settings], asked)
    return run


def runs_on(cohort: SlideCohort, model: str, several: Sequence[Mapping[str, Any]], asked: Asked) -> list[Run]:
    """The same with each of several settings, which differ in EACH_ITS_OWN: what is not there is trained as one population."""
    studies = []
    for settings in several:
        name = "-".join([model.replace("/", "-"), *(f"{key.rstrip('_')}_{value}" for key, value in settings.items())])
        words = words_of(cohort, model, asked, name, **settings)
        studies.append(Settings.of(words, where=f"{cohort.name}, {model}"))
    missing = sum(not finished(study.out) for study in studies)
    checkpoint = studies[0].out.with_name(f"{'-and-'.join(study.out.name for study in studies)}.checkpoint.safetensors")
    left = Checkpoint(checkpoint, key="")
    if missing > 1 or (missing and left.begun()):
        material = open_material(studies[0], log=quietly)
        for study in studies:
            check(study)
            check_fit(study, material)
        run_together(studies, material, checkpoint=checkpoint, log=quietly)
    left.remove()  # it was killed after the last of them
    return [run_study(study, log=quietly) for study in studies]


def words_of(cohort: SlideCohort, model: str, asked: Asked, name: str, **settings: Any) -> dict[str, Any]:
    """A study as `carmil train` is asked for it, in a folder of this name among the cohort's runs."""
    study = {
        "bags": packed(cohort, asked),
        "labels": cohort.labels,
        "out": runs_of(cohort, asked) / name,
        "model": model,
        "preset": "0.1",
        "official": cohort.official,
        "folds": min(cohort.folds, FAST_FOLDS) if asked.fast else cohort.folds,
        "seeds": cohort.seeds,
        "seed": asked.seed,
        "lr": cohort.lr,
        "epochs": FAST_EPOCHS if asked.fast else EPOCHS,
        "patience": PATIENCE,
        "device": asked.device,
        "options": FAST_OPTIONS.get(model.rpartition("/")[2]) if asked.fast else None,
    }
    return study | settings


def packed(cohort: SlideCohort, asked: Asked) -> Path:
    """The store of a cohort's features: a folder of files is packed once, for all methods and recipes."""
    home = asked.shared / "cohorts" / safe_name(f"{cohort.name}-{cohort.encoder}")
    with _PACKING:  # trainings side by side ask for the same store
        return open_bags(cohort.bags, home, dtype="float16", truth=None, log=quietly).path


_PACKING = threading.Lock()


def runs_of(cohort: SlideCohort, asked: Asked) -> Path:
    """Where the runs on a cohort lie. A look at the machinery and another seed are other runs."""
    kind = "fast_runs" if asked.fast else "runs"
    return asked.shared / kind / safe_name(f"{cohort.name}-{cohort.encoder}-seed{asked.seed}")


def quietly(line: str) -> None:
    """What was guessed is in the run's card."""
