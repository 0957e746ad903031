"""Figure 2: the method, drawn from our own architecture: every size and count is read from the model that is built.

Below it a bag of digits and a small trained model: both attentions, both predictions, the three terms of the loss.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from carmil.bags.bags import Bags
from carmil.bags.pictures import Pictures
from carmil.counterfactual import create_model
from carmil.counterfactual.branches import CAR, CounterfactualModel, branch_coefficients
from carmil.counterfactual.objective import evidence_differential_loss, l1_distance
from carmil.datasets.digit_cohorts import DIGITS, load_digits
from carmil.models.abmil import ABMIL
from carmil.models.contract import BagModel, cross_entropy
from carmil.models.pooling import Offsets, bag_softmax
from carmil.report.overview_figure import BagView, Stage, draw_overview
from carmil.reproduce.branch_outputs import models_of_run, predict_branches
from carmil.reproduce.method_runs import train_model
from carmil.reproduce.recipes import Finding, Picture, Request, write_finding
from carmil.studies.subjects import open_run_store
from carmil.tables import ResultTable

MODEL, WIDTH, CLASSES = "car/abmil.gated", 1024, 2  # UNI's features, two classes
TASK, LABEL = "four_bags", 3  # the first test bag of this class that is predicted correctly
SIZES = (600, 150, 100)
EPOCHS, FAST_EPOCHS = 100, 40


def reproduce(request: Request) -> Finding:
    """Draw the method; the bag is of the bundled digits, so that no data is needed."""
    stages = stages_of(create_model(MODEL, WIDTH, CLASSES))
    bag, description = example_bag(request)
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
        f"the boxes are {MODEL} as it is built here for slides; the bag below is one of the same model with the sizes of the "
        f"digit template and a whole second attention, as Table 1 has it: {description}",
    )
    caption = "The method: two attentions in front of one classifier. Below, a bag of digits as a trained model attends to it."
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


def example_bag(request: Request) -> tuple[BagView, str]:
    """A bag of the bundled digits as a small trained model attends to it, and a description of both."""
    data = load_digits(sizes=SIZES, seed=request.seed)
    protocol = replace(DIGITS, seeds=1, epochs=EPOCHS, fast_epochs=FAST_EPOCHS, lr=8e-3)
    run = train_model(data.cohort(TASK, request.shared / "cohorts", protocol), MODEL, request)
    bags, (one,) = models_of_run(run, request.device)
    answers = predict_branches(one.model, bags, one.places).logits.argmax(1)
    wanted = torch.nonzero((one.labels == LABEL) & (answers == one.labels)).flatten()
    first = int(wanted[0] if len(wanted) else torch.nonzero(one.labels == LABEL).flatten()[0])
    pictures = open_run_store(run).pictures()
    assert pictures is not None
    which = "predicted correctly" if len(wanted) else "though it is predicted wrongly"
    description = (
        f"trained on {SIZES[0]} bags ({data.facts['images']}), AUC {100 * run.metrics.by_fold[0].figures['auc']:.1f} % on "
        f"{SIZES[2]} others; the first test bag of class {run.classes[LABEL]!r}, {which}; digits are sorted for display"
    )
    return _view(one.model, bags, int(one.places[first]), pictures), description


def _view(model: BagModel, bags: Bags, place: int, pictures: Pictures) -> BagView:
    bag, labels = bags[place], torch.tensor([LABEL])
    start = int(bags.offsets[place])
    seen = predict_branches(model, bag)
    u_cf, after = seen.branch
    shown = pictures.index[start : start + len(bag.features)]
    order = shown.argsort(kind="stable")
    a, a_cf = (bag_softmax(u.unsqueeze(-1), seen.offsets)[:, 0].numpy()[order] for u in (seen.scores, u_cf))
    weights = branch_coefficients("car/abmil")
    return BagView(
        pictures=pictures.images[shown[order], :, :, 0],
        attention=a,
        counterfactual=a_cf,
        logits=seen.logits[0].numpy(),
        counterfactual_logits=after[0].numpy(),
        label=LABEL,
        terms=_terms(seen.scores, u_cf, seen.logits, after, labels, seen.offsets),
        weights=(weights["diff"], weights["l1"]),
    )


def _terms(
    u: Tensor, u_cf: Tensor, before: Tensor, after: Tensor, labels: Tensor, offsets: Offsets
) -> tuple[float, ...]:
    """CE(F(u), y), CE(F(u) - F(u_cf), y) and D(u, u_cf) of one bag."""
    return (
        float(cross_entropy(before, labels)),
        float(evidence_differential_loss(before, after.unsqueeze(-2), labels)),
        float(l1_distance(u.unsqueeze(-1), u_cf[:, None, None], offsets)),
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _sizes(module: nn.Module) -> str:
    """The sizes of the layers of a module, from its inputs to its outputs."""
    shapes = [parameter.shape for parameter in module.parameters() if parameter.ndim == 2]
    return " → ".join(str(size) for size in (shapes[0][1], *(shape[0] for shape in shapes)))
