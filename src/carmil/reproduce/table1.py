"""Table 1 of the paper: digit bags, where the truth about every instance is known.

Ours and the paper's figures stand side by side, never mixed; every row names the rule its negative evidence was scored by.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from carmil.counterfactual import list_models
from carmil.counterfactual.branches import branch_coefficients
from carmil.datasets.digits import TASKS, DigitStudy
from carmil.errors import CarmilError, unknown
from carmil.evidence import EXPLAINERS, NEGATIVE_RULES
from carmil.files import write_text
from carmil.reproduce.digit_data import digits_of, training_of
from carmil.reproduce.digit_runs import ADAM, Experiment, optimizer_of, run_experiment
from carmil.reproduce.paper import PAPER, Figure
from carmil.reproduce.parallel import run_parallel
from carmil.reproduce.recipes import Finding, Request
from carmil.tables import ResultTable
from carmil.training.population import Member
from carmil.training.recipe import Recipe
from carmil.training.runs import Run

DIGIT_TASKS = ("adjacent_pairs", "four_bags")
ALL_MODELS = ("abmil", "additive", "transmil", "car/abmil", "targeted/abmil")
MEASURES = {"auc": "AUC", "auprc_pos": "AUPRC+", "auprc_both": "AUPRC±"}
EVIDENCE = ("attention", "rollout", "patch_scores", "targeted", "path")  # of every model that has it

WHOSE = ("ours", "paper")


@dataclass(frozen=True)
class Row:
    """One line of the table. `ours` and `paper` map a measure to its figure; `note` says what a reader must know.

    `weights` says which alpha and lambda it is of, where several were asked for; `interval` is of AUPRC±, if any.
    """

    task: str
    model: str
    evidence: str
    negative: str
    ours: dict[str, Figure]
    paper: dict[str, Figure]
    note: str = ""
    weights: str = ""
    interval: Figure | None = None


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
        request = {"alpha": self.alpha, "lambda_": self.lambda_} if "/" in model else {}
        named = {name: values for name, values in request.items() if values}
        return [dict(zip(named, values, strict=True)) for values in product(*named.values())]


def reproduce(request: Request) -> Finding:
    """Every row of the paper's table, on both tasks."""
    digits = digits_of(request, DIGIT_TASKS)
    settings = Settings(models=ALL_MODELS, **training_of(request))
    rows, lines = run_table1(
        digits.studies, settings, digits.about, request.out, device=request.device, shared=request.digits
    )
    return Finding(tuple(tables(rows)), conditions=tuple(lines))


def run_table1(
    studies: Mapping[str, DigitStudy],
    settings: Settings,
    data: Mapping[str, Any],
    out: Path,
    *,
    device: str,
    shared: Path | None = None,
) -> tuple[list[Row], list[str]]:
    """Trains what is not yet in `shared` (or `out`), and writes table1.md and table1.json to `out`. Gives the rows and what they
    depend on."""
    rows: list[Row] = []
    machines: list[str] = []
    for experiment, run in trained(planned(studies, settings, data), studies, shared or out, device):
        rows += rows_of_run(experiment.task.name, experiment.model, run, settings.points(experiment.model))
        machines.append(run.measured_on)
    for task in studies:
        rows += missing_rows(task, settings.models)
    lines = conditions(settings, data, machines)
    write_text(out / "table1.json", json.dumps(as_json(rows, lines), indent=2))
    write_text(out / "table1.md", markdown("Table 1: digit bags", rows, lines))
    return rows, lines


def planned(studies: Mapping[str, DigitStudy], settings: Settings, data: Mapping[str, Any]) -> list[Experiment]:
    """A population for every task and model; what cannot be built is known before any training."""
    experiments = [
        Experiment(
            TASKS[task],
            model,
            settings.members(model),
            Recipe(epochs=settings.epochs, optimizer=optimizer_of(model)),
            {**data, "task": task},
            evidence_of(model),
        )
        for task in studies
        for model in settings.models
    ]
    for experiment in experiments:
        experiment.build(studies[experiment.task.name].train.bags.width)
    return experiments


def trained(
    experiments: Sequence[Experiment], studies: Mapping[str, DigitStudy], out: Path, device: str
) -> list[tuple[Experiment, Run]]:
    """Each with its run, trained if `out` does not have it; on a GPU several at once."""

    def train(experiment: Experiment) -> Run:
        task = experiment.task.name
        return run_experiment(experiment, studies[task], run_folder(out, task, experiment.model), device=device)

    runs = run_parallel([partial(train, experiment) for experiment in experiments], device)
    return list(zip(experiments, runs, strict=True))


def evidence_of(model: str) -> tuple[str, ...]:
    """Explainers that a run holds the maps of: what the table shows, what the paper has for this model, and what scores
    negatives by the paper's rule."""
    papers = [evidence for name, evidence, _ in PAPER if name == model]
    return tuple(dict.fromkeys([*EVIDENCE, *papers, "counterfactual_attention"]))


def run_folder(out: Path, task: str, model: str) -> Path:
    return out / "runs" / task / model.replace("/", "-")


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
                if both is None or evidence == "counterfactual_attention":
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
                        paper=papers(task, model, evidence, negative) if len(points) == 1 else {},
                        note="control" if negative == "self" else "",
                        weights=point_name(point) if len(points) > 1 else "",
                    )
                )
    return rows


def papers(task: str, model: str, evidence: str, negative: str) -> dict[str, Figure]:
    """The paper's figures of this row, if it has it."""
    return PAPER.get((model, evidence, negative), {}).get(task, {})


def point_name(point: Mapping[str, float]) -> str:
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


def tables(rows: Sequence[Row], measures: Mapping[str, str] = MEASURES) -> list[ResultTable]:
    """A table a task: ours, and, if the paper has a measure too, a column of its figures beside."""
    several, bounded = any(row.weights for row in rows), any(row.interval for row in rows)
    columns = [
        (measure, whose, f"{title} {whose}" if both else title)
        for measure, title in measures.items()
        for both in [any(measure in row.paper for row in rows)]
        for whose in WHOSE[: 1 + both]
    ]
    return [
        ResultTable(
            TASKS[task].title,
            (
                "model",
                *(["weights"] if several else []),
                "evidence",
                "negative rule",
                *(title for _, _, title in columns),
                *(["AUPRC± interval"] if bounded else []),
                "note",
            ),
            tuple(
                (
                    row.model,
                    *([row.weights] if several else []),
                    row.evidence,
                    row.negative,
                    *(shown(getattr(row, whose).get(measure)) for measure, whose, _ in columns),
                    *([_bounds(row.interval)] if bounded else []),
                    row.note,
                )
                for row in rows
                if row.task == task
            ),
            names=3 + several,
        )
        for task in dict.fromkeys(row.task for row in rows)
    ]


def _bounds(interval: Figure | None) -> str:
    return "–" if interval is None else f"{interval[0]:.1f} to {interval[1]:.1f}"


def markdown(title: str, rows: Sequence[Row], lines: Sequence[str], measures: Mapping[str, str] = MEASURES) -> str:
    rules = [f"- `{name}`: {text}" for name, text in NEGATIVE_RULES.items()]
    parts = [f"# {title}", "", *(f"- {line}" for line in lines), ""]
    shown_tables = [table.markdown() for table in tables(rows, measures)]
    return "\n".join([*parts, *shown_tables, "Negative rules:", "", *rules, ""])


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


def as_json(rows: Sequence[Row], lines: Sequence[str]) -> dict[str, Any]:
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
                **({} if row.interval is None else {"auprc_both_interval": list(row.interval)}),
                "note": row.note,
            }
            for row in rows
        ],
    }
