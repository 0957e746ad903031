"""A public benchmark of maps: every explainer on every model that it fits, on cohorts where the truth about instances is
known.

Each map has its agreement with the truth (AUPRC+ and AUPRC±, where negative evidence is the map with its sign changed),
its faithfulness (SRG, by the engine of `carmil faithfulness`) and its cost. Maps of one model on one cohort are ranked:
the score of a map is the share of the model's other maps that it beats, ties counting half, so that models with few and
with many maps can be averaged. 1 is best, 0.5 is chance. Explainers that are registered from outside take part like ours
(docs/extending.md).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from carmil.bags.bags import runs_of
from carmil.bags.labels import read_labels
from carmil.counterfactual.branches import create_model
from carmil.datasets.stand_in import build_stand_in
from carmil.datasets.study_cohort import StudyCohort
from carmil.errors import CarmilError, unknown
from carmil.evidence.explainers import EXPLAINERS, check_explainers, default_explainer, explain, explainers_of
from carmil.explanations.faithfulness import measure_faithfulness
from carmil.progress import count_progress
from carmil.report.dots import write_dots
from carmil.report.paper import Finding, Picture, Section, write_paper
from carmil.reproduce.digits import digit_cohorts
from carmil.reproduce.method_runs import Method, MethodRun, measured_on, quietly, train_methods
from carmil.reproduce.recipes import Request, write_finding
from carmil.reproduce.targets import PLANTED, planted_cohort
from carmil.runs.compute_once import compute_once
from carmil.runs.facts import SlideMean
from carmil.runs.faithfulness import PASSED
from carmil.runs.run import Run, weights_key
from carmil.statistics.bootstrap import Interval
from carmil.studies.agreement import slide_agreement
from carmil.studies.figures import mean_interval, mean_text
from carmil.studies.subjects import open_run_store, own_subjects
from carmil.studies.train import check_model
from carmil.tables import ResultTable
from carmil.targets import Classes, Survival, Target

COHORTS = ("four_bags", "adjacent_pairs", "crc", "foci", "kinds", "planted-hazards")
DIGIT_TASKS = COHORTS[:2]
MODELS = (
    "mean",
    "max",
    "additive",
    "abmil",
    "abmil.gated",
    "clam.sb",
    "clam.mb",
    "acmil",
    "dsmil",
    "rrt",
    "transmil",
    "car/abmil",
    "car/abmil.gated",
    "car/transmil",
    "targeted/abmil",
    "cia/abmil",
)
FAST_MODELS = ("abmil", "car/abmil")
STEPS, RANDOM_ORDERS = 100, 10
FAST_STEPS, FAST_RANDOM_ORDERS = 10, 2
HEADING = "Which maps find the truth, and which are faithful to the model"
TIMED = 2**13  # instances whose maps are timed
LINES = (
    "agreement: AUPRC+ is the average precision of the map for the instances of the class, AUPRC± the mean of that and of the "
    "average precision of the map, its sign changed, for the instances against it; means over test bags that have both kinds",
    "cost: of one model on its test bags, on the machine below; a first call is not timed",
    "score: the share of the other maps of the same model and cohort that a map beats, by the mean over its test bags; 1 is best, "
    "0.5 chance. Averaged over models, then over cohorts; the 95 % interval resamples cohorts",
    "a model and its maps are tested on the same bags; bags are resampled for the 95 % intervals in brackets (crc: patients)",
)


@dataclass(frozen=True)
class Bench:
    """A cohort of the benchmark, its target, and the settings of `carmil train` that select the target."""

    cohort: StudyCohort
    target: Target
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MapResult:
    """The figures of one explainer of a model on a cohort; None where the truth does not concern the target.

    seconds: per 1,000 instances. beaten: by figure, the share of the model's other maps that this map beats.
    """

    cohort: str
    model: str
    explainer: str
    default: bool
    auprc_plus: SlideMean | None
    auprc_both: SlideMean | None
    srg: SlideMean
    verdict: str
    seconds: float
    beaten: Mapping[str, float] = field(default_factory=dict)


def reproduce(
    request: Request,
    *,
    cohorts: Sequence[str] = COHORTS,
    models: Sequence[str] = (),
    explainers: Sequence[str] = (),
) -> Finding:
    """Measure the maps on the cohorts of these names, as far as DATA has them."""
    check_explainers(explainers)
    for model in models:
        check_model(model)
    for name in cohorts:
        if name not in COHORTS:
            raise CarmilError(f"--cohorts: {unknown('cohort', name, COHORTS)}")
    benches, missing = find_benches(request, cohorts)
    return run_maps(
        benches, models or (FAST_MODELS if request.fast else MODELS), request, explainers=explainers, notes=missing
    )


def find_benches(request: Request, names: Sequence[str]) -> tuple[list[Bench], list[str]]:
    """Return the cohorts of the benchmark, and one line about those whose data is missing."""
    tasks = [name for name in DIGIT_TASKS if name in names]
    benches = [Bench(one, classes_of(one)) for one in digit_cohorts(request, tasks)] if tasks else []
    of_nuclei = [name for name in COHORTS if name in names and name not in DIGIT_TASKS]
    crc = request.folder("crc")
    if crc is None:
        missing = [f"without {', '.join(of_nuclei)}, which are made of DATA/crc"] if of_nuclei else []
        if not benches:
            raise CarmilError(
                f"no cohort: {', '.join(names)} are made of crc's nuclei, expected in DATA/crc; give --data"
            )
        return benches, missing
    if set(of_nuclei) - {"planted-hazards"}:
        made = build_stand_in(crc, request.shared / "stand-in", fast=request.fast, seed=request.seed)
        benches += [Bench(one, classes_of(one)) for one in made if one.name in of_nuclei]
    if "planted-hazards" in of_nuclei:
        benches.append(Bench(planted_cohort(crc, request), Survival(columns=("time", "event")), PLANTED))
    return benches, []


def classes_of(cohort: StudyCohort) -> Classes:
    return Classes(names=tuple(read_labels(cohort.labels).classes))


def run_maps(
    benches: Sequence[Bench],
    models: Sequence[str],
    request: Request,
    *,
    explainers: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Finding:
    """Train, explain and measure whatever is missing; write maps.md, maps.json, maps.png and maps.html.

    explainers: by default all that fit a model, with those registered from outside.
    """
    results, runs, left_out = list[MapResult](), list[MethodRun](), list[str]()
    pairs = [(bench, model) for bench in benches for model in dict.fromkeys(models)]
    with count_progress("maps of", "models") as on_models:
        for done, (bench, model) in enumerate(pairs):
            on_models(done, len(pairs))
            if trouble := _misfit(bench, model):
                left_out.append(f"{bench.cohort.title}: without {model}: {trouble}")
                continue
            (one,) = train_methods([bench.cohort], [Method(model, model, bench.settings)], request)
            results += measure_maps(one, request, explainers)
            runs.append(one)
        on_models(len(pairs), len(pairs))
    if not results:
        raise CarmilError("no model has any of these explainers: expected at least one map; see `carmil models`")
    scores = summarise(results)
    axis = "share of the other maps of the same model that a map beats"
    path = request.out / "maps.png"
    write_dots(_dots(scores), path, axis=axis, guide=0.5, note="chance")
    several = len({one.cohort for one in results}) > 1
    caption = f"{axis[0].upper()}{axis[1:]}{', with 95 % intervals over cohorts' if several else ', on one cohort'}."
    trained = [one.run for one in runs]
    finding = write_finding(
        "maps",
        request,
        {"maps": results, "scores": scores},
        tables=(_summary_table(results, scores), *(_cohort_table(bench, results) for bench in benches)),
        pictures=(Picture(path, caption),),
        lines=_ours(results, scores),
        conditions=(
            *notes,
            *left_out,
            *LINES,
            *dict.fromkeys(note for bench in benches for note in bench.cohort.notes),
            measured_on(trained),
        ),
        heading=HEADING,
    )
    section = Section("maps", "not in the paper", HEADING, "digits, DATA/crc", finding, took="run")
    write_paper(
        request.out / "maps.html",
        [section],
        fast=request.fast,
        command="carmil reproduce maps",
        facts={"machine": measured_on(trained)},
        title="A benchmark of maps",
        about="Every explainer on every model that it fits, on cohorts where the truth about instances is known: does the map find "
        "the truth, does the model need what the map shows, and what does the map cost?",
    )
    return finding


def _misfit(bench: Bench, model: str) -> str:
    """Return why a model cannot be trained on the cohort; empty if it can."""
    try:
        options = bench.cohort.protocol.of_model(model).options
        create_model(model, 2, len(bench.target.outputs), link=bench.target.link(), **options)
    except CarmilError as error:
        return str(error)
    return ""


def measure_maps(one: MethodRun, request: Request, explainers: Sequence[str] = ()) -> list[MapResult]:
    """Return the figures of every explainer that fits the run's model, with their scores."""
    run = one.run
    names = [name for name in explainers_of(run.model()) if not explainers or name in explainers]
    if not names:
        return []
    (faithful,) = measure_faithfulness(
        [run.folder],
        request.out / "faithfulness" / one.cohort.name / run.folder.name,
        methods=names,
        steps=FAST_STEPS if request.fast else STEPS,
        random_orders=FAST_RANDOM_ORDERS if request.fast else RANDOM_ORDERS,
        device=request.device,
        log=quietly,
    )
    measured = slide_agreement(run, names, device=request.device)
    agreement = {name: measured.get(name, {}) for name in names}
    results = [
        MapResult(
            one.cohort.title,
            one.method.title,
            each.method,
            each.method == default_explainer(run.model()),
            auprc_plus=agreement[each.method].get("auprc_plus"),
            auprc_both=agreement[each.method].get("auprc_both"),
            srg=each.figures["srg"],
            verdict=each.verdict,
            seconds=_seconds(run, each.method, request.device),
        )
        for each in faithful.maps
    ]
    shares = {figure: _beaten([_value(each, figure) for each in results]) for figure in FIGURES}
    return [replace(each, beaten={figure: shares[figure][i] for figure in FIGURES}) for i, each in enumerate(results)]


FIGURES = {"auprc_both": "agreement with the truth, AUPRC±", "srg": "faithfulness, SRG"}  # by which maps are ranked


def _value(one: MapResult, figure: str) -> float:
    found: SlideMean | None = getattr(one, figure)
    return float("nan") if found is None else found.value


def _beaten(values: Sequence[float]) -> list[float]:
    """Return the share of the other values that each value exceeds, ties counting half; NaN for NaN, and for a single
    value.
    """
    import pandas as pd

    ranks = pd.Series(values, dtype=float).rank()
    return ((ranks - 1) / (ranks.count() - 1)).tolist()


def _seconds(run: Run, name: str, device: str) -> float:
    """Return the seconds per 1,000 instances of an explainer, for the first model of the run; measured once."""
    key = {"weights": weights_key(run), "explainer": name, "instances": TIMED}
    path = run.folder / "agreement" / f"seconds-{name}-{device}.json"
    seconds, _ = compute_once(path, key, partial(_time, run, name, device), device=device)
    return seconds


def _time(run: Run, name: str, device: str) -> float:
    store = open_run_store(run)
    places = [subject.place for subject in own_subjects(run, store) if 0 in subject.models]
    model, bags = run.population(device).member(0), store.bags()
    _, count = runs_of(bags.sizes[places].tolist(), TIMED)[0]
    part = bags[places[:count]].to(device)
    explain(model, part[0], name).cpu()
    started = time.perf_counter()
    explain(model, part, name).cpu()  # which waits for a GPU
    return 1000 * (time.perf_counter() - started) / len(part.features)


def summarise(results: Sequence[MapResult]) -> dict[str, dict[str, SlideMean]]:
    """Return the scores of every explainer by figure, the explainer with the highest mean first.

    A score is the mean over the models of a cohort, then over cohorts, with its interval.
    """
    import pandas as pd

    frame = pd.DataFrame([{"explainer": one.explainer, "cohort": one.cohort, **one.beaten} for one in results])
    by_cohort = frame.groupby(["explainer", "cohort"], sort=False).mean()
    scores = {
        str(name): {figure: mean_interval(rows[figure]) for figure in FIGURES}
        for name, rows in by_cohort.groupby("explainer", sort=False)
    }

    def mean(by_figure: Mapping[str, SlideMean]) -> float:
        known = [one.value for one in by_figure.values() if not np.isnan(one.value)]
        return float(np.mean(known)) if known else -1.0

    return dict(sorted(scores.items(), key=lambda item: -mean(item[1])))


def _dots(scores: Mapping[str, Mapping[str, SlideMean]]) -> dict[str, dict[str, Interval]]:
    """Return the known scores by figure and explainer; without an interval, a dot alone."""
    dots: dict[str, dict[str, Interval]] = {}
    for figure, title in FIGURES.items():
        for name, by_figure in scores.items():
            one = by_figure[figure]
            if not np.isnan(one.value):
                low, high = (one.value, one.value) if np.isnan(one.low) else (one.low, one.high)
                dots.setdefault(title, {})[name] = Interval(low, high, one.value)
    return dots


def _summary_table(results: Sequence[MapResult], scores: Mapping[str, Mapping[str, SlideMean]]) -> ResultTable:
    lines = []
    for place, (name, by_figure) in enumerate(scores.items(), start=1):
        own = [one for one in results if one.explainer == name]
        passed = sum(one.verdict == PASSED for one in own)
        lines.append(
            (
                str(place),
                f"{name} (default)" if any(one.default for one in own) else name,
                EXPLAINERS[name].kind,
                *(mean_text(by_figure[figure]) for figure in FIGURES),
                f"{passed} of {len(own)}",
                _time_text(float(np.median([one.seconds for one in own]))),
            )
        )
    heads = (
        "place",
        "map",
        "kind",
        *(f"score by {words}" for words in FIGURES.values()),
        "models that pass the randomisation test",
        "seconds per 1,000 tiles, median",
    )
    return ResultTable("All maps, over models and cohorts", heads, tuple(lines), names=3)


def _cohort_table(bench: Bench, results: Sequence[MapResult]) -> ResultTable:
    own = [one for one in results if one.cohort == bench.cohort.title]
    lines = tuple(
        (
            one.model,
            f"{one.explainer} (default)" if one.default else one.explainer,
            mean_text(one.auprc_plus, 3),
            mean_text(one.auprc_both, 3),
            mean_text(one.srg, 3),
            *("–" if np.isnan(one.beaten[figure]) else f"{one.beaten[figure]:.2f}" for figure in FIGURES),
            one.verdict,
            _time_text(one.seconds),
        )
        for one in own
    )
    heads = (
        "model",
        "map",
        "AUPRC+",
        "AUPRC±",
        "SRG",
        "score, AUPRC±",
        "score, SRG",
        "randomisation",
        "s per 1,000 tiles",
    )
    return ResultTable(bench.cohort.title, heads, lines, names=2)


def _time_text(seconds: float) -> str:
    return f"{seconds:.2g}" if seconds >= 0.0001 else f"{seconds:.0e}"


def _ours(results: Sequence[MapResult], scores: Mapping[str, Mapping[str, SlideMean]]) -> list[str]:
    """Return lines with the ranks of carmil's default maps."""
    ranked = list(scores)
    defaults = dict.fromkeys(one.explainer for one in results if one.default)
    return [
        f"{name}, a default map of carmil, is number {ranked.index(name) + 1} of {len(ranked)}" for name in defaults
    ]
