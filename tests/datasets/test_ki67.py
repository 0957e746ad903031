from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from carmil.bags.labels import read_labels
from carmil.bags.store import open_store
from carmil.datasets.ki67 import (
    DISTANT,
    FARTHEST,
    LABEL_COLUMNS,
    LEAST_SD,
    NEAREST,
    POSITIVE,
    RADII,
    THRESHOLDS,
    build_ki67,
    cell_features,
)
from carmil.errors import CarmilError
from carmil.statistics.survival import concordance

PATIENTS = """patient,cells,recurrence,months,age,node,t_stage,hormone_receptor,grade,her2
P1,90,1,12,50,1,2,1,3,0
P2,60,0,80,61,-1,1,1,,1
P3,60,0,95,43,0,1,1,1,
"""


def made_cells(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the markers (n) and the places (n, 2) of made-up cells, all pairs of which have different distances."""
    rng = np.random.default_rng(seed)
    return rng.lognormal(6.4, 0.8, n).astype(np.float32), rng.uniform(0, 600, (n, 2))


def made_ki67(folder: Path, **changes: np.ndarray) -> Path:
    """Write a folder in the layout of ki67; the cells of the two cores of P1 alternate."""
    marker, places = made_cells(210)
    cells = {
        "patient": np.repeat([0, 1, 2], [90, 60, 60]),
        "core": np.concatenate([[7, 4] * 45, [9] * 60, [2] * 60]),
        "marker": marker,
        "x": places[:, 0],
        "y": places[:, 1],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "patients.csv").write_text(PATIENTS)
    np.savez(folder / "cells.npz", **{**cells, **changes})
    return folder


@pytest.mark.parametrize("n", [2, 15, 80])
def test_features_of_neighbours_equal_those_by_brute_force(n):
    marker, places = made_cells(n)
    features, log = cell_features(marker, places), np.log(marker)
    for cell in (0, n // 2, n - 1):
        distance = np.hypot(*(places - places[cell]).T)
        order = [other for other in np.argsort(distance) if other != cell]
        for k in NEAREST:
            near = log[order[:k]]
            assert features[f"mean_of_nearest_{k}"][cell] == pytest.approx(near.mean(), rel=1e-5)
            assert features[f"sd_of_nearest_{k}"][cell] == pytest.approx(near.std(), abs=1e-5)
            assert features[f"max_of_nearest_{k}"][cell] == near.max()
            contrast = (log[cell] - near.mean()) / (near.std() + LEAST_SD)
            assert features[f"contrast_with_nearest_{k}"][cell] == pytest.approx(contrast, abs=1e-4)
        for k in NEAREST[2:]:
            share = (marker[order[:k]] > POSITIVE).mean()
            assert features[f"positive_of_nearest_{k}"][cell] == pytest.approx(share)
        for k in DISTANT:
            kth = distance[order][:k].max()
            assert features[f"log_distance_to_nearest_{k}"][cell] == pytest.approx(np.log(kth))
        for radius in RADII:
            assert np.exp(features[f"log_count_within_{radius}"][cell]) == pytest.approx((distance <= radius).sum())
        for threshold in THRESHOLDS:
            nearest = min((distance[other] for other in order if marker[other] > threshold), default=FARTHEST)
            assert features[f"log_distance_to_above_{threshold}"][cell] == pytest.approx(np.log(nearest))


def test_features_of_a_core_are_the_same_for_all_its_cells():
    marker, places = made_cells(50)
    features = cell_features(marker, places)
    core = {name: values for name, values in features.items() if name.startswith("core_")}
    assert all(len(np.unique(values)) == 1 for values in core.values())
    assert core["core_mean"][0] == np.log(marker).mean() and core["core_log_cells"][0] == np.log(50)
    assert core["core_above_1000"][0] == (marker > 1000).mean()
    ranks = features["rank"]
    assert np.array_equal(np.argsort(ranks), np.argsort(marker))
    assert (ranks.min(), ranks.max()) == (pytest.approx(0.01), pytest.approx(0.99))


def test_cells_are_described_by_their_own_core_only(tmp_path):
    data = made_ki67(tmp_path / "data")
    bag = open_store(build_ki67(data, tmp_path / "out").bags).bags()[[0]]
    marker, places = made_cells(210)
    for rows, first in ((slice(1, 90, 2), 0), (slice(0, 90, 2), 45)):  # core 4, then core 7
        expected = np.stack(list(cell_features(marker[rows].astype(np.float64), places[rows]).values()), axis=1)
        np.testing.assert_array_equal(bag.features[first : first + 45], expected.astype(np.float32))


def test_cores_of_a_patient_lie_side_by_side_on_the_map_of_the_patient(tmp_path):
    bags = open_store(build_ki67(made_ki67(tmp_path / "data"), tmp_path / "out").bags).bags()
    _, places = made_cells(210)
    shift = np.repeat([[0, 0], [FARTHEST, 0]], 45, axis=0)
    expected = np.concatenate([places[1:90:2], places[0:90:2]]) + shift
    np.testing.assert_allclose(bags[[0]].coordinates, expected, rtol=1e-6)
    np.testing.assert_allclose(bags[[1]].coordinates, places[90:150], rtol=1e-6)
    assert bags.coordinate_unit == "level0_px"


def test_label_table_has_empty_cells_for_unknown_values_and_summaries_of_the_cells(tmp_path):
    cohort = build_ki67(made_ki67(tmp_path / "data"), tmp_path / "out")
    table = pd.read_csv(cohort.labels, dtype=str, keep_default_na=False)
    assert tuple(table.columns) == LABEL_COLUMNS
    assert table["slide"].tolist() == table["patient"].tolist() == ["P1", "P2", "P3"]
    assert table["node"].tolist() == ["1", "", "0"]
    assert table["grade"].tolist() == ["3", "", "1"]
    assert table["her2"].tolist() == ["0", "1", ""]
    marker, _ = made_cells(210)
    for i, part in enumerate(np.split(marker.astype(np.float64), [90, 150])):
        assert float(table["mean_log_ki67"][i]) == pytest.approx(np.log(part).mean())
        assert float(table["share_above_1000"][i]) == pytest.approx((part > 1000).mean())
    assert read_labels(cohort.labels, target=("months", "recurrence")).slides == open_store(cohort.bags).ids


def test_store_is_reused_and_built_again_if_a_file_changes(tmp_path):
    data, out = made_ki67(tmp_path / "data"), tmp_path / "out"
    cohort = build_ki67(data, out)
    before, labels = (cohort.bags / "index.json").stat().st_mtime_ns, cohort.labels.read_bytes()
    assert build_ki67(data, out) == cohort
    assert (cohort.bags / "index.json").stat().st_mtime_ns == before
    assert cohort.labels.read_bytes() == labels
    again = build_ki67(data, tmp_path / "again")
    assert (again.bags / "features.bin").read_bytes() == (cohort.bags / "features.bin").read_bytes()
    fingerprint = open_store(cohort.bags).fingerprint
    build_ki67(made_ki67(data, marker=made_cells(210, seed=1)[0]), out)
    assert open_store(cohort.bags).fingerprint != fingerprint


@pytest.mark.parametrize("name", ["patients.csv", "cells.npz"])
def test_folder_without_a_file_is_refused(tmp_path, name):
    data = made_ki67(tmp_path / "data")
    (data / name).unlink()
    with pytest.raises(CarmilError, match=f"data has no {name}: expected the folder with ki67's"):
        build_ki67(data, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patient": np.repeat([0, 1], [90, 120])}, "`patient` must be the rows 0 to 2 of patients.csv"),
        ({"marker": np.zeros(210)}, "`marker` must be finite and above 0"),
        ({"x": np.zeros(9)}, "expected one number per cell in each"),
        ({"x": np.zeros(210), "y": np.zeros(210)}, "'P1': core 4 has 45 cells at 1 place: expected at least two cells"),
        ({"core": np.arange(210)}, "'P1': core 0 has 1 cell at 1 place"),
    ],
)
def test_unusable_cells_are_refused(tmp_path, changes, message):
    with pytest.raises(CarmilError, match=message):
        build_ki67(made_ki67(tmp_path / "data", **changes), tmp_path / "out")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [("months", "time", "expected a column 'months'"), ("P2", "P1", "a patient appears twice")],
)
def test_unusable_table_of_patients_is_refused(tmp_path, old, new, message):
    data = made_ki67(tmp_path / "data")
    (data / "patients.csv").write_text(PATIENTS.replace(old, new))
    with pytest.raises(CarmilError, match=message):
        build_ki67(data, tmp_path / "out")


def test_damaged_cells_are_refused(tmp_path):
    data = made_ki67(tmp_path / "data")
    (data / "cells.npz").write_bytes((data / "cells.npz").read_bytes()[:500])
    with pytest.raises(CarmilError, match=r"cells\.npz"):
        build_ki67(data, tmp_path / "out")


def test_ki67_has_the_patients_events_and_baselines_that_were_measured(shared_data, tmp_path):
    cohort = build_ki67(shared_data / "ki67", tmp_path)
    store, table = open_store(cohort.bags), pd.read_csv(cohort.labels)
    assert (len(store.ids), store.rows, store.width) == (622, 366_812, 37)
    assert store.bags().features.isfinite().all()
    assert table["recurrence"].sum() == 118
    assert table[["node", "grade", "her2"]].isna().sum().tolist() == [1, 3, 27]
    each = [concordance(table["months"], table["recurrence"] == 1, table[name]) for name in LABEL_COLUMNS[-2:]]
    assert each == pytest.approx([0.570, 0.598], abs=0.01)  # means over folds by patient
