"""The paper's deletion figure, and its Figure 1a, for ABMIL, CIA and CAR: on digit bags, and on crc's nuclei where they are there.

Digit models are table1's, in run folders of the same form: `--out` of a table1 run with the same settings is used again.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from carmil.bags.bags import Bags
from carmil.counterfactual import create_model
from carmil.datasets.digits import DigitStudy
from carmil.datasets.study_cohort import StudyCohort
from carmil.errors import CarmilError
from carmil.files import write_text
from carmil.progress import console
from carmil.report.deletion import Panel, Ribbon, draw_ribbons
from carmil.reproduce import crc, recipes, table1
from carmil.reproduce.deletion_curves import FRACTION, MEASURES, Bounded, Curves, Request, check_model, curves_of
from carmil.reproduce.digit_data import digits_of, training_of
from carmil.reproduce.digit_runs import Experiment, population_of
from carmil.reproduce.method_runs import Method, train_methods
from carmil.reproduce.table1 import DIGIT_TASKS, Settings, figure, shown
from carmil.runs.compute_once import compute_once
from carmil.runs.run import Run as StudyRun
from carmil.studies.cohort import replace_labels
from carmil.studies.subjects import open_run_store, own_subjects
from carmil.tables import ResultTable
from carmil.training.predict import predict
from carmil.training.runs import Run

NUCLEI = "CRC nuclei"
CURVES, COHORT = "faithfulness.png", "cohort_auc.png"
ORDERS = {"attention": "by attention", "path": "by path evidence"}  # a column of panels each
PAPERS_ORDER = "factual_minus_counterfactual"  # the paper's relevance for CAR-MIL, drawn beside the attention


MODELS = ("abmil", "cia/abmil", "car/abmil")
NUCLEI_MODELS = ("abmil.gated", "cia/abmil.gated", "car/abmil.gated")


@dataclass(frozen=True)
class Nuclei:
    """crc's folder, the models to train on its five folds, and how."""

    folder: Path
    models: tuple[str, ...]
    epochs: int = crc.PROTOCOL.epochs
    seed: int = 0


def reproduce(request: recipes.Request) -> recipes.Finding:
    """ABMIL, CIA and CAR on digit bags, and on crc's nuclei if they are there."""
    digits = digits_of(request, DIGIT_TASKS)
    settings = Settings(models=MODELS, **training_of(request))
    folder = request.folder("crc")
    epochs = crc.PROTOCOL.fast_epochs if request.fast else crc.PROTOCOL.epochs
    nuclei = None if folder is None else Nuclei(folder, NUCLEI_MODELS, epochs, request.seed)
    curves, lines = run_faithfulness(
        digits.studies, settings, digits.about, request.out, nuclei=nuclei, device=request.device, shared=request.digits
    )
    pictures = (
        recipes.Picture(
            request.out / CURVES, "How sure a model stays of its answer as its most relevant instances go."
        ),
        recipes.Picture(request.out / COHORT, "The AUC of all test bags meanwhile (the paper's Figure 1a)."),
    )
    return recipes.Finding(tuple(tables(curves)), pictures, conditions=tuple(lines))


def run_faithfulness(
    studies: Mapping[str, DigitStudy],
    settings: Settings,
    data: Mapping[str, Any],
    out: Path,
    *,
    nuclei: Nuclei | None = None,
    device: str,
    shared: Path | None = None,
) -> tuple[list[Curves], list[str]]:
    """Trains and asks what is not yet in `out`; writes faithfulness.md, .json and .png, and cohort_auc.png.

    shared: where the trained models of digit bags are, if not in `out`.
    """
    if any(len(settings.points(model)) > 1 for model in settings.models):
        raise CarmilError("several weights: expected one --alpha and one --lambda, as a curve is of one model")
    if not studies and nuclei is None:
        raise CarmilError("no bags named: expected a digit task, crc's folder, or both")
    experiments = table1.planned(studies, settings, data)
    for experiment in experiments:
        check_model(experiment.model, experiment.build(studies[experiment.task.name].test.bags.width))
    where = recipes.Request(out, shared or out, device=device, seed=0 if nuclei is None else nuclei.seed)
    cohort = None if nuclei is None else _cohort(nuclei, where)
    found: list[Curves] = []
    machines: list[str] = []
    for experiment, run in table1.trained(experiments, studies, shared or out, device):
        curves, machine = _of_digits(experiment, run, studies[experiment.task.name].test.bags, out, device)
        found += curves
        machines += [run.measured_on, machine]
    if nuclei is not None and cohort is not None:
        for row in train_methods([cohort], [Method(model, model) for model in nuclei.models], where):
            curves, machine = _of_nuclei(row.run, out, device)
            found += curves
            machines.append(machine)
    lines = conditions(settings, data, machines, cohort, where.seed)
    _draw(found, out)
    write_text(out / "faithfulness.json", json.dumps({"conditions": lines, "curves": [asdict(one) for one in found]}))
    write_text(out / "faithfulness.md", markdown(found, lines))
    return found, lines


def _cohort(nuclei: Nuclei, request: recipes.Request) -> StudyCohort:
    """crc's patients; a model that cannot be built, or has no curve, is refused before any training."""
    for model in nuclei.models:
        check_model(model, create_model(model, 1024, 2, **crc.model_protocol(model).options))
    return crc.crc_cohort(nuclei.folder, request, epochs=nuclei.epochs)


def _of_digits(experiment: Experiment, run: Run, test: Bags, out: Path, device: str) -> tuple[list[Curves], str]:
    """The curves of all initialisations on the same test bags."""
    title, model = experiment.task.title, experiment.model

    def tested() -> Iterator[Request]:
        population = population_of(run, experiment, test.width, device=device)
        answers = predict(population, test, maps=False).probabilities.argmax(-1)
        there, everything = test.to(device), torch.arange(len(test))
        for row, member in enumerate(experiment.members):
            yield Request(population.member(row), there, everything, answers[row], member.seed)

    return _once(title, model, {"config": experiment.config}, tested, out / "deletion" / experiment.task.name, device)


def _of_nuclei(run: StudyRun, out: Path, device: str) -> tuple[list[Curves], str]:
    """The curves of the five folds' models, each on its own test bags."""

    def tested() -> Iterator[Request]:
        store, population = open_run_store(run), run.population(device)
        subjects = own_subjects(run, store)
        for row in range(len(population)):
            own = [subject for subject in subjects if row in subject.models]
            places = torch.tensor([subject.place for subject in own])
            labels = torch.tensor([run.classes.index(str(subject.label)) for subject in own])
            answers = torch.tensor([subject.probabilities for subject in own]).argmax(-1)
            bags = replace_labels(store.bags()[places], labels).to(device)
            yield Request(population.member(row), bags, places, answers)

    return _once(NUCLEI, run.settings.model, {"run": run.key}, tested, out / "deletion" / "crc", device)


def _once(
    dataset: str,
    model: str,
    request: Mapping[str, Any],
    tested: Callable[[], Iterator[Request]],
    folder: Path,
    device: str,
) -> tuple[list[Curves], str]:
    """Curves, measured once, and the machine that measured them."""

    def measure() -> list[dict[str, Any]]:
        with console.status(f"deleting: {model} on {dataset}"):
            return [asdict(curves) for curves in curves_of(dataset, model, tested())]

    request = {**request, "measures": list(MEASURES)}
    facts, where = compute_once(folder / f"{model.replace('/', '-')}.json", request, measure, device=device)
    return [Curves(**one) for one in facts], where


def _draw(found: Sequence[Curves], out: Path) -> None:
    """Deletion curves and the cohort's AUC: a row of panels a dataset, a column an order."""
    for name, axis, cohort in (
        (CURVES, "probability of the answered class", False),
        (COHORT, "AUC of the test bags", True),
    ):
        rows = [
            [Panel(f"{dataset}, {title}", _ribbons(found, dataset, order, cohort)) for order, title in ORDERS.items()]
            for dataset in dict.fromkeys(one.dataset for one in found)
        ]
        draw_ribbons(rows, out / name, axis=axis)


def _ribbons(found: Sequence[Curves], dataset: str, order: str, cohort: bool) -> tuple[Ribbon, ...]:
    here = [one for one in found if one.dataset == dataset]
    colours = {model: i for i, model in enumerate(dict.fromkeys(one.model for one in here))}
    ribbons = []
    for one in here:
        papers = order == "attention" and one.evidence == PAPERS_ORDER
        if one.evidence == order or papers:
            label = f"{one.model}, attention - counterfactual" if papers else one.model
            bounds = one.cohort if cohort else one.deletion
            ribbons.append(Ribbon(label, colours[one.model], **bounds, style="--" if papers else "-"))
            if not cohort and not papers:
                ribbons.append(Ribbon(f"{one.model}, random order", colours[one.model], one.at_random, style=":"))
    return tuple(ribbons)


def tables(found: Sequence[Curves]) -> list[ResultTable]:
    """A table a dataset."""
    heads = ("model", "evidence", "AUC", "right", *MEASURES)
    return [
        ResultTable(
            dataset,
            heads,
            tuple(
                (
                    one.model,
                    one.evidence,
                    shown(figure(one.aucs)),
                    shown(figure(one.right)),
                    *(_shown(bounded) for bounded in one.measures.values()),
                )
                for one in found
                if one.dataset == dataset
            ),
            names=2,
        )
        for dataset in dict.fromkeys(one.dataset for one in found)
    ]


def _shown(bounded: Bounded) -> str:
    if bounded["mean"] is None:
        return "–"
    return f"{bounded['mean']:.3f} [{bounded['low']:.3f}, {bounded['high']:.3f}]"


def conditions(
    settings: Settings, data: Mapping[str, Any], machines: Sequence[str], cohort: StudyCohort | None, seed: int
) -> list[str]:
    """What the figures depend on, a line each."""
    spread, bags, _, training, measured = table1.conditions(settings, data, machines)
    return [
        "101 points, from the whole bag to the bag of zeros; relevance is that for the class a model answers",
        "curves and measures are over the test bags that a model answers right, probabilities from 0 to 1; in brackets and as "
        "bands 95 % intervals: bootstrap over bags and initialisations together (crc: over patients)",
        f"AUC and right: {spread} (crc: over folds); the cohort's AUC as instances go has bands of ± that deviation",
        "lower is better for the deletion area, higher for the others; sufficiency and necessity at "
        f"{FRACTION * 100:g} % of a bag; AOPC over that of 10 random orders, dotted in the figure",
        f"{PAPERS_ORDER}: the relevance that the paper orders CAR-MIL's instances by; its figure comes without numbers, so that "
        "none stand beside ours",
        bags,
        training,
        *([f"crc: {line}" for line in crc.conditions(cohort, seed)] if cohort is not None else []),
        measured,
    ]


def markdown(found: Sequence[Curves], lines: Sequence[str]) -> str:
    parts = ["# Faithfulness", "", *(f"- {line}" for line in lines), ""]
    pictures = [f"![deletion curves]({CURVES})", "", f"![AUC of the cohort]({COHORT})", ""]
    return "\n".join([*parts, *pictures, *(table.markdown() for table in tables(found))])
