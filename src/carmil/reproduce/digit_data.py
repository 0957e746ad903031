"""The digit bags and the training that the recipes of digits are asked for."""

from collections.abc import Sequence
from typing import Any

from carmil.datasets.digit_data import FAST_SIZES, FEATURES, SIZES, DigitData, load_digits
from carmil.reproduce.recipes import Request


def digits_of(request: Request, tasks: Sequence[str]) -> DigitData:
    """The digits that every recipe draws its bags from: MNIST in DATA/mnist, one pool for all splits as the paper has it, and
    the features there if any; else the bundled images, none in two splits."""
    folder = request.folder("mnist")
    features = None if folder is None else folder / FEATURES
    return load_digits(
        tasks,
        mnist=None if folder is None else str(folder),
        features=features if features is not None and features.is_file() else None,
        pool="disjoint" if folder is None else "shared",
        sizes=FAST_SIZES if request.fast else SIZES,
        seed=request.seed,
        device=request.device,
    )


def training_of(request: Request) -> dict[str, Any]:
    """How every recipe trains on them, for table1's Settings, so that one's runs are another's: its defaults, or the demo's
    if only a look is asked for."""
    return {"repetitions": 2, "epochs": 12, "lr": 4e-3} if request.fast else {}
