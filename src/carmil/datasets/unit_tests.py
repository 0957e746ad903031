"""Bags that reveal which assumption a model makes: a shortcut holds in training and is reversed in the test.

After Raff and Holt, "Reproducibility in Multiple Instance Learning: A Case For Algorithmic Unit Tests" (NeurIPS 2023): the
distributions of single-concept, multi-concept and false-frequency are those of their Algorithms 1 to 3 as torchmil's
data sets have them, except that negative bags of false-frequency there hold concept A only, up to 44 instances; numbers of
bags and features are ours, and so are threshold, which follows the same plan, and shifted-mean. Instances have 16 features,
independent of one another; N(m, s) has the mean m and the deviation s in each.

ordinary tile  N(0, 1)                  concept A  N(2, 0.1)
poison         N(-10, 0.1)              concept B  N(3, 0.1)

single-concept    positive bags hold 1 to 3 instances of N(0, 3) or N(1, 1), chosen at random, and all bags 10 ordinary
                  tiles. Each negative bag has one poison instance in training; in the test each positive bag has it.
multi-concept     positive bags hold 1 to 3 pairs of A and B, negative bags one instance of A or of B; all 1 to 9 ordinary
                  tiles. Poison as above.
threshold         positive bags hold 4 to 6 instances of A, negative bags 1 to 3; all 10 ordinary tiles. Poison as above.
false-frequency   positive bags hold one A and one B, negative bags one of either, 35 to 45 of it in the test; all 1 to 9
                  ordinary tiles.
shifted-mean      no shortcut: all 20 tiles of a positive bag are N(shift, 1), those of a negative bag N(0, 1). The sum of all
                  features is optimal; its AUC is `BOUND`.

A test without a shortcut is drawn as the training bags are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from carmil.bags.bags import Bags

WIDTH = 16  # features
ORDINARY = 10  # tiles of a bag that hold no concept, where their number is fixed
SHIFTED = 20  # tiles of a bag of shifted-mean
SHIFT = 0.13  # of every feature of every tile
BOUND = NormalDist().cdf(SHIFT * (WIDTH * SHIFTED / 2) ** 0.5)  # AUC of the sum of all features
A, B = (2.0, 0.1), (3.0, 0.1)
POISON = (-10.0, 0.1)

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, bool, bool], Floats]  # random numbers, whether positive, whether in the test


@dataclass(frozen=True)
class UnitTest:
    """One test. assumption: the one that a passing model respects; shortcut: the one that a failing model has learned.

    bound: the AUC of the optimal answer, if no shortcut is reversed; None for the other tests.
    """

    name: str
    assumption: str
    shortcut: str
    draw: Draw
    bound: float | None = None


def _tiles(rng: np.random.Generator, count: int, mean: float = 0.0, deviation: float = 1.0) -> Floats:
    return rng.normal(mean, deviation, (count, WIDTH))


def _few(rng: np.random.Generator, low: int, high: int) -> int:
    return int(rng.integers(low, high, endpoint=True))


def _with_poison(parts: list[Floats], rng: np.random.Generator, positive: bool, tested: bool) -> Floats:
    """Return the bag, with poison in negative training bags and in positive test bags."""
    return np.concatenate([*parts, _tiles(rng, 1, *POISON)] if positive == tested else parts)


def _single_concept(rng: np.random.Generator, positive: bool, tested: bool) -> Floats:
    kinds = ((0.0, 3.0), (1.0, 1.0))
    concept = [_tiles(rng, 1, *kinds[_few(rng, 0, 1)]) for _ in range(_few(rng, 1, 3) if positive else 0)]
    return _with_poison([*concept, _tiles(rng, ORDINARY)], rng, positive, tested)


def _multi_concept(rng: np.random.Generator, positive: bool, tested: bool) -> Floats:
    count = _few(rng, 1, 3)
    both = [_tiles(rng, count, *A), _tiles(rng, count, *B)]
    concepts = both if positive else [_tiles(rng, 1, *(A, B)[_few(rng, 0, 1)])]
    return _with_poison([*concepts, _tiles(rng, _few(rng, 1, 9))], rng, positive, tested)


def _threshold(rng: np.random.Generator, positive: bool, tested: bool) -> Floats:
    concept = _tiles(rng, _few(rng, 4, 6) if positive else _few(rng, 1, 3), *A)
    return _with_poison([concept, _tiles(rng, ORDINARY)], rng, positive, tested)


def _false_frequency(rng: np.random.Generator, positive: bool, tested: bool) -> Floats:
    one = (A, B)[_few(rng, 0, 1)]
    count = _few(rng, 35, 45) if tested else 1
    concepts = [_tiles(rng, 1, *A), _tiles(rng, 1, *B)] if positive else [_tiles(rng, count, *one)]
    return np.concatenate([*concepts, _tiles(rng, _few(rng, 1, 9))])


def _shifted_mean(rng: np.random.Generator, positive: bool, tested: bool) -> Floats:
    return _tiles(rng, SHIFTED, SHIFT * positive)


ABSENCE = "the absence of the poison: a bag is positive until a counter-example is seen"
UNIT_TESTS: dict[str, UnitTest] = {
    test.name: test
    for test in (
        UnitTest("single-concept", "a bag is positive if one tile is", ABSENCE, _single_concept),
        UnitTest("multi-concept", "a bag is positive if two kinds of tiles are both in it", ABSENCE, _multi_concept),
        UnitTest("threshold", "a bag is positive if enough tiles of a kind are in it", ABSENCE, _threshold),
        UnitTest(
            "false-frequency",
            "two kinds of tiles must both be there, however many",
            "how many concept tiles there are, not that both kinds are there",
            _false_frequency,
        ),
        UnitTest(
            "shifted-mean",
            "every tile says a little, and the sum of all counts",
            "only a part of what the tiles say together",
            _shifted_mean,
            BOUND,
        ),
    )
}


def draw_bags(test: UnitTest, count: int, *, tested: bool = False, seed: int = 0) -> Bags:
    """Draw bags, half of them positive (label 1). tested: with the shortcut reversed, as in the test.

    The instances of a bag are in random order.
    """
    name = f"{test.name}, {'test' if tested else 'training'}"
    rng = np.random.default_rng([seed, crc32(name.encode())])
    drawn = [rng.permutation(test.draw(rng, bool(i % 2), tested)).astype(np.float32) for i in range(count)]
    return Bags.from_list([torch.from_numpy(bag) for bag in drawn], labels=torch.arange(count) % 2)
