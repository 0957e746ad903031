"""The paper's deletion figure, and its Figure 1a, for ABMIL, CIA and CAR: on digit bags, and on crc's nuclei where they are there.

The curves are those of `carmil faithfulness`; the runs are table1's where --out and settings are the same.
"""

from collections.abc import Sequence
from pathlib import Path

from carmil.datasets.study_cohort import StudyCohort
from carmil.errors import CarmilError
from carmil.evidence import explainers_of
from carmil.report.deletion import Panel, Ribbon, draw_ribbons
from carmil.reproduce import crc
from carmil.reproduce.digits import TASKS, build, digit_cohorts, digit_methods, spread_line, training_lines
from carmil.reproduce.method_runs import Method, MethodRun, quietly, train_methods
from carmil.reproduce.paper import figure, figure_text
from carmil.reproduce.recipes import Finding, Picture, Request, write_finding
from carmil.runs.facts import SlideMean
from carmil.runs.faithfulness import MapFaithfulness, RunFaithfulness
from carmil.studies.faithfulness import measure_faithfulness
from carmil.tables import ResultTable

MODELS = ("abmil", "cia/abmil", "car/abmil")
NUCLEI_MODELS = ("abmil.gated", "cia/abmil.gated", "car/abmil.gated")
PAPERS_ORDER = "factual_minus_counterfactual"  # the paper's relevance for CAR-MIL, drawn beside the attention
EVIDENCE = ("attention", PAPERS_ORDER, "path")
ORDERS = {"attention": "by attention", "path": "by path evidence"}  # one column of panels each
MEASURES = {
    "deletion_area": "deletion area",
    "aopc_over_random": "AOPC over random",
    "insertion_area": "insertion area",
    "sufficiency": "sufficiency, 10 %",
    "necessity": "necessity, 10 %",
    "monotonicity": "monotonicity",
}
RANDOM_ORDERS = 10
STEPS, DIGIT_STEPS = 100, 30  # a step per digit of a bag

Measured = tuple[MethodRun, RunFaithfulness]


def reproduce(request: Request) -> Finding:
    """ABMIL, CIA and CAR on digit bags, and on crc's nuclei if they are there."""
    folder = request.folder("crc")
    nuclei = [] if folder is None else [crc.crc_cohort(folder, request)]
    methods = [Method(model, model) for model in NUCLEI_MODELS]
    return run_faithfulness(
        digit_cohorts(request), digit_methods(MODELS), request, nuclei=nuclei, nuclei_methods=methods
    )


def run_faithfulness(
    digits: Sequence[StudyCohort],
    methods: Sequence[Method],
    request: Request,
    *,
    nuclei: Sequence[StudyCohort] = (),
    nuclei_methods: Sequence[Method] = (),
) -> Finding:
    """Train and follow what is not there yet; write faithfulness.md, .json and .png, and cohort_auc.png."""
    if len(methods) > len({method.model for method in methods}):
        raise CarmilError("several weights: expected one --alpha and one --lambda, as a curve is of one model")
    if not digits and not nuclei:
        raise CarmilError("no bags named: expected a digit task, crc's folder, or both")
    found: list[Measured] = []
    for cohorts, of, steps in ((digits, methods, DIGIT_STEPS), (nuclei, nuclei_methods, STEPS)):
        for method in of if cohorts else ():
            _check(method, cohorts[0])
        found += [pair for cohort in cohorts for pair in _measure(cohort, of, steps, request)]
    pictures = (
        _draw(found, request.out / "faithfulness.png", cohort_auc=False),
        _draw(found, request.out / "cohort_auc.png", cohort_auc=True),
    )
    finding = Finding(tuple(_tables(found)), pictures, conditions=_conditions(found, digits, nuclei, request.seed))
    return write_finding(
        "faithfulness", request, finding, {"curves": [_facts(*pair, one) for pair in found for one in pair[1].maps]}
    )


def _check(method: Method, cohort: StudyCohort) -> None:
    """Refuse a model that has none of the maps whose order the curves follow."""
    if not set(EVIDENCE) & set(explainers_of(build(method, cohort))):
        raise CarmilError(
            f"{method.model} has none of the maps that curves are drawn of ({', '.join(EVIDENCE)}): expected a model with attention"
        )


def _measure(cohort: StudyCohort, methods: Sequence[Method], steps: int, request: Request) -> list[Measured]:
    runs = train_methods([cohort], methods, request)
    measured = measure_faithfulness(
        [one.run.folder for one in runs],
        request.out / "deletion" / cohort.name,
        methods=EVIDENCE,
        steps=steps,
        random_orders=RANDOM_ORDERS,
        device=request.device,
        log=quietly,
    )
    for one, found in zip(runs, measured, strict=True):
        if not found.rightly_answered:
            raise CarmilError(
                f"{one.method.model} answers no test bag of {cohort.title} right: there is nothing to delete from; train longer"
            )
    return list(zip(runs, measured, strict=True))


def _draw(found: Sequence[Measured], path: Path, *, cohort_auc: bool) -> Picture:
    """One row of panels per cohort, one column per order."""
    titles = dict.fromkeys(one.cohort.title for one, _ in found)
    rows = [
        [Panel(f"{cohort}, {title}", _ribbons(found, cohort, order, cohort_auc)) for order, title in ORDERS.items()]
        for cohort in titles
    ]
    draw_ribbons(rows, path, axis="AUC of the test bags" if cohort_auc else "probability of the answered class")
    caption = "How sure a model stays of its answer as its most relevant instances go."
    return Picture(path, "The AUC of all test bags meanwhile (the paper's Figure 1a)." if cohort_auc else caption)


def _ribbons(found: Sequence[Measured], cohort: str, order: str, cohort_auc: bool) -> tuple[Ribbon, ...]:
    ribbons = []
    for colour, (one, measured) in enumerate(pair for pair in found if pair[0].cohort.title == cohort):
        for map_ in measured.maps:
            papers = order == "attention" and map_.method == PAPERS_ORDER
            if map_.method != order and not papers:
                continue
            label = f"{one.method.model}, attention - counterfactual" if papers else one.method.model
            style = "--" if papers else "-"
            if cohort_auc:
                ribbons.append(Ribbon(label, colour, map_.auc, style=style))
                continue
            band = map_.deletion
            ribbons.append(Ribbon(label, colour, band.mean, band.low, band.high, style=style))
            if not papers:
                chance = measured.random_order.mean
                ribbons.append(Ribbon(f"{one.method.model}, random order", colour, chance, style=":"))
    return tuple(ribbons)


def _tables(found: Sequence[Measured]) -> list[ResultTable]:
    """One table per cohort."""
    tables = []
    for cohort in dict.fromkeys(one.cohort.title for one, _ in found):
        lines = tuple(
            (
                one.method.model,
                map_.method,
                figure_text(figure(one.values("auc"))),
                f"{100 * measured.rightly_answered / measured.slides:.1f}",
                *(_bounded(map_.figures[name]) for name in MEASURES),
            )
            for one, measured in found
            if one.cohort.title == cohort
            for map_ in measured.maps
        )
        tables.append(ResultTable(cohort, ("model", "evidence", "AUC", "right", *MEASURES.values()), lines, names=2))
    return tables


def _bounded(found: SlideMean) -> str:
    if found.value != found.value:
        return "–"
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _facts(one: MethodRun, measured: RunFaithfulness, map_: MapFaithfulness) -> dict[str, object]:
    return {
        "dataset": one.cohort.title,
        "model": one.method.model,
        "evidence": map_.method,
        "aucs": one.values("auc"),
        "right": measured.rightly_answered / measured.slides,
        "measures": {name: vars(map_.figures[name]) for name in MEASURES},
        "deletion": vars(map_.deletion),
        "at_random": measured.random_order.mean,
        "cohort": map_.auc,
    }


def _conditions(
    found: Sequence[Measured], digits: Sequence[StudyCohort], nuclei: Sequence[StudyCohort], seed: int
) -> tuple[str, ...]:
    of_digits = [one.run for one, _ in found if one.cohort.name in TASKS or one.cohort in digits]
    return (
        f"{DIGIT_STEPS} steps on digits, {STEPS} on crc, from the whole bag to the bag of zeros; relevance is that for the class a "
        "model answers; a bag's figure is the mean over its models that answer it right",
        "probabilities from 0 to 1; in brackets and as bands 95 % intervals: bootstrap over bags (crc: over patients); right: the "
        "share of test bags that a model of the run answers right",
        *([f"AUC: {spread_line(digits[0].protocol)} (crc: over folds)"] if digits else []),
        "the cohort's AUC as instances go is that of the mean probabilities over the models",
        "lower is better for the deletion area, higher for the others; sufficiency and necessity at 10 % of a bag; AOPC over that "
        f"of {RANDOM_ORDERS} random orders, dotted in the figure",
        f"{PAPERS_ORDER}: the relevance that the paper orders CAR-MIL's instances by; its figure comes without numbers, so that "
        "none stand beside ours",
        *(training_lines(digits, of_digits) if digits else []),
        *(f"crc: {line}" for cohort in nuclei for line in crc.conditions(cohort, seed)[:2]),
    )
