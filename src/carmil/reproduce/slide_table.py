"""Common parts of the tables on slides: figures by method and cohort, differences on the same cases, and conditions."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from carmil.datasets.study_cohort import StudyCohort
from carmil.report.paper import Finding, Picture
from carmil.reproduce.method_runs import Method, MethodRun, measured_on
from carmil.reproduce.paper import figure, figure_text
from carmil.reproduce.recipes import Request, write_finding
from carmil.reproduce.slide_cohorts import CohortSet
from carmil.studies.agreement import run_agreement
from carmil.studies.compare import Comparison, compare_pairs
from carmil.studies.tables import figures_lines
from carmil.tables import ResultTable
from carmil.training.recipe import first_eligible_epoch

MEASURES = {"auc": "AUC", "f1_macro": "F1", "balanced_accuracy": "BACC", "auprc_attention": "AUPRC+"}
MAPS = (
    "AUPRC+ scores attention before the softmax against the truth of the instances, slide by slide: AddMIL's attention (not its "
    "patch scores), DSMIL's map of the positive class, the mean of ACMIL's maps, WENO's teacher's, TransMIL's "
    "rollout; mean and max pooling have no attention"
)
READING = (
    "a difference is that of the two means over folds and runs, its 95 % interval over patients, or sets of donors. F1 and "
    "balanced accuracy of two classes are at each fold's own threshold, chosen on validation bags; of more, of the most probable",
    "a method is better or worse where that interval excludes 0; a paired t-test over folds that share training cases is too "
    "optimistic; over runs of one split it shows the effect of initialisation, not of other cases",
    "p values in brackets are corrected by Holm's method for the pairs of one cohort and measure",
)
CAR_WEIGHTS = "CAR: alpha 0.2, lambda 1"
ABMIL = Method("ABMIL", "abmil.gated")
CAR_L1 = Method("CAR-MIL (L1)", "car/abmil.gated")
CAR_COSINE = Method("CAR-MIL (cosine)", "car/abmil.gated", {"distance": "cosine"})


@dataclass(frozen=True)
class Difference:
    """The difference between two methods on a cohort by one measure.

    informed: whether at least one of the two methods is better than always predicting the class frequencies."""

    cohort: StudyCohort
    measure: str
    comparison: Comparison
    informed: bool = True


def write_slide_finding(
    name: str,
    request: Request,
    found: CohortSet,
    rows: Sequence[MethodRun],
    compared: Sequence[Difference],
    *,
    others: Sequence[Difference] = (),
    tables: Sequence[ResultTable] = (),
    pictures: Sequence[Picture] = (),
    lines: Sequence[str] = (),
    conditions: Sequence[str] = (),
    weights: str = CAR_WEIGHTS,
) -> Finding:
    """Write the finding of a recipe on slides: figures, differences if there are any, the recipe's own tables.

    others: further differences, for the JSON file only.
    """
    between = [difference_table(compared)] if compared else []
    return write_finding(
        name,
        request,
        figures_json(rows, [*compared, *others]),
        tables=(figures_table(rows), *between, *tables),
        pictures=pictures,
        lines=(*lines, *caution_lines(rows)),
        conditions=(*conditions, *READING, *study_conditions(rows, found, request, weights)),
    )


def figures_table(rows: Sequence[MethodRun]) -> ResultTable:
    """Tabulate mean and standard deviation over folds, or over runs, in per cent."""
    cohorts = {row.cohort.name: row.cohort for row in rows}
    methods = list(dict.fromkeys(row.method.title for row in rows))
    by_name = {(row.cohort.name, row.method.title): row for row in rows}
    columns = [(name, measure) for name, cohort in cohorts.items() for measure in cohort.measures]
    lines = tuple(
        (method, *(_cell(by_name.get((name, method)), measure) for name, measure in columns)) for method in methods
    )
    heads = ("model", *(f"{cohorts[name].title} {MEASURES[measure]}" for name, measure in columns))
    return ResultTable(f"Ours{_stand_in(cohorts.values())}: mean ± standard deviation, per cent", heads, lines)


def differences(rows: Sequence[MethodRun], pairs: Iterable[tuple[Method, Method]]) -> list[Difference]:
    """Return first minus second, by the measures of each cohort that has both methods.

    p values are corrected for the number of pairs of one cohort and measure.
    """
    by_title = {(row.cohort, row.method.title): row for row in rows}
    titles, results = [(first.title, second.title) for first, second in pairs], []
    for cohort in dict.fromkeys(row.cohort for row in rows):
        both = [[by_title.get((cohort, title)) for title in pair] for pair in titles]
        for measure in cohort.measures:
            own = [(a, b) for a, b in both if a and b and a.has(measure) and b.has(measure)]
            compared = compare_pairs([(a.judged(measure), b.judged(measure)) for a, b in own])
            results += [
                Difference(cohort, measure, comparison, not (a.cautions and b.cautions))
                for comparison, (a, b) in zip(compared, own, strict=True)
            ]
    return results


def difference_table(compared: Sequence[Difference]) -> ResultTable:
    def p(value: float, corrected: float, over: str = "") -> str:
        return "–" if np.isnan(value) else f"{value:.2g} ({corrected:.2g}){over}"

    lines = tuple(
        (
            one.cohort.title,
            f"{pair.first} − {pair.second}",
            MEASURES[one.measure],
            f"{100 * pair.difference:+.1f}",
            f"{100 * pair.low:+.1f} to {100 * pair.high:+.1f}",
            p(pair.p_patients, pair.holm_patients),
            p(pair.p_t, pair.holm_t, f" over {'runs' if pair.pairs == 'seeds' else 'folds'}"),
            "yes" if one.informed else "neither",
        )
        for one in compared
        for pair in [one.comparison]
    )
    tests = ("p over patients (Holm)", "p paired t (Holm)", "better than class frequencies")
    title = f"Differences on the same cases{_stand_in(one.cohort for one in compared)}"
    return ResultTable(title, ("cohort", "pair", "measure", "difference", "95 % interval", *tests), lines, names=3)


def caution_lines(rows: Sequence[MethodRun]) -> list[str]:
    """Return one line per method that is no better than the class frequencies."""
    return [f"{row.cohort.title}, {row.method.title}: {caution}" for row in rows for caution in row.cautions]


def study_conditions(rows: Sequence[MethodRun], found: CohortSet, request: Request, weights: str) -> list[str]:
    """Return the conditions of the figures, one line each."""
    lines = []
    for row in {row.cohort: row for row in rows}.values():
        counts = figures_lines(row.run)[0].partition(": ")[2]
        lines.append(f"{row.cohort.title}: {counts}; {row.cohort.encoder} features, lr {row.cohort.protocol.lr:g}")
        lines += row.cohort.notes
    settings = rows[0].run.settings
    first = first_eligible_epoch(settings.warmup, settings.epochs)
    lines.append(
        f"every method: Adam, weight decay 1e-5, a cosine over at most {settings.epochs} epochs, patience {settings.patience}, one "
        f"slide per step; the epoch of the lowest validation loss, from epoch {first} on (counted from 0), and nothing is chosen "
        f"on test bags. {weights}; the rest of a method is as its authors published it. The paper leaves most of this open"
    )
    lines += ["--fast: TransMIL, RRT-MIL and WENO are smaller than published"] if request.fast else []
    with_maps = {row.cohort: row for row in rows if "auprc_attention" in row.cohort.measures}
    lines += [MAPS] if with_maps else []
    for cohort, row in with_maps.items():
        for chance in run_agreement(row.run, ["random"], device=request.device):
            share = figure_text(figure(chance.measures["auprc_plus"].nanmean((1, 2)).tolist()))
            lines.append(f"{cohort.title}: AUPRC+ of a random map is {share}")
    return [*dict.fromkeys([*lines, measured_on([row.run for row in rows])]), *found.missing]


def figures_json(rows: Sequence[MethodRun], compared: Sequence[Difference]) -> dict[str, object]:
    """Return every figure of every fold or run, and every comparison, for the JSON file."""
    return {
        "figures": [
            {
                "cohort": row.cohort.name,
                "encoder": row.cohort.encoder,
                "stand_in": row.cohort.stand_in,
                "method": row.method.title,
                "model": row.method.model,
                "measure": row.method.figure(measure),
                "over": "folds" if len({line.fold for line in row.by_fold}) > 1 else "runs",
                "values": row.values(measure),
            }
            for row in rows
            for measure in row.cohort.measures
            if row.has(measure)
        ],
        "differences": [
            {"cohort": one.cohort.name, "encoder": one.cohort.encoder, "informed": one.informed}
            | asdict(one.comparison)
            for one in compared
        ],
    }


def _cell(row: MethodRun | None, measure: str) -> str:
    """Format a figure over the folds that have it, with their number unless all have it."""
    values = [] if row is None else row.values(measure)
    missing = int(np.isnan(values).sum())
    counted = f" ({len(values) - missing} of {len(values)})" if 0 < missing < len(values) else ""
    return figure_text(figure(values)) + counted


def _stand_in(cohorts: Iterable[StudyCohort]) -> str:
    return ", on a stand-in made of crc's nuclei" if any(cohort.stand_in for cohort in cohorts) else ""
