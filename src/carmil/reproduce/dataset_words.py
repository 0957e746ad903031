"""The cohorts of slides in words: which files are expected where, the commands that make them, and what of it is there."""

from collections.abc import Iterator
from pathlib import Path

from carmil.datasets.paper_cohorts import DATASETS, Dataset
from carmil.reproduce.slide_cohorts import counts_said, is_there, missing_line, slides_in

ENCODERS = {"uni": "hf-hub:MahmoodLab/UNI"}  # by the name of their folder, as `carmil slides encode` knows them


def shown(dataset: Dataset, encoder: str) -> str:
    """What is expected of a cohort, as lines for a terminal."""
    home, name = f"DATA/{dataset.name}", dataset.name
    known = ENCODERS.get(encoder, encoder)
    protocol = "official split, 3 initialisations" if dataset.official else "5 folds by patient"
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
        *(f"  {line}" for line in _label_commands(name)),
        "",
        "features, from the slides in SCANS:",
        "  carmil slides tile SCANS --out tiles",
    ]
    if dataset.patch_labels:
        lines += [
            f"  carmil slides encode SCANS --tiles tiles --encoder {known} --out work/store --h5 trident work",
            "  mv work/features_* work/features",
            "  carmil slides label SCANS/*.tif --tiles tiles --annotations ANNOTATIONS --complete --rule any --out work",
            f"  carmil cohort build work/features --out {home}/{encoder}",
            "  ANNOTATIONS is the challenge's folder of XML files (or of masks), of the training and the test slides together;",
            "  a tile is positive if any part of it is annotated. Without these labels there is no AUPRC of attention.",
        ]
    else:
        lines.append(f"  carmil slides encode SCANS --tiles tiles --encoder {known} --out {home}/{encoder}")
    if encoder == "uni":
        lines.append("  UNI's weights need a token of its owner's in HF_TOKEN; --encoder resnet50 needs none")
    return "\n".join(lines)


def _label_commands(name: str) -> list[str]:
    command = f"carmil dataset labels {name}"
    match name:
        case "nsclc":
            return [f"{command} --from TABLE --out DATA", f"{command} --from LUAD=TABLE --from LUSC=TABLE --out DATA"]
        case "luad_tp53":
            return [f"{command} --from MUTATIONS --out DATA", f"{command} --from MUTATIONS --from CASES --out DATA"]
        case "camelyon16":
            return [f"{command} --from TABLE --out DATA", f"{command} --from TRAINING --from reference.csv --out DATA"]
        case _:
            return [f"{command} --from TABLE --out DATA"]


def checked(data: Path, encoder: str) -> Iterator[str]:
    """A line or more a cohort: what is there, counts that are not the paper's, what is missing."""
    for dataset in DATASETS:
        if not is_there(data, dataset, encoder):
            yield f"{dataset.name}: {missing_line(data, dataset, encoder)}"
            continue
        found = slides_in(dataset, data / dataset.name, encoder)
        said = counts_said(dataset, found)
        told = f"{len(found.classes)} slides of {len(set(found.patients))} patients with features and a label"
        yield f"{dataset.name}: {told}" + ("" if said else ", the paper's counts")
        yield from (f"  {line}" for line in said)
    if (data / "crc").is_dir():
        yield "crc: there; a stand-in is made of it where all five are missing"
