"""The report of a digit study: one HTML file that shows, digit by digit, what speaks for an answer and what against it."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from carmil.datasets.digit_images import DigitImages
from carmil.datasets.digits import BAG_SIZE, DigitBags, Task
from carmil.maps.tile_maps import tile_maps
from carmil.report.curves import Curve, curve_svg
from carmil.report.page import embedded, write_page
from carmil.tables import ResultTable
from carmil.training.runs import Run

SIDE = 28


@dataclass(frozen=True)
class Strip:
    """The digits of a bag once: a heading, and for each digit the colour of its frame and what to say of it."""

    heading: str
    explanation: str
    cells: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Card:
    """One bag. `places` are where its digits lie in the sprite, in the order they are shown."""

    bag: str
    truth: str
    answer: str
    confidence: str
    right: bool
    counterfactual: str
    bars: tuple[tuple[str, float, float | None], ...]
    sprite: str
    places: tuple[int, ...]
    strips: tuple[Strip, ...]


def write_report(
    path: Path,
    *,
    title: str,
    tables: Sequence[ResultTable],
    galleries: Sequence[tuple[str, str, Sequence[Card]]],
    curves: Sequence[tuple[str, str]],
    facts: Mapping[str, str],
) -> None:
    """galleries: (heading, introduction, cards); curves: (heading, svg); facts: the run card."""
    write_page(
        path,
        "digits.html",
        title=title,
        tables=tables,
        galleries=galleries,
        curves=curves,
        facts=facts,
        side=SIDE,
        sprite_width=SIDE * BAG_SIZE,
    )


def gallery(run: Run, task: Task, test: DigitBags, images: DigitImages, *, per_class: int = 2) -> list[Card]:
    """The first test bags of every class, and the first that is answered wrongly, as the run's first model sees them."""
    import pandas as pd

    answers = pd.read_parquet(run.folder / "predictions.parquet").query("model == 0")
    probabilities = answers[[f"p{c}" for c in range(task.classes)]].to_numpy()
    counterfactual = answers[[f"cf0_p{c}" for c in range(task.classes)]].to_numpy()
    labels = answers["label"].to_numpy()
    wrong = np.flatnonzero(probabilities.argmax(1) != labels)[:1]
    chosen = [i for c in range(task.classes) for i in np.flatnonzero(labels == c)[:per_class]]
    return [
        _card(int(i), run, task, test, images, probabilities[i], counterfactual[i], int(labels[i]))
        for i in [*chosen, *(i for i in wrong if i not in chosen)]
    ]


def learning_curves(run: Run) -> str:
    """Training and validation cross-entropy of every model of the run, best epochs marked."""
    curves = [
        Curve(name, values[name_of], dashed=name == "validation")
        for name, values, name_of in (
            ("training", run.history["train"], "cls"),
            ("validation", run.history, "validation"),
        )
    ]
    return curve_svg(curves, marks=run.history["best_epoch"], y_label="cross-entropy")


def _card(
    i: int,
    run: Run,
    task: Task,
    test: DigitBags,
    images: DigitImages,
    probabilities: np.ndarray,
    counterfactual: np.ndarray,
    label: int,
) -> Card:
    first, last = (int(x) for x in test.bags.offsets[i : i + 2])
    digits = test.digits[first:last]
    order = np.argsort(digits, kind="stable")
    answer, runner_up = (int(c) for c in np.argsort(-probabilities)[:2])
    here = {name: values[0, first:last].double().numpy()[order] for name, values in run.maps.items()}
    evidence = here["path"]
    maps = tile_maps({name: evidence[:, c] for c, name in enumerate(task.class_names)})
    drawn = [maps[c] for c in (answer, runner_up) if not maps[c].negligible]
    largest = max((float(np.abs(one.values).max()) for one in drawn), default=math.inf)  # negligible: no colour
    shown = digits[order]
    strips = (
        Strip("attention weight", "where the model looks", _attended(_softmax(here["attention"][:, answer]), shown)),
        Strip(
            "counterfactual attention weight",
            "close to the factual one, yet drawn towards another answer",
            _attended(_softmax(here["counterfactual"][:, 0, 0]), shown),
        ),
        Strip(f"evidence for “{task.class_names[answer]}”", "the answer", _signed(evidence[:, answer], largest, shown)),
        Strip(
            f"evidence for “{task.class_names[runner_up]}”",
            "the runner-up",
            _signed(evidence[:, runner_up], largest, shown),
        ),
    )
    return Card(
        bag=test.bags.ids[i],
        truth=task.class_names[label],
        answer=task.class_names[answer],
        confidence=f"{probabilities[answer]:.0%}",
        right=answer == label,
        counterfactual=task.class_names[int(counterfactual.argmax())],
        bars=tuple(zip(task.class_names, probabilities.tolist(), counterfactual.tolist(), strict=True)),
        sprite=_sprite(images.images[test.images[first:last][order]]),
        places=tuple(range(0, SIDE * (last - first), SIDE)),
        strips=strips,
    )


def _attended(weights: np.ndarray, digits: np.ndarray) -> tuple[tuple[str, str], ...]:
    """Frames of one hue, as strong as the attention is next to the bag's largest."""
    strengths = weights / weights.max()
    return tuple(
        (f"rgb(128 80 170 / {s:.2f})", f"{d}: attention weight {w:.1%}")
        for s, w, d in zip(strengths, weights, digits, strict=True)
    )


def _signed(evidence: np.ndarray, largest: float, digits: np.ndarray) -> tuple[tuple[str, str], ...]:
    """Blue frames where an instance supports the class, orange where it refutes it."""
    return tuple(
        (
            f"rgb({'20 100 200' if e >= 0 else '225 105 0'} / {min(1.0, abs(e) / largest):.2f})",
            f"{d}: {'supports' if e >= 0 else 'refutes'}, {e:+.3f}",
        )
        for e, d in zip(evidence, digits, strict=True)
    )


def _sprite(images: np.ndarray) -> str:
    """Images side by side as one PNG, as text that a page can hold."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(255 - np.concatenate(list(images), axis=1)).save(buffer, format="PNG", optimize=True)
    return embedded(buffer.getvalue())


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()
