"""`carmil unit-test`: train a model on bags with a shortcut, and reveal what it has learned on bags with the shortcut
reversed.

Training is that of `carmil train` with its defaults, except for SMALL layers, BATCH bags per step and bags in memory.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.datasets.unit_tests import BOUND, UNIT_TESTS, WIDTH, UnitTest, draw_bags
from carmil.errors import CarmilError
from carmil.models.registry import registered_models
from carmil.progress import training_progress
from carmil.runs.facts import Range
from carmil.runs.run import build
from carmil.runs.settings import Settings, Value
from carmil.runs.unit_tests import UnitTestResult
from carmil.statistics.intervals import FoldAnswers, figure_interval
from carmil.statistics.performance import bag_auc
from carmil.studies.train import check_model, grid_of, recipe_of
from carmil.tables import ResultTable
from carmil.targets import Classes
from carmil.training.population import Population
from carmil.training.predict import predict
from carmil.training.protocol import train_protocol
from carmil.training.recipe import TRAIN, VALIDATION
from carmil.training.scaling import fit_scales

TRAINED, VALIDATED, TESTED = 240, 80, 400  # bags
SMALL = 64  # hidden units
BATCH = 32  # bags per step


def models_under_test() -> list[str]:
    """Return the names of the models whose verdicts are kept: every method, and the default of `carmil train`."""
    return [*registered_models(), Settings.model]


def unit_test_results(model: str, *, seeds: int = 5, tests: Sequence[UnitTest] = ()) -> list[UnitTestResult]:
    """Train a model on every test, with several initialisations, and test it."""
    check_model(model)
    if not 1 <= seeds <= 1000:
        raise CarmilError(f"--seeds {seeds}: expected 1 to 1000")
    return [_tested(model, test, seeds) for test in tests or UNIT_TESTS.values()]


def _tested(model: str, test: UnitTest, seeds: int) -> UnitTestResult:
    settings = Settings(
        bags=Path(test.name), out=Path(test.name), model=model, options=_small(model), batch=BATCH, seeds=seeds
    )
    target = Classes(names=("negative", "positive"))
    bags = draw_bags(test, TRAINED + VALIDATED)
    roles = torch.full((1, len(bags)), TRAIN)
    roles[:, TRAINED:] = VALIDATION

    def prepare(population: Population, roles: Tensor) -> None:
        fit_scales(population, bags, roles, settings.scale)

    recipe = recipe_of(settings, target)
    with training_progress(f"{model}, {test.name}", recipe.epochs, seeds) as on_epoch:
        trained = train_protocol(
            partial(build, settings, WIDTH, target),
            bags,
            roles,
            recipe=recipe,
            seeds=range(seeds),
            grid=grid_of(settings),
            prepare=prepare,
            on_epoch=on_epoch,
        ).select()
    familiar, reversed_ = (
        _aucs(trained.population, draw_bags(test, TESTED, tested=tested, seed=1)) for tested in (False, True)
    )
    return UnitTestResult(model, test.name, familiar[0], reversed_[0], reversed_[1])


def _small(model: str) -> dict[str, Value] | None:
    """Return the options of small layers, for a model that has them."""
    import inspect

    known = inspect.signature(registered_models()[model.rpartition("/")[2]].build).parameters
    return {"hidden": SMALL} if "hidden" in known else None


def _aucs(population: Population, bags: Bags) -> tuple[Range, tuple[float, ...]]:
    """Return the mean AUC over the seeds with its interval, and that of each seed."""
    assert bags.labels is not None
    labels, values = bags.labels.numpy(), predict(population, bags, maps=False).values.double().numpy()
    seeds = len(values)
    answers = FoldAnswers.of(
        np.tile(labels, seeds),
        np.concatenate(values),
        seeds=np.repeat(np.arange(seeds), len(labels)),
        cases=np.tile(np.arange(len(labels)), seeds),
    )
    interval = figure_interval("auc", answers)
    return Range.of(interval), tuple(bag_auc(p, labels) for p in values)


def unit_test_tables(results: Sequence[UnitTestResult]) -> list[ResultTable]:
    """Return one table per model: the AUC of every test, and its verdict."""
    heads = ("test", "AUC, as in training", "AUC, shortcut reversed", "lowest to highest seed", "verdict")
    tables = []
    for model in dict.fromkeys(one.model for one in results):
        rows = tuple(
            (
                one.test,
                _text(one.familiar),
                _text(one.reversed_)
                if UNIT_TESTS[one.test].bound is None
                else f"{_text(one.reversed_)}, best {BOUND:.2f}",
                f"{min(one.seeds):.2f} to {max(one.seeds):.2f}",
                one.verdict,
            )
            for one in results
            if one.model == model
        )
        tables.append(ResultTable(f"{model}: unit tests, 95 % intervals over {TESTED} bags", heads, rows))
    return tables


def verdicts_table(results: Sequence[UnitTestResult]) -> ResultTable:
    """Return one row per model: in each test its verdict, and its AUC where the shortcut is reversed."""
    found = {(one.model, one.test): f"{one.word} {one.reversed_.value:.2f}" for one in results}
    models = dict.fromkeys(one.model for one in results)
    rows = tuple((model, *(found.get((model, test), "–") for test in UNIT_TESTS)) for model in models)
    title = "Unit tests: the verdict, and the AUC where the shortcut is reversed"
    return ResultTable(title, ("model", *UNIT_TESTS), rows)


def _text(value: Range) -> str:
    return f"{value.value:.2f} ({value.low:.2f} to {value.high:.2f})"
