"""The test bags of a digit run, drawn again as its config says, with the picture of every digit."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carmil.counterfactual import create_model
from carmil.datasets.digit_data import DigitData, load_digits
from carmil.datasets.digits import TASKS
from carmil.errors import CarmilError
from carmil.models.contract import Ability
from carmil.runs.decision import Decision
from carmil.training.population import Member, Population
from carmil.training.runs import Run, read_run
from carmil.untrusted import read_json
from carmil.viewer.cases import Case, RunCases

ENLARGED = 4


def is_digit_run(folder: Path) -> bool:
    try:
        return "task" in read_json(folder / "run.json")["config"]
    except (CarmilError, KeyError, TypeError):
        return False


def digit_runs(folder: Path) -> list[Path]:
    """The runs that `carmil demo` left in a folder, those with a counterfactual branch first."""
    found = [path.parent for path in folder.glob("runs/*/*/run.json") if is_digit_run(path.parent)]
    return sorted(found, key=lambda run: (not run.name.startswith("car-"), run.parent.name != "four_bags", str(run)))


def digit_cases(folder: Path) -> RunCases:
    run = read_run(folder)
    task, data = TASKS[run.config["task"]], _drawn_again(run)
    test = data.studies[task.name].test
    options = run.config["options"]
    population = Population(
        lambda: create_model(run.config["model"], test.bags.width, task.classes, **options),
        [Member(**member) for member in run.config["members"]],
    )
    population.load_state(run.weights)
    answers = _answers(run, test.bags.ids, "p", task.classes)
    counterfactual = (
        _answers(run, test.bags.ids, "cf0_p", task.classes)
        if Ability.COUNTERFACTUAL_MAP in population.model.abilities
        else None
    )
    assert test.bags.labels is not None
    decision = Decision(tuple(task.class_names))
    cases = tuple(
        Case(
            slide=name,
            place=i,
            models=tuple(range(len(population))),
            decision=decision,
            probabilities=answers[i],
            counterfactual=None if counterfactual is None else counterfactual[i],
            label=task.class_names[int(test.bags.labels[i])],
        )
        for i, name in enumerate(test.bags.ids)
    )

    def picture(row: int) -> NDArray[np.uint8]:
        large = 255 - data.images.images[test.images[row]].repeat(ENLARGED, 0).repeat(ENLARGED, 1)
        return np.repeat(large[..., None], 3, axis=2)

    name = f"{task.title}: {run.config['model']}"
    return RunCases(name, task.class_names, test.bags, cases, population, picture)


def _drawn_again(run: Run) -> DigitData:
    """The bags of the run, from the images that come with a package; a run of others is refused."""
    about: dict[str, Any] = run.config["data"]
    try:
        data = load_digits(
            (run.config["task"],), pool=about["pool"], sizes=tuple(about["sizes"]), seed=int(about["seed"])
        )
    except KeyError as error:
        raise CarmilError(f"{run.folder} does not record its bags ({error} is missing): run it again") from None
    other = [name for name, value in data.about.items() if about.get(name) != value]
    if other:
        raise CarmilError(
            f"{run.folder} is of other {' and '.join(other)} ({about.get(other[0])}): only runs on the bundled digits and "
            "their pixels can be viewed"
        )
    return data


def _answers(run: Run, ids: tuple[str, ...], prefix: str, classes: int) -> NDArray[np.float64]:
    """(b, k) the mean over the models."""
    import pandas as pd

    frame = pd.read_parquet(run.folder / "predictions.parquet")
    names = [f"{prefix}{c}" for c in range(classes)]
    return frame.groupby("bag")[names].mean().loc[list(ids)].to_numpy(dtype=np.float64)
