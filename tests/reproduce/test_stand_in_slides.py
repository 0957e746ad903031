import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from carmil.datasets.crc_nuclei import INFLAMMATORY, NORMAL, STROMA, TUMOUR, Nuclei, read_nuclei
from carmil.datasets.planting import Focus, plant, tissue
from carmil.datasets.stand_in_slides import FAST, KINDS, make_slides
from carmil.errors import CarmilError

from .made_crc import made_crc

MIXED = ["foci", "kinds", "weak"]


@pytest.fixture(scope="module")
def nuclei(tmp_path_factory: pytest.TempPathFactory) -> Nuclei:
    return read_nuclei(made_crc(tmp_path_factory.mktemp("crc")))


def patients_of(nuclei: Nuclei, slides) -> set[str]:
    return {patient for slide in slides for patient in nuclei.patients[slide.nuclei]}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_slides_use_only_patients_with_known_kinds(name: str, nuclei: Nuclei) -> None:
    assert {"61", "62"} < set(nuclei.patients)
    assert not patients_of(nuclei, make_slides(name, nuclei, FAST, 0)) & {"61", "62"}


@pytest.mark.parametrize("name", ["foci", "kinds"])
def test_official_split_divides_no_patient(name: str, nuclei: Nuclei) -> None:
    slides = make_slides(name, nuclei, FAST, 0)
    parts = [patients_of(nuclei, [s for s in slides if s.split == part]) for part in ("train", "val", "test")]
    assert all(parts)
    assert sum(map(len, parts)) == len(set.union(*parts))


def test_groups_of_the_weak_cohort_share_no_patients(nuclei: Nuclei) -> None:
    slides = make_slides("weak", nuclei, FAST, 0)
    groups = {s.patient: patients_of(nuclei, [t for t in slides if t.patient == s.patient]) for s in slides}
    assert len(groups) == FAST.groups
    assert sum(map(len, groups.values())) == len(set.union(*groups.values())) == 60


@pytest.mark.parametrize("name", MIXED)
def test_slides_of_all_classes_have_the_same_donors_and_sizes(name: str, nuclei: Nuclei) -> None:
    slides = make_slides(name, nuclei, FAST, 0)
    labels = {s.label for s in slides}
    for block in {s.patient for s in slides}:
        of_block = [s for s in slides if s.patient == block]
        assert Counter(s.label for s in of_block) == dict.fromkeys(labels, len(of_block) // len(labels))
        sizes = {label: sorted(len(s.nuclei) for s in of_block if s.label == label) for label in labels}
        assert len(set(map(tuple, sizes.values()))) == 1


def test_planting_foci_changes_only_the_planted_nuclei(nuclei: Nuclei) -> None:
    places = tissue(500, np.random.default_rng(0))
    background = np.random.default_rng(1).choice(nuclei.rows(["1", "2"], NORMAL), 500)
    tumour = nuclei.rows(["1", "2"], (TUMOUR,))
    planted, truth = plant(background, places, [Focus(tumour, 0.1)], np.random.default_rng(2))
    assert truth.sum() == 50
    assert (planted[truth == 0] == background[truth == 0]).all()
    assert np.isin(planted[truth == 1], tumour).all()


def test_background_of_a_slide_does_not_depend_on_planted_foci(nuclei: Nuclei, monkeypatch) -> None:
    """The background is drawn before the label is used: without foci, the same seed gives the same slides."""
    first = make_slides("foci", nuclei, FAST, 3)[1]
    assert first.label == "tumour"
    monkeypatch.setattr("carmil.datasets.stand_in_slides.plant", lambda drawn, *_: (drawn, np.zeros_like(drawn)))
    bare = make_slides("foci", nuclei, FAST, 3)[1]
    assert first.truth is not None and 0 < first.truth.sum() < len(first.truth)
    assert (bare.nuclei[first.truth == 0] == first.nuclei[first.truth == 0]).all()
    assert np.array_equal(bare.places, first.places)


def test_focus_is_a_connected_disc_on_the_grid() -> None:
    places = tissue(2000, np.random.default_rng(0))
    nuclei = np.zeros(2000, dtype=np.int64)
    for seed in range(5):
        _, truth = plant(nuclei, places, [Focus(np.array([1]), 0.02)], np.random.default_rng(seed))
        inside = places[truth == 1] / 27
        near = [np.abs(inside - place).max(axis=1) == 1 for place in inside]
        assert min(map(np.sum, near)) >= 1, "every planted nucleus has a planted neighbour"


def test_tissue_places_are_unique_grid_positions_in_row_order() -> None:
    places = tissue(777, np.random.default_rng(0))
    assert len(np.unique(places, axis=0)) == 777
    assert (places % 27 == 0).all()
    assert (np.diff(places[:, 1]) >= 0).all()


def test_slides_of_the_kinds_cohort_contain_the_kinds_of_their_class(nuclei: Nuclei) -> None:
    for slide in make_slides("kinds", nuclei, FAST, 0):
        kinds = nuclei.kinds[slide.nuclei]
        assert slide.truth is not None
        assert set(kinds[slide.truth == 0]) <= set(STROMA)
        assert set(kinds[slide.truth == 1]) == {kind for kind, _ in KINDS[slide.label]}
        assert ("inflamed" in slide.label) == (INFLAMMATORY in kinds)


def test_classes_of_the_weak_cohort_differ_in_the_share_of_inflammatory_nuclei(nuclei: Nuclei) -> None:
    slides = make_slides("weak", nuclei, FAST, 0)
    shares = {
        label: np.mean([(nuclei.kinds[s.nuclei] == INFLAMMATORY).mean() for s in slides if s.label == label])
        for label in ("base", "more")
    }
    assert 0.04 < shares["more"] - shares["base"] < 0.16
    assert all(s.truth is None for s in slides)


def test_equal_seeds_give_equal_slides_and_different_seeds_different_slides(nuclei: Nuclei) -> None:
    one, again, other = (make_slides("foci", nuclei, FAST, seed)[0] for seed in (0, 0, 1))
    assert np.array_equal(one.nuclei, again.nuclei)
    assert not np.array_equal(one.nuclei, other.nuclei)


@pytest.mark.parametrize(
    ("name", "drawn"),
    [
        ("crc", "d88d7212c55a6467"),
        ("foci", "e28df3e9514bb7d2"),
        ("kinds", "5b8cf336e492be58"),
        ("weak", "86d904110946a7bb"),
    ],
)
def test_stand_in_slides_have_the_fixed_digests(name: str, drawn: str, nuclei: Nuclei) -> None:
    """If a digest changes, `VERSION` must change and every figure of the stand-in must be measured again."""
    digest = hashlib.sha256()
    for slide in make_slides(name, nuclei, FAST, 0):
        digest.update(slide.nuclei.astype("<i8").tobytes())
        digest.update(b"" if slide.places is None else slide.places.tobytes())
    assert digest.hexdigest()[:16] == drawn


def test_too_few_patients_raise_an_error(tmp_path: Path) -> None:
    few = read_nuclei(made_crc(tmp_path, patients=6))
    for name in MIXED:
        with pytest.raises(CarmilError, match="6 patients have nuclei of known kind, too few"):
            make_slides(name, few, FAST, 0)
