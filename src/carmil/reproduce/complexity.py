"""The paper's complexity table: parameters and multiply-adds.

The paper says 10,000 instances; all twelve of its figures come out at 9,000, counting modules only (linear layers,
convolutions, and 4 operations per element for LayerNorm, as the profiler thop does). A full count has every matrix product:
pooling, q.k products, Nystrom's products and its pseudo-inverse.

References count the published architectures analytically; our implementation is measured by torch's own flop counter.
1024 features, 512 hidden units, 2 classes.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch

from carmil.counterfactual import create_model
from carmil.progress import progress_bar
from carmil.reproduce.recipes import Finding, Request, write_finding
from carmil.tables import ResultTable

INSTANCES, PAPER_INSTANCES = 10_000, 9_000
IN, HIDDEN, CLASSES = 1024, 512, 2


@dataclass(frozen=True)
class Count:
    """Multiply-adds of a forward pass: of modules (linear, convolution), of LayerNorm as thop counts it, of other products."""

    modules: int
    products: int = 0
    norms: int = 0

    def __add__(self, other: "Count") -> "Count":
        return Count(self.modules + other.modules, self.products + other.products, self.norms + other.norms)

    @property
    def full(self) -> int:
        return self.modules + self.products

    @property
    def as_profiled(self) -> int:
        return self.modules + self.norms


def _embedding(n: int) -> Count:
    return Count(n * IN * HIDDEN)


def _instance_scores(n: int) -> Count:
    """Mean and max pooling of the instances' class scores."""
    return _embedding(n) + Count(n * HIDDEN * CLASSES)


def _abmil(n: int, *, gated: bool = True, size: int = 128) -> Count:
    return _embedding(n) + Count((1 + gated) * n * HIDDEN * size + n * size + HIDDEN * CLASSES, n * HIDDEN)


def _car_abmil(n: int) -> Count:
    return _abmil(n) + Count(n * 128 + HIDDEN * CLASSES, n * HIDDEN)


def _dsmil_stream(n: int) -> Count:
    """A query, its similarity to the critical instances, pooling, the bag classifier."""
    modules = n * HIDDEN * 128 + CLASSES * HIDDEN * 128 + CLASSES * CLASSES * HIDDEN
    return Count(modules, n * 128 * CLASSES + n * HIDDEN * CLASSES)


def _dsmil(n: int, *, streams: int = 1) -> Count:
    return sum((_dsmil_stream(n) for _ in range(streams)), _instance_scores(n))


def _nystrom_layer(tokens: int) -> Count:
    m, heads = HIDDEN // 2, 8
    padded = math.ceil(tokens / m) * m
    modules = padded * HIDDEN * 3 * HIDDEN + padded * HIDDEN * HIDDEN + padded * HIDDEN * 33
    products = 4 * padded * m * HIDDEN + m * m * HIDDEN + padded * m * m * heads + 6 * 4 * m**3 * heads
    return Count(modules, products, 4 * tokens * HIDDEN)


def _transmil(n: int) -> Count:
    square = math.ceil(math.sqrt(n)) ** 2
    layers = _nystrom_layer(square + 1) + _nystrom_layer(square + 1)
    return (
        _embedding(n) + layers + Count(square * HIDDEN * (49 + 25 + 9) + HIDDEN * CLASSES, 0, 4 * (square + 1) * HIDDEN)
    )


def _car_transmil(n: int) -> Count:
    tokens = math.ceil(math.sqrt(n)) ** 2 + 1
    return _transmil(n) + _nystrom_layer(tokens) + Count(HIDDEN * CLASSES, 0, 4 * tokens * HIDDEN)


def _clam(n: int, *, heads: int) -> Count:
    return _embedding(n) + Count(2 * n * HIDDEN * 256 + n * 256 * heads + HIDDEN * CLASSES, n * HIDDEN * heads)


def _additive(n: int) -> Count:
    modules = n * (2 * (IN * 256 + 256 * 256) + 256 + 256 * CLASSES)
    return Count(modules, n * IN)


def _acmil(n: int) -> Count:
    modules = 2 * n * HIDDEN * 128 + n * 128 * 5 + 6 * HIDDEN * CLASSES
    return _embedding(n) + Count(modules, 6 * n * HIDDEN)


def _rrt(n: int) -> Count:
    side = math.ceil(math.ceil(math.sqrt(n)) / 8) * 8
    tokens, region, heads, k = side * side, (side // 8) ** 2, 8, 3
    layer = Count(tokens * HIDDEN * 4 * HIDDEN + tokens * region * heads * 15, 2 * tokens * region * HIDDEN)
    cross = Count(64 * k * HIDDEN * 4 * HIDDEN, 3 * tokens * HIDDEN * k + 2 * k * 64 * 64 * HIDDEN)
    pooling = Count(n * HIDDEN * 128 + n * 128 + HIDDEN * CLASSES, n * HIDDEN)
    return _embedding(n) + layer + cross + pooling


def _weno(n: int) -> Count:
    teacher = n * (IN * 512 + 512 * 1024 + 1024 * 1024 + 1024 * 512 + 512) + 1024 * CLASSES
    student = n * (512 * 4096 + 4096 * 4096 + 4096 * CLASSES)
    return Count(teacher + student, n * 1024)


COUNTS: dict[str, Callable[[int], Count]] = {
    "mean": _instance_scores,
    "max": _instance_scores,
    "abmil.gated": _abmil,
    "car/abmil.gated": _car_abmil,
    "abmil": partial(_abmil, gated=False),
    "clam.sb": partial(_clam, heads=1),
    "clam.mb": partial(_clam, heads=CLASSES),
    "additive": _additive,
    "dsmil": _dsmil,
    "car/dsmil": partial(_dsmil, streams=2),
    "transmil": _transmil,
    "car/transmil": _car_transmil,
    "acmil": _acmil,
    "rrt": _rrt,
    "weno": _weno,
}
PAPER = {  # multiply-adds in G, parameters in M
    "abmil.gated": (5.899, 0.657),
    "car/abmil.gated": (5.901, 0.657),
    "dsmil": (5.318, 0.594),
    "car/dsmil": (5.908, 0.659),
    "transmil": (24.796, 2.672),
    "car/transmil": (34.653, 3.722),
}
EXPLANATION = (
    f"Multiply-adds in G of one bag of {IN} features, parameters in M. Ours is measured by torch's flop counter; the reference "
    f"is counted analytically: in full, and modules only at {PAPER_INSTANCES:,} instances, which is what the paper's figures are "
    "although it says 10,000."
)
HEADS = (
    "model",
    "parameters",
    "parameters, paper",
    f"ours, N = {INSTANCES:,}",
    f"reference in full, N = {INSTANCES:,}",
    f"reference, modules only, N = {PAPER_INSTANCES:,}",
    "paper",
)


@dataclass(frozen=True)
class Complexity:
    """One row of the table: multiply-adds, and parameters, as they are; the paper's in G and M."""

    model: str
    parameters: int
    measured: int
    reference_full: int
    reference_profiled: int
    paper_gmacs: float | None
    paper_mparams: float | None

    @property
    def cells(self) -> tuple[str, ...]:
        ours = (self.measured, self.reference_full, self.reference_profiled)
        figures = (self.parameters / 1e6, self.paper_mparams, *(count / 1e9 for count in ours), self.paper_gmacs)
        return (self.model, *("–" if figure is None else f"{figure:.3f}" for figure in figures))


def measure(name: str, instances: int = INSTANCES) -> tuple[int, int]:
    """Parameters, and multiply-adds of one forward pass by torch's flop counter (every matrix product and convolution)."""
    from torch.utils.flop_counter import FlopCounterMode

    model = create_model(name, IN, CLASSES).eval()
    counter = FlopCounterMode(display=False)
    with torch.inference_mode(), counter:
        model(torch.randn(instances, IN), torch.tensor([0, instances]))
    return sum(p.numel() for p in model.parameters()), counter.get_total_flops() // 2


def reproduce(request: Request) -> Finding:
    """Count every model."""
    names, rows = list(COUNTS), []
    for i in progress_bar(range(len(names)), "counting"):
        name, count = names[i], COUNTS[names[i]]
        gmacs, mparams = PAPER.get(name, (None, None))
        references = count(INSTANCES).full, count(PAPER_INSTANCES).as_profiled
        rows.append(Complexity(name, *measure(name), *references, gmacs, mparams))
    table = ResultTable("Parameters and multiply-adds", HEADS, tuple(row.cells for row in rows))
    finding = Finding((table,), conditions=(EXPLANATION,))
    return write_finding("complexity", request, finding, {"models": [asdict(row) for row in rows]})
