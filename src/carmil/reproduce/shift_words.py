"""What the shift's figures say in words, and why they are so: every word follows from the run's own data."""

from collections.abc import Sequence

import numpy as np

from carmil.reproduce.paper import figure, figure_text
from carmil.reproduce.shift_reading import CONTROL, DIGITS, READINGS, Floats, Reasons, Shift
from carmil.tables import ResultTable

PAPER = {(1, 3): 100.0, (3, 1): 62.0}  # of Four Bags, in per cent: from a true class to the class that grows most
COMES_OUT = 90.0  # per cent of the bags of class 1
SMALLEST = 0.005  # a change below this, of attention or of a logit, is called none


def class_name(names: Sequence[str], c: int) -> str:
    """Classes that are named by their number are not numbered again."""
    return names[c] if names[c].split()[0] == str(c) else f"{c}: {names[c]}"


def verdict(names: Sequence[str], shift: Shift) -> str:
    """Does the paper's shift come out?"""
    parts = []
    for (y, c), papers in PAPER.items():
        ours = percents(shift.shares()[:, y, c])
        parts.append(f"class {y} ({names[y]}) goes to class {c} ({names[c]}) in {ours} % (the paper: {papers:.0f} %)")
    mean = mean_known(shift.shares()[:, 1, 3])
    if np.isnan(mean):
        word = "cannot be said: no bag of class 1 was answered rightly"
    else:
        word = "comes out" if 100 * mean >= COMES_OUT else "does not come out"
    return f"The paper's shift on Four Bags {word}: of rightly answered bags {' and '.join(parts)}"


def reasons_lines(names: Sequence[str], shift: Shift, reasons: Reasons) -> list[str]:
    return [_why(names, shift, reasons, y, c) for y, c in PAPER if not np.isnan(mean_known(shift.change[:, y]).sum())]


def _why(names: Sequence[str], shift: Shift, reasons: Reasons, y: int, c: int) -> str:
    """Where the attention of a class's bags goes, what that says for each class, and so which logits grow."""
    moved = mean_known(reasons.counterfactual[:, y] - reasons.attention[:, y])  # (d)
    change, evidence = mean_known(shift.change[:, y]), mean_known(reasons.evidence)
    if np.abs(moved).max() < SMALLEST:
        return f"Why, class {y} ({names[y]}): the counterfactual attention moves by less than {SMALLEST:.1%} of the attention"
    lost, gained = int(moved.argmin()), int(moved.argmax())
    best = int(change.argmax())
    told = ", ".join(f"{k}: {value:+.2f}" for k, value in enumerate(change))
    words = (
        f"Why, class {y} ({names[y]}): the counterfactual attention takes {-moved[lost]:.1%} of a bag's attention from "
        f"{_digits(lost)} and gives {moved[gained]:.1%} to {_digits(gained)}. By path evidence {_digits(lost)} speak "
        f"{_sides(evidence[lost])}. The logits change by {told} on the mean, so that class {best} grows most"
    )
    if best == c:
        return words
    if evidence[lost, y] > 0 and evidence[lost, c] > 0:
        return (
            f"{words}, not class {c}: {_digits(lost)} speak for both {y} and {c}, and where they are looked at less both lose "
            f"what supports them"
        )
    return f"{words}, not class {c}, whose logit changes by {change[c]:+.2f}"


def nearest_reading(shift: Shift) -> str:
    """Which way to count comes nearest to the paper's two figures, and what the factual attention alone gives."""
    ours = {name: [100 * float(mean_known(shift.shares(name)[:, y, c])) for y, c in PAPER] for name in READINGS}
    if np.isnan([*ours.values()]).any():
        return "No bag of class 1 or none of class 3 was answered rightly: no way to count gives both of the paper's figures"
    tried = [name for name in READINGS if name != CONTROL]
    name = min(tried, key=lambda one: sum(abs(a - b) for a, b in zip(ours[one], PAPER.values(), strict=True)))
    words = (
        f"Of the {len(tried)} ways to count that were tried, '{name}' ({READINGS[name]}) comes nearest to the paper's figures, "
        f"with {_two(shift, name)}"
    )
    if name == "grows most":
        return f"{words}; it is the paper's own"
    return (
        f"{words}; the paper's words and its authors' code have another. Without any counterfactual, the strongest other class "
        f"under the factual attention, F(u), gives {_two(shift, CONTROL)}"
    )


def _two(shift: Shift, reading: str) -> str:
    (first, second) = (percents(shift.shares(reading)[:, y, c]) for y, c in PAPER)
    return f"{first} % (class 1 to 3) and {second} % (3 to 1)"


def tables_of_reasons(names: Sequence[str], shift: Shift, reasons: Reasons) -> list[ResultTable]:
    """Where attention goes, what the digits say, how the logits change, and the other ways to count."""
    classes = range(len(names))
    heads = tuple(class_name(names, c) for c in classes)
    return [
        ResultTable(
            "Mean change of the logits, F(u_cf) - F(u), in rightly answered bags",
            ("true class", *heads),
            tuple((heads[y], *(_signed(shift.change[:, y, c]) for c in classes)) for y in classes),
        ),
        ResultTable(
            "Attention weight on each digit in rightly answered bags, per cent: factual, then counterfactual",
            ("true class", *(f"{digit}, {which}" for digit in DIGITS for which in ("u", "u_cf"))),
            tuple(
                (
                    heads[y],
                    *(
                        percents(of[:, y, d])
                        for d in range(len(DIGITS))
                        for of in (reasons.attention, reasons.counterfactual)
                    ),
                )
                for y in classes
            ),
        ),
        ResultTable(
            "What digits say: path evidence of all of them in a bag, in logits; rightly answered bags that have them",
            ("digit", *heads),
            tuple((digit, *(_signed(reasons.evidence[:, d, c]) for c in classes)) for d, digit in enumerate(DIGITS)),
        ),
        ResultTable(
            "Other ways to count: per cent of rightly answered bags",
            ("the class that", *(f"class {y} to {c}" for y, c in PAPER)),
            tuple((name, *(percents(shift.shares(name)[:, y, c]) for y, c in PAPER)) for name in READINGS),
        ),
    ]


def _digits(d: int) -> str:
    return "the other digits" if DIGITS[d] == "others" else f"{DIGITS[d]}s"


def _sides(evidence: Floats) -> str:
    def listed(sign: int) -> str:
        return " and ".join(f"{c} ({e:+.2f})" for c, e in enumerate(evidence) if sign * e > SMALLEST)

    sides = [f"{word} class {listed(sign)}" for word, sign in (("for", 1), ("against", -1)) if listed(sign)]
    return " and ".join(sides) or "for no class and against none"


def _known(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def mean_known(values: Floats) -> Floats:
    """Over the models that have a value; NaN where none has."""
    there = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.where(there, values, 0.0).sum(0) / there.sum(0)


def percents(values: Floats) -> str:
    return figure_text(figure(_known(values).tolist())) if len(_known(values)) else "–"


def _signed(values: Floats) -> str:
    known = _known(values)
    if not len(known):
        return "–"
    return f"{known.mean():+.2f}" + (f" ± {known.std(ddof=1):.2f}" if len(known) > 1 else "")
