"""Figure 2: the method, drawn from our own architecture: every size and count is read from the model that is built.

Below it a bag of digits as a small trained model sees it: both attentions, both answers, the three terms of the loss.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from carmil.counterfactual import create_model
from carmil.counterfactual.branches import CAR, CounterfactualModel, branch_coefficients
from carmil.counterfactual.objective import evidence_differential_loss, l1_distance
from carmil.datasets.digit_data import load_digits
from carmil.datasets.digits import TASKS, DigitBags
from carmil.models.abmil import ABMIL
from carmil.models.contract import BagModel, cross_entropy
from carmil.models.pooling import Offsets, bag_softmax
from carmil.report.overview_figure import BagView, Stage, draw_overview
from carmil.reproduce.digit_runs import known, population_of
from carmil.reproduce.recipes import Finding, Picture, Request, write_finding
from carmil.reproduce.table1 import Settings, planned, trained
from carmil.reproduce.two_branches import look
from carmil.tables import ResultTable

MODEL, WIDTH, CLASSES = "car/abmil.gated", 1024, 2  # UNI's features, two classes
TASK, SHOWN = "four_bags", 3  # the first test bag of this class that is answered rightly
SIZES = (600, 150, 100)
EPOCHS, FAST_EPOCHS = 100, 40


def reproduce(request: Request) -> Finding:
    """Needs nothing: the bag is of the bundled digits."""
    stages = stages_of(create_model(MODEL, WIDTH, CLASSES))
    bag, said = seen_bag(request)
    picture = draw_overview(stages, bag, request.out / "overview.png")
    total = sum(stage.parameters for stage in stages)
    branch = next(stage for stage in stages if stage.name == "counterfactual attention")
    table = ResultTable(
        f"{MODEL}, {WIDTH} features and {CLASSES} classes",
        ("part", "what it computes", "sizes", "parameters"),
        tuple((stage.name, stage.equation, stage.sizes, f"{stage.parameters:,}") for stage in stages),
        names=3,
    )
    lines = (
        f"{total:,} parameters, of which the counterfactual branch has {branch.parameters:,} ({branch.parameters / total:.2%})",
        f"the boxes are {MODEL} as it is built here for slides; the bag below is seen by the same model with the sizes of the "
        f"digit template and a whole second attention, as Table 1 has it: {said}",
    )
    caption = (
        "The method: two attentions in front of one classifier. Below, a bag of digits as a trained model sees it."
    )
    finding = Finding((table,), (Picture(picture, caption),), lines)
    facts = {"parameters": total, "stages": [vars(stage) for stage in stages]}
    return write_finding("overview", request, finding, facts)


def stages_of(model: BagModel) -> list[Stage]:
    """The parts of a gated CAR-ABMIL in the order of the data, with the sizes and counts of its modules."""
    assert isinstance(model, CounterfactualModel) and isinstance(model.model, ABMIL) and isinstance(model.branch, CAR)
    inner, branch = model.model, model.branch
    attention = inner.attention
    assert attention.U is not None
    gate = (attention.V, attention.U)
    return [
        Stage("embedding", "z = relu(E x)", _sizes(inner.embedding), _count(inner.embedding)),
        Stage("attention trunk", "t = tanh(V z) * sigmoid(U z)", f"2 x {_sizes(attention.V)}", sum(map(_count, gate))),
        Stage("attention", "u = w . t", _sizes(attention.score), _count(attention.score)),
        Stage("counterfactual attention", "u_cf = w_cf . t", _sizes(branch), _count(branch)),
        Stage("classifier", "F = phi(Z)", _sizes(inner.classifier), _count(inner.classifier)),
    ]


def seen_bag(request: Request) -> tuple[BagView, str]:
    """A small model, trained on the bundled digits, and the bag that it is shown."""
    digits = load_digits([TASK], sizes=SIZES, seed=request.seed)
    settings = Settings(models=(MODEL,), repetitions=1, epochs=FAST_EPOCHS if request.fast else EPOCHS, lr=8e-3)
    plan = planned(digits.studies, settings, digits.about)
    ((experiment, run),) = trained(plan, digits.studies, request.digits / "overview", request.device)
    test = digits.studies[TASK].test
    model = population_of(run, experiment, test.bags.width, device=request.device).member(0)
    labels = known(test.bags.labels)
    answers = look(model, test.bags).logits.argmax(1)
    wanted = torch.nonzero((labels == SHOWN) & (answers == labels)).flatten()
    place = int(wanted[0] if len(wanted) else torch.nonzero(labels == SHOWN).flatten()[0])
    found = _seen(model, test, place)
    found = BagView(**{**vars(found), "pictures": digits.images.images[test.images[found.rows]]})
    names = TASKS[TASK].class_names
    which = "answered rightly" if len(wanted) else "though it is answered wrongly"
    said = (
        f"trained on {SIZES[0]} bags ({digits.about['images']}), AUC {100 * run.metrics['auc'][0]:.1f} % on {SIZES[2]} others; "
        f"the first test bag of class {names[SHOWN]!r}, {which}; digits are sorted for the eye"
    )
    return found, said


@dataclass(frozen=True)
class _Terms:
    classified: float
    differs: float
    distance: float


def _seen(model: BagModel, test: DigitBags, place: int) -> BagView:
    bag = test.bags[torch.tensor([place])]
    start = int(test.bags.offsets[place])
    seen = look(model, bag)
    u_cf, after = seen.branch
    terms = _terms(seen.scores, u_cf, seen.logits, after, known(bag.labels), seen.offsets)
    digits = test.digits[start : start + len(bag.features)]
    order = digits.argsort(kind="stable")
    a, a_cf = (bag_softmax(u.unsqueeze(-1), seen.offsets)[:, 0].numpy()[order] for u in (seen.scores, u_cf))
    weights = branch_coefficients("car/abmil")
    return BagView(
        rows=start + order,
        digits=digits[order],
        pictures=digits,
        attention=a,
        counterfactual=a_cf,
        logits=seen.logits[0].numpy(),
        counterfactual_logits=after[0].numpy(),
        label=int(known(bag.labels)[0]),
        terms=(terms.classified, terms.differs, terms.distance),
        weights=(weights["diff"], weights["l1"]),
    )


def _terms(u: Tensor, u_cf: Tensor, before: Tensor, after: Tensor, labels: Tensor, offsets: Offsets) -> _Terms:
    """CE(F(u), y), CE(F(u) - F(u_cf), y) and D(u, u_cf) of one bag."""
    return _Terms(
        float(cross_entropy(before, labels)),
        float(evidence_differential_loss(before, after.unsqueeze(-2), labels)),
        float(l1_distance(u.unsqueeze(-1), u_cf[:, None, None], offsets)),
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _sizes(module: nn.Module) -> str:
    """From the inputs to the outputs of the layers in it."""
    shapes = [parameter.shape for parameter in module.parameters() if parameter.ndim == 2]
    return " → ".join(str(size) for size in (shapes[0][1], *(shape[0] for shape in shapes)))
