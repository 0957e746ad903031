"""What `carmil faithfulness` found, as JSON has it, and read back for the report of the run."""

from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from carmil.errors import CarmilError
from carmil.provenance import numbers_again
from carmil.runs.evidence_schema import Interval
from carmil.runs.run import Run, weights_key
from carmil.studies.accumulator import Curve
from carmil.studies.verdict import Followed, JudgedMap, JudgedRun
from carmil.untrusted import parsed, read_json, shown

FILE = "faithfulness.json"


def facts_of(run: JudgedRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "run": run.run.key,
        "weights": weights_key(run.run),
        "data": run.run.data.fingerprint,
        "model": run.run.settings.model,
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


class _Curve(TypedDict):
    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]


class _Followed(TypedDict):
    figures: dict[str, Interval]
    deletion: _Curve
    insertion: _Curve
    auc: list[float | None]


class _Map(_Followed):
    method: str
    learned: bool | None
    weights_shuffled: _Followed


class _Facts(TypedDict):
    """One run of faithfulness.json, as `facts_of` writes it."""

    name: str
    run: str
    weights: str
    slides: int
    rightly_answered: int
    random_order: _Curve
    random_order_auc: list[float | None]
    auc_of_twins: list[float | None]
    maps: list[_Map]


class _File(TypedDict):
    runs: list[_Facts]


def read_judged(run: Run, path: Path) -> JudgedRun:
    """What was found of this run. A file of another run, or of other weights, is refused."""
    again = f"run `carmil faithfulness {run.name}` again"
    held = read_json(path, again)
    parsed(held, _File, f"{path} is not as `carmil faithfulness` writes it", again)
    mine = [one for one in held["runs"] if (one["run"], one["weights"]) == (run.key, weights_key(run))]
    if not mine:
        raise CarmilError(f"{path} is not of the weights of this run: {again}")
    if problem := _problem(mine[0]):
        raise CarmilError(f"{path}: {problem}; {again}")
    return _judged(run, mine[0])


def _problem(facts: _Facts) -> str | None:
    """What does not fit together in the facts of a run, in words."""
    parts: list[_Followed] = [part for one in facts["maps"] for part in (one, one["weights_shuffled"])]
    curves = [facts["random_order"], *(part[name] for part in parts for name in ("deletion", "insertion"))]
    steps = {len(values) for curve in curves for values in (curve["mean"], curve["low"], curve["high"])}
    steps |= {len(values) for values in (facts["random_order_auc"], *(part["auc"] for part in parts))}
    if not parts or not facts["auc_of_twins"]:
        return "maps or auc_of_twins is empty"
    if len(steps) != 1 or min(steps) < 2:
        return "its curves have different numbers of steps, or fewer than two"
    for one in facts["maps"]:
        for name in ("randomisation", "aopc_gain"):
            if name not in one["figures"]:
                return f"{name} of the map {shown(one['method'])} is missing"
    return None


def _judged(run: Run, facts: _Facts) -> JudgedRun:
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


def _followed_again(facts: _Followed) -> Followed:
    return Followed(
        numbers_again(facts["figures"]),
        _curve_again(facts["deletion"]),
        _curve_again(facts["insertion"]),
        np.array(numbers_again(facts["auc"])),
    )


def _curve(curve: Curve) -> dict[str, list[float]]:
    return {"mean": curve.mean.tolist(), "low": curve.low.tolist(), "high": curve.high.tolist()}


def _curve_again(facts: _Curve) -> Curve:
    mean, low, high = (
        np.array(numbers_again(values), dtype=np.float64) for values in (facts["mean"], facts["low"], facts["high"])
    )
    return Curve(mean, low, high)
