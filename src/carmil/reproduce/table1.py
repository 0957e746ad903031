"""Table 1 of the paper: digit bags, where the truth about every instance is known.

Ours and the paper's figures stand side by side, never mixed; every row names the rule its negative evidence was scored by.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from carmil.bags.digits import TASKS, DigitStudy
from carmil.counterfactual import list_models
from carmil.counterfactual.branches import branch_coefficients
from carmil.errors import CarmilError, unknown
from carmil.evidence import EXPLAINERS, NEGATIVE_RULES
from carmil.files import write_text
from carmil.report.tables import ResultTable
from carmil.reproduce.digit_runs import ADAM, Experiment, optimizer_of, run_experiment
from carmil.training.population import Member
from carmil.training.recipe import Recipe
from carmil.training.runs import Run

ALL_MODELS = ("abmil", "additive", "transmil", "car/abmil", "targeted/abmil")
MEASURES = {"auc": "AUC", "auprc_pos": "AUPRC+", "auprc_both": "AUPRC±"}

WHOSE = ("ours", "paper")

Figure = tuple[float, float]  # mean and standard deviation, in per cent

# (model, evidence, negative rule) -> task -> measure -> figure
PAPER: dict[tuple[str, str, str], dict[str, dict[str, Figure]]] = {
    ("abmil", "attention", "mirror"): {
        "adjacent_pairs": {"auc": (85.7, 5.9), "auprc_pos": (76.9, 6.1), "auprc_both": (61.5, 0.9)},
        "four_bags": {"auc": (99.1, 0.1), "auprc_pos": (86.8, 0.2), "auprc_both": (53.1, 0.1)},
    },
    ("additive", "attention", "mirror"): {
        "adjacent_pairs": {"auc": (81.0, 2.2), "auprc_pos": (64.3, 4.8), "auprc_both": (63.5, 1.2)},
        "four_bags": {"auc": (97.0, 2.7), "auprc_pos": (82.1, 12.1), "auprc_both": (53.4, 0.8)},
    },
    ("additive", "patch_scores", "mirror"): {
        "adjacent_pairs": {"auprc_pos": (66.7, 7.4), "auprc_both": (67.6, 6.6)},
        "four_bags": {"auprc_pos": (76.4, 15.0), "auprc_both": (76.8, 14.6)},
    },
    ("transmil", "rollout", "mirror"): {
        "adjacent_pairs": {"auc": (94.6, 4.4), "auprc_pos": (81.5, 6.9), "auprc_both": (61.7, 2.1)},
        "four_bags": {"auc": (99.5, 0.1), "auprc_pos": (81.6, 6.3), "auprc_both": (51.9, 0.8)},
    },
    # the interpretability table
    ("abmil", "random", "mirror"): {
        "adjacent_pairs": {"auprc_pos": (54.2, 0.9), "auprc_both": (54.2, 0.9)},
        "four_bags": {"auprc_pos": (30.6, 0.2), "auprc_both": (31.2, 0.2)},
    },
    ("abmil", "single", "mirror"): {
        "adjacent_pairs": {"auprc_pos": (78.5, 1.0), "auprc_both": (78.5, 1.0)},
        "four_bags": {"auprc_pos": (87.9, 1.6), "auprc_both": (87.7, 2.1)},
    },
    ("car/abmil", "attention", "counterfactual"): {
        "adjacent_pairs": {"auc": (94.1, 5.9), "auprc_pos": (85.7, 6.5), "auprc_both": (84.6, 5.2)},
        "four_bags": {"auc": (99.6, 0.1), "auprc_pos": (86.8, 0.6), "auprc_both": (89.7, 0.9)},
    },
}


@dataclass(frozen=True)
class Row:
    """One line of the table. `ours` and `paper` map a measure to its figure; `note` says what a reader must know.

    `weights` says which alpha and lambda it is of, where several were asked for.
    """

    task: str
    model: str
    evidence: str
    negative: str
    ours: dict[str, Figure]
    paper: dict[str, Figure]
    note: str = ""
    weights: str = ""


@dataclass(frozen=True)
class Settings:
    """What every population of the table shares. Every combination of alpha and lambda is trained, all in one population."""

    models: tuple[str, ...] = ("abmil", "car/abmil")
    repetitions: int = 10
    lr: float = 1e-3
    epochs: int = 1000
    alpha: tuple[float, ...] = ()  # none: the branch's own
    lambda_: tuple[float, ...] = ()
    distance: str = "l1"

    def __post_init__(self) -> None:
        known = list_models()
        if not self.models:
            raise CarmilError("no model named: expected for example --models abmil,car/abmil")
        for model in self.models:
            if model not in known:
                raise CarmilError(unknown("model", model, known))
        if self.repetitions < 1:
            raise CarmilError(f"{self.repetitions} repetitions: expected at least 1")
        for model in self.models:
            self.members(model)
        Recipe(epochs=self.epochs)

    def members(self, model: str) -> tuple[Member, ...]:
        """Point by point, models that differ in their seed alone."""
        distance = {"distance": self.distance} if model.startswith("car/") else {}
        return tuple(
            Member(seed=seed, lr=self.lr, coefficients=branch_coefficients(model, **point, **distance))
            for point in self.points(model)
            for seed in range(self.repetitions)
        )

    def points(self, model: str) -> list[dict[str, float]]:
        """Every combination of alpha and lambda; what is not asked for is left to the branch, and there is none without one."""
        asked = {"alpha": self.alpha, "lambda_": self.lambda_} if "/" in model else {}
        named = {name: values for name, values in asked.items() if values}
        return [dict(zip(named, values, strict=True)) for values in product(*named.values())]


def run_table1(
    studies: Mapping[str, DigitStudy], settings: Settings, data: Mapping[str, Any], out: Path, *, device: str
) -> tuple[list[Row], list[str]]:
    """Trains what is not yet in `out`, and writes table1.md and table1.json there. Gives the rows and what they depend on."""
    experiments = [
        Experiment(
            TASKS[task],
            model,
            settings.members(model),
            Recipe(epochs=settings.epochs, optimizer=optimizer_of(model)),
            {**data, "task": task},
        )
        for task in studies
        for model in settings.models
    ]
    for experiment in experiments:
        experiment.build(
            studies[experiment.task.name].train.bags.width
        )  # what cannot be built is known before any training
    rows: list[Row] = []
    machines: list[str] = []
    for experiment in experiments:
        task, model = experiment.task.name, experiment.model
        folder = out / "runs" / task / model.replace("/", "-")
        run = run_experiment(experiment, studies[task], folder, device=device)
        rows += rows_of_run(task, model, run, settings.points(model))
        machines.append(run.measured_on)
    for task in studies:
        rows += missing_rows(task, settings.models)
    lines = conditions(settings, data, machines)
    write_text(out / "table1.json", json.dumps(_as_json(rows, lines), indent=2))
    write_text(out / "table1.md", markdown(rows, lines))
    return rows, lines


def rows_of_run(task: str, model: str, run: Run, points: Sequence[Mapping[str, float]] = ({},)) -> list[Row]:
    """A row for every map of the run and every rule its negative evidence can be scored by, at every point of the grid.

    Models come point by point. The paper's figures, whose alpha and lambda are not known, stand where there is one point.
    """
    rows = []
    repetitions = len(run.metrics["auc"]) // len(points)
    for i, point in enumerate(points):
        mine = slice(i * repetitions, (i + 1) * repetitions)
        for evidence in EXPLAINERS:
            for negative in ("mirror", "counterfactual", "self"):
                both = run.metrics.get(f"{evidence}.{negative}.auprc_both")
                if both is None or (negative == "self" and evidence != "attention"):
                    continue
                values = {
                    "auc": run.metrics["auc"],
                    "auprc_pos": run.metrics[f"{evidence}.auprc_pos"],
                    "auprc_both": both,
                }
                rows.append(
                    Row(
                        task=task,
                        model=model,
                        evidence=evidence,
                        negative=negative,
                        ours={name: figure(value[mine]) for name, value in values.items()},
                        paper=PAPER.get((model, evidence, negative), {}).get(task, {}) if len(points) == 1 else {},
                        note="control" if negative == "self" else "",
                        weights=_named(point) if len(points) > 1 else "",
                    )
                )
    return rows


def _named(point: Mapping[str, float]) -> str:
    return ", ".join(f"{name.removesuffix('_')} {value:g}" for name, value in point.items())


def missing_rows(task: str, measured: Sequence[str]) -> list[Row]:
    """The paper's rows that were not asked for, said to be missing."""
    return [
        Row(task, model, evidence, negative, {}, figures[task], "not asked for")
        for (model, evidence, negative), figures in PAPER.items()
        if model not in measured and task in figures
    ]


def figure(values: Sequence[float]) -> Figure:
    """Mean and standard deviation over the models, in per cent; of one model there is no deviation."""
    known = np.asarray(values, dtype=float)  # None, as JSON has it, becomes NaN
    spread = float(known.std(ddof=1)) if len(known) > 1 else float("nan")
    return 100 * float(known.mean()), 100 * spread


def shown(value: Figure | None) -> str:
    if value is None:
        return "–"
    mean, spread = value
    return f"{mean:.1f}" if np.isnan(spread) else f"{mean:.1f} ± {spread:.1f}"


def tables(rows: Sequence[Row]) -> list[ResultTable]:
    """A table a task: ours, and, if any row is the paper's too, a column of its figures beside."""
    both = any(row.paper for row in rows)
    several = any(row.weights for row in rows)
    heads = [f"{title} {whose}" if both else title for title in MEASURES.values() for whose in WHOSE[: 1 + both]]
    return [
        ResultTable(
            TASKS[task].title,
            ("model", *(["weights"] if several else []), "evidence", "negative rule", *heads, "note"),
            tuple(
                (
                    row.model,
                    *([row.weights] if several else []),
                    row.evidence,
                    row.negative,
                    *(shown(getattr(row, whose).get(measure)) for measure in MEASURES for whose in WHOSE[: 1 + both]),
                    row.note,
                )
                for row in rows
                if row.task == task
            ),
            names=3 + several,
        )
        for task in dict.fromkeys(row.task for row in rows)
    ]


def markdown(rows: Sequence[Row], lines: Sequence[str]) -> str:
    rules = [f"- `{name}`: {text}" for name, text in NEGATIVE_RULES.items()]
    parts = ["# Table 1: digit bags", "", *(f"- {line}" for line in lines), ""]
    return "\n".join([*parts, *(table.markdown() for table in tables(rows)), "Negative rules:", "", *rules, ""])


def conditions(settings: Settings, data: Mapping[str, Any], machines: Sequence[str]) -> list[str]:
    """What the figures depend on, a line each."""
    return [
        f"mean ± standard deviation over {settings.repetitions} initialisations on the same bags, in per cent",
        f"ours: {data['images']}; features: {data['features']}; pool {data['pool']}; data seed {data['seed']}; "
        f"{' / '.join(str(size) for size in data['sizes'])} train / validation / test bags",
        "the paper's: ResNet18 features of MNIST, learning rate 2e-4, other bags",
        f"ours: SGD, momentum 0.9 ({', '.join(ADAM)}: Adam), learning rate {settings.lr:g}, at most {settings.epochs} epochs, "
        "patience 100; "
        "the epoch with the lowest validation cross-entropy of the factual answer",
        f"measured on {'; and on '.join(dict.fromkeys(machines))}",
    ]


def _as_json(rows: Sequence[Row], lines: Sequence[str]) -> dict[str, Any]:
    def named(figures: Mapping[str, Figure]) -> dict[str, dict[str, float | None]]:
        return {name: {"mean": mean, "std": None if np.isnan(std) else std} for name, (mean, std) in figures.items()}

    return {
        "conditions": list(lines),
        "negative_rules": NEGATIVE_RULES,
        "rows": [
            {
                "task": row.task,
                "model": row.model,
                "evidence": row.evidence,
                "negative": row.negative,
                "weights": row.weights,
                "ours": named(row.ours),
                "paper": named(row.paper),
                "note": row.note,
            }
            for row in rows
        ],
    }
