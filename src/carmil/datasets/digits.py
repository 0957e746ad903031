"""Digit bags: the xMIL benchmark (Hense et al., 2024), where the truth about every instance is known.

A bag is 30 handwritten digits. The digits that occur determine its class, and thereby which digits are evidence for
or against a class. n instances, b bags, k classes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from carmil.bags.bags import Bags
from carmil.errors import CarmilError

BAG_SIZE = 30


@dataclass(frozen=True)
class Task:
    """A task: digits (b, 30) -> labels (b); digits (b, 30) -> evidence (b, 30, k): +1 supports class c, -1 refutes
    it, 0 neither.

    class_names: in alphabetical order, in which a study numbers its classes.
    """

    name: str
    title: str
    class_names: tuple[str, ...]
    label: Callable[[np.ndarray], np.ndarray]
    evidence: Callable[[np.ndarray], np.ndarray]

    @property
    def classes(self) -> int:
        return len(self.class_names)


def _four_bags_label(digits: np.ndarray) -> np.ndarray:
    return (digits == 8).any(1) + 2 * (digits == 9).any(1)


def _four_bags_evidence(digits: np.ndarray) -> np.ndarray:
    of_eight, of_nine = np.array([-1, 1, -1, 1]), np.array([-1, -1, 1, 1])
    return (digits == 8)[..., None] * of_eight + (digits == 9)[..., None] * of_nine


def _in_adjacent_pair(digits: np.ndarray) -> np.ndarray:
    """Return a mask (b, 30) of the digits below 5 that have a neighbour, also below 5, in the bag."""
    present = (digits[..., None] == np.arange(5)).any(1)
    neighbour = np.zeros_like(present)
    neighbour[:, 1:] |= present[:, :-1]
    neighbour[:, :-1] |= present[:, 1:]
    paired = np.zeros((len(digits), 10), dtype=bool)
    paired[:, :5] = present & neighbour
    return np.take_along_axis(paired, digits, axis=1)


def _adjacent_pairs_label(digits: np.ndarray) -> np.ndarray:
    return _in_adjacent_pair(digits).any(1).astype(int)


def _adjacent_pairs_evidence(digits: np.ndarray) -> np.ndarray:
    return _in_adjacent_pair(digits)[..., None] * np.array([-1, 1])


def _pos_neg_sign(digits: np.ndarray) -> np.ndarray:
    return np.isin(digits, (4, 6, 8)).astype(int) - np.isin(digits, (5, 7, 9)).astype(int)


def _pos_neg_label(digits: np.ndarray) -> np.ndarray:
    return (_pos_neg_sign(digits).sum(1) > 0).astype(int)


def _pos_neg_evidence(digits: np.ndarray) -> np.ndarray:
    return _pos_neg_sign(digits)[..., None] * np.array([-1, 1])


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "adjacent_pairs",
            "Adjacent Pairs",
            ("no pair", "two neighbours among 0 to 4"),
            _adjacent_pairs_label,
            _adjacent_pairs_evidence,
        ),
        Task(
            "four_bags",
            "Four Bags",
            ("neither 8 nor 9", "some 8, no 9", "some 9, no 8", "some of both"),
            _four_bags_label,
            _four_bags_evidence,
        ),
        Task(
            "pos_neg",
            "Pos-Neg",
            ("at most as many 4, 6, 8 as 5, 7, 9", "more 4, 6, 8 than 5, 7, 9"),
            _pos_neg_label,
            _pos_neg_evidence,
        ),
    )
}


@dataclass(frozen=True)
class DigitBags:
    """Bags, with the digit of each instance and the row of its image. digits, images (n)."""

    bags: Bags
    digits: np.ndarray
    images: np.ndarray


@dataclass(frozen=True)
class DigitStudy:
    train: DigitBags
    validation: DigitBags
    test: DigitBags


def sample_digits(bags: int, rng: np.random.Generator) -> np.ndarray:
    """Sample digits (bags, 30) as xMIL does.

    Each of the ten digits is included with probability 1/2, and an empty selection is drawn again; then 30 digits are
    drawn from those included.
    """
    included = rng.random((bags, 10)) < 0.5
    while (empty := ~included.any(1)).any():
        included[empty] = rng.random((int(empty.sum()), 10)) < 0.5
    included_first = np.argsort(~included, axis=1, kind="stable")
    picks = (rng.random((bags, BAG_SIZE)) * included.sum(1, keepdims=True)).astype(int)
    return np.take_along_axis(included_first, picks, axis=1)


def sample_bags(
    task: Task, bags: int, labels: np.ndarray, pool: np.ndarray, rng: np.random.Generator, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Sample digits and image rows, (bags, 30) each. `labels` are the digits of all images, `pool` the rows to draw from."""
    rows_by_digit = [pool[labels[pool] == digit] for digit in range(10)]
    counts = np.array([len(rows) for rows in rows_by_digit])
    if (counts == 0).any():
        raise CarmilError(
            f"the {name} pool of {len(pool)} images has no {int(np.argmin(counts))}: expected at least one "
            "image of every digit; use a larger pool"
        )
    digits = sample_digits(bags, rng)
    starts = np.concatenate([[0], counts.cumsum()[:-1]])
    places = starts[digits] + (rng.random(digits.shape) * counts[digits]).astype(int)
    return digits, np.concatenate(rows_by_digit)[places]


def split_pool(labels: np.ndarray, shares: tuple[int, ...], rng: np.random.Generator) -> list[np.ndarray]:
    """Divide the images of each digit in these shares: no image is in two parts."""
    parts: list[list[np.ndarray]] = [[] for _ in shares]
    cuts = np.cumsum(shares)[:-1] / sum(shares)
    for digit in range(10):
        rows = rng.permutation(np.flatnonzero(labels == digit))
        for part, chunk in zip(parts, np.split(rows, (cuts * len(rows)).astype(int)), strict=True):
            part.append(chunk)
    return [np.sort(np.concatenate(part)) for part in parts]


def pools(
    labels: np.ndarray, sizes: tuple[int, int, int], pool: str, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows from which train, validation and test images are drawn.

    `shared`: all images for each; `disjoint`: no image in two of them.
    """
    if pool == "shared":
        everything = np.arange(len(labels))
        return everything, everything, everything
    if pool != "disjoint":
        raise CarmilError(f"unknown pool {pool!r}: expected 'shared' or 'disjoint'")
    train, validation, test = split_pool(labels, sizes, np.random.default_rng([seed, 0]))
    return train, validation, test


def sample_study(
    task: Task,
    labels: np.ndarray,
    features: np.ndarray,
    *,
    sizes: tuple[int, int, int] = (2000, 500, 1000),
    pool: str = "disjoint",
    seed: int = 0,
) -> DigitStudy:
    """Sample train, validation and test bags. `labels` (images) are the digits, `features` (images, d) their features."""
    if len(labels) != len(features):
        raise CarmilError(
            f"{len(features)} rows of features for {len(labels)} digit images: expected one row per image, in "
            "the same order"
        )
    parts = []
    for i, (name, size, rows) in enumerate(
        zip(("train", "validation", "test"), sizes, pools(labels, sizes, pool, seed), strict=True)
    ):
        if size < 1:
            raise CarmilError(f"{size} {name} bags: expected at least one")
        digits, images = sample_bags(task, size, labels, rows, np.random.default_rng([seed, 1 + i]), name)
        evidence = task.evidence(digits).reshape(-1, task.classes)
        parts.append(
            DigitBags(
                Bags(
                    features=torch.from_numpy(np.asarray(features[images.ravel()], dtype=np.float32)),
                    offsets=torch.arange(size + 1) * BAG_SIZE,
                    labels=torch.from_numpy(task.label(digits)),
                    ids=tuple(f"{name}-{j:04d}" for j in range(size)),
                    instance_labels=torch.from_numpy(evidence.astype(np.int8)),
                ),
                digits=digits.ravel(),
                images=images.ravel(),
            )
        )
    return DigitStudy(*parts)
