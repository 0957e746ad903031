"""From a user's words (a folder, a file, an encoder) to digit bags, and to the lines that say which bags these are."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carmil.datasets.digit_features import array_features, pixel_features, resnet18_features
from carmil.datasets.digit_images import DigitImages, bundled_digits, download_mnist, mnist_from_folder
from carmil.datasets.digits import TASKS, DigitStudy, pools, sample_study
from carmil.errors import CarmilError
from carmil.progress import console, progress_bar

ENCODERS = ("pixels", "resnet18")
SIZES, FAST_SIZES = (2000, 500, 1000), (200, 60, 100)
FEATURES = "resnet50_pca256.npy"  # beside MNIST's idx files: what a model sees instead of principal components


@dataclass(frozen=True)
class DigitData:
    """Bags of every task, the images they were drawn from, and what a run's config says of them."""

    studies: dict[str, DigitStudy]
    images: DigitImages
    about: dict[str, Any]


def load_digits(
    tasks: Sequence[str],
    *,
    mnist: str | None = None,
    features: Path | None = None,
    encoder: str = "pixels",
    weights: Path | None = None,
    pool: str = "disjoint",
    sizes: tuple[int, int, int] = SIZES,
    seed: int = 0,
    device: str = "cpu",
) -> DigitData:
    """mnist: a folder of idx files, 'download', or None for the bundled images. features: a .npy with a row an image."""
    if encoder not in ENCODERS:
        raise CarmilError(f"unknown encoder {encoder!r}: expected one of {', '.join(ENCODERS)}")
    if features is not None and encoder != "pixels":
        raise CarmilError("--features and --encoder exclude each other: the one is in place of the other")
    if weights is not None and encoder != "resnet18":
        raise CarmilError("--weights belongs to --encoder resnet18")
    if mnist is None:
        images = bundled_digits()
    elif mnist == "download":
        with console.status("downloading MNIST"):
            images = download_mnist()
    else:
        images = mnist_from_folder(Path(mnist))
    train_rows = pools(images.labels, sizes, pool, seed)[0]
    if features is not None:
        array = array_features(features, images)
        name = f"{features.name} ({array.shape[1]} wide, sha256 {_file_fingerprint(features)})"
    elif encoder == "resnet18":
        array = resnet18_features(images, weights=weights, device=device, track=progress_bar)
        whose = f"{weights.name}, sha256 {_file_fingerprint(weights)}" if weights else "torchvision's weights"
        name = f"ImageNet ResNet18 ({whose}), 512 wide"
    else:
        array = pixel_features(images, train_rows)
        name = f"{array.shape[1]} principal components of the pixels, fitted on training images"
    return DigitData(
        studies={
            task: sample_study(TASKS[task], images.labels, array, sizes=sizes, pool=pool, seed=seed) for task in tasks
        },
        images=images,
        about={
            "images": f"{images.source} (sha256 {images.fingerprint})",
            "features": name,
            "pool": pool,
            "sizes": list(sizes),
            "seed": seed,
        },
    )


def _file_fingerprint(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
