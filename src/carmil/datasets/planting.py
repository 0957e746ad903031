"""Synthetic slides: a grid of tissue, with a nucleus drawn for each place, and foci planted among them.

Size, tissue and background are drawn first, independently of the label. Foci then replace the nuclei in their area,
so that nothing outside them depends on the label. n places.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from carmil.datasets.crc_nuclei import PATCH

MOST_FOCI = 3


@dataclass(frozen=True, eq=False)
class SyntheticSlide:
    """nuclei (n): the nucleus at each place; places (n, 2): corners in level-0 pixels; truth (n): 1 if planted."""

    name: str
    patient: str
    label: str
    nuclei: np.ndarray
    places: np.ndarray | None = None
    truth: np.ndarray | None = None
    split: str = ""


@dataclass(frozen=True)
class Focus:
    """A planted focus: the nuclei to draw from, and its share of the slide."""

    nuclei: np.ndarray
    share: float


def tissue(n: int, rng: np.random.Generator) -> np.ndarray:
    """Return the places (n, 2) of a grid within an ellipse, row by row, in level-0 pixels."""
    stretch, turn = rng.uniform(1, 2), rng.uniform(0, np.pi)
    half = int(np.ceil(np.sqrt(n * stretch))) + 1
    y, x = np.mgrid[-half : half + 1, -half : half + 1].reshape(2, -1)
    along, across = np.cos(turn) * x + np.sin(turn) * y, np.cos(turn) * y - np.sin(turn) * x
    inside = np.sort(np.argsort(along**2 / stretch + across**2 * stretch, kind="stable")[:n])
    places = np.stack([x[inside], y[inside]], axis=1)
    return ((places - places.min(axis=0)) * PATCH).astype(np.float32)


def plant(
    background: np.ndarray, places: np.ndarray, foci: Sequence[Focus], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return the nuclei (n) with one to three discs of each focus among them, and a truth (n) that is 1 in the discs."""
    nuclei, free = background.copy(), np.ones(len(background), dtype=bool)
    for focus in foci:
        wanted = max(1, round(focus.share * len(nuclei)))
        for part in np.array_split(np.arange(wanted), min(wanted, int(rng.integers(1, MOST_FOCI + 1)))):
            centre = places[rng.integers(len(places))]
            far = np.where(free, np.square(places - centre).sum(axis=1), np.inf)
            disc = np.argsort(far, kind="stable")[: len(part)]
            nuclei[disc] = rng.choice(focus.nuclei, len(disc))
            free[disc] = False
    return nuclei, (~free).astype(np.int64)
