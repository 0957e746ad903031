"""The stand-in study on disk: four cohorts as ordinary stores with label tables, built once.

OUT/SIZE-seedN/NAME/labels.csv and OUT/SIZE-seedN/NAME/ENCODER, a store. `stand_in_slides` makes the slides.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from carmil.bags.sources import Bag
from carmil.csv_files import csv_text
from carmil.datasets.crc_nuclei import ENCODERS, PATCH, Nuclei, read_nuclei
from carmil.datasets.packing import is_made_from, write_store
from carmil.datasets.planting import SyntheticSlide
from carmil.datasets.stand_in_slides import FAST, FULL, Size, make_slides
from carmil.datasets.study_cohort import SLIDES, Protocol, StudyCohort
from carmil.errors import CarmilError, unknown
from carmil.files import write_text

VERSION = 1  # version of the study, increased with every change to its slides
SYNTHETIC = "a stand-in: real nuclei of crc, synthetic slides; its figures are no one's published figures"
MIXED = "nuclei of the 60 patients whose kinds are known, drawn with replacement; no patient is in two parts"
SETS = (
    "its slides are of sets of five donors, and sets of one part share donors: intervals over sets are narrower than intervals "
    "over patients would be"
)
NOT_UNI = "features: ResNet50 up to layer 3 (ImageNet), not UNI"
OFFICIAL = Protocol(official=True, seeds=3)

# name, title, measures, protocol and notes, in the order of the columns in the paper
COHORTS: tuple[tuple[str, str, tuple[str, str], Protocol, tuple[str, ...]], ...] = (
    (
        "crc",
        "crc (stand-in)",
        ("auc", "f1_macro"),
        SLIDES,
        ("crc, a stand-in: one bag per patient, positive if any nucleus is cancerous; five folds by patient",),
    ),
    (
        "weak",
        "weak shift (stand-in for LUAD-TP53)",
        ("auc", "f1_macro"),
        SLIDES,
        (
            "weak shift: one class has ten percentage points more inflammatory nuclei, anywhere in a slide, where slides differ by "
            "seven by themselves; folds by group of crc patients",
            SYNTHETIC,
            MIXED,
        ),
    ),
    (
        "kinds",
        "six kinds (stand-in for BRACS)",
        ("balanced_accuracy", "f1_macro"),
        replace(OFFICIAL, lr=1e-4),
        (
            "six kinds: foci planted in stroma; none, little or much tumour, with and without inflammation; patients divided into "
            "train, validation and test",
            SYNTHETIC,
            MIXED,
            SETS,
        ),
    ),
    (
        "foci",
        "foci (stand-in for CAMELYON16)",
        ("auc", "auprc_attention"),
        OFFICIAL,
        (
            "foci: one to three discs of tumour nuclei among normal ones, small in half of the slides with tumour and large in the "
            "other; patients divided into train, validation and test",
            SYNTHETIC,
            MIXED,
            SETS,
        ),
    ),
)


def build_stand_in(
    crc: Path, out: Path, *, fast: bool, seed: int, encoder: str = "resnet50"
) -> tuple[StudyCohort, ...]:
    """Build the four cohorts from crc's nuclei, unless they exist.

    encoder: resnet50 or pixels; uni, which crc does not have, is replaced by resnet50, and a note records this.
    """
    if encoder not in (*ENCODERS, "uni"):
        raise CarmilError(f"the stand-in study: {unknown('encoder', encoder, ENCODERS)}")
    more = (NOT_UNI,) if encoder == "uni" else ()
    features = "resnet50" if encoder == "uni" else encoder
    nuclei, size = read_nuclei(crc), FAST if fast else FULL
    home = out / f"{'fast' if fast else 'full'}-seed{seed}"

    def build(name: str) -> None:
        make_cohort(name, nuclei, home / name, features, size=size, seed=seed)

    with ThreadPoolExecutor() as pool:  # most of the time is spent writing files
        list(pool.map(build, [name for name, *_ in COHORTS]))
    return tuple(
        StudyCohort(
            name,
            title,
            home / name / features,
            home / name / "labels.csv",
            measures,
            features,
            protocol,
            stand_in=True,
            notes=(*notes, *more),
        )
        for name, title, measures, protocol, notes in COHORTS
    )


def make_cohort(name: str, nuclei: Nuclei, folder: Path, encoder: str, *, size: Size, seed: int) -> None:
    """Write labels.csv and a store of the encoder's features into `folder`, unless the same store exists."""
    key = {"version": VERSION, "crc": nuclei.fingerprint(encoder), "size": asdict(size), "seed": seed}
    if is_made_from(folder / encoder, key):
        return
    slides, features = make_slides(name, nuclei, size, seed), nuclei.features(encoder)
    official = any(slide.split for slide in slides)
    columns = ("name", "patient", "label", *(("split",) if official else ()))
    table = [("slide", *columns[1:]), *(tuple(getattr(slide, column) for column in columns) for slide in slides)]
    write_text(folder / "labels.csv", csv_text(table, for_people=False))

    def bag(slide: SyntheticSlide) -> Bag:
        rows = np.asarray(features[slide.nuclei], dtype=np.float16)
        if slide.places is None:
            return Bag(slide.name, rows, encoder=encoder, instance_labels=slide.truth)
        return Bag(slide.name, rows, slide.places, "level0_px", float(PATCH), encoder, slide.truth)

    write_store(map(bag, sorted(slides, key=lambda slide: slide.name)), folder / encoder, key=key)
