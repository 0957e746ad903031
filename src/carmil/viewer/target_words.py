"""Describe the target of a run in the words and number formats of the page, which does not distinguish kinds of
targets.

p predictions and k outputs of a slide. Rows are the numbers of its answer: the predictions and, where these are not
one number per output, the quantities of the outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10

import numpy as np
from numpy.typing import ArrayLike, NDArray

from carmil.targets import Target
from carmil.targets.target import EvidenceWords, Quantity

Floats = NDArray[np.float64]
MOST_DECIMALS = 12


@dataclass(frozen=True)
class NumberFormat:
    """The format of a number: in per cent if it is a share, with its sign if it has one. low and high: the ends of its
    scale.
    """

    share: bool
    signed: bool
    decimals: int
    low: float
    high: float


@dataclass(frozen=True)
class AnswerRow:
    """A number of the answer, and the output (its number) whose evidence belongs to it; None if there is none."""

    name: str
    output: int | None
    format: NumberFormat


@dataclass(frozen=True)
class OutputWords:
    """An output, the effects of positive and negative evidence on it, headings for the tiles with the most, and its
    curve.

    top: the tiles with the highest evidence, as in "the 10 % of the tiles that raise the risk most".
    """

    name: str
    positive: str
    negative: str
    most_positive: str
    most_negative: str
    sides: str
    top: str
    curve: str


@dataclass(frozen=True)
class TargetWords:
    """The target of a run.

    quantity: the number that slides are sorted by, `note` its meaning; predicted: what the rows are. judged: whether
    answers can be right or wrong; answers: whether they say more than the number. either, neither: about the
    sign of evidence. first, last: the orders in which tiles are removed.
    """

    outputs: tuple[OutputWords, ...]
    rows: tuple[AnswerRow, ...]
    output_word: str
    leading: str
    predicted: str
    quantity: str
    note: str
    format: NumberFormat
    judged: bool
    answers: bool
    either: str
    neither: str
    first: str
    last: str


def target_words(target: Target, predicted: Sequence[ArrayLike]) -> TargetWords:
    """Describe a target. predicted: all predictions (p) of the run's slides, which give numbers their scale."""
    words, quantity = target.words, target.quantity
    numbers = np.array([target.quantities(np.asarray(one)) for one in predicted]).reshape(-1, len(target.outputs))
    formats = [_format(quantity, column) for column in numbers.T]
    outputs = [AnswerRow(_name(quantity, name), i, formats[i]) for i, name in enumerate(target.outputs)]
    rows = outputs
    if target.prediction_names != target.outputs:
        share = _format(Quantity("probability", share=True), np.zeros(0))
        rows = [*(AnswerRow(name, None, share) for name in target.prediction_names), *outputs]
    note = ": ".join(part for part in (quantity.unit, quantity.note) if part)
    for_answers = words.of_answers
    return TargetWords(
        outputs=tuple(_output(words, quantity, name) for name in target.outputs),
        rows=tuple(rows),
        output_word=target.output_word,
        leading=target.leading_words,
        predicted=target.output_word if len(target.outputs) > 1 else "predicted",
        quantity=quantity.name,
        note=note,
        format=formats[0],
        judged=bool(target.answer_names),
        answers=target.answers_in_words,
        either="is for or against" if for_answers else "raises or lowers",
        neither="is neither for nor against" if for_answers else "neither raises nor lowers",
        first="most supporting first" if for_answers else "what raises it most first",
        last="least supporting first" if for_answers else "what lowers it most first",
    )


def row_values(target: Target, predicted: ArrayLike) -> Floats:
    """Return the numbers of the rows for the predictions (p) of a slide."""
    p = np.asarray(predicted, dtype=np.float64)
    return p if target.prediction_names == target.outputs else np.concatenate([p, target.quantities(p)])


def _name(quantity: Quantity, output: str) -> str:
    """Return the name of an output's row: that of its quantity, if this is more than a probability."""
    return output if quantity.share else quantity.name


def _format(quantity: Quantity, values: Floats) -> NumberFormat:
    low, high = (0.0, 1.0) if quantity.share or not len(values) else (float(values.min()), float(values.max()))
    largest = max(abs(low), abs(high)) or 1.0
    decimals = min(MOST_DECIMALS, max(0, quantity.digits - 1 - floor(log10(largest))))
    return NumberFormat(share=quantity.share, signed=quantity.signed, decimals=decimals, low=low, high=high)


def _output(words: EvidenceWords, quantity: Quantity, name: str) -> OutputWords:
    if words.of_answers:
        return OutputWords(
            name,
            positive=f"supports “{name}”",
            negative=f"refutes “{name}”",
            most_positive=f"Most supporting “{name}”",
            most_negative=f"Most refuting “{name}”",
            sides="For and against",
            top=f"that support “{name}” most",
            curve=f"Probability of “{name}”",
        )
    unit = f" ({quantity.unit})" if quantity.unit else ""
    return OutputWords(
        name,
        positive=f"raises the {name}",
        negative=f"lowers the {name}",
        most_positive=f"Raises the {name} most",
        most_negative=f"Lowers the {name} most",
        sides=f"What raises and what lowers the {name}",
        top=f"that raise the {name} most",
        curve=f"{quantity.name[0].upper()}{quantity.name[1:]}{unit}",
    )
