"""A model trained on a cohort of slides: an ordinary run of `carmil train`, kept where all recipes find it."""

from typing import Any

from carmil.reproduce.recipes import Asked
from carmil.reproduce.slide_cohorts import SlideCohort
from carmil.studies.run_folder import StudyRun
from carmil.studies.settings import Settings
from carmil.studies.train import run_study

EPOCHS, FAST_EPOCHS = 100, 3
PATIENCE = 20


def run_on(cohort: SlideCohort, model: str, asked: Asked, **settings: Any) -> StudyRun:
    """Trains the model on the cohort, or reads the run that is there. settings: of `carmil train`, where they differ from the
    paper's; they are part of the run's name."""
    name = "-".join([model.replace("/", "-"), *(f"{key.rstrip('_')}_{value}" for key, value in settings.items())])
    study = {
        "bags": cohort.bags,
        "labels": cohort.labels,
        "out": asked.shared / "runs" / f"{cohort.name}-{cohort.encoder}" / name,
        "model": model,
        "official": cohort.official,
        "folds": cohort.folds,
        "seeds": cohort.seeds,
        "seed": asked.seed,
        "lr": cohort.lr,
        "epochs": FAST_EPOCHS if asked.fast else EPOCHS,
        "patience": PATIENCE,
        "device": asked.device,
    }
    return run_study(Settings.of(study | settings, where=f"{cohort.name}, {model}"), say=_quietly)


def _quietly(line: str) -> None:
    """What was guessed is in the run's card."""
