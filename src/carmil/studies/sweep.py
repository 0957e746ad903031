"""`carmil sweep`: a grid over any settings of a study. Every point is a run, as `carmil train` would write it.

sweep.json       the request, and at the end the figures of every point
points/NAME/     one run per point
data/            bags that are packed or regrouped first, once for all points
checkpoint-*     the state from which interrupted training resumes; removed when its points are complete
sweep.md, sweep.png, report.html   for people

Points that differ in PER_MODEL_SETTINGS only are trained as one population. p points of the grid.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path

from carmil.errors import CarmilError, unknown
from carmil.files import safe_name
from carmil.progress import Log
from carmil.provenance import config_key
from carmil.runs.run import Run
from carmil.runs.settings import WHERE, Settings, Value, plain_name, set_by
from carmil.runs.writing import begin_sweep
from carmil.studies.cohort import Material, log_once, open_material
from carmil.studies.train import PER_MODEL_SETTINGS, check, check_fit, grid_of, run_together
from carmil.words import plural

# Settings that determine the bags, the target and its outcomes, and those that determine the folds.
COHORT = (
    *("bags", "labels", "slide", "patient", "label", "site", "split", "positive", "truth", "patients", "dtype"),
    *("target", "event", "kind", "loss", "grades", "adjust", "allow_duplicates", "skip_broken"),
)
FOLDS = ("folds", "seeds", "inner", "splits", "official", "validation", "reshuffle", "seed", "conformal")
LONGEST_NAME = 120


@dataclass(frozen=True)
class Point:
    """A point of the grid: the values of the swept settings, and the resulting study."""

    name: str
    values: dict[str, Value]
    study: Settings

    @property
    def idle(self) -> bool:
        """Return whether all loss weights of the counterfactual branch are zero, so that the point is the plain model."""
        return all(point.coefficients and not any(point.coefficients.values()) for point in grid_of(self.study))


@dataclass(frozen=True)
class Sweep:
    """A sweep to run; `over` lists the values of every swept setting."""

    out: Path
    over: dict[str, list[Value]]
    points: tuple[Point, ...]


@dataclass(frozen=True)
class SweepResult:
    """A finished sweep: one run per point, in the order of the points."""

    sweep: Sweep
    runs: tuple[Run, ...]


def parse_over(words: Sequence[str]) -> dict[str, list[str]]:
    """Parse "alpha=0,0.2" into {"alpha": ["0", "0.2"]}."""
    over: dict[str, list[str]] = {}
    for word in words:
        name, _, text = word.partition("=")
        name, values = plain_name(name.strip()), [value.strip() for value in text.split(",")]
        if not name or not all(values):
            raise CarmilError(f"--over {word}: expected NAME=VALUE,VALUE,... for example alpha=0,0.2,0.8,1")
        if name in over:
            raise CarmilError(
                f"--over {word}: {setting_name(name)} is swept already: give all its values in one --over"
            )
        over[name] = values
    return over


def sweep_of(given: Mapping[str, Value], over: Mapping[str, Sequence[Value]], *, where: str) -> Sweep:
    """Build the grid of a sweep.

    given: settings of a study, and `sweep` with names and values; `over` extends and overrides these.
    """
    words = {name: value for name, value in given.items() if name != "sweep"}
    grid = {**_value_lists(given.get("sweep") or {}, where), **over}
    if not grid:
        raise CarmilError(f"{where}: nothing to sweep over; expected, for example, --over alpha=0,0.2,0.8,1")
    for name in grid:
        _check_name(name, where)
    studies = []
    for values in product(*grid.values()):
        study = Settings.of(_combine(words, dict(zip(grid, values, strict=True))), where=where)
        studies.append((study, {name: _value_of(study, name) for name in grid}))
    names = _names([values for _, values in studies])
    out = studies[0][0].out
    points = tuple(
        Point(name, values, replace(study, out=out / "points" / name))
        for name, (study, values) in zip(names, studies, strict=True)
    )
    first_by_key: dict[str, Point] = {}
    for point in points:
        twin = first_by_key.setdefault(_key(point.study, without=("out",)), point)
        if twin is not point:
            raise CarmilError(f"{where}: two points of the sweep are the same, {twin.name}: give each value once")
    return Sweep(out, {name: _distinct([point.values[name] for point in points]) for name in grid}, points)


def run_sweep(sweep: Sweep, *, log: Log = lambda line: None) -> SweepResult:
    """Train all points, population by population. An interrupted sweep is resumed; a finished one is read."""
    for point in sweep.points:
        check(point.study)
    if (sweep.out / "run.json").exists():
        raise CarmilError(f"{sweep.out} holds a run: choose another --out for the sweep")
    populations = _populations(sweep)
    materials = _materials(sweep, [points[0] for points in populations], log=log)
    for points, material in zip(populations, materials, strict=True):
        check_fit(points[0].study, material)
    defaults = set_by(materials[0].cohort.target)
    common = common_settings(sweep)
    begin_sweep(
        sweep.out,
        {name: defaults.get(name) if value is None else value for name, value in common.items()},
        sweep.over,
        data=[material.cohort.fingerprint for material in materials],
        truth=[material.cohort.truth for material in materials],
        splits=[material.divisions for material in materials],
    )
    models = sum(models_of(point.study, m) for ps, m in zip(populations, materials, strict=True) for point in ps)
    log(f"{plural(len(sweep.points), 'point')}, {plural(models, 'model')} in {plural(len(populations), 'population')}")
    runs: dict[str, Run] = {}
    for i, (points, material) in enumerate(zip(populations, materials, strict=True)):
        studies = [point.study for point in points]
        ended = run_together(studies, material, checkpoint=sweep.out / f"checkpoint-{i}.safetensors", log=log)
        runs |= {point.name: run for point, run in zip(points, ended, strict=True)}
    return SweepResult(sweep, tuple(runs[point.name] for point in sweep.points))


def models_of(study: Settings, material: Material) -> int:
    """Return the number of models trained for a point: folds x seeds, times the size of the point's own grid."""
    return material.roles.shape[1] * study.seeds * len(grid_of(study))


def value_text(value: Value) -> str:
    """Return a short text for a value; the last part of a path."""
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:g}"
        case Path():
            return value.name
        case list():
            return "+".join(value_text(item) for item in value)
        case dict():
            return "+".join(f"{name}={value_text(item)}" for name, item in value.items())
        case _:
            return str(value)


def setting_name(name: str) -> str:
    return name.rstrip("_")


def _value_lists(sweep: Value, where: str) -> dict[str, list[Value]]:
    if not isinstance(sweep, dict) or not all(isinstance(values, list) and values for values in sweep.values()):
        raise CarmilError(
            f"{where}: sweep is {sweep!r}: expected names with lists of values, such as 'alpha: [0, 0.2]'"
        )
    return {plain_name(str(name)): values for name, values in sweep.items()}


def _check_name(name: str, where: str) -> None:
    known = [field.name for field in fields(Settings) if field.name not in WHERE]
    if name in WHERE:
        raise CarmilError(f"{where}: {name} cannot be swept: it does not change the results of a run")
    if name not in known and not (name.startswith("options.") and name != "options."):
        raise CarmilError(
            f"{where}: {unknown('setting', setting_name(name), [setting_name(field) for field in known])}"
        )


def _combine(words: Mapping[str, Value], values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the settings of one point. `options.hidden` sets one option of the model and keeps the common options."""
    settings = {**words, **{name: value for name, value in values.items() if not name.startswith("options.")}}
    swept = {name.removeprefix("options."): _option(value) for name, value in values.items() if name not in settings}
    common = settings.get("options")
    if swept:
        settings["options"] = {**common, **swept} if isinstance(common, Mapping) else swept
    return settings


def _option(value: Value) -> Value:
    """Convert text to a number or a boolean where possible: only the model knows the types of its options."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(value, value)


def _value_of(study: Settings, name: str) -> Value:
    if name.startswith("options."):
        return (study.options or {})[name.removeprefix("options.")]
    return getattr(study, name)


def _distinct(values: Sequence[Value]) -> list[Value]:
    distinct: list[Value] = []
    for value in values:
        if value not in distinct:
            distinct.append(value)
    return distinct


def _names(points: Sequence[Mapping[str, Value]]) -> list[str]:
    """Return one folder name per point, numbered if the values alone are too long or ambiguous."""
    names = [folder_name(values) for values in points]
    if len({name.lower() for name in names}) < len(names) or max(map(len, names)) > LONGEST_NAME:
        return [f"{i},{name[:LONGEST_NAME]}" for i, name in enumerate(names)]
    return names


def folder_name(values: Mapping[str, Value]) -> str:
    text = ",".join(f"{setting_name(name)}={value_text(value)}" for name, value in values.items())
    return safe_name(re.sub(r"[^\w.,=+-]", "-", text)) if text else ""


def _key(study: Settings, *, without: Sequence[str] = (), only: Sequence[str] | None = None) -> str:
    values = study.as_json()
    return config_key({name: values[name] for name in values if name not in without and (only is None or name in only)})


def common_settings(sweep: Sweep) -> dict[str, Value]:
    """Return the settings that are the same at all points, as in JSON."""
    study = sweep.points[0].study
    options = {name: value for name, value in (study.options or {}).items() if f"options.{name}" not in sweep.over}
    common = study.lasting() | {"options": options or study.options}
    return {name: value for name, value in common.items() if name not in sweep.over}


def _populations(sweep: Sweep) -> list[list[Point]]:
    groups: dict[str, list[Point]] = {}
    for point in sweep.points:
        groups.setdefault(_key(point.study, without=(*PER_MODEL_SETTINGS, "out")), []).append(point)
    return list(groups.values())


def _materials(sweep: Sweep, points: Sequence[Point], *, log: Log) -> list[Material]:
    """Open the bags and folds of these points, once where they are the same. Each message is logged once."""
    materials: dict[str, Material] = {}
    log = log_once(log)
    keys = [_key(point.study, only=(*COHORT, *FOLDS)) for point in points]
    for key, point in zip(keys, points, strict=True):
        if key not in materials:
            cohort_values = {name: value for name, value in point.values.items() if name in COHORT}
            folder = sweep.out / "data" / folder_name(cohort_values)
            materials[key] = open_material(replace(point.study, out=folder), log=log)
    return [materials[key] for key in keys]
