"""What `carmil faithfulness` found, as JSON has it, and read back for the report of the run."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from carmil.errors import CarmilError
from carmil.studies.gathered import Curve
from carmil.studies.run_folder import StudyRun, weights_key
from carmil.studies.verdict import Followed, JudgedMap, JudgedRun
from carmil.training.runs import numbers_again

FILE = "faithfulness.json"


def facts_of(run: JudgedRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "run": run.run.facts["key"],
        "weights": weights_key(run.run),
        "data": run.run.facts["data"],
        "model": run.run.settings["model"],
        "slides": run.slides,
        "rightly_answered": run.right,
        "random_order": _curve(run.at_random),
        "random_order_auc": run.auc_at_random.tolist(),
        "auc_of_twins": run.auc_of_twins.tolist(),
        "maps": [
            {
                "method": one.method,
                "fails_randomisation": one.fails,
                "failures": list(one.failures),
                "learned": one.learned,
                **_followed(one),
                "weights_shuffled": _followed(one.twin),
            }
            for one in run.maps
        ],
    }


def read_judged(run: StudyRun, path: Path) -> JudgedRun:
    """What was found of this run. A file of another run, or of other weights, is refused."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))["runs"]
        mine = [one for one in facts if (one["run"], one["weights"]) == (run.facts["key"], weights_key(run))]
        if not mine:
            raise CarmilError(f"{path} is not of the weights of this run: run `carmil faithfulness {run.name}` again")
        return _judged(run, mine[0])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CarmilError(f"{path} cannot be read ({error}): run `carmil faithfulness {run.name}` again") from error


def _judged(run: StudyRun, facts: dict[str, Any]) -> JudgedRun:
    maps = tuple(
        JudgedMap(
            **vars(_followed_again(one)),
            run=facts["name"],
            method=one["method"],
            twin=_followed_again(one["weights_shuffled"]),
            learned=one["learned"],
        )
        for one in facts["maps"]
    )
    return JudgedRun(
        run,
        facts["name"],
        facts["slides"],
        facts["rightly_answered"],
        maps,
        _curve_again(facts["random_order"]),
        np.array(numbers_again(facts["random_order_auc"])),
        np.array(numbers_again(facts["auc_of_twins"])),
    )


def _followed(found: Followed) -> dict[str, Any]:
    return {
        "figures": found.figures,
        "deletion": _curve(found.deletion),
        "insertion": _curve(found.insertion),
        "auc": found.auc.tolist(),
    }


def _followed_again(facts: dict[str, Any]) -> Followed:
    return Followed(
        numbers_again(facts["figures"]),
        _curve_again(facts["deletion"]),
        _curve_again(facts["insertion"]),
        np.array(numbers_again(facts["auc"])),
    )


def _curve(curve: Curve) -> dict[str, list[float]]:
    return {"mean": curve.mean.tolist(), "low": curve.low.tolist(), "high": curve.high.tolist()}


def _curve_again(facts: dict[str, Any]) -> Curve:
    return Curve(**{name: np.array(numbers_again(values), dtype=np.float64) for name, values in facts.items()})
