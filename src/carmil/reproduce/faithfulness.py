"""The paper's deletion figure, and its Figure 1a, for ABMIL, CIA and CAR: on digit bags, and on crc's nuclei if DATA
has them.

The curves are those of `carmil faithfulness`; the runs are those of table1 if --out and settings are the same.
"""

from collections.abc import Sequence

from carmil.datasets.study_cohort import StudyCohort
from carmil.errors import CarmilError
from carmil.evidence import explainers_of
from carmil.explanations.faithfulness import measure_faithfulness
from carmil.report.deletion import draw_deletion
from carmil.report.faithfulness import ALL_FIGURES
from carmil.report.paper import Finding, Picture
from carmil.reproduce import crc
from carmil.reproduce.digits import build, digit_cohorts, digit_methods, training_lines
from carmil.reproduce.method_runs import Method, MethodRun, quietly, train_methods
from carmil.reproduce.paper import figure, figure_text
from carmil.reproduce.recipes import Request, write_finding
from carmil.runs.faithfulness import MapFaithfulness, RunFaithfulness
from carmil.studies.figures import mean_text
from carmil.tables import ResultTable

MODELS = ("abmil", "cia/abmil", "car/abmil")
NUCLEI_MODELS = ("abmil.gated", "cia/abmil.gated", "car/abmil.gated")
PAPERS_ORDER = "factual_minus_counterfactual"  # the paper's relevance for CAR-MIL, drawn next to the attention
EVIDENCE = ("attention", PAPERS_ORDER, "path")
ORDERS = {  # one column of panels each
    "by attention": {"attention": "", PAPERS_ORDER: ", attention - counterfactual"},
    "by path evidence": {"path": ""},
}
PICTURES = {
    "faithfulness": "How sure a model stays of its answer as its most relevant instances go.",
    "cohort_auc": "The AUC of all test bags meanwhile (the paper's Figure 1a).",
}
RANDOM_ORDERS = 10
STEPS, DIGIT_STEPS = 100, 30  # on digit bags, one step per digit

Measured = tuple[MethodRun, RunFaithfulness]


def reproduce(request: Request) -> Finding:
    """Run ABMIL, CIA and CAR on digit bags, and on crc's nuclei if DATA has them."""
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
    """Train and evaluate whatever is missing; write faithfulness.md, .json and .png, and cohort_auc.png."""
    if len(methods) > len({method.model for method in methods}):
        raise CarmilError("several weights: expected one --alpha and one --lambda, as each curve shows one model")
    studies = [(cohort, methods, DIGIT_STEPS) for cohort in digits]
    studies += [(cohort, nuclei_methods, STEPS) for cohort in nuclei]
    for cohort, of, _ in studies:
        for method in of:
            if not set(EVIDENCE) & set(explainers_of(build(method, cohort))):
                maps = ", ".join(EVIDENCE)
                raise CarmilError(
                    f"{method.model} has none of the maps that curves are drawn for ({maps}): expected attention"
                )
    results = {cohort.title: _measure(cohort, of, steps, request) for cohort, of, steps in studies}
    drawn = {cohort: {one.method.model: measured for one, measured in pairs} for cohort, pairs in results.items()}
    pictures = [Picture(request.out / f"{name}.png", caption) for name, caption in PICTURES.items()]
    for picture in pictures:
        draw_deletion(drawn, picture.path, orders=ORDERS, cohort_auc=picture.path.stem == "cohort_auc")
    runs = [one.run for cohort in digits for one, _ in results[cohort.title]]
    conditions = (
        f"{DIGIT_STEPS} steps on digits, {STEPS} on crc, from the whole bag to the bag of zeros; relevance is that for the class a "
        "model answers; a bag's figure is the mean over its models that answer it right",
        "probabilities from 0 to 1; in brackets and as bands 95 % intervals: bootstrap over bags (crc: over patients); right: the "
        "share of test bags that a model of the run answers right",
        "the cohort's AUC as instances go is that of the mean probabilities over the models",
        f"AOPC over that of {RANDOM_ORDERS} random orders, dotted in the figure",
        f"{PAPERS_ORDER}: the relevance that the paper orders CAR-MIL's instances by; its figure comes without numbers, so that "
        "none stand beside ours",
        *training_lines(digits, runs),
        *(f"crc: {line}" for cohort in nuclei for line in crc.crc_conditions(cohort, request.seed)),
    )
    tables = [_table(cohort, pairs) for cohort, pairs in results.items()]
    curves = [_facts(*pair, one) for pairs in results.values() for pair in pairs for one in pair[1].maps]
    facts = {"curves": curves}
    return write_finding("faithfulness", request, facts, tables=tables, pictures=pictures, conditions=conditions)


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
    for one, measured_run in zip(runs, measured, strict=True):
        if not measured_run.rightly_answered:
            raise CarmilError(
                f"{one.method.model} answers no test bag of {cohort.title} correctly, and deletion needs at "
                "least one: train longer"
            )
    return list(zip(runs, measured, strict=True))


def _table(cohort: str, found: Sequence[Measured]) -> ResultTable:
    lines = tuple(
        (
            one.method.model,
            map_.method,
            figure_text(figure(one.values("auc"))),
            f"{100 * measured.rightly_answered / measured.slides:.1f}",
            *(mean_text(map_.figures[name], 3) for name in ALL_FIGURES),
        )
        for one, measured in found
        for map_ in measured.maps
    )
    return ResultTable(cohort, ("model", "evidence", "AUC", "right", *ALL_FIGURES.values()), lines, names=2)


def _facts(one: MethodRun, measured: RunFaithfulness, map_: MapFaithfulness) -> dict[str, object]:
    return {
        "dataset": one.cohort.title,
        "model": one.method.model,
        "evidence": map_.method,
        "aucs": one.values("auc"),
        "right": measured.rightly_answered / measured.slides,
        "measures": {name: vars(map_.figures[name]) for name in ALL_FIGURES},
        "deletion": vars(map_.deletion),
        "at_random": measured.random_order.mean,
        "cohort": map_.auc,
    }
