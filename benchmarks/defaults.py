"""Measure how good the defaults are: AUC over cohorts x settings x methods, and the regret of the default settings.

    python benchmarks/defaults.py --data DATA --out OUT [--device cuda]
    python benchmarks/defaults.py --bags FOLDER --labels CSV --out OUT

SETTINGS and METHODS are fixed before anything is trained, in a commit of their own. The best pair of a cohort is picked on seeds
0 to 4; **regret** is its AUC minus that of the default, both on seeds 5 to 9. The AUC of a seed is the mean over its folds.

Writes OUT/results.jsonl, one row per cohort, setting, method and seed, and OUT/defaults.md. If interrupted, run the same command
again to resume.
"""

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import cohorts
import pandas as pd
import torch
import typer
from cohorts import Cohort
from speed.script import run_script
from speed.timing import DEVICE

from carmil.models.contract import Prediction
from carmil.models.pooling import bag_softmax, bag_sum
from carmil.runs.run import build
from carmil.runs.settings import Settings
from carmil.statistics.performance import bag_auc
from carmil.studies.train import grid_of, recipe_of
from carmil.tables import ResultTable
from carmil.training.population import Population
from carmil.training.predict import predict
from carmil.training.protocol import train_protocol
from carmil.training.scaling import fit_scales

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "0.1": {"preset": "0.1"},
    "scale own": {"scale": "own"},
    "scale common": {"scale": "common"},
    "init own": {"init": "own"},
    "lr 2e-4": {"lr": 2e-4},
    "decay 1e-4": {"weight_decay": 1e-4},
    "no smoothing": {"label_smoothing": 0.0},
}
METHODS = ("car/abmil.gated", "abmil.gated", "clam.sb", "dsmil", "transmil", "acmil", "mean", "max")
# Every method with the default settings and those of 0.1.0; every setting with these two.
EVERY_METHOD, EVERY_SETTING = ("default", "0.1"), ("car/abmil.gated", "abmil.gated")
PICK, JUDGE = range(5), range(5, 10)


PAIRS = [(s, m) for s in SETTINGS for m in METHODS if s in EVERY_METHOD or m in EVERY_SETTING]
Row = dict[str, Any]


def train_and_test(
    cohort: Cohort, setting: dict[str, Any], method: str, seeds: Sequence[int], device: str
) -> Iterator[dict[str, float]]:
    """Train all folds and seeds at once, as `carmil train` would, and yield the figures of each seed."""
    settings = Settings.of({"bags": "-", "out": "-", "model": method, **setting}, where=method)
    divisions = [cohort.roles(seed) for seed in seeds]
    roles, tested = torch.stack([role for role, _ in divisions]), torch.cat([test for _, test in divisions])
    assert cohort.bags.labels is not None
    width, labels = cohort.bags.width, cohort.bags.labels

    def prepare(population: Population, roles: torch.Tensor) -> None:
        if settings.scale != "none":
            fit_scales(population, cohort.bags, roles, settings.scale)

    selection = train_protocol(
        lambda: build(settings, width, cohort.bags.classes),
        cohort.bags,
        roles,
        recipe=recipe_of(settings),
        seeds=seeds,
        grid=grid_of(settings),
        prepare=prepare,
        device=device,
        precision=settings.precision,
    ).select()
    test_bags = tested.any(0).nonzero().squeeze(-1)
    shifts: list[torch.Tensor] = []

    def on_part(prediction: Prediction) -> None:
        if prediction.counterfactual:
            shifts.append(attention_shift(prediction))

    answers = predict(selection.population, cohort.bags, chosen=test_bags, maps=False, on_part=on_part)
    shift = torch.cat(shifts, dim=1) if shifts else None
    folds = tested.shape[0] // len(seeds)
    for i in range(len(seeds)):
        rows = range(i * folds, (i + 1) * folds)
        aucs = [bag_auc(answers.probabilities[row][tested[row, test_bags]], labels[tested[row]]) for row in rows]
        figures = {"auc": 100 * statistics.fmean(auc for auc in aucs if auc == auc)}
        if shift is not None:
            figures["moved"] = float(torch.cat([shift[row][tested[row, test_bags]] for row in rows]).median())
        yield figures


def attention_shift(prediction: Prediction) -> torch.Tensor:
    """(r, b) sum |a_cf - a| of every bag, for the first counterfactual attention."""
    assert prediction.counterfactual is not None
    a = bag_softmax(prediction.scores, prediction.offsets)
    a_cf = bag_softmax(prediction.counterfactual.scores[..., 0, :], prediction.offsets)
    return bag_sum((a_cf - a).abs(), prediction.offsets).mean(-1).cpu()


def report(rows: list[Row]) -> str:
    """The three tables in markdown."""
    frame = pd.DataFrame(rows)
    names = list(frame["cohort"].unique())
    means = frame.groupby(["cohort", "setting", "method"])
    aucs = {key: f"{group['auc'].mean():.1f} ± {group['auc'].std(ddof=0):.1f}" for key, group in means}
    moved = {
        key: f"{group['moved'].mean():.2f}" for key, group in means if group.get("moved", pd.Series()).notna().any()
    }
    auc_rows = [(*pair, *(aucs.get((name, *pair), "") for name in names)) for pair in PAIRS]
    moved_rows = [
        (setting, *(moved.get((name, setting, method), "") for name in names))
        for setting, method in PAIRS
        if method.startswith("car/")
    ]
    tables = (
        _table("AUC, mean over the seeds ± their deviation", ("settings", "method"), names, auc_rows),
        regret_table(frame, names),
        _table(
            "Attention moved by CAR: median of sum |a_cf - a| over test bags, of 2", ("settings",), names, moved_rows
        ),
    )
    return "\n".join(table.markdown() for table in tables)


def _table(title: str, keys: tuple[str, ...], names: Sequence[str], rows: Sequence[tuple[str, ...]]) -> ResultTable:
    filled = tuple(row for row in rows if any(row[len(keys) :]))
    return ResultTable(title, (*keys, *names), filled, names=len(keys) + len(names))


def regret_table(frame: pd.DataFrame, names: Sequence[str]) -> ResultTable:
    """AUC of each cohort's best pair minus that of the default settings with the first two methods."""
    defaults = METHODS[:2]
    rows, regrets = [], []
    for name in names:
        seeds = (
            frame[frame["cohort"] == name].pivot_table("auc", ["setting", "method"], "seed").reindex(columns=range(10))
        )
        complete = seeds.dropna()
        if len(complete) < 2:
            continue
        best = complete[list(PICK)].mean(axis=1).reindex([pair for pair in PAIRS if pair in complete.index]).idxmax()
        judged = complete[list(JUDGE)].mean(axis=1)
        own = [judged.get(("default", method), float("nan")) for method in defaults]
        regrets.append([judged[best] - value for value in own])
        figures = (judged[best], *own, *regrets[-1])
        rows.append((name, f"{best[0]}, {best[1]}", *(f"{value:.1f}" for value in figures)))
    mean = [f"{statistics.fmean(column):.2f}" for column in zip(*regrets, strict=True)] or ["", ""]
    heads = ("cohort", "best pair", "its AUC", *defaults, *(f"regret of {method}" for method in defaults))
    title = "Regret of the default settings: best pair on seeds 0 to 4, measured on seeds 5 to 9"
    return ResultTable(title, heads, (*rows, ("mean", "", "", "", "", *mean)), names=len(heads))


def main(
    out: Annotated[Path, typer.Option()],
    data: Annotated[Path | None, typer.Option(help="Folder with crc, mil and mnist.")] = None,
    bags: Annotated[Path | None, typer.Option(help="Your own folder of bags, with --labels.")] = None,
    labels: Path | None = None,
    cohorts_: Annotated[str, typer.Option("--cohorts")] = ",".join(cohorts.NAMES),
    settings: str = ",".join(SETTINGS),
    methods: str = ",".join(METHODS),
    seeds: int = 10,
    seconds: Annotated[float, typer.Option(help="Start no training after this many.")] = float("inf"),
    fast: Annotated[bool, typer.Option("--fast", help="Small cohorts and 2 epochs, to see that it runs.")] = False,
    device: str = DEVICE,
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    results, begin = out / "results.jsonl", time.monotonic()
    rows: list[Row] = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = {(row["cohort"], row["setting"], row["method"], row["seed"]) for row in rows}
    for name in [bags.name] if bags else cohorts_.split(","):
        cohort = None
        for setting, method in PAIRS:
            missing = [seed for seed in range(seeds) if (name, setting, method, seed) not in done]
            wanted = setting in settings.split(",") and method in methods.split(",")
            if not (missing and wanted) or time.monotonic() - begin > seconds:
                continue
            if cohort is None:
                cohort = cohorts.from_folder(bags, labels) if bags else cohorts.load(name, data, fast=fast)
            start = time.monotonic()
            words = SETTINGS[setting] | ({"epochs": 2} if fast else {})
            new = [
                {"cohort": name, "setting": setting, "method": method, "seed": seed, **figures}
                for seed, figures in zip(missing, train_and_test(cohort, words, method, missing, device), strict=True)
            ]
            rows += new
            with results.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in new)
            mean = statistics.fmean(row["auc"] for row in new)
            print(f"{name}, {setting}, {method}: AUC {mean:.1f}, {time.monotonic() - start:.0f} s", flush=True)
            (out / "defaults.md").write_text(report(rows))
    print(report(rows))


if __name__ == "__main__":
    run_script(main)
