from pathlib import Path

import numpy as np
import pytest

from carmil.bags.building import build_store
from carmil.bags.sources import Bag
from carmil.bags.writers import write_bag
from carmil.datasets.paper_cohorts import DATASETS
from carmil.maps.tile_labels import TileLabels, write_truth
from carmil.slides.slide import Tiles


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.csv"
    path.write_text("TCGA-E2-A154,IDC\nTCGA-AO-A0J6,ILC\n")
    return path


def test_dataset_list_shows_counts_sources_and_terms(run_cli) -> None:
    status, out, _ = run_cli("dataset", "list")
    assert status == 0
    for dataset in DATASETS:
        assert dataset.counted in out
        assert dataset.source in out
        assert dataset.terms in out


@pytest.mark.parametrize("name", [dataset.name for dataset in DATASETS])
def test_dataset_show_lists_the_expected_files(run_cli, name: str) -> None:
    status, out, _ = run_cli("dataset", "show", name, "--encoder", "resnet50")
    assert status == 0
    assert f"DATA/{name}/labels.csv" in out
    assert f"DATA/{name}/resnet50" in out
    assert f"carmil dataset labels {name} --from" in out
    assert ("carmil slides label SCANS/*.tif" in out) == (name == "camelyon16")


def test_dataset_labels_writes_labels_and_reports_differences_from_the_paper(
    run_cli, table: Path, tmp_path: Path
) -> None:
    status, out, err = run_cli("dataset", "labels", "brca", "--from", str(table), "--out", str(tmp_path / "data"))
    assert status == 0
    assert "2 rows of 2 patients" in out
    assert "2 (IDC 1, ILC 1) slides, the paper has 977 (IDC 779, ILC 198)" in err
    written = tmp_path / "data" / "brca" / "labels.csv"
    assert written.read_text() == "slide,patient,label\nTCGA-E2-A154,TCGA-E2-A154,IDC\nTCGA-AO-A0J6,TCGA-AO-A0J6,ILC\n"


def test_dataset_labels_does_not_overwrite_different_labels(run_cli, table: Path, tmp_path: Path) -> None:
    command = ("dataset", "labels", "brca", "--from", str(table), "--out", str(tmp_path / "data"))
    assert [run_cli(*command)[0], run_cli(*command)[0]] == [0, 0]
    table.write_text("TCGA-E2-A154,ILC\nTCGA-AO-A0J6,IDC\n")
    status, _, err = run_cli(*command)
    assert status == 2
    assert err.count("\n") == 1
    assert "already exists with other content" in err


def test_dataset_check_counts_present_cohorts_and_accepts_missing_cohorts(run_cli, table: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    run_cli("dataset", "labels", "brca", "--from", str(table), "--out", str(data))
    assert "brca: TCGA-BRCA is missing: expected features in DATA/brca/uni" in run_cli("dataset", "check", str(data))[1]
    for slide in ("TCGA-E2-A154-01Z-00-DX1", "TCGA-E2-A154-01Z-00-DX2", "TCGA-AO-A0J6-01Z-00-DX1"):
        write_bag(Bag(slide, np.ones((2, 3), dtype=np.float32)), data / "brca" / "uni", "npy")
    status, out, _ = run_cli("dataset", "check", str(data))
    assert status == 0
    assert "brca: 3 slides of 2 patients with features and a label" in out
    assert "3 (IDC 2, ILC 1) slides, the paper has 977" in out
    assert "camelyon16: CAMELYON16 is missing: expected DATA/camelyon16/labels.csv" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("show", "bracks"), "unknown dataset 'bracks'; did you mean 'bracs'?"),
        (("check", "nowhere"), "nowhere is not a folder"),
        (("labels", "brca", "--from", "nowhere.csv", "--out", "data"), "nowhere.csv: does not exist"),
    ],
)
def test_invalid_dataset_arguments_exit_with_one_line_and_status_2(
    run_cli, words: tuple[str, ...], expected: str
) -> None:
    status, _, err = run_cli("dataset", *words)
    assert status == 2
    assert err.count("\n") == 1
    assert expected in err


def test_camelyon16_features_and_tile_labels_give_a_store_with_truth(tmp_path: Path) -> None:
    """Run the last three commands of `dataset show camelyon16` on files like those that the earlier commands write."""
    corners = np.array([[0, 0], [256, 0]], dtype=np.int64)
    work = tmp_path / "work"
    bag = Bag("tumor_001", np.ones((2, 3), dtype=np.float16), corners.astype(np.float32), "level0_px", 256.0, "uni")
    write_bag(bag, work, "trident").parent.rename(work / "features")
    tiles = Tiles("tumor_001", corners, 256, 256, 0.5, 512, 256, 0.5)
    nothing = np.zeros(2)
    write_truth([(tiles, TileLabels(np.array([0, 1]), nothing, nothing))], work)
    bags = build_store(work / "features", tmp_path / "store").bags()
    assert bags.instance_labels is not None
    assert bags.instance_labels.tolist() == [0, 1]
    assert bags.coordinates is not None
    assert bags.coordinates.tolist() == corners.tolist()
