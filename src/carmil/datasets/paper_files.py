"""The files of the paper's cohorts: their expected places, the commands that create them, and which of them exist.

DATA/NAME/labels.csv and DATA/NAME/ENCODER, a store or a folder of features.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from carmil.bags.columns import PART_OF_WORD
from carmil.bags.finding import find_bags
from carmil.bags.labels import match, read_labels
from carmil.bags.store import is_store, open_store
from carmil.datasets.paper_cohorts import DATASETS, Dataset
from carmil.datasets.study_cohort import Protocol, StudyCohort
from carmil.errors import CarmilError

ENCODERS = {"uni": "hf-hub:MahmoodLab/UNI"}  # name of the folder -> `--encoder` of `carmil slides encode`
PUBLISHED_BRACS = 547  # number of slides
LABEL_TABLES = {  # input of `carmil dataset labels NAME`, if one table may not be enough
    "nsclc": ("TABLE", "LUAD=TABLE --from LUSC=TABLE"),
    "luad_tp53": ("MUTATIONS", "MUTATIONS --from CASES"),
    "camelyon16": ("TABLE", "TRAINING --from reference.csv"),
}
# ENCODER is the name of a folder, MODEL the value of `--encoder`, HOME the cohort's folder.
FEATURES = ("carmil slides encode SCANS --tiles tiles --encoder MODEL --out HOME/ENCODER",)
ANNOTATED_FEATURES = (
    "carmil slides encode SCANS --tiles tiles --encoder MODEL --out work/store --h5 trident work",
    "mv work/features_* work/features",
    "carmil slides label SCANS/*.tif --tiles tiles --annotations ANNOTATIONS --complete --rule any --out work",
    "carmil cohort build work/features --out HOME/ENCODER",
    "ANNOTATIONS is the challenge's folder of XML files (or of masks), of the training and the test slides together;",
    "a tile is positive if any part of it is annotated. Without these labels there is no AUPRC of attention.",
)


@dataclass(frozen=True)
class LabelledSlides:
    """The class, patient and part of every labelled slide; no parts if the table has none."""

    classes: tuple[str, ...]
    patients: tuple[str, ...]
    parts: tuple[str, ...] | None


def has_files(data: Path | None, dataset: Dataset, encoder: str) -> bool:
    home = None if data is None else data / dataset.name
    return home is not None and (home / "labels.csv").is_file() and (home / encoder).exists()


def missing_files(data: Path | None, dataset: Dataset, encoder: str) -> str:
    """Return the missing files of a cohort, with the command that creates or explains them."""
    home, expected = Path("DATA") / dataset.name, []
    if data is None or not (data / dataset.name / "labels.csv").is_file():
        expected.append(f"{home / 'labels.csv'} (carmil dataset labels {dataset.name} makes it)")
    if data is None or not (data / dataset.name / encoder).exists():
        expected.append(f"features in {home / encoder} (see carmil dataset show {dataset.name})")
    return f"{dataset.title} is missing: expected {' and '.join(expected)}"


def read_slides(dataset: Dataset, home: Path, encoder: str) -> LabelledSlides:
    """Return the slides of a cohort that have both features and a label."""
    bags, table = home / encoder, read_labels(home / "labels.csv")
    ids = open_store(bags).ids if is_store(bags) else tuple(source.id for source in find_bags(bags).sources)
    matched = match(table, ids)
    known = [dataset.class_of(name) for name in table.classes]
    names = [name if one is None else one.name for name, one in zip(table.classes, known, strict=True)]
    return LabelledSlides(tuple(names[label] for label in matched.labels), matched.patients, matched.official)


def count_notes(dataset: Dataset, slides: LabelledSlides) -> list[str]:
    """Return one line for each count that differs from the paper's."""
    counts = Counter(slides.classes)
    patients = Counter(dict(zip(slides.patients, slides.classes, strict=True)).values())
    expected = {one.name: one.slides for one in dataset.classes}
    notes = []
    if counts != expected:
        line = f"{dataset.title}: {_counts(counts, expected)} slides, the paper has {_counts(expected, expected)}"
        if patients == expected:
            line += "; patients are as many as the paper's slides: it may have counted these"
        elif dataset.name == "bracs" and counts.total() == PUBLISHED_BRACS:
            line += f"; BRACS as it is published has {PUBLISHED_BRACS}"
        notes.append(line)
    for part, numbers in dataset.parts if slides.parts is not None else ():
        pairs = zip(slides.classes, slides.parts or (), strict=True)
        here = Counter(name for name, word in pairs if _part(word) == part)
        wanted = dict(zip(expected, numbers, strict=True))
        if here != wanted:
            notes.append(
                f"{dataset.title}, {part}: {_counts(here, expected)} slides, the paper has {_counts(wanted, expected)}"
            )
    of_patient = dict[str, set[str]]()
    for patient, name in zip(slides.patients, slides.classes, strict=True):
        of_patient.setdefault(patient, set()).add(name)
    if len(of_patient) < len(slides.classes) and all(len(names) == 1 for names in of_patient.values()):
        notes.append(
            f"{dataset.title}: {len(slides.classes)} slides of {len(of_patient)} patients: figures are of patients, each by the "
            "mean of its slides; the paper says slides"
        )
    if dataset.official and slides.parts is None:
        notes.append(f"{dataset.title}: labels.csv has no column `split`, and its official split is needed")
    return notes


def study_cohort(dataset: Dataset, data: Path, encoder: str) -> StudyCohort:
    """Return the cohort in DATA with these features, and its protocol."""
    home = data / dataset.name
    slides = read_slides(dataset, home, encoder)
    if dataset.official and slides.parts is None:
        raise CarmilError(f"{home / 'labels.csv'} has no column `split`: expected the official split, train or test")
    return StudyCohort(
        name=dataset.name,
        title=dataset.title,
        bags=home / encoder,
        labels=home / "labels.csv",
        measures=dataset.measures,
        encoder=encoder,
        protocol=Protocol(official=dataset.official, seeds=dataset.seeds, lr=dataset.lr),
        notes=tuple(count_notes(dataset, slides)),
    )


def _part(word: str) -> str:
    """Return train or test; validation slides are drawn from the training slides."""
    return "test" if PART_OF_WORD.get(word.casefold()) == "test" else "train"


def _counts(counts: Mapping[str, int], order: Iterable[str]) -> str:
    names = [*order, *sorted(set(counts) - set(order))]
    return f"{sum(counts.values())} ({', '.join(f'{name} {counts.get(name, 0)}' for name in names)})"


def describe_files(dataset: Dataset, encoder: str) -> str:
    """Describe, for a terminal, the files expected of a cohort and the commands that create them."""
    home, name = f"DATA/{dataset.name}", dataset.name
    protocol = "official split, 3 initialisations" if dataset.official else "5 folds by patient"
    features = "\n".join(f"  {line}" for line in (ANNOTATED_FEATURES if dataset.patch_labels else FEATURES))
    for word, value in (("MODEL", ENCODERS.get(encoder, encoder)), ("HOME", home), ("ENCODER", encoder)):
        features = features.replace(word, value)
    tables = LABEL_TABLES.get(name, ("TABLE",))
    lines = [
        f"{dataset.title}: {dataset.question}",
        f"  the paper has {dataset.counted}",
        f"  {protocol}, learning rate {dataset.lr:g}, {' and '.join(dataset.measures)}",
        f"  from {dataset.source} ({dataset.terms})",
        "",
        "expected:",
        f"  {home}/labels.csv   slide, patient, label" + (", split" if dataset.official else ""),
        f"  {home}/{encoder}   a store of carmil's, or a folder of features in any layout that `carmil cohort build` reads",
        "",
        f"labels.csv, of {dataset.tables}:",
        *(f"  carmil dataset labels {name} --from {table} --out DATA" for table in tables),
        "",
        "features, from the slides in SCANS:",
        "  carmil slides tile SCANS --out tiles",
        features,
    ]
    if encoder == "uni":
        lines.append("  UNI's weights need a token of its owner's in HF_TOKEN; --encoder resnet50 needs none")
    return "\n".join(lines)


def check_files(data: Path, encoder: str) -> Iterator[str]:
    """Yield one or more lines per cohort: existing files, counts that differ from the paper's, and missing files."""
    for dataset in DATASETS:
        if not has_files(data, dataset, encoder):
            yield f"{dataset.name}: {missing_files(data, dataset, encoder)}"
            continue
        slides = read_slides(dataset, data / dataset.name, encoder)
        notes = count_notes(dataset, slides)
        summary = f"{len(slides.classes)} slides of {len(set(slides.patients))} patients with features and a label"
        yield f"{dataset.name}: {summary}" + ("" if notes else ", the paper's counts")
        yield from (f"  {line}" for line in notes)
    if (data / "crc").is_dir():
        yield "crc: found; used for a stand-in if all five cohorts are missing"
