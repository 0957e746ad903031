"""The tables of slides: a row a method, two columns a cohort; then differences on the same cases, and what they say in words."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from carmil.datasets.study_cohort import StudyCohort
from carmil.errors import CarmilError, unknown
from carmil.reproduce.method_runs import Method, MethodRun
from carmil.reproduce.recipes import Request
from carmil.reproduce.slide_cohorts import Found
from carmil.reproduce.table1 import figure, shown
from carmil.studies.cautions import LITTLE
from carmil.studies.compare import Comparison, compare_pairs
from carmil.studies.subjects import open_run_store
from carmil.tables import ResultTable
from carmil.training.recipe import first_eligible_epoch
from carmil.truth import UNKNOWN

MEASURES = {"auc": "AUC", "f1_macro": "F1", "balanced_accuracy": "BACC", "auprc_attention": "AUPRC+"}
MAPS = (
    "AUPRC+ scores attention before the softmax as a guess at the instances' truth, slide by slide: AddMIL's attention (not its "
    "patch scores), DSMIL's map of the positive class, the mean of ACMIL's maps, WENO's teacher's, TransMIL's "
    "rollout; mean and max pooling attend to nothing"
)
READ = (
    "a difference is that of the two means over folds and runs, its 95 % interval over patients, or sets of donors. F1 and "
    "balanced accuracy of two classes are of the answers from each fold's own threshold on, which validation bags chose; of more, "
    "of the likeliest class",
    "words follow that interval; a paired t-test over folds that share training cases is bolder than it should be; over runs of "
    "one division it says what initialisation does, and nothing of other cases",
    "p values in brackets are corrected by Holm's method for the pairs of one cohort and measure",
)
ABMIL = Method("ABMIL", "abmil.gated")
CAR_L1 = Method("CAR-MIL (L1)", "car/abmil.gated")
CAR_COSINE = Method("CAR-MIL (cosine)", "car/abmil.gated", {"distance": "cosine"})


@dataclass(frozen=True)
class Difference:
    """One method minus another on a cohort, by one of its measures. informed: whether one of them, at least, is so."""

    cohort: StudyCohort
    measure: str
    found: Comparison
    informed: bool = True

    @property
    def verdict(self) -> str:
        if np.isnan(self.found.low):
            return "nothing that can be told from these cases"
        if self.found.low <= 0 <= self.found.high:
            return "no difference that these cases can show"
        way = "better" if self.found.low > 0 else "worse"
        but = "" if self.informed else ", but the probabilities of neither tell more than the classes' shares"
        return f"{way}, by more than the choice of cases explains{but}"

    @property
    def told(self) -> str:
        low, high = 100 * self.found.low, 100 * self.found.high
        return f"{MEASURES[self.measure]} {100 * self.found.difference:+.1f} [{low:+.1f}, {high:+.1f}]: {self.verdict}"


def there(found: Found) -> tuple[StudyCohort, ...]:
    """The cohorts, or one line about what is missing where there is none at all."""
    if not found.cohorts:
        raise CarmilError(f"no cohort of slides is there: {'; '.join(found.missing)}")
    return found.cohorts


def picked(methods: Sequence[Method], names: Sequence[str]) -> tuple[Method, ...]:
    """Those of the methods whose model or title is named; all, if none is."""
    for name in names:
        if not any(name in (one.title, one.model) for one in methods):
            raise CarmilError(unknown("model", name, list(dict.fromkeys(one.model for one in methods))))
    return tuple(one for one in methods if not names or one.title in names or one.model in names)


def figures_table(rows: Sequence[MethodRun], title: str = "Ours") -> ResultTable:
    """Mean and standard deviation over folds, or over runs, in per cent."""
    cohorts = {one.cohort.name: one.cohort for one in rows}
    methods = list(dict.fromkeys(one.method.title for one in rows))
    of = {(one.cohort.name, one.method.title): one for one in rows}
    columns = [(name, measure) for name, cohort in cohorts.items() for measure in cohort.measures]
    lines = tuple(
        (method, *(_cell(of.get((name, method)), measure) for name, measure in columns)) for method in methods
    )
    heads = ("model", *(f"{cohorts[name].title} {MEASURES[measure]}" for name, measure in columns))
    return ResultTable(f"{title}{_stands_in(cohorts.values())}: mean ± standard deviation, per cent", heads, lines)


def pairs_of(
    rows: Sequence[MethodRun], firsts: Collection[Method], seconds: Collection[Method]
) -> list[tuple[MethodRun, MethodRun]]:
    """Each of these methods with each of those, cohort by cohort."""
    return [
        (first, second)
        for first in rows
        if first.method in firsts
        for second in rows
        if second.cohort == first.cohort and second.method in seconds
    ]


def differences(pairs: Sequence[tuple[MethodRun, MethodRun]]) -> list[Difference]:
    """First minus second by both measures of their cohort; corrected for the pairs of one cohort and measure."""
    found = []
    for cohort in {first.cohort.name: first.cohort for first, _ in pairs}.values():
        for measure in cohort.measures:
            mine = [
                (first, second)
                for first, second in pairs
                if first.cohort == cohort and first.has(measure) and second.has(measure)
            ]
            judged = [(first.judged(measure), second.judged(measure)) for first, second in mine]
            compared = compare_pairs(judged)
            found += [
                Difference(cohort, measure, one, first.informed or second.informed)
                for one, (first, second) in zip(compared, mine, strict=True)
            ]
    return found


def difference_table(found: Sequence[Difference]) -> ResultTable:
    def p(value: float, corrected: float, over: str = "") -> str:
        return "–" if np.isnan(value) else f"{value:.2g} ({corrected:.2g}){over}"

    lines = tuple(
        (
            one.cohort.title,
            f"{one.found.first} − {one.found.second}",
            MEASURES[one.measure],
            f"{100 * one.found.difference:+.1f}",
            f"{100 * one.found.low:+.1f} to {100 * one.found.high:+.1f}",
            p(one.found.p_patients, one.found.holm_patients),
            p(one.found.p_t, one.found.holm_t, " over runs" if one.found.pairs == "seeds" else " over folds"),
        )
        for one in found
    )
    heads = ("cohort", "pair", "measure", "difference", "95 % interval", "p over patients (Holm)", "p paired t (Holm)")
    title = f"Differences on the same cases{_stands_in([one.cohort for one in found])}"
    return ResultTable(title, heads, lines, names=3)


def in_words(found: Sequence[Difference]) -> list[str]:
    """A line a cohort and pair, whichever way it goes."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for one in found:
        key = (one.found.first, one.found.second, one.cohort.title)
        lines.setdefault(key, []).append(one.told)
    return [f"{first} beside {second} on {title}: {'; '.join(told)}" for (first, second, title), told in lines.items()]


def uninformed(rows: Sequence[MethodRun]) -> list[str]:
    """Whose probabilities tell no more than the classes' shares, a line a cohort."""
    lines = []
    for cohort in {(one.cohort.name, one.cohort.encoder): one.cohort for one in rows}.values():
        mine = [one for one in rows if one.cohort == cohort]
        idle = [one.method.title for one in mine if not one.informed]
        if idle:
            lines.append(
                f"{cohort.title}: the probabilities of {', '.join(idle)} are no closer to the truth than always answering how "
                f"common each class is: their cross-entropy on the test cases, the mean over runs, is not {100 * LITTLE:g} % "
                f"below that ({mine[0].chance:.3f}). Whether they rank cases all the same AUC tells, where it is given; their "
                "differences and maps are to be read with this in mind"
            )
    return lines


def conditions(
    rows: Sequence[MethodRun], found: Found, request: Request, *, weights: str = "CAR: alpha 0.2, lambda 1"
) -> list[str]:
    """What the figures depend on, a line each."""
    cohorts = list({one.cohort.name + one.cohort.encoder: one for one in rows}.values())
    lines = [line for one in cohorts for line in _about(one)]
    trained = rows[0].run.settings
    first = first_eligible_epoch(trained.warmup, trained.epochs)
    lines.append(
        f"every method: Adam, weight decay 1e-5, a cosine over at most {trained.epochs} epochs, patience {trained.patience}, "
        f"one slide a step; the epoch of the lowest validation loss, from epoch {first} on (counted from 0), and no test bag "
        f"chooses anything. {weights}; what else a method has is as its authors published it. The paper leaves most of this open"
    )
    lines += ["--fast: TransMIL, RRT-MIL and WENO are smaller than published"] if request.fast else []
    with_maps = [one for one in cohorts if "auprc_attention" in one.cohort.measures]
    lines += [MAPS, *(line for one in with_maps for line in _blind_map(one))] if with_maps else []
    machines = (", ".join(f"{name} {value}" for name, value in one.run.machine.items()) for one in rows)
    lines.append(f"measured on {'; and on '.join(dict.fromkeys(machines))}")
    return [*dict.fromkeys(lines), *found.missing]


def as_json(rows: Sequence[MethodRun], found: Sequence[Difference]) -> dict[str, Any]:
    """Every figure of every fold or run, and every comparison, for a script."""
    return {
        "figures": [
            {
                "cohort": one.cohort.name,
                "encoder": one.cohort.encoder,
                "stand_in": one.cohort.stand_in,
                "method": one.method.title,
                "model": one.method.model,
                "measure": one.method.figure(measure),
                "over": "folds" if len({line.fold for line in one.by_fold}) > 1 else "runs",
                "values": one.values(measure),
            }
            for one in rows
            for measure in one.cohort.measures
            if one.has(measure)
        ],
        "differences": [
            {"cohort": one.cohort.name, "encoder": one.cohort.encoder, "informed": one.informed, **asdict(one.found)}
            for one in found
        ],
    }


def _cell(row: MethodRun | None, measure: str) -> str:
    """Over the folds that have the figure; how many, if not all."""
    each = [] if row is None else row.values(measure)
    known = [value for value in each if not np.isnan(value)]
    if not known:
        return "–"
    return shown(figure(known)) + (f" ({len(known)} of {len(each)})" if len(known) < len(each) else "")


def _blind_map(row: MethodRun) -> Iterator[str]:
    """What AUPRC+ is without any knowledge: the share of positive instances, the mean over the test slides that are counted."""
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
            f"{row.cohort.title}: AUPRC+ of a map that knows nothing is near {100 * np.mean(shares):.1f}, the mean share of "
            f"positive instances in the {len(shares)} test slides that have both kinds"
        )


def _stands_in(cohorts: Any) -> str:
    return ", on a stand-in made of crc's nuclei" if any(one.stand_in for one in cohorts) else ""


def _about(row: MethodRun) -> Iterator[str]:
    cohort, data = row.cohort, row.run.data
    folds = len({line.fold for line in row.by_fold})
    spread = (
        f"{folds} folds by patient" if folds > 1 else f"the table's own split, {len(row.by_fold)} initialisations of it"
    )
    whose = "patients or sets of donors" if cohort.stand_in else "patients"
    counts = ", ".join(f"{name}: {n}" for name, n in zip(row.run.classes, data.class_counts, strict=True))
    yield (
        f"{cohort.title}: {data.slides} slides of {data.patients} {whose} ({counts}); {spread}; "
        f"{cohort.encoder} features, learning rate {cohort.protocol.lr:g}"
    )
    yield from cohort.notes
