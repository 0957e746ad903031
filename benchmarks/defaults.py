"""Measure how good the defaults are: AUC over cohorts x settings x methods, and the regret of the default settings.

    python benchmarks/defaults.py --data DATA --out OUT [--device cuda] [--processes 6]
    python benchmarks/defaults.py --bags FOLDER --labels CSV --out OUT

SETTINGS and METHODS are fixed before anything is trained, in a commit of their own. The best pair of a cohort is picked on seeds
0 to 4; **regret** is its AUC minus that of the default, both on seeds 5 to 9. The AUC of a seed is the mean over its folds. A last
table has the AUC of the default if each fold also chose its model, linear classifier or MLP, by the validation loss.

Writes OUT/results.jsonl, one row per cohort, setting, method and seed, and OUT/defaults.md. If interrupted, run the same command
again to resume. `--report` computes the tables from the rows there are.
"""

import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import cohorts
import numpy as np
import pandas as pd
import torch
import typer
from cohorts import Cohort
from reattention import random_fall
from speed.script import run_script
from speed.timing import DEVICE

from carmil.evidence.counterfactual_change import attention_moved
from carmil.models.contract import Ability, Prediction
from carmil.runs.run import build
from carmil.runs.settings import Settings
from carmil.statistics.intervals import FoldAnswers, difference_interval, estimate
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
    "lr 2e-4": {"lr": 2e-4},
    "decay 1e-4": {"weight_decay": 1e-4},
}
METHODS = (
    "car/abmil.gated",
    "abmil.gated",
    "car/abmil.mlp",
    "abmil.mlp",
    "clam.sb",
    "dsmil",
    "acmil",
    "mean",
    "max",
    "transmil",
)
DEFAULT, PLAIN = METHODS[:2]  # the default model, and the same without CAR
# Every method with the default settings; every setting with the default model.
PAIRS = [
    *(("default", method) for method in METHODS),
    *(("0.1", method) for method in METHODS[:2]),
    *((setting, DEFAULT) for setting in SETTINGS if setting not in ("default", "0.1")),
]
SLOW, MOST_INSTANCES = "transmil", 1_000  # some thirty times the cost of ABMIL: only where bags are smaller, on average
PICK, JUDGE = range(5), range(5, 10)

Row = dict[str, Any]


def train_and_test(
    cohort: Cohort,
    setting: dict[str, Any],
    method: str,
    seeds: Sequence[int],
    device: str,
    *,
    in_detail: bool,
) -> Iterator[Row]:
    """Train all folds and seeds at once, as `carmil train` would, and yield the figures of each seed.

    in_detail: with every answer, and what the counterfactual attention does.
    """
    settings = Settings.of({"bags": "-", "out": "-", **setting, "model": method}, where=method)
    divisions = [cohort.roles(seed) for seed in seeds]
    roles, tested = torch.stack([role for role, _ in divisions]), torch.cat([test for _, test in divisions])
    assert cohort.bags.labels is not None
    width, labels = cohort.bags.width, cohort.bags.labels

    def prepare(population: Population, roles: torch.Tensor) -> None:
        if settings.scale != "none":
            fit_scales(population, cohort.bags, roles, settings.scale, device=device)

    selection = train_protocol(
        lambda: build(settings, width, cohort.target),
        cohort.bags,
        roles,
        recipe=recipe_of(settings),
        seeds=seeds,
        grid=grid_of(settings),
        prepare=prepare,
        device=device,
        precision=settings.precision,
    ).select()
    population = selection.population
    test_bags = tested.any(0).nonzero().squeeze(-1)
    shifts: list[torch.Tensor] = []  # (3, r, bags of a part): attention moved, fall of the logit, fall at random

    def on_part(prediction: Prediction) -> None:
        if in_detail and prediction.counterfactual:
            shifts.append(torch.stack(random_fall(population.model, prediction)).cpu())
        elif prediction.counterfactual and Ability.SCORES_ARE_WEIGHTS not in population.model.abilities:
            moved = attention_moved(prediction).squeeze(-1).cpu()
            shifts.append(torch.stack([moved, *[torch.full_like(moved, torch.nan)] * 2]))

    answers = predict(population, cohort.bags, chosen=test_bags, maps=False, on_part=on_part)
    shift = torch.cat(shifts, dim=2) if shifts else None
    folds = tested.shape[0] // len(seeds)
    for i in range(len(seeds)):
        rows = range(i * folds, (i + 1) * folds)
        aucs = [bag_auc(answers.values[row][tested[row, test_bags]], labels[tested[row]]) for row in rows]
        figures: Row = {
            "auc": 100 * statistics.fmean(auc for auc in aucs if auc == auc),
            "folds": [[100 * auc, selection.models[row].validation_loss] for row, auc in zip(rows, aucs, strict=True)],
        }
        if shift is not None:
            own = torch.cat([shift[:, row][:, tested[row, test_bags]] for row in rows], dim=1)
            figures |= dict(zip(("moved", "fall", "fall_at_random"), own.median(1).values.tolist(), strict=True))
        if in_detail:
            figures["answers"] = [
                [fold, bag, int(labels[bag]), *(round(p, 6) for p in answers.values[row][at].tolist())]
                for fold, row in enumerate(rows)
                for at, bag in enumerate(test_bags.tolist())
                if tested[row, bag]
            ]
        yield figures


@lru_cache(maxsize=2)
def _cohort(name: str, data: Path | None, bags: Path | None, labels: Path | None, fast: bool) -> Cohort:
    if bags is not None:
        assert labels is not None
        return cohorts.from_folder(bags, labels)
    assert data is not None
    return cohorts.load(name, data, fast=fast)


def measure(source: tuple[Any, ...], setting: str, method: str, seeds: list[int], device: str) -> list[Row]:
    """Rows of one cohort, setting and method; none where the method is left out."""
    name, fast, start = source[0], source[-1], time.monotonic()
    cohort = _cohort(*source)
    if method == SLOW and len(cohort.bags.features) / len(cohort.bags) > MOST_INSTANCES:
        return []
    words = SETTINGS[setting] | ({"epochs": 2} if fast else {})
    in_detail = setting == "default" and method in (DEFAULT, PLAIN)
    found = train_and_test(cohort, words, method, seeds, device, in_detail=in_detail)
    rows = [
        {"cohort": name, "setting": setting, "method": method, "seed": seed, **figures}
        for seed, figures in zip(seeds, found, strict=True)
    ]
    mean = statistics.fmean(row["auc"] for row in rows)
    print(f"{name}, {setting}, {method}: AUC {mean:.1f}, {time.monotonic() - start:.0f} s", flush=True)
    return rows


def report(rows: list[Row]) -> str:
    """The tables in markdown."""
    frame = pd.DataFrame(rows)
    names = list(frame["cohort"].unique())
    means = frame.groupby(["cohort", "setting", "method"])
    aucs = {key: f"{group['auc'].mean():.1f} ± {group['auc'].std(ddof=0):.1f}" for key, group in means}
    auc_rows = [(*pair, *(aucs.get((name, *pair), "") for name in names)) for pair in PAIRS]
    filled = tuple(row for row in auc_rows if any(row[2:]))
    heads = ("settings", "method", *names)
    tables = (
        ResultTable("AUC, mean over the seeds ± their deviation", heads, filled, names=len(heads)),
        regret_table(frame, names),
        counterfactual_table(frame, names),
        chosen_table(frame, names),
    )
    return "\n".join(table.markdown() for table in tables)


def regret_table(frame: pd.DataFrame, names: Sequence[str]) -> ResultTable:
    """AUC of each cohort's best pair minus that of the default settings, with and without CAR."""
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
        own = [judged.get(("default", method), float("nan")) for method in (DEFAULT, PLAIN)]
        regrets.append([judged[best] - value for value in own])
        figures = (judged[best], *own, *regrets[-1])
        rows.append((name, f"{best[0]}, {best[1]}", *(f"{value:.1f}" for value in figures)))
    mean = [f"{statistics.fmean(column):.2f}" for column in zip(*regrets, strict=True)] or ["", ""]
    heads = ("cohort", "best pair", "its AUC", DEFAULT, PLAIN, f"regret of {DEFAULT}", f"regret of {PLAIN}")
    title = "Regret of the default settings: best pair on seeds 0 to 4, measured on seeds 5 to 9"
    return ResultTable(title, heads, (*rows, ("mean", "", "", "", "", *mean)), names=len(heads))


def counterfactual_table(frame: pd.DataFrame, names: Sequence[str]) -> ResultTable:
    """CAR beside the same model without it, and what its counterfactual attention does."""
    rows = []
    for name in names:
        of = frame[(frame["cohort"] == name) & (frame["setting"] == "default")]
        given = [_answers(of[of["method"] == method]) for method in (DEFAULT, PLAIN)]
        if None in given or "moved" not in of:
            continue
        car = of[of["method"] == DEFAULT]
        spread = difference_interval(*(estimate("auc", answers) for answers in given if answers is not None))
        figures = (f"{car[column].mean():.2f}" for column in ("moved", "fall", "fall_at_random"))
        rows.append(
            (name, f"{100 * spread.value:+.1f}", f"{100 * spread.low:+.1f} to {100 * spread.high:+.1f}", *figures)
        )
    heads = ("cohort", "AUC with CAR minus without", "95 % interval", "attention moved, of 2", "fall", "fall at random")
    title = (
        f"{DEFAULT} beside {PLAIN}; medians over test bags of sum |a_cf - a|, of the answered class's logit minus that under "
        "u_cf, and of the same under a random attention that moves as much"
    )
    return ResultTable(title, heads, tuple(rows), names=len(heads))


def chosen_table(frame: pd.DataFrame, names: Sequence[str]) -> ResultTable:
    """AUC where each fold takes, of two methods with the default settings, the one with the lower validation loss."""
    rows = []
    for linear, mlp in (("car/abmil.gated", "car/abmil.mlp"), ("abmil.gated", "abmil.mlp")):
        for name in names:
            of = frame[(frame["cohort"] == name) & (frame["setting"] == "default")]
            folds = [of[of["method"] == method].set_index("seed")["folds"] for method in (linear, mlp)]
            seeds = sorted(set(folds[0].index) & set(folds[1].index))
            if not seeds:
                continue
            # (2, seeds, folds, 2): AUC and validation loss
            pair = np.array([[of_method[seed] for seed in seeds] for of_method in folds])
            with_mlp = pair[1, ..., 1] < pair[0, ..., 1]
            chosen = np.where(with_mlp, pair[1, ..., 0], pair[0, ..., 0])
            aucs = (np.nanmean(values) for values in (pair[0, ..., 0], pair[1, ..., 0], chosen))
            rows.append((linear, name, *(f"{auc:.1f}" for auc in aucs), f"{with_mlp.mean():.2f}"))
    heads = ("model", "cohort", "linear classifier", "MLP beside it", "chosen by validation loss", "share with MLP")
    return ResultTable("AUC if each fold chooses its classifier by the validation loss", heads, tuple(rows), names=2)


def _answers(rows: pd.DataFrame) -> FoldAnswers | None:
    """All answers of one method. Folds that are drawn again for every seed are folds of their own."""
    if rows.empty or rows["answers"].isna().any():
        return None
    table = np.array([[seed, *row] for seed, own in zip(rows["seed"], rows["answers"], strict=True) for row in own])
    seed, fold, bag, label = table[:, :4].astype(np.int64).T
    folds = int(fold.max()) + 1
    fold = fold + folds * seed if folds > 1 else fold
    return FoldAnswers.of(label, table[:, 4:], folds=fold, seeds=seed, cases=bag)


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
    processes: Annotated[int, typer.Option(help="Trainings at a time, each in a process of its own.")] = 1,
    report_only: Annotated[bool, typer.Option("--report", help="Train nothing.")] = False,
    device: str = DEVICE,
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    results, end = out / "results.jsonl", time.monotonic() + seconds
    rows: list[Row] = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = {(row["cohort"], row["setting"], row["method"], row["seed"]) for row in rows}
    names = [bags.name] if bags else cohorts_.split(",")
    jobs = [
        ((name, data, bags, labels, fast), setting, method, missing, device)
        for setting, method in PAIRS
        if setting in settings.split(",") and method in methods.split(",")
        for name in names
        if (missing := [seed for seed in range(seeds) if (name, setting, method, seed) not in done])
    ]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        waiting = iter([] if report_only else jobs)
        running = {pool.submit(measure, *job) for _, job in zip(range(processes), waiting, strict=False)}
        while running:
            ended = next(as_completed(running))
            running.remove(ended)
            rows += ended.result()
            with results.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in ended.result())
            if time.monotonic() < end and (job := next(waiting, None)):
                running.add(pool.submit(measure, *job))
    (out / "defaults.md").write_text(report(rows))
    print(report(rows))


if __name__ == "__main__":
    run_script(main)
