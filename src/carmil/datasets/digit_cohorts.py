"""Digit tasks as ordinary cohorts on disk: a store with signed truth and pictures, and a table of labels with the official split.

OUT/TASK-KEY/labels.csv and OUT/TASK-KEY/digits (a store); KEY changes with the images, features, pool, sizes and seed.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from carmil.bags.bags import Bags
from carmil.bags.pictures import Pictures
from carmil.bags.sources import Bag
from carmil.csv_files import csv_text
from carmil.datasets.digit_features import array_features, pixel_features, resnet18_features
from carmil.datasets.digit_images import DigitImages, bundled_digits, download_mnist, mnist_from_folder
from carmil.datasets.digits import BAG_SIZE, TASKS, DigitStudy, pools, sample_study
from carmil.datasets.packing import is_made_from, write_store
from carmil.datasets.study_cohort import ModelProtocol, Protocol, StudyCohort
from carmil.errors import CarmilError
from carmil.files import write_text
from carmil.progress import console, progress_bar
from carmil.provenance import config_key

ENCODERS = ("pixels", "resnet18")
COMPONENTS = 64  # principal components of the pixels
SIZES, FAST_SIZES = (2000, 500, 1000), (200, 60, 100)
FEATURES = "resnet50_pca256.npy"  # a file beside MNIST's idx files: the features instead of principal components

# xMIL's template: 20 units everywhere, ungated attention, one hidden output layer, no dropout. Additional layers of a
# method are reduced to the same size.
TEMPLATE: dict[str, dict[str, Any]] = {
    "mean": {"dropout": 0.0},
    "max": {"dropout": 0.0},
    "abmil": {"attention": 20, "output_layers": 1, "dropout": 0.0},
    "abmil.gated": {"attention": 20, "output_layers": 1, "dropout": 0.0},
    "abmil.mlp": {"attention": 20, "mlp": 20, "dropout": 0.0},
    "clam.sb": {"attention": 20, "dropout": 0.0},
    "clam.mb": {"attention": 20, "dropout": 0.0},
    "acmil": {"attention": 20},
    "dsmil": {"query_size": 20, "dropout": 0.0},
    "dsmil.official": {"query_size": 20},
    "transmil": {"dropout": 0.0},
    "rrt": {"heads": 2, "attention": 20, "dropout": 0.0, "projection_dropout": 0.0},
    "weno": {"teacher": 20, "attention": 20, "student": 20, "dropout": 0.0, "init_std": None},
}
# SGD with momentum, as in the template. Additive uses Adam, as in xMIL; the other models listed use Adam by our own
# choice: SGD was not tried on them (xMIL trains TransMIL with SGD).
ADAM = ("additive", "acmil", "dsmil", "dsmil.official", "transmil", "rrt", "weno")


def template(model: str) -> ModelProtocol:
    """Return the options and the optimizer of a model on digit bags."""
    branch, _, plain = model.rpartition("/")
    options = {"hidden": 20, **TEMPLATE.get(plain, {})}
    if plain == "dsmil.official":
        options.pop("hidden")
    if branch == "car":
        options["branch"] = "full"  # the counterfactual branch in Table 1 is a complete second attention
    return ModelProtocol(options, "adam" if plain in ADAM else "sgd")


DIGITS = Protocol(
    official=True,
    seeds=10,
    epochs=1000,
    patience=100,
    warmup=10,
    batch=16,
    optimizer="sgd",
    lr=1e-3,
    weight_decay=0.0,
    schedule="constant",
    precision="float32",
    fast_epochs=12,
    of_model=template,
)


@dataclass(frozen=True, eq=False)
class DigitData:
    """Digit images and their features. `facts` distinguish the bags of one DigitData from those of another."""

    images: DigitImages
    facts: Mapping[str, Any]
    features_file: Path | None
    encoder: str
    weights: Path | None
    device: str

    @cached_property
    def features(self) -> np.ndarray:
        """Return features (images, d); they are computed when first used."""
        if self.features_file is not None:
            return array_features(self.features_file, self.images)
        if self.encoder == "resnet18":
            return resnet18_features(self.images, weights=self.weights, device=self.device, track=progress_bar)
        training = pools(self.images.labels, tuple(self.facts["sizes"]), self.facts["pool"], self.facts["seed"])[0]
        return pixel_features(self.images, training, components=COMPONENTS)

    def study(self, task: str) -> DigitStudy:
        """Draw the bags of a task."""
        sizes, pool, seed = tuple(self.facts["sizes"]), self.facts["pool"], self.facts["seed"]
        return sample_study(TASKS[task], self.images.labels, self.features, sizes=sizes, pool=pool, seed=seed)

    def cohort(self, task: str, out: Path, protocol: Protocol = DIGITS) -> StudyCohort:
        """Return the cohort of a task below `out`; write it if it does not exist."""
        key = config_key({**self.facts, "task": task, "classes": TASKS[task].class_names})[:8]
        home = out / f"{task}-{key}"
        if not is_made_from(home / "digits", self.facts):
            _write(task, self.study(task), self.images, home, self.facts)
        trained = config_key({name: value for name, value in vars(protocol).items() if name != "of_model"})[:4]
        return StudyCohort(
            name=task,
            title=TASKS[task].title,
            bags=home / "digits",
            labels=home / "labels.csv",
            measures=("auc",),
            encoder=self.encoder,
            protocol=protocol,
            notes=(self.line,),
            folder=f"{task}-{key}-{trained}",
        )

    @property
    def line(self) -> str:
        """Describe the bags."""
        facts = self.facts
        return (
            f"ours: {facts['images']}; features: {facts['features']}; pool {facts['pool']}; data seed {facts['seed']}; "
            f"{' / '.join(map(str, facts['sizes']))} train / validation / test bags"
        )


def load_digits(
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
    """Load digit images, and prepare their features.

    mnist: a folder of idx files, 'download', or None for the bundled images. features: a .npy with one row per image.
    """
    if encoder not in ENCODERS:
        raise CarmilError(f"unknown encoder {encoder!r}: expected one of {', '.join(ENCODERS)}")
    if features is not None and encoder != "pixels":
        raise CarmilError("--features and --encoder exclude each other: both set the features; give one of them")
    if weights is not None and encoder != "resnet18":
        raise CarmilError("--weights without --encoder resnet18: expected both; add the encoder or leave out --weights")
    if mnist is None:
        images = bundled_digits()
    elif mnist == "download":
        with console.status("downloading MNIST"):
            images = download_mnist()
    else:
        images = mnist_from_folder(Path(mnist))
    if features is not None:
        width = array_features(features, images).shape[1]
        name = f"{features.name} ({width} wide, sha256 {_file_fingerprint(features)})"
    elif encoder == "resnet18":
        source = f"{weights.name}, sha256 {_file_fingerprint(weights)}" if weights else "torchvision's weights"
        name = f"ImageNet ResNet18 ({source}), 512 wide"
    else:
        name = f"{COMPONENTS} principal components of the pixels, fitted on training images"
    facts = {
        "images": f"{images.source} (sha256 {images.fingerprint})",
        "features": name,
        "pool": pool,
        "sizes": list(sizes),
        "seed": seed,
    }
    return DigitData(images, facts, features, encoder, weights, device)


def _write(task: str, study: DigitStudy, images: DigitImages, home: Path, key: object) -> None:
    parts = {"train": study.train, "validation": study.validation, "test": study.test}
    names = TASKS[task].class_names
    rows = [("slide", "label", "split")]
    for split, part in parts.items():
        assert part.bags.labels is not None
        rows += [
            (bag, names[label], split) for bag, label in zip(part.bags.ids, part.bags.labels.tolist(), strict=True)
        ]
    write_text(home / "labels.csv", csv_text(rows, for_people=False))
    image_rows = np.concatenate([part.images for part in parts.values()])
    used, index = np.unique(image_rows, return_inverse=True)
    order = np.argsort(images.labels[used], kind="stable")  # images of one digit are adjacent
    pictures = Pictures((255 - images.images[used[order]])[..., None], np.argsort(order)[index])
    write_store(
        (bag for part in parts.values() for bag in _bags(part.bags)),
        home / "digits",
        dtype="float32",
        key=key,
        truth_classes=names,
        pictures=pictures,
    )


def _bags(bags: Bags) -> list[Bag]:
    assert bags.instance_labels is not None
    features, truth = (
        values.numpy().reshape(len(bags), BAG_SIZE, -1) for values in (bags.features, bags.instance_labels)
    )
    return [Bag(name, features[i], instance_labels=truth[i]) for i, name in enumerate(bags.ids)]


def _file_fingerprint(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
