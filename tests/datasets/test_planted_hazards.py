from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from carmil.bags.labels import read_labels
from carmil.bags.store import open_store
from carmil.datasets.crc_nuclei import Nuclei, read_nuclei
from carmil.datasets.planted_hazards import (
    COLUMNS,
    EFFECT,
    FAST,
    FEWEST,
    FULL,
    MEDIAN,
    build_planted_hazards,
    draw_bags,
    draw_times,
    log_hazards,
    signed_truth,
)
from carmil.errors import CarmilError
from carmil.statistics.hazards import censoring
from carmil.statistics.survival import concordance
from carmil.targets import Survival

from ..reproduce.made_crc import KINDS, made_crc


@pytest.fixture(scope="module")
def crc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_crc(tmp_path_factory.mktemp("crc"))


@pytest.fixture(scope="module")
def nuclei(crc: Path) -> Nuclei:
    return read_nuclei(crc)


def label_table(cohort) -> pd.DataFrame:
    return pd.read_csv(cohort.labels, dtype={"patient": str})


def c_index(table: pd.DataFrame) -> float:
    return concordance(table["time"], table["event"] == 1, table["log_hazard"])


def test_all_nuclei_of_a_bag_come_from_one_donor(nuclei):
    bags = draw_bags(nuclei, FAST, seed=0)
    assert all(set(nuclei.patients[bag.nuclei]) == {bag.donor} for bag in bags)
    assert set(Counter(bag.donor for bag in bags).values()) == {FAST.bags}
    assert len({bag.name for bag in bags}) == len(bags)
    low, high = FAST.nuclei
    sizes = [len(bag.nuclei) for bag in bags]
    assert low <= min(sizes) < max(sizes) <= high


def test_donors_are_the_patients_with_enough_nuclei_of_both_kinds_and_of_background(nuclei):
    donors = {bag.donor for bag in draw_bags(nuclei, FAST, seed=0)}
    with_tumour = {str(patient) for patient in range(1, 61) if patient % 5 < 3}  # see made_crc
    assert donors == with_tumour
    sparse = nuclei.kinds.copy()
    sparse[np.flatnonzero((nuclei.patients == "1") & (sparse == "epithelial"))[FEWEST - 1 :]] = "fibroblast"
    assert {bag.donor for bag in draw_bags(replace(nuclei, kinds=sparse), FAST, seed=0)} == with_tumour - {"1"}


def test_shares_of_bags_do_not_depend_on_the_donor(nuclei):
    bags = draw_bags(nuclei, replace(FAST, bags=60), seed=0)
    signs = [signed_truth(nuclei.kinds[bag.nuclei]) for bag in bags]
    frame = pd.DataFrame({"donor": [bag.donor for bag in bags], "raising": [(sign == 1).mean() for sign in signs]})
    between = frame.groupby("donor")["raising"].transform("mean").var() / frame["raising"].var()
    assert between < 2 / 60  # 1/60 is expected of 60 independent bags per donor
    assert frame["raising"].std() > 0.25


def test_truth_is_the_sign_of_the_effect_of_the_kind_of_nucleus(crc, tmp_path):
    assert signed_truth(np.array(KINDS)).tolist() == [[1], [-1], [0], [0]]
    store = open_store(build_planted_hazards(crc, tmp_path, fast=True).bags)
    bags = store.bags()
    kinds = np.array(KINDS)[bags.features[:, 0].long()]  # see made_crc
    assert store.truth_classes == Survival().outputs == ("risk",)
    assert np.array_equal(bags.instance_labels, signed_truth(kinds))


def test_hazard_is_the_formula_applied_to_the_nuclei_of_the_store(crc, tmp_path):
    cohort = build_planted_hazards(crc, tmp_path, fast=True)
    table, bags = label_table(cohort), open_store(cohort.bags).bags()
    assert tuple(table.columns) == COLUMNS
    assert tuple(table["slide"]) == bags.ids
    kinds = [part[:, 0].numpy() for part in bags.features.split(bags.offsets.diff().tolist())]
    raising = np.array([(part == 0).mean() for part in kinds])
    lowering = np.array([(part == 1).mean() for part in kinds])
    by_hand = EFFECT * ((raising - raising.mean()) / raising.std() - (lowering - lowering.mean()) / lowering.std())
    np.testing.assert_allclose(table["log_hazard"], by_hand, atol=1e-12)
    np.testing.assert_allclose(table[["share_raising", "share_lowering"]], np.stack([raising, lowering], axis=1))


def test_log_hazard_rises_with_one_share_and_falls_with_the_other():
    shares = np.array([[0.1, 0.4], [0.3, 0.4], [0.3, 0.2], [0.1, 0.2]])
    np.testing.assert_allclose(log_hazards(shares), [-2 * EFFECT, 0, 2 * EFFECT, 0], atol=1e-12)


@pytest.mark.parametrize("censored", [0.0, 0.2, 0.5, 0.8])
def test_share_of_censored_cases_equals_the_requested_share(censored):
    log_hazard = np.random.default_rng(0).normal(size=20_000)
    _, event = draw_times(log_hazard, censored, seed=0)
    assert 1 - event.mean() == pytest.approx(censored, abs=0.01)


def test_times_are_whole_months_with_ties_and_a_median_set_by_the_hazard():
    time, event = draw_times(np.zeros(20_000), 0.0, seed=0)
    assert time.min() == 1 and event.all()
    assert np.median(time) == pytest.approx(MEDIAN, abs=1)
    twice, _ = draw_times(np.full(20_000, np.log(2)), 0.0, seed=0)
    assert np.median(twice) == pytest.approx(MEDIAN / 2, abs=1)
    time, event = draw_times(np.random.default_rng(0).normal(size=360), 0.5, seed=0)
    assert len(np.unique(time[event])) < event.sum() / 2


def test_censoring_does_not_depend_on_the_hazard():
    log_hazard = np.repeat([-1.0, 1.0], 20_000)
    time, event = draw_times(log_hazard, 0.5, seed=0)
    uncensored, _ = draw_times(log_hazard, 0.0, seed=0)
    assert np.array_equal(time[event], uncensored[event])
    low, high = (censoring(time[log_hazard == value], event[log_hazard == value]).at([5, 10, 20]) for value in (-1, 1))
    np.testing.assert_allclose(low, high, atol=0.03)


def test_same_seed_gives_the_same_bytes_and_another_seed_other_bags(crc, tmp_path):
    first, second = (build_planted_hazards(crc, tmp_path / name, fast=True) for name in ("first", "second"))
    assert first.labels.read_bytes() == second.labels.read_bytes()
    for name in ("features.bin", "instance_labels.bin", "index.json"):
        assert (first.bags / name).read_bytes() == (second.bags / name).read_bytes()
    other = build_planted_hazards(crc, tmp_path / "first", fast=True, seed=1)
    assert other.bags != first.bags and other.labels != first.labels and other.folder != first.folder
    assert label_table(other)["log_hazard"].tolist() != label_table(first)["log_hazard"].tolist()


def test_store_is_reused_and_built_again_if_crc_changes(tmp_path):
    crc = made_crc(tmp_path / "crc")
    cohort = build_planted_hazards(crc, tmp_path / "out", fast=True)
    before, labels = (cohort.bags / "index.json").stat().st_mtime_ns, cohort.labels.read_bytes()
    assert build_planted_hazards(crc, tmp_path / "out", fast=True) == cohort
    assert (cohort.bags / "index.json").stat().st_mtime_ns == before
    assert cohort.labels.read_bytes() == labels
    np.save(crc / "features.npy", np.load(crc / "features.npy") + np.float16(1))
    build_planted_hazards(crc, tmp_path / "out", fast=True)
    assert float(open_store(cohort.bags).bags().features[:, 3].min()) == 2


def test_share_of_censored_cases_changes_neither_bags_nor_log_hazards(crc, tmp_path):
    half, fewer = (build_planted_hazards(crc, tmp_path, fast=True, censored=share) for share in (0.5, 0.2))
    assert half.bags == fewer.bags and half.labels != fewer.labels and half.folder != fewer.folder
    first, second = label_table(half), label_table(fewer)
    assert first["log_hazard"].tolist() == second["log_hazard"].tolist()
    both = (first["event"] == 1) & (second["event"] == 1)
    assert first["time"][both].tolist() == second["time"][both].tolist()
    assert first["event"].sum() < second["event"].sum()


def test_shuffling_preserves_pairs_of_time_and_event_but_not_their_relation_to_the_hazard(crc, tmp_path):
    planted, null = (build_planted_hazards(crc, tmp_path, fast=True, shuffled=value) for value in (False, True))
    assert null.bags == planted.bags and null.labels != planted.labels and null.folder != planted.folder
    first, second = label_table(planted), label_table(null)
    pairs = [Counter(zip(table["time"], table["event"], strict=True)) for table in (first, second)]
    assert pairs[0] == pairs[1]
    kept = ["slide", "patient", "log_hazard", "share_raising", "share_lowering"]
    assert first[kept].equals(second[kept])
    assert c_index(first) > 0.7
    assert abs(c_index(second) - 0.5) < 0.1


def test_label_table_is_read_with_donors_as_patients(crc, tmp_path):
    cohort = build_planted_hazards(crc, tmp_path, fast=True)
    table = read_labels(cohort.labels, target=("time", "event"))
    assert table.slides == open_store(cohort.bags).ids
    assert all(slide.split("_")[1] == patient for slide, patient in zip(table.slides, table.patients, strict=True))
    assert {event for _, event in table.cells} == {"0", "1"}
    assert (cohort.measures, cohort.protocol.batch) == (("c_index",), 32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"encoder": "uni"}, "unknown encoder 'uni'"),
        ({"censored": 1.0}, "share of 1 censored: expected at least 0 and less than 1"),
        ({"censored": -0.1}, "share of -0.1 censored"),
    ],
)
def test_unusable_options_are_refused(crc, tmp_path, given, message):
    with pytest.raises(CarmilError, match=message):
        build_planted_hazards(crc, tmp_path, **given)


def test_folder_without_crc_is_refused(tmp_path):
    with pytest.raises(CarmilError, match=r"has no features\.npy"):
        build_planted_hazards(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(CarmilError, match=r"nuclei each of epithelial, inflammatory, fibroblast or others: 1"):
        build_planted_hazards(made_crc(tmp_path / "crc", patients=1), tmp_path / "out")


def test_true_hazard_of_crc_has_a_c_index_of_three_quarters_to_four_fifths(shared_data, tmp_path):
    nuclei = read_nuclei(shared_data / "crc")
    assert len(draw_bags(nuclei, FULL, seed=0)) == 360
    cohort = build_planted_hazards(shared_data / "crc", tmp_path, encoder="pixels")
    table = label_table(cohort)
    assert (len(table), table["patient"].nunique()) == (360, 30)
    assert 0.75 < c_index(table) < 0.8
    assert table["event"].mean() == pytest.approx(0.5, abs=0.05)
