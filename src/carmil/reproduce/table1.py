"""Table 1 of the paper: digit bags, where the truth about every instance is known.

Our figures and the paper's are in separate columns; every row names the rule by which its negative evidence was
scored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from carmil.datasets.study_cohort import StudyCohort
from carmil.evidence import EXPLAINERS, NEGATIVE_RULES
from carmil.evidence.explainers import explainers_of
from carmil.report.paper import Finding
from carmil.reproduce.digits import build, digit_cohorts, digit_methods, training_lines
from carmil.reproduce.method_runs import Method, MethodRun, train_methods
from carmil.reproduce.paper import PAPER, Figure, figure, figure_text
from carmil.reproduce.recipes import Request, write_finding
from carmil.statistics.bootstrap import mean_intervals
from carmil.studies.agreement import MapAgreement, run_agreement
from carmil.tables import ResultTable

MODELS = ("abmil", "additive", "transmil", "car/abmil", "targeted/abmil")  # of the paper
MEASURES = {"auc": "AUC", "auprc_plus": "AUPRC+", "auprc_both": "AUPRC±"}
EVIDENCE = ("attention", "rollout", "patch_scores", "targeted", "path")  # for every model that has it
PAPERS = "the paper's: ResNet18 features of MNIST, learning rate 2e-4, other bags"
REPEATS = 2000


@dataclass(frozen=True)
class Row:
    """One row of the table. `ours` and `paper` map a measure to its figure.

    note: a remark for readers. interval: that of AUPRC±.
    """

    task: str
    model: str
    evidence: str
    negative: str
    ours: Mapping[str, Figure]
    paper: Mapping[str, Figure]
    note: str = ""
    interval: Figure | None = None


def reproduce(request: Request) -> Finding:
    """Reproduce every row of the paper's table, on both tasks."""
    return run_table1(digit_cohorts(request), digit_methods(MODELS), request)


def run_table1(cohorts: Sequence[StudyCohort], methods: Sequence[Method], request: Request) -> Finding:
    """Train the missing models; write table1.md and table1.json."""
    for cohort, method in product(cohorts, methods):
        build(method, cohort)
    runs = train_methods(cohorts, methods, request)
    rows = [row for one in runs for row in agreement_rows(one, maps_of(one.method.model), request)]
    return digit_table("table1", cohorts, runs, rows, request, MEASURES)


def maps_of(model: str) -> list[str]:
    """Return the maps of the table, and those that the paper has for this model."""
    return list(dict.fromkeys([*EVIDENCE, *(evidence for name, evidence, _ in PAPER if name == model)]))


def agreement_rows(
    one: MethodRun, explainers: Sequence[str], request: Request, *, intervals: bool = False
) -> list[Row]:
    """Return one row per map of the run and per rule by which its negative evidence can be scored.

    The paper's figures, whose alpha and lambda are unknown, are in the rows with the branch's default weights.
    """
    fitting = set(explainers) & set(explainers_of(one.run.model())) - {"counterfactual_attention"}
    names = [name for name in EXPLAINERS if name in fitting]
    task, title, auc = one.cohort.name, one.method.title, figure(one.values("auc"))
    if not names:
        return [Row(task, title, "none", "none", {"auc": auc}, {})]
    rows = []
    agreements = run_agreement(one.run, names, device=request.device)
    for each in sorted(agreements, key=lambda each: (names.index(each.explainer), each.rule == "self")):
        figures = {"auc": auc} | {name: figure(values.nanmean((1, 2))) for name, values in each.measures.items()}
        paper = PAPER.get((title, each.explainer, each.rule), {}).get(task, {})
        note, interval = "control" if each.rule == "self" else "", _interval(each) if intervals else None
        rows.append(Row(task, title, each.explainer, each.rule, figures, paper, note, interval))
    return rows


def _interval(found: MapAgreement) -> Figure | None:
    """Return the 95 % interval of AUPRC± over test bags, for the mean over the models; None if it is unknown."""
    both = found.measures["auprc_both"].mean(0)  # (b, k)
    bags = torch.arange(len(both)).repeat_interleave(both.shape[1])
    _, (low,), (high,) = mean_intervals(both.flatten().unsqueeze(-1), bags, repeats=REPEATS)
    return None if np.isnan(low) else (100 * float(low), 100 * float(high))


def digit_table(
    name: str,
    cohorts: Sequence[StudyCohort],
    runs: Sequence[MethodRun],
    rows: Sequence[Row],
    request: Request,
    measures: Mapping[str, str],
    lines: Sequence[str] = (),
) -> Finding:
    """Write the rows, then those rows of the paper that were not requested, to NAME.md and NAME.json."""
    models = {one.method.model for one in runs}
    missing = [
        Row(cohort.name, model, evidence, negative, {}, figures[cohort.name], "not asked for")
        for cohort in cohorts
        for (model, evidence, negative), figures in PAPER.items()
        if model not in models and cohort.name in figures
    ]
    rows = [*rows, *missing]
    conditions = [
        *training_lines(cohorts, [one.run for one in runs]),
        PAPERS,
        *lines,
        *(f"negative rule `{rule}`: {text}" for rule, text in NEGATIVE_RULES.items()),
    ]
    tables = tuple(row_table(cohort, [row for row in rows if row.task == cohort.name], measures) for cohort in cohorts)
    facts = {"negative_rules": NEGATIVE_RULES, "rows": rows}
    return write_finding(name, request, facts, tables=tables, conditions=conditions)


def row_table(cohort: StudyCohort, rows: Sequence[Row], measures: Mapping[str, str]) -> ResultTable:
    """Tabulate our figures and, if the paper has a measure too, its figures in a column next to ours."""
    bounded = any(row.interval for row in rows)
    columns = [
        (name, whose)
        for name in measures
        for whose in ("ours", "paper")
        if any(name in getattr(row, whose) for row in rows)
    ]
    titles = [f"{measures[name]} {whose}" if (name, "paper") in columns else measures[name] for name, whose in columns]
    lines = []
    for row in rows:
        figures = [figure_text(getattr(row, whose).get(measure)) for measure, whose in columns]
        figures += ["–" if row.interval is None else f"{row.interval[0]:.1f} to {row.interval[1]:.1f}"] * bounded
        lines.append((row.model, row.evidence, row.negative, *figures, row.note))
    heads = ("model", "evidence", "negative rule", *titles, *["AUPRC± interval"] * bounded, "note")
    return ResultTable(cohort.title, heads, tuple(lines), names=3)
