"""Table 1 of the paper: digit bags, where the truth about every instance is known.

Ours and the paper's figures stand side by side, never mixed; every row names the rule its negative evidence was scored by.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from carmil.datasets.study_cohort import StudyCohort
from carmil.evidence import EXPLAINERS, NEGATIVE_RULES
from carmil.evidence.explainers import explainers_of
from carmil.reproduce.digits import build, digit_cohorts, digit_methods, point_name, spread_line, training_lines
from carmil.reproduce.method_runs import Method, MethodRun, train_methods
from carmil.reproduce.paper import PAPER, Figure, figure, figure_text
from carmil.reproduce.recipes import Finding, Request, write_finding
from carmil.statistics.bootstrap import mean_intervals
from carmil.studies.agreement import MapAgreement, run_agreement
from carmil.tables import ResultTable

MODELS = ("abmil", "additive", "transmil", "car/abmil", "targeted/abmil")  # of the paper
MEASURES = {"auc": "AUC", "auprc_plus": "AUPRC+", "auprc_both": "AUPRC±"}
EVIDENCE = ("attention", "rollout", "patch_scores", "targeted", "path")  # of every model that has it
PAPERS = "the paper's: ResNet18 features of MNIST, learning rate 2e-4, other bags"
REPEATS = 2000


@dataclass(frozen=True)
class Row:
    """One row of the table. `ours` and `paper` map a measure to its figure.

    note: what a reader must know. weights: which alpha and lambda it is of, where several were asked for. interval: of AUPRC±.
    """

    task: str
    model: str
    evidence: str
    negative: str
    ours: Mapping[str, Figure]
    paper: Mapping[str, Figure]
    note: str = ""
    weights: str = ""
    interval: Figure | None = None


def reproduce(request: Request) -> Finding:
    """Every row of the paper's table, on both tasks."""
    return run_table1(digit_cohorts(request), digit_methods(MODELS), request)


def run_table1(cohorts: Sequence[StudyCohort], methods: Sequence[Method], request: Request) -> Finding:
    """Train what is not there yet; write table1.md and table1.json."""
    for cohort, method in product(cohorts, methods):
        build(method, cohort)
    runs = train_methods(cohorts, methods, request)
    rows = [row for one in runs for row in agreement_rows(one, maps_of(one.method.model), request, MEASURES)]
    return digit_table("table1", cohorts, runs, rows, request, MEASURES)


def maps_of(model: str) -> list[str]:
    """What the table shows, and what the paper has for this model."""
    return list(dict.fromkeys([*EVIDENCE, *(evidence for name, evidence, _ in PAPER if name == model)]))


def agreement_rows(
    one: MethodRun, explainers: Sequence[str], request: Request, measures: Mapping[str, str], *, intervals: bool = False
) -> list[Row]:
    """One row per map of the run and rule its negative evidence can be scored by.

    The paper's figures, whose alpha and lambda are not known, stand where the branch has its own.
    """
    fitting = explainers_of(one.run.model())
    names = [
        name for name in EXPLAINERS if name in explainers and name in fitting and name != "counterfactual_attention"
    ]
    if not names:
        return []
    task, model, weights = one.cohort.name, one.method.model, point_name(one.method.settings)
    rows = []
    for found in sorted(run_agreement(one.run, names, device=request.device), key=lambda found: found.rule == "self"):
        means = {name: values.nanmean((1, 2)).tolist() for name, values in found.measures.items()}
        values = {"auc": one.values("auc"), **means}
        paper = PAPER.get((model, found.explainer, found.rule), {}).get(task, {})
        rows.append(
            Row(
                task=task,
                model=model,
                evidence=found.explainer,
                negative=found.rule,
                ours={name: figure(values[name]) for name in measures},
                paper={} if weights else paper,
                note="control" if found.rule == "self" else "",
                weights=weights,
                interval=_interval(found) if intervals else None,
            )
        )
    return sorted(rows, key=lambda row: names.index(row.evidence))


def _interval(found: MapAgreement) -> Figure | None:
    """Of AUPRC±, 95 % over test bags of the mean over the models; None where it is not known."""
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
    """The rows, then those of the paper that were not asked for; as tables, and written to NAME.md and NAME.json."""
    models = {one.method.model for one in runs}
    rows = [
        *rows,
        *(
            Row(cohort.name, model, evidence, negative, {}, figures[cohort.name], "not asked for")
            for cohort in cohorts
            for (model, evidence, negative), figures in PAPER.items()
            if model not in models and cohort.name in figures
        ),
    ]
    conditions = [
        spread_line(cohorts[0].protocol),
        *training_lines(cohorts, [one.run for one in runs]),
        PAPERS,
        *lines,
        *(f"negative rule `{rule}`: {text}" for rule, text in NEGATIVE_RULES.items()),
    ]
    tables = tuple(row_table(cohort, [row for row in rows if row.task == cohort.name], measures) for cohort in cohorts)
    facts = {"negative_rules": NEGATIVE_RULES, "rows": [_facts(row) for row in rows]}
    return write_finding(name, request, Finding(tables, conditions=tuple(conditions)), facts)


def row_table(cohort: StudyCohort, rows: Sequence[Row], measures: Mapping[str, str]) -> ResultTable:
    """Ours and, if the paper has a measure too, a column of its figures beside."""
    weights, bounded = any(row.weights for row in rows), any(row.interval for row in rows)
    columns = []
    for measure, title in measures.items():
        beside = any(measure in row.paper for row in rows)
        columns += [(measure, "ours", f"{title} ours" if beside else title)]
        columns += [(measure, "paper", f"{title} paper")] if beside else []
    heads = ["model", *["weights"] * weights, "evidence", "negative rule", *(title for _, _, title in columns)]
    lines = []
    for row in rows:
        cells = [row.model, *[row.weights] * weights, row.evidence, row.negative]
        cells += [figure_text(getattr(row, whose).get(measure)) for measure, whose, _ in columns]
        cells += ["–" if row.interval is None else f"{row.interval[0]:.1f} to {row.interval[1]:.1f}"] * bounded
        lines.append((*cells, row.note))
    return ResultTable(cohort.title, (*heads, *["AUPRC± interval"] * bounded, "note"), tuple(lines), names=3 + weights)


def _facts(row: Row) -> dict[str, object]:
    def named(figures: Mapping[str, Figure]) -> dict[str, dict[str, float]]:
        return {name: {"mean": mean, "std": std} for name, (mean, std) in figures.items()}

    interval = {} if row.interval is None else {"auprc_both_interval": list(row.interval)}
    return {**vars(row), "ours": named(row.ours), "paper": named(row.paper), **interval}
