from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from carmil.bags.sources import Bag
from carmil.bags.writers import write_bag
from carmil.datasets.paper_cohorts import DATASETS, dataset_named
from carmil.datasets.paper_files import LabelledSlides, count_notes
from carmil.errors import CarmilError
from carmil.reproduce.recipes import Request
from carmil.reproduce.slide_cohorts import find_cohorts

from .made_crc import made_crc


def recipe_request(tmp_path: Path, data: Path | None) -> Request:
    return Request(out=tmp_path / "out", shared=tmp_path / "shared", data=data, fast=True)


def brca(home: Path, encoder: str = "uni") -> None:
    lines = []
    for i in range(6):
        name = f"TCGA-AA-A00{i}-01Z-00-DX1"
        lines.append(f"{name},{name[:12]},{'ILC' if i % 2 else 'IDC'}")
        write_bag(Bag(name, np.ones((3, 4), dtype=np.float32)), home / "brca" / encoder, "npy")
    (home / "brca" / "labels.csv").write_text("\n".join(["slide,patient,label", *lines, ""]))


def test_present_cohorts_are_found_and_missing_cohorts_are_listed(tmp_path: Path) -> None:
    brca(tmp_path / "data")
    result = find_cohorts(recipe_request(tmp_path, tmp_path / "data"))
    (cohort,) = result.cohorts
    assert (cohort.name, cohort.measures, cohort.protocol.official, cohort.protocol.folds, cohort.protocol.lr) == (
        "brca",
        ("auc", "f1_macro"),
        False,
        5,
        2e-4,
    )
    assert cohort.bags == tmp_path / "data" / "brca" / "uni"
    assert not cohort.stand_in
    assert "TCGA-BRCA: 6 (IDC 3, ILC 3) slides, the paper has 977 (IDC 779, ILC 198)" in cohort.notes
    assert len(result.missing) == 4
    assert "DATA/camelyon16/labels.csv (carmil dataset labels camelyon16 makes it)" in result.missing[-1]


def test_unusable_cohort_is_reported_with_the_reason_and_others_are_found(tmp_path: Path) -> None:
    brca(tmp_path / "data")
    (tmp_path / "data" / "bracs" / "uni").mkdir(parents=True)
    write_bag(Bag("BRACS_1", np.ones((3, 4), dtype=np.float32)), tmp_path / "data" / "bracs" / "uni", "npy")
    (tmp_path / "data" / "bracs" / "labels.csv").write_text("slide,label\nBRACS_1,N\nBRACS_2,PB\n")
    (tmp_path / "data" / "nsclc" / "uni").mkdir(parents=True)
    (tmp_path / "data" / "nsclc" / "labels.csv").write_text("slide,label\na,LUAD\nb,LUSC\n")
    result = find_cohorts(recipe_request(tmp_path, tmp_path / "data"))
    assert [one.name for one in result.cohorts] == ["brca"]
    unusable = [line for line in result.missing if "cannot be used" in line]
    assert len(unusable) == 2
    assert "TCGA-NSCLC" in unusable[0] and "nsclc" in unusable[0]
    assert "BRACS" in unusable[1] and "has no column `split`" in unusable[1]


def test_cohort_is_found_for_the_requested_encoder(tmp_path: Path) -> None:
    brca(tmp_path / "data", "resnet50")
    resnet = replace(recipe_request(tmp_path, tmp_path / "data"), encoder="resnet50")
    assert find_cohorts(resnet).cohorts[0].bags.name == "resnet50"


def test_only_missing_files_of_a_cohort_are_listed(tmp_path: Path) -> None:
    brca(tmp_path / "data")
    brca(tmp_path / "data", "resnet50")
    (tmp_path / "data" / "bracs").mkdir()
    (tmp_path / "data" / "bracs" / "labels.csv").write_text("slide,label\n")
    line = next(line for line in find_cohorts(recipe_request(tmp_path, tmp_path / "data")).missing if "BRACS" in line)
    assert "labels.csv" not in line
    assert "features in DATA/bracs/uni" in line
    assert (
        find_cohorts(recipe_request(tmp_path, tmp_path / "data"), encoder="resnet50").cohorts[0].encoder == "resnet50"
    )


def test_official_cohorts_have_three_seeds_and_specific_metrics() -> None:
    protocols = {d.name: (d.official, d.seeds, d.lr, d.measures) for d in DATASETS if d.official}
    assert protocols == {
        "bracs": (True, 3, 1e-4, ("balanced_accuracy", "f1_macro")),
        "camelyon16": (True, 3, 2e-4, ("auc", "auprc_attention")),
    }


def test_slide_counts_of_the_paper_add_up() -> None:
    assert {d.name: d.slides for d in DATASETS} == {
        "brca": 977,
        "nsclc": 956,
        "luad_tp53": 427,
        "bracs": 546,
        "camelyon16": 270 + 129,
    }
    for dataset in DATASETS:
        for counts in zip(
            *(counts for _, counts in dataset.parts), (one.slides for one in dataset.classes), strict=True
        ):
            assert not dataset.parts or sum(counts[:-1]) == counts[-1]


def counted(name: str, **changes: int) -> LabelledSlides:
    """Return as many slides per class as in the paper, except for the changes."""
    classes = [
        one.name for one in dataset_named(name).classes for _ in range(changes.get(one.name[-3:].strip(), one.slides))
    ]
    return LabelledSlides(tuple(classes), tuple(str(i) for i in range(len(classes))), ("train",) * len(classes))


def test_counts_equal_to_the_paper_give_no_notes() -> None:
    assert count_notes(dataset_named("bracs"), counted("bracs")) == []


def test_count_of_published_bracs_is_explained() -> None:
    (line,) = count_notes(dataset_named("bracs"), counted("bracs", UDH=74))
    assert "547" in line
    assert "2 UDH 74" in line
    assert line.endswith("BRACS as it is published has 547")


def test_note_if_patients_match_the_slide_count_of_the_paper() -> None:
    patients = counted("brca")
    slides = LabelledSlides(patients.classes + ("IDC",) * 5, patients.patients + ("0",) * 5, None)
    line, level = count_notes(dataset_named("brca"), slides)
    assert "982 slides of 977 patients: figures are of patients" in level
    assert line.endswith("patients are as many as the paper's slides: it may have counted these")


def test_camelyon16_counts_validation_slides_as_training_slides() -> None:
    whole = counted("camelyon16")
    parts = ["train"] * 100 + ["val"] * 59 + ["test"] * 80 + ["train"] * 111 + ["test"] * 49
    assert count_notes(dataset_named("camelyon16"), LabelledSlides(whole.classes, whole.patients, tuple(parts))) == []
    parts[0] = "test"
    train, test = count_notes(dataset_named("camelyon16"), LabelledSlides(whole.classes, whole.patients, tuple(parts)))
    assert "train: 269 (normal 158, tumor 111) slides, the paper has 270 (normal 159, tumor 111)" in train
    assert "test: 130" in test


def test_stand_in_is_used_if_all_five_cohorts_are_missing(tmp_path: Path) -> None:
    made_crc(tmp_path / "data" / "crc")
    result = find_cohorts(recipe_request(tmp_path, tmp_path / "data"))
    assert [cohort.stand_in for cohort in result.cohorts] == [True] * 4
    assert len(result.missing) == 5
    assert result.cohorts[0].bags.is_relative_to(tmp_path / "shared")


@pytest.mark.parametrize("there", [True, False])
def test_missing_slides_and_crc_raise_an_error(tmp_path: Path, there: bool) -> None:
    with pytest.raises(CarmilError, match=r"expected DATA/NAME/labels.csv and DATA/NAME/uni of one of brca, nsclc"):
        find_cohorts(recipe_request(tmp_path, tmp_path if there else None))
