"""What the tables of slides share: figures by method and cohort, differences on the same cases, and both in words."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from carmil.datasets.study_cohort import StudyCohort
from carmil.reproduce.method_runs import Method, MethodRun
from carmil.reproduce.paper import figure, figure_text
from carmil.reproduce.recipes import Finding, Picture, Request, write_finding
from carmil.reproduce.slide_cohorts import CohortSet
from carmil.studies.cautions import LITTLE
from carmil.studies.compare import Comparison, compare_pairs
from carmil.studies.subjects import open_run_store
from carmil.tables import ResultTable
from carmil.training.recipe import first_eligible_epoch
from carmil.truth import UNKNOWN

MEASURES = {"auc": "AUC", "f1_macro": "F1", "balanced_accuracy": "BACC", "auprc_attention": "AUPRC+"}
MAPS = (
    "AUPRC+ scores attention before the softmax against the truth of the instances, slide by slide: AddMIL's attention (not its "
    "patch scores), DSMIL's map of the positive class, the mean of ACMIL's maps, WENO's teacher's, TransMIL's "
    "rollout; mean and max pooling have no attention"
)
READING = (
    "a difference is that of the two means over folds and runs, its 95 % interval over patients, or sets of donors. F1 and "
    "balanced accuracy of two classes are at each fold's own threshold, chosen on validation bags; of more, of the likeliest",
    "words follow that interval; a paired t-test over folds that share training cases is too optimistic; over runs of one split it "
    "shows the effect of initialisation, not of other cases",
    "p values in brackets are corrected by Holm's method for the pairs of one cohort and measure",
)
CAR_WEIGHTS = "CAR: alpha 0.2, lambda 1"
ABMIL = Method("ABMIL", "abmil.gated")
CAR_L1 = Method("CAR-MIL (L1)", "car/abmil.gated")
CAR_COSINE = Method("CAR-MIL (cosine)", "car/abmil.gated", {"distance": "cosine"})

Pair = tuple[MethodRun, MethodRun]


@dataclass(frozen=True)
class Difference:
    """One method minus another on a cohort, by one of its measures. informed: whether at least one of the two
    methods is better than always predicting the class frequencies."""

    cohort: StudyCohort
    measure: str
    comparison: Comparison
    informed: bool = True

    @property
    def verdict(self) -> str:
        low, high = self.comparison.low, self.comparison.high
        if np.isnan(low):
            return "these cases are too few to tell"
        if low <= 0 <= high:
            return "no difference that these cases can show"
        direction = "better" if low > 0 else "worse"
        but = "" if self.informed else ", but neither predicts better than the class frequencies"
        return f"{direction}, by more than the choice of cases explains{but}"

    @property
    def summary(self) -> str:
        value, low, high = (
            100 * one for one in (self.comparison.difference, self.comparison.low, self.comparison.high)
        )
        return f"{MEASURES[self.measure]} {value:+.1f} [{low:+.1f}, {high:+.1f}]: {self.verdict}"


@dataclass(frozen=True)
class MethodComparison:
    """Methods on cohorts and the differences between some of them, as tables and in words."""

    rows: tuple[MethodRun, ...]
    differences: tuple[Difference, ...]
    title: str = "Ours"

    @classmethod
    def of(cls, rows: Sequence[MethodRun], pairs: Sequence[Pair], title: str = "Ours") -> "MethodComparison":
        return cls(tuple(rows), tuple(differences(pairs)), title)

    @property
    def tables(self) -> list[ResultTable]:
        """Figures, and differences if there are any."""
        between = [difference_table(self.differences)] if self.differences else []
        return [figures_table(self.rows, self.title), *between]

    @property
    def lines(self) -> list[str]:
        return [*difference_lines(self.differences), *uninformed_lines(self.rows)]


def write_slide_finding(
    name: str,
    request: Request,
    found: CohortSet,
    rows: Sequence[MethodRun],
    compared: Sequence[Difference],
    *,
    tables: Sequence[ResultTable],
    pictures: Sequence[Picture] = (),
    lines: Sequence[str] = (),
    conditions: Sequence[str] = (),
    weights: str = CAR_WEIGHTS,
) -> Finding:
    """Write the finding of a recipe on slides; to its conditions come those of reading and training that all share."""
    finding = Finding(
        tuple(tables),
        tuple(pictures),
        tuple(lines),
        (*conditions, *READING, *study_conditions(rows, found, request, weights)),
    )
    return write_finding(name, request, finding, figures_json(rows, compared))


def figures_table(rows: Sequence[MethodRun], title: str = "Ours") -> ResultTable:
    """Mean and standard deviation over folds, or over runs, in per cent."""
    cohorts = {row.cohort.name: row.cohort for row in rows}
    methods = list(dict.fromkeys(row.method.title for row in rows))
    by_name = {(row.cohort.name, row.method.title): row for row in rows}
    columns = [(name, measure) for name, cohort in cohorts.items() for measure in cohort.measures]
    lines = tuple(
        (method, *(_cell(by_name.get((name, method)), measure) for name, measure in columns)) for method in methods
    )
    heads = ("model", *(f"{cohorts[name].title} {MEASURES[measure]}" for name, measure in columns))
    return ResultTable(f"{title}{_stand_in(cohorts.values())}: mean ± standard deviation, per cent", heads, lines)


def pairs_of(rows: Sequence[MethodRun], firsts: Collection[Method], seconds: Collection[Method]) -> list[Pair]:
    """Each of the first methods with each of the second, cohort by cohort."""
    return [
        (first, second)
        for first in rows
        if first.method in firsts
        for second in rows
        if second.cohort == first.cohort and second.method in seconds
    ]


def differences(pairs: Sequence[Pair]) -> list[Difference]:
    """First minus second by the measures of their cohort; corrected for the pairs of one cohort and measure."""
    found = []
    for cohort in {first.cohort.name: first.cohort for first, _ in pairs}.values():
        for measure in cohort.measures:
            own = [
                (first, second)
                for first, second in pairs
                if first.cohort == cohort and first.has(measure) and second.has(measure)
            ]
            compared = compare_pairs([(first.judged(measure), second.judged(measure)) for first, second in own])
            found += [
                Difference(cohort, measure, comparison, first.informed or second.informed)
                for comparison, (first, second) in zip(compared, own, strict=True)
            ]
    return found


def difference_table(compared: Sequence[Difference]) -> ResultTable:
    def p(value: float, corrected: float, over: str = "") -> str:
        return "–" if np.isnan(value) else f"{value:.2g} ({corrected:.2g}){over}"

    lines = []
    for one in compared:
        pair = one.comparison
        lines.append(
            (
                one.cohort.title,
                f"{pair.first} − {pair.second}",
                MEASURES[one.measure],
                f"{100 * pair.difference:+.1f}",
                f"{100 * pair.low:+.1f} to {100 * pair.high:+.1f}",
                p(pair.p_patients, pair.holm_patients),
                p(pair.p_t, pair.holm_t, " over runs" if pair.pairs == "seeds" else " over folds"),
            )
        )
    heads = ("cohort", "pair", "measure", "difference", "95 % interval", "p over patients (Holm)", "p paired t (Holm)")
    title = f"Differences on the same cases{_stand_in(one.cohort for one in compared)}"
    return ResultTable(title, heads, tuple(lines), names=3)


def difference_lines(compared: Sequence[Difference]) -> list[str]:
    """One line per cohort and pair."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for one in compared:
        key = (one.comparison.first, one.comparison.second, one.cohort.title)
        lines.setdefault(key, []).append(one.summary)
    return [
        f"{first} beside {second} on {title}: {'; '.join(parts)}" for (first, second, title), parts in lines.items()
    ]


def uninformed_lines(rows: Sequence[MethodRun]) -> list[str]:
    """The methods whose probabilities are no better than the class frequencies, one line per cohort."""
    lines = []
    for cohort in {(row.cohort.name, row.cohort.encoder): row.cohort for row in rows}.values():
        own = [row for row in rows if row.cohort == cohort]
        idle = [row.method.title for row in own if not row.informed]
        if idle:
            lines.append(
                f"{cohort.title}: the probabilities of {', '.join(idle)} are no better than always predicting the class "
                f"frequencies: their cross-entropy on the test cases, the mean over runs, is not {100 * LITTLE:g} % below that "
                f"({own[0].chance:.3f}). AUC, where it is given, tells whether they rank cases all the same; read their "
                "differences and maps with this in mind"
            )
    return lines


def study_conditions(rows: Sequence[MethodRun], found: CohortSet, request: Request, weights: str) -> list[str]:
    """What the figures depend on, one line each."""
    first_rows = list({row.cohort.name + row.cohort.encoder: row for row in rows}.values())
    lines = [line for row in first_rows for line in _cohort_lines(row)]
    settings = rows[0].run.settings
    first = first_eligible_epoch(settings.warmup, settings.epochs)
    lines.append(
        f"every method: Adam, weight decay 1e-5, a cosine over at most {settings.epochs} epochs, patience {settings.patience}, one "
        f"slide per step; the epoch of the lowest validation loss, from epoch {first} on (counted from 0), and nothing is chosen "
        f"on test bags. {weights}; the rest of a method is as its authors published it. The paper leaves most of this open"
    )
    lines += ["--fast: TransMIL, RRT-MIL and WENO are smaller than published"] if request.fast else []
    with_maps = [row for row in first_rows if "auprc_attention" in row.cohort.measures]
    lines += [MAPS, *(line for row in with_maps for line in _chance_map(row))] if with_maps else []
    machines = (", ".join(f"{name} {value}" for name, value in row.run.machine.items()) for row in rows)
    lines.append(f"measured on {'; and on '.join(dict.fromkeys(machines))}")
    return [*dict.fromkeys(lines), *found.missing]


def figures_json(rows: Sequence[MethodRun], compared: Sequence[Difference]) -> dict[str, object]:
    """Every figure of every fold or run, and every comparison, for a script."""
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
            {
                "cohort": one.cohort.name,
                "encoder": one.cohort.encoder,
                "informed": one.informed,
                **asdict(one.comparison),
            }
            for one in compared
        ],
    }


def _cell(row: MethodRun | None, measure: str) -> str:
    """Over the folds that have the figure; how many, if not all."""
    values = [] if row is None else row.values(measure)
    known = [value for value in values if not np.isnan(value)]
    if not known:
        return "–"
    return figure_text(figure(known)) + (f" ({len(known)} of {len(values)})" if len(known) < len(values) else "")


def _chance_map(row: MethodRun) -> Iterator[str]:
    """AUPRC+ of a random map: the share of positive instances, the mean over the test slides that are counted."""
    bags = open_run_store(row.run).bags()
    if bags.instance_labels is None:
        return
    tested, shares = set(row.predictions["slide"]), []
    for name, truth in zip(bags.ids, bags.instance_labels.split(bags.sizes.tolist()), strict=True):
        positive = truth[truth != UNKNOWN] > 0
        if name in tested and positive.any() and not positive.all():
            shares.append(float(positive.double().mean()))
    if shares:
        yield (
            f"{row.cohort.title}: AUPRC+ of a random map is near {100 * np.mean(shares):.1f}, the mean share of positive instances "
            f"in the {len(shares)} test slides that have both kinds"
        )


def _stand_in(cohorts: Iterable[StudyCohort]) -> str:
    return ", on a stand-in made of crc's nuclei" if any(cohort.stand_in for cohort in cohorts) else ""


def _cohort_lines(row: MethodRun) -> Iterator[str]:
    cohort, data = row.cohort, row.run.data
    folds = len({line.fold for line in row.by_fold})
    split = (
        f"{folds} folds by patient" if folds > 1 else f"the table's own split, {len(row.by_fold)} initialisations of it"
    )
    patients = "patients or sets of donors" if cohort.stand_in else "patients"
    counts = ", ".join(f"{name}: {n}" for name, n in zip(row.run.classes, data.class_counts, strict=True))
    yield (
        f"{cohort.title}: {data.slides} slides of {data.patients} {patients} ({counts}); {split}; "
        f"{cohort.encoder} features, learning rate {cohort.protocol.lr:g}"
    )
    yield from cohort.notes
