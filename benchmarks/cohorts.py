"""The cohorts on which defaults.py measures, each with its protocol. b bags, f folds.

crc, foci, kinds, weak      slides of crc's nuclei (`carmil.datasets.stand_in_slides`), full size
musk1, musk2                the classical molecules
adjacent_pairs, four_bags   2,000 / 500 / 1,000 digit bags, of the features beside MNIST
or any folder of bags with a table of labels

Cohorts with an official split use it; the others have five folds, drawn again for every seed, and no patient (donor group,
molecule) is in two of them.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.datasets.crc_nuclei import read_nuclei
from carmil.datasets.digits import TASKS, sample_study
from carmil.datasets.stand_in_slides import FAST, FULL, make_slides
from carmil.targets import Classes
from carmil.training.recipe import TRAIN, UNUSED, VALIDATION

FOLDS, VALIDATION_SHARE = 5, 0.15
SLIDES, MOLECULES, DIGITS = ("crc", "foci", "kinds", "weak"), ("musk1", "musk2"), ("adjacent_pairs", "four_bags")
NAMES = (*SLIDES, *MOLECULES, *DIGITS)


@dataclass(frozen=True, eq=False)
class Cohort:
    """parts (b): train, val or test, where the split is official; groups (b): what must not be in two parts."""

    name: str
    bags: Bags
    groups: np.ndarray
    parts: np.ndarray | None = None

    @property
    def target(self) -> Classes:
        return Classes(names=tuple(str(c) for c in range(self.bags.classes)))

    def roles(self, seed: int) -> tuple[Tensor, Tensor]:
        """Roles of the bags in each fold (f, b), in which test bags are unused; and which bags are tested (f, b) bool."""
        assert self.bags.labels is not None
        if self.parts is not None:
            role = np.select([self.parts == "train", self.parts == "val"], [TRAIN, VALIDATION], UNUSED)
            return torch.from_numpy(role)[None], torch.from_numpy(self.parts == "test")[None]
        y, rng = self.bags.labels.numpy(), np.random.default_rng([seed, 2])
        fold = _deal(y, self.groups, FOLDS, rng)
        roles = torch.full((FOLDS, len(y)), UNUSED)
        for i in range(FOLDS):
            rest = np.flatnonzero(fold != i)
            pieces = round(1 / VALIDATION_SHARE)
            validation = _deal(y[rest], self.groups[rest], pieces, rng) == 0
            roles[i, torch.from_numpy(rest)] = torch.from_numpy(np.where(validation, VALIDATION, TRAIN))
        return roles, torch.from_numpy(fold[None] == np.arange(FOLDS)[:, None])


def load(name: str, data: Path, *, fast: bool = False) -> Cohort:
    if name in SLIDES:
        return _slides(name, data / "crc", fast)
    if name in MOLECULES:
        return _molecules(name, data / "mil" / f"{name}.npz")
    return _digits(name, data / "mnist", fast)


def from_folder(bags: Path, labels: Path) -> Cohort:
    """The user's own features and labels, as `carmil train` reads them."""
    from carmil.runs.settings import Settings
    from carmil.studies.cohort import open_material

    settings = Settings.of({"bags": bags, "labels": labels, "out": bags.parent / "unused"}, where="command line")
    cohort = open_material(settings, log=print).cohort
    return Cohort(bags.name, cohort.bags[cohort.known], np.array(cohort.patients))


def _slides(name: str, crc: Path, fast: bool) -> Cohort:
    nuclei = read_nuclei(crc)
    slides = make_slides(name, nuclei, FAST if fast else FULL, 0)
    features = torch.from_numpy(np.array(nuclei.features("resnet50")))
    labels = sorted({slide.label for slide in slides})
    offsets = np.cumsum([0, *(len(slide.nuclei) for slide in slides)])
    bags = Bags(
        features[torch.from_numpy(np.concatenate([slide.nuclei for slide in slides]))],
        torch.from_numpy(offsets),
        torch.tensor([labels.index(slide.label) for slide in slides]),
        tuple(slide.name for slide in slides),
    )
    parts = np.array([slide.split for slide in slides])
    return Cohort(name, bags, np.array([slide.patient for slide in slides]), parts if parts[0] else None)


def _molecules(name: str, path: Path) -> Cohort:
    with np.load(path) as file:
        x, bag, y = file["X"], file["bag"], file["y_bag"]
    order = np.argsort(bag, kind="stable")
    names, starts = np.unique(bag[order], return_index=True)
    bags = Bags(
        torch.from_numpy(x[order].astype(np.float32)),
        torch.from_numpy(np.append(starts, len(x))),
        torch.from_numpy(y.astype(np.int64)),
        tuple(map(str, names)),
    )
    return Cohort(name, bags, np.arange(len(names)))


def _digits(name: str, mnist: Path, fast: bool) -> Cohort:
    features, labels = _images(mnist)
    sizes = (200, 60, 100) if fast else (2000, 500, 1000)
    study = sample_study(TASKS[name], labels, features, sizes=sizes, pool="shared")
    parts = [(study.train, "train"), (study.validation, "val"), (study.test, "test")]
    bags = Bags.concatenate([part.bags for part, _ in parts])
    return Cohort(name, bags, np.arange(len(bags)), np.repeat([word for _, word in parts], [*sizes]))


def _images(mnist: Path) -> tuple[np.ndarray, np.ndarray]:
    """Features and digits of all images, or of those in some.npz if that file is there."""
    if (part := mnist / "some.npz").is_file():
        with np.load(part) as file:
            return file["features"].astype(np.float32), file["labels"].astype(np.int64)
    from carmil.datasets.digit_features import array_features
    from carmil.datasets.digit_images import mnist_from_folder

    images = mnist_from_folder(mnist)
    return array_features(mnist / "resnet50_pca256.npy", images), images.labels


def _deal(y: np.ndarray, groups: np.ndarray, parts: int, rng: np.random.Generator) -> np.ndarray:
    """Part of each bag (b): groups are dealt in turn, each class of groups evenly."""
    part = np.zeros(len(y), dtype=np.int64)
    label_of = {group: y[groups == group].max() for group in np.unique(groups)}
    count = 0
    for label in sorted(set(label_of.values())):
        for group in rng.permutation([group for group in label_of if label_of[group] == label]):
            part[groups == group] = count % parts
            count += 1
    return part
