"""`carmil faithfulness`: do the models need what their maps show? Several runs and explainers, asked alike.

Every model is asked about the slides it was tested on, by its own map of the class it answers. A slide's figure is the mean
over its models; deletion, insertion and what follows from them are over rightly answered slides, as the paper has it.

e maps, b slides, S steps, n instances of some slides, k classes, r random orders.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.errors import CarmilError
from carmil.evidence.abilities import scores_are_weights
from carmil.evidence.concentration import concentration_of, stability
from carmil.evidence.explainers import check_explainers, default_explainer, explain, explainers_of
from carmil.evidence.faithfulness import Faithfulness, deletion, judged, of_classes, shuffled
from carmil.evidence.ranks import spearman
from carmil.models.contract import BagModel
from carmil.models.pooling import Offsets, bag_softmax
from carmil.progress import counted
from carmil.studies.cohort import Say
from carmil.studies.gathered import Curve, Gathered
from carmil.studies.run_folder import StudyRun, build, read_run
from carmil.studies.tested import own_subjects, reopened, together

AT_ONCE = 2**17  # instances in memory
FRACTION = 0.1  # at which necessity and sufficiency are asked
CONCENTRATION = ("normalised_entropy", "gini", "effective")
FAILS_FROM = 0.5  # a map that agrees so well with that of the shuffled model fails the randomisation test
SCORES = ("attention", "counterfactual_attention")  # maps that become weights by a softmax

Figure = dict[str, float]  # value, low, high, slides


@dataclass(frozen=True, eq=False)
class JudgedMap:
    """One explainer of a run: its figures by name, its curves over the share of instances taken away."""

    run: str
    method: str
    figures: dict[str, Figure]
    deletion: Curve
    insertion: Curve
    auc: NDArray[np.float64]

    @property
    def fails(self) -> bool | None:
        """The randomisation test; None where there is no value."""
        value = self.figures["randomisation"]["value"]
        return None if value != value else value >= FAILS_FROM


@dataclass(frozen=True, eq=False)
class JudgedRun:
    """All maps of a run, and what random orders do to its answers."""

    run: StudyRun
    name: str
    slides: int
    right: int
    maps: tuple[JudgedMap, ...]
    at_random: Curve
    auc_at_random: NDArray[np.float64]


def judge_runs(
    folders: Sequence[Path], *, methods: Sequence[str], steps: int, random_orders: int, device: str, say: Say
) -> list[JudgedRun]:
    """Every run by every method that fits it; by default its default explainer and attention."""
    if steps < 10 or steps % 10:
        raise CarmilError(f"--steps {steps}: expected a multiple of 10, so that a tenth of the tiles is a step")
    if random_orders < 1:
        raise CarmilError(f"--random-orders {random_orders}: expected at least one, to compare with")
    check_explainers(methods)
    runs = [read_run(folder) for folder in folders]
    if len({run.facts["data"] for run in runs}) > 1:
        say(
            "these runs are not of the same slides and labels: their curves stand side by side, but not against each other"
        )
    chosen = [_fitting(run, methods) for run in runs]
    for method in methods:
        without = [run for run, own in zip(runs, chosen, strict=True) if method not in own]
        if len(without) == len(runs):
            raise CarmilError(
                f"none of these runs' models can be asked for {method!r}; {runs[0].folder} can be for {_all(runs[0])}"
            )
        for run in without:
            say(f"{run.folder} cannot be asked for {method}: it is left out there")
    names = _names(runs)
    return [
        _judged_run(run, name, own, steps, random_orders, device)
        for run, name, own in zip(runs, names, chosen, strict=True)
    ]


def _model(run: StudyRun) -> BagModel:
    return build(run.settings, run.facts["width"], len(run.classes))


def _all(run: StudyRun) -> str:
    return ", ".join(explainers_of(_model(run)))


def _fitting(run: StudyRun, asked: Sequence[str]) -> tuple[str, ...]:
    model = _model(run)
    wanted = asked or (default_explainer(model), "attention")
    found = tuple(dict.fromkeys(method for method in wanted if method in explainers_of(model)))
    if not found:
        raise CarmilError(f"{run.folder} can be asked for none of {', '.join(asked)}; there is: {_all(run)}")
    return found


def _names(runs: Sequence[StudyRun]) -> list[str]:
    """Names of the folders; a second one of the same name gets a number."""
    names: list[str] = []
    for run in runs:
        same = sum(name.partition(" (")[0] == run.name for name in names)
        names.append(f"{run.name} ({same + 1})" if same else run.name)
    return names


def _judged_run(
    run: StudyRun, name: str, methods: tuple[str, ...], steps: int, random_orders: int, device: str
) -> JudgedRun:
    store = reopened(run)
    subjects = own_subjects(run, store)
    bags, population = store.bags(), run.population(device)
    number = {of: c for c, of in enumerate(run.classes)}
    patients = [subject.patient or subject.slide for subject in subjects]
    gathered = Gathered(len(subjects), methods, steps, random_orders, len(run.classes))
    at = {subject.slide: i for i, subject in enumerate(subjects)}
    total, done = sum(len(subject.models) for subject in subjects), 0
    with counted(f"asking {name}", "answers") as on_part:
        for models, group in together(subjects).items():
            members = [population.member(row) for row in models]
            places = torch.tensor([subject.place for subject in group])
            of_slide = {subject.slide: number[str(subject.label)] for subject in group}
            for part in bags.parts(AT_ONCE, places):
                labels = torch.tensor([of_slide[slide] for slide in part.ids])
                where = np.array([at[slide] for slide in part.ids])
                every = [
                    _asked(model, part, labels, methods, gathered, where, steps, random_orders) for model in members
                ]
                if len(members) > 1:
                    alike = stability(torch.stack(every), part.offsets)
                    gathered.add("stability", where, alike.spearman.mean(0).T)
                    gathered.add("overlap", where, alike.overlap.mean(0).T)
                done += len(members) * len(part)
                on_part(done, total)
    figures = gathered.figures(patients)
    auc, auc_at_random = gathered.auc([number[str(subject.label)] for subject in subjects])
    maps = tuple(
        JudgedMap(
            name,
            method,
            figures[i],
            gathered.curve(gathered.most[i], patients),
            gathered.curve(gathered.least[i], patients, backwards=True),
            auc[i],
        )
        for i, method in enumerate(methods)
    )
    at_random = gathered.curve(gathered.at_random, patients)
    return JudgedRun(run, name, len(subjects), int((gathered.rights > 0).sum()), maps, at_random, auc_at_random)


def _asked(
    model: BagModel,
    part: Bags,
    labels: Tensor,
    methods: Sequence[str],
    gathered: Gathered,
    where: NDArray[np.int64],
    steps: int,
    random_orders: int,
) -> Tensor:
    """Asks one model about some slides and tells `gathered`; gives its maps of the labels' classes, (n, e)."""
    first, offsets = next(model.parameters()), Offsets(part.offsets)
    with torch.no_grad():
        answers = model(part.features.to(first), Offsets(part.offsets, first.device)).logits.argmax(-1).cpu()
    evidence = torch.stack([explain(model, part, method) for method in methods])
    other = shuffled(model)
    without = torch.stack([explain(other, part, method) for method in methods]).nan_to_num()
    maps, lost = of_classes(evidence, answers, offsets), of_classes(without, answers, offsets)
    chance = torch.rand(random_orders, maps.shape[1], generator=torch.Generator().manual_seed(int(where[0])))
    logits = deletion(model, part, torch.cat([maps, -maps, chance.to(maps), lost]), steps=steps)
    found = judged(logits[: -len(methods)], labels, maps=len(methods))
    p_lost = (
        logits[-len(methods) :]
        .softmax(-1)
        .gather(-1, labels[None, :, None, None].expand(len(methods), -1, steps + 1, 1))
    )
    gathered.add_curves(where, found, logits.double().softmax(-1))
    for name, values in _of_curves(found).items():
        gathered.add(name, where, values, only=found.right)
    gathered.add("aopc_shuffled", where, found.at_random.mean((0, -1)) - p_lost.squeeze(-1).mean(-1), only=found.right)
    gathered.add("randomisation", where, spearman(maps.T, lost.T, offsets).T)
    weights = [_weights(model, method, column, offsets) for method, column in zip(methods, maps, strict=True)]
    concentrated = concentration_of(torch.stack(weights, dim=-1), offsets)
    for name in CONCENTRATION:
        gathered.add(name, where, getattr(concentrated, name).T)
    return of_classes(evidence, labels, offsets).T


def _of_curves(found: Faithfulness) -> dict[str, Tensor]:
    """(e, b) each."""
    return {
        "deletion_area": found.deletion_area,
        "insertion_area": found.insertion_area,
        "aopc_over_random": found.aopc_over_random,
        "monotonicity": found.monotonicity,
        "necessity": found.necessity(FRACTION),
        "sufficiency": found.sufficiency(FRACTION),
    }


def _weights(model: BagModel, method: str, scores: Tensor, offsets: Offsets) -> Tensor:
    """A map (n) as weights that can be shared out: the softmax of attention scores, the size of evidence."""
    if method in SCORES and not scores_are_weights(model):
        return bag_softmax(scores.unsqueeze(-1), offsets).squeeze(-1)
    return scores.abs()
