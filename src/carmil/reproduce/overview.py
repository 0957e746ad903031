"""Figure 2: the method, drawn from our own architecture. All sizes and counts are read from the model.

Below the method, the figure shows a bag of digits and a small trained model: both attentions, both predictions, the
three terms of the loss.
"""

from dataclasses import replace

import torch

from carmil.bags.bags import Bags
from carmil.bags.pictures import Pictures
from carmil.counterfactual import create_model
from carmil.counterfactual.branches import branch_coefficients
from carmil.counterfactual.objective import evidence_differential_loss, l1_distance
from carmil.datasets.digit_cohorts import DIGITS, load_digits
from carmil.evidence.branch_outputs import predict_branches
from carmil.models.contract import BagModel
from carmil.models.pooling import bag_softmax
from carmil.report.overview_figure import BagView, draw_overview, stages_of
from carmil.report.paper import Finding, Picture
from carmil.reproduce.method_runs import models_of_run, train_model
from carmil.reproduce.recipes import Request, write_finding
from carmil.studies.subjects import open_run_store
from carmil.tables import ResultTable
from carmil.targets.links import cross_entropy

MODEL, WIDTH, CLASSES = "car/abmil.gated", 1024, 2  # UNI's features, two classes
TASK, LABEL = "four_bags", 3  # the first test bag of this class that is predicted correctly
SIZES = (600, 150, 100)
EPOCHS, FAST_EPOCHS = 100, 40


def reproduce(request: Request) -> Finding:
    """Draw the method; the bag consists of bundled digits, so that no data is needed."""
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
    facts = {"parameters": total, "stages": stages}
    return write_finding(
        "overview", request, facts, tables=(table,), pictures=(Picture(picture, caption),), lines=lines
    )


def example_bag(request: Request) -> tuple[BagView, str]:
    """Return the outputs of a small trained model for a bag of bundled digits, and a description of both."""
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
        f"{SIZES[2]} others; the first test bag of class {run.outputs[LABEL]!r}, {which}; digits are sorted for display"
    )
    return _view(one.model, bags, int(one.places[first]), pictures), description


def _view(model: BagModel, bags: Bags, place: int, pictures: Pictures) -> BagView:
    bag, labels = bags[place], torch.tensor([LABEL])
    start = int(bags.offsets[place])
    outputs = predict_branches(model, bag)
    u, u_cf = outputs.scores, outputs.counterfactual_scores
    before, after = outputs.logits, outputs.counterfactual_logits
    image_rows = pictures.index[start : start + len(bag.features)]
    order = image_rows.argsort(kind="stable")
    a, a_cf = (bag_softmax(one.unsqueeze(-1), outputs.offsets)[:, 0].numpy()[order] for one in (u, u_cf))
    weights = branch_coefficients("car/abmil")
    return BagView(
        pictures=pictures.images[image_rows[order], :, :, 0],
        attention=a,
        counterfactual=a_cf,
        logits=before[0].numpy(),
        counterfactual_logits=after[0].numpy(),
        label=LABEL,
        terms=(
            float(cross_entropy(before, labels)),
            float(evidence_differential_loss(before, after.unsqueeze(-2), labels)),
            float(l1_distance(u.unsqueeze(-1), u_cf[:, None, None], outputs.offsets)),
        ),
        weights=(weights["diff"], weights["l1"]),
    )
