"""The stand-in study on disk: its four cohorts as ordinary stores with tables of labels, made once and found again.

OUT/SIZE-seedN/NAME/labels.csv, OUT/SIZE-seedN/NAME/ENCODER (a store) and ENCODER.json, which says what it was made of.
How the slides are made is in `stand_in_slides`.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from carmil.bags.building import build_store
from carmil.bags.names import write_names
from carmil.bags.sources import Bag
from carmil.bags.store import is_store
from carmil.bags.writers import write_bag
from carmil.csv_files import csv_text
from carmil.datasets.crc_nuclei import ENCODERS, PATCH, Nuclei, read_nuclei
from carmil.datasets.stand_in_slides import FAST, FULL, Size, slides_of
from carmil.datasets.study_cohort import SLIDES, Protocol, StudyCohort
from carmil.errors import CarmilError, unknown
from carmil.files import atomic_folder, temporary_folder, write_text

VERSION = 1  # of the study: another number is another study
MADE = "a stand-in: real nuclei of crc, made slides; its figures are no one's published figures"
MIXED = "nuclei of the 60 patients whose kinds are known, drawn with replacement; no patient is in two parts"
SETS = (
    "its slides are of sets of five donors, and sets of one part share donors: intervals over sets are narrower than intervals "
    "over patients would be"
)


def build_stand_in(
    crc: Path, out: Path, *, fast: bool, seed: int, encoder: str = "resnet50"
) -> tuple[StudyCohort, ...]:
    """The four cohorts, made of crc's nuclei where they are not there yet. encoder: resnet50 or pixels; uni is not to be had
    here, and what takes its place is said."""
    if encoder not in (*ENCODERS, "uni"):
        raise CarmilError(f"the stand-in study: {unknown('encoder', encoder, ENCODERS)}")
    nuclei, size = read_nuclei(crc), FAST if fast else FULL
    home = out / f"{'fast' if fast else 'full'}-seed{seed}"
    if encoder == "uni":
        cohorts = _cohorts(home, "resnet50", "features: ResNet50 up to layer 3 (ImageNet), not UNI")
    else:
        cohorts = _cohorts(home, encoder)

    def make(cohort: StudyCohort) -> None:
        make_cohort(cohort.name, nuclei, home / cohort.name, cohort.encoder, size=size, seed=seed)

    with ThreadPoolExecutor() as pool:  # it is mostly files that are written
        list(pool.map(make, cohorts))
    return cohorts


def _cohorts(home: Path, encoder: str, *more: str) -> tuple[StudyCohort, ...]:
    """In the order of the paper's columns. more: what is to be said of each."""

    def cohort(
        name: str, title: str, measures: tuple[str, str], notes: tuple[str, ...], protocol: Protocol = SLIDES
    ) -> StudyCohort:
        bags, labels = home / name / encoder, home / name / "labels.csv"
        return StudyCohort(name, title, bags, labels, measures, encoder, protocol, stand_in=True, notes=(*notes, *more))

    return (
        cohort(
            "crc",
            "crc (stand-in)",
            ("auc", "f1_macro"),
            ("crc, a stand-in: a bag a patient, positive if any nucleus is cancerous; five folds by patient",),
        ),
        cohort(
            "weak",
            "weak shift (stand-in for LUAD-TP53)",
            ("auc", "f1_macro"),
            (
                "weak shift: in one class inflammatory nuclei are ten per cent of a slide more, anywhere in it, and slides "
                "differ by seven by themselves; folds by group of crc patients",
                MADE,
                MIXED,
            ),
        ),
        cohort(
            "kinds",
            "six kinds (stand-in for BRACS)",
            ("balanced_accuracy", "f1_macro"),
            (
                "six kinds: foci planted in stroma; none, little or much tumour, with and without inflammation; patients "
                "divided into train, validation and test",
                MADE,
                MIXED,
                SETS,
            ),
            Protocol(official=True, seeds=3, lr=1e-4),
        ),
        cohort(
            "foci",
            "foci (stand-in for CAMELYON16)",
            ("auc", "auprc_attention"),
            (
                "foci: one to three discs of tumour nuclei among normal ones, small in half of the slides with tumour and "
                "large in the other; patients divided into train, validation and test",
                MADE,
                MIXED,
                SETS,
            ),
            Protocol(official=True, seeds=3),
        ),
    )


def make_cohort(name: str, nuclei: Nuclei, folder: Path, encoder: str, *, size: Size, seed: int) -> None:
    """labels.csv and a store of features by the encoder in `folder`; what is there already and the same is left as it is."""
    key = {"version": VERSION, "crc": nuclei.fingerprint(encoder), "size": asdict(size), "seed": seed}
    record, store = folder / f"{encoder}.json", folder / encoder
    if is_store(store) and _recorded(record) == json.loads(json.dumps(key)):
        return
    record.unlink(missing_ok=True)
    slides, features = slides_of(name, nuclei, size, seed), nuclei.features(encoder)
    official = any(slide.split for slide in slides)
    columns = ("name", "patient", "label", *(("split",) if official else ()))
    table = [("slide", *columns[1:]), *(tuple(getattr(slide, column) for column in columns) for slide in slides)]
    write_text(folder / "labels.csv", csv_text(table, for_people=False))
    with temporary_folder(folder) as aside:
        work = aside / name
        names = write_names(work, [slide.name for slide in slides])
        for slide in slides:
            size_of_tile = None if slide.places is None else float(PATCH)
            unit: Any = None if slide.places is None else "level0_px"
            rows = np.asarray(features[slide.nuclei], dtype=np.float16)
            bag = Bag(slide.name, rows, slide.places, unit, size_of_tile, encoder, slide.truth)
            write_bag(bag, work, "safetensors", names=names)
        with atomic_folder(store) as whole:
            build_store(work, whole)
    write_text(record, json.dumps(key))


def _recorded(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
