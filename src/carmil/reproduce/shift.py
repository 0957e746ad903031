"""The multi-class shift of the paper's section 5: the class whose logit grows most under the counterfactual attention.

It is computed on Four Bags, where the truth is known and the reasons can be analysed, and on a cohort of slides with
several classes. r models, k classes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.evidence import explain
from carmil.evidence.branch_outputs import TestedModel, predict_branches
from carmil.evidence.counterfactual_change import count_choices
from carmil.models.contract import one_hot
from carmil.models.pooling import bag_softmax, bag_sum
from carmil.progress import console
from carmil.report.matrices import Matrix, draw_matrices
from carmil.report.paper import Finding, Picture
from carmil.reproduce.digits import Point, digit_cohorts, training_lines
from carmil.reproduce.method_runs import MethodRun, models_of_run, train_methods
from carmil.reproduce.paper import figure, figure_text
from carmil.reproduce.recipes import Request, write_finding
from carmil.reproduce.slide_cohorts import several_classes
from carmil.reproduce.slide_table import CAR_L1, caution_lines
from carmil.runs.run import Run
from carmil.tables import ResultTable

Floats = NDArray[np.float64]
Answers = tuple[Tensor, Tensor, Tensor]  # F(u) and F(u_cf) (b, k), labels (b)

TASK = "four_bags"
COUNTED = "share of the correctly answered bags of a class (row) in which the logit of a class (column) grows most, in per cent"
CHANGE = "Mean change of the logits, F(u_cf) - F(u), in correctly answered bags"
ATTENTION = "Attention weight on each digit in correctly answered bags, per cent: factual, then counterfactual"
EVIDENCE = "Path evidence of all instances of a digit in a bag, in logits; correctly answered bags with the digit"
TOLD = (1, 3), (3, 1)  # from a true class to the class that grows most, as the paper reports for Four Bags
PAPER = ("the paper", "", "100", "62")
BRACS = "the paper says of BRACS in words that its shift is diffuse over all 7 classes, and gives no figures"
READINGS = {
    "grows most": "argmax of F(u_cf) - F(u) over all classes: the paper's words, and what its authors' code counts",
    "is answered": "argmax of F(u_cf): what the counterfactual attention answers",
    "strongest other": "argmax of F(u_cf) over the classes that are not the bag's",
    "falls most beside": "argmax of F(u) - F(u_cf) over the classes that are not the bag's: the competitor that the paper's "
    "appendix says the loss is governed by",
    "runner-up": "argmax of F(u) over the classes that are not the bag's: no counterfactual at all, a control",
}
DIGITS = ("8", "9", "others")
EIGHT, NINE = (-1, 1, -1, 1), (-1, -1, 1, 1)  # their evidence for the classes


@dataclass(frozen=True, eq=False)
class Shift:
    """counts (r, k, k) under each of READINGS; change (r, k, k), the mean F_c(u_cf) - F_c(u) of a true class's bags."""

    counts: dict[str, Floats]
    change: Floats

    @property
    def right(self) -> Floats:
        """Return (r, k) the number of correctly answered bags of each class."""
        return self.counts["grows most"].sum(-1)

    def shares(self, reading: str = "grows most") -> Floats:
        """Return (r, k, k) shares of the correctly answered bags of a class; NaN if there are none."""
        with np.errstate(invalid="ignore"):
            return self.counts[reading] / self.right[..., None]


def reproduce(request: Request, *, points: Sequence[Point] = (Point(),)) -> Finding:
    """Compute the shift. The first of `points` is analysed in detail, the others have one row each."""
    cohorts = digit_cohorts(request, [TASK])
    runs = train_methods(cohorts, [point.method for point in points], request)
    shifts = [shift_of_run(one.run, request.device) for one in runs]
    shift, (attention, evidence) = shifts[0], reasons_of(*models_of_run(runs[0].run, request.device))
    names, title = _numbered(runs[0].run.outputs), f"Four Bags ({points[0].name})"
    tables = [
        _count_table(f"{title}: {COUNTED}", names, shift),
        _table(CHANGE, names, names, shift.change, signed=True),
        _table(ATTENTION, names, [f"{digit}, {u}" for u in ("u", "u_cf") for digit in DIGITS], attention),
        _table(EVIDENCE, DIGITS, names, evidence, head="digit", signed=True),
        _readings_table(shift),
        *([_points_table(points, runs, shifts)] if len(points) > 1 else []),
    ]
    matrices = [_matrix(title, tables[0], 100 * shift.shares())]
    change = _matrix(title, tables[1], shift.change, across="class")
    facts: dict[str, object] = {
        "four_bags": _facts(runs[0].run, shift)
        | {
            "attention_by_digit": attention[..., : len(DIGITS)],
            "counterfactual_by_digit": attention[..., len(DIGITS) :],
            "evidence_by_digit": evidence,
        },
        "points": points,
    }
    cohort, notes = several_classes(request)
    lines = [BRACS]
    if cohort is not None:
        (one,) = train_methods([cohort], [CAR_L1], request)
        with console.status(f"comparing both attentions of {CAR_L1.model} on {cohort.title}"):
            classes, on_slides = _numbered(one.run.outputs), shift_of_run(one.run, request.device)
        tables.append(_count_table(f"{cohort.title}: {COUNTED}", classes, on_slides))
        matrices.append(_matrix(f"{cohort.title}, {CAR_L1.model}", tables[-1], 100 * on_slides.shares()))
        lines, notes = [*lines, *caution_lines([one])], [*cohort.notes, *notes]
        facts["slides"] = {"cohort": cohort.name, **_facts(one.run, on_slides)}
    bar = "per cent of a class's correctly answered bags"
    picture = draw_matrices(matrices, request.out / "shift.png", low=0, high=100, bar=bar)
    most = float(np.nanmax(np.abs(change.values), initial=0.0)) or 1.0
    bar = "mean change of the logit, F(u_cf) - F(u)"
    changes = draw_matrices([change], request.out / "shift_change.png", low=-most, high=most, bar=bar, signed=True)
    caption = "Which class's logit grows most under the counterfactual attention; one row per true class."
    why = "Change of each logit in these bags: evidence for the same class falls and rises together."
    conditions = (
        f"CAR-MIL, {points[0].name}; each initialisation over its own correctly answered test bags",
        *training_lines(cohorts, [one.run for one in runs]),
        *notes,
    )
    pictures = Picture(picture, caption), Picture(changes, why)
    return write_finding("shift", request, facts, tables=tables, pictures=pictures, lines=lines, conditions=conditions)


def _numbered(names: Sequence[str]) -> list[str]:
    """Number the classes, unless their names are numbers."""
    return [name if name.split()[0] == str(c) else f"{c}: {name}" for c, name in enumerate(names)]


def _text(values: Floats, *, signed: bool = False) -> str:
    """Format the mean and standard deviation over the models (r) of logits, or of shares in per cent."""
    return figure_text(figure(values, 1), "+.2f") if signed else figure_text(figure(values))


def _table(
    title: str,
    rows: Sequence[str],
    heads: Sequence[str],
    values: Floats,
    *,
    head: str = "true class",
    signed: bool = False,
) -> ResultTable:
    """Tabulate values (r, rows, heads)."""
    lines = tuple((name, *(_text(cell, signed=signed) for cell in values[:, y].T)) for y, name in enumerate(rows))
    return ResultTable(title, (head, *heads), lines)


def _matrix(title: str, table: ResultTable, values: Floats, across: str = "class whose logit grows most") -> Matrix:
    """Return the picture of a table of values (r, k, k)."""
    names, k = tuple(line[0] for line in table.lines), len(table.lines)
    means = np.ma.masked_invalid(values).mean(0).filled(np.nan)
    cells = tuple(line[1 : k + 1] for line in table.lines)
    return Matrix(title, names, tuple(str(c) for c in range(k)), means, cells, across, "true class")


def _count_table(title: str, names: Sequence[str], shift: Shift) -> ResultTable:
    """Tabulate shares and the number of bags in each class, the mean over the models."""
    table, bags = _table(title, names, names, shift.shares()), shift.right.mean(0)
    lines = tuple((*line, f"{n:.{int(n < 10)}f}") for line, n in zip(table.lines, bags, strict=True))
    return replace(table, heads=(*table.heads, "bags"), lines=lines)


def _readings_table(shift: Shift) -> ResultTable:
    lines = tuple((name, how, *(_text(shift.shares(name)[:, y, c]) for y, c in TOLD)) for name, how in READINGS.items())
    heads = ("the class that", "", *(f"class {y} to {c}" for y, c in TOLD))
    return ResultTable("Ways to count: per cent of correctly answered bags", heads, (*lines, PAPER), names=2)


def _points_table(points: Sequence[Point], found: Sequence[MethodRun], shifts: Sequence[Shift]) -> ResultTable:
    lines = tuple(
        (
            point.distance,
            f"{point.alpha:g}",
            f"{point.lambda_:g}",
            figure_text(figure(one.values("auc"))),
            *(_text(shift.shares()[:, y, c]) for y, c in TOLD),
        )
        for point, one, shift in zip(points, found, shifts, strict=True)
    )
    heads = ("distance", "alpha", "lambda", "AUC", *(f"class {y} to {c}" for y, c in TOLD))
    return ResultTable("Four Bags at other weights and distances: per cent", heads, lines, names=3)


def _facts(run: Run, shift: Shift) -> dict[str, object]:
    return {"classes": run.outputs, "counts": shift.counts, "readings": READINGS, "mean_logit_change": shift.change}


def shift_of_run(run: Run, device: str) -> Shift:
    """Return the shift of each seed, over the test bags of all its folds."""
    bags, models = models_of_run(run, device)
    by_seed: dict[int, list[Answers]] = {}
    for one in models:
        outputs = predict_branches(one.model, bags, one.places)
        by_seed.setdefault(one.seed, []).append((outputs.logits, outputs.counterfactual_logits, one.labels))
    return shift_of(
        (torch.cat(a), torch.cat(b), torch.cat(y)) for a, b, y in (zip(*s, strict=True) for s in by_seed.values())
    )


def shift_of(answers: Iterable[Answers]) -> Shift:
    counts: dict[str, list[Tensor]] = {name: [] for name in READINGS}
    changes = []
    for before, after, labels in answers:
        own = one_hot(labels, before.shape[-1]).bool()
        choices = {
            "grows most": after - before,
            "is answered": after,
            "strongest other": after.masked_fill(own, -torch.inf),
            "falls most beside": (before - after).masked_fill(own, -torch.inf),
            "runner-up": before.masked_fill(own, -torch.inf),
        }
        for name, values in choices.items():
            counts[name].append(count_choices(values.argmax(-1), before, labels))
        changes.append(_by_class(after - before, before, labels))
    return Shift({name: _stacked(one) for name, one in counts.items()}, _stacked(changes))


def reasons_of(bags: Bags, models: Iterable[TestedModel]) -> tuple[Floats, Floats]:
    """Explain the shift on Four Bags, where the truth is known for each group of digits, over correctly answered bags.

    Return the attention on each group of digits by true class, factual then counterfactual (r, k, 2 d), and the path
    evidence (r, d, k) of all instances of a group in a bag."""
    attention: list[Tensor] = []
    evidence: list[Tensor] = []
    for one in models:
        tested, labels = bags[one.places], one.labels
        assert tested.instance_labels is not None
        eight, nine = ((tested.instance_labels == torch.tensor(signs)).all(1) for signs in (EIGHT, NINE))
        groups = torch.stack([eight, nine, ~eight & ~nine], dim=1)  # (n, d)
        outputs = predict_branches(one.model, tested)
        maps = torch.stack([outputs.scores, outputs.counterfactual_scores], dim=-1)
        weights = (bag_softmax(maps, outputs.offsets).unsqueeze(-1) * groups.unsqueeze(1)).flatten(1)
        attention.append(_by_class(bag_sum(weights, outputs.offsets), outputs.logits, labels))
        path = explain(one.model, tested, "path").cpu()
        sums = bag_sum((groups.unsqueeze(-1) * path.unsqueeze(1)).flatten(1), outputs.offsets).unflatten(
            1, (len(DIGITS), -1)
        )
        right = (outputs.logits.argmax(-1) == labels).unsqueeze(-1)
        present = ((bag_sum(groups.double(), outputs.offsets) > 0) & right).unsqueeze(-1)  # (b, d, 1)
        evidence.append((sums * present).sum(0) / present.sum(0))
    return _stacked(attention), _stacked(evidence)


def _by_class(values: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of (b, c) over the correctly answered bags of each class, (k, c)."""
    right = logits.argmax(-1) == labels
    members = torch.stack([right & (labels == y) for y in range(logits.shape[-1])]).double()
    return (members @ values.double()) / members.sum(1, keepdim=True)


def _stacked(rows: Sequence[Tensor]) -> Floats:
    return torch.stack([row.double() for row in rows]).numpy()
