import json
from pathlib import Path

import numpy as np
import pytest

from carmil.bags.labels import read_labels
from carmil.bags.store import open_store
from carmil.datasets.stand_in import build_stand_in
from carmil.datasets.study_cohort import StudyCohort
from carmil.errors import CarmilError

from .made_crc import KINDS, made_crc

TUMOUR = KINDS.index("epithelial")


@pytest.fixture(scope="module")
def crc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_crc(tmp_path_factory.mktemp("crc"))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made")


@pytest.fixture(scope="module")
def cohorts(crc: Path, out: Path) -> dict[str, StudyCohort]:
    return {cohort.name: cohort for cohort in build_stand_in(crc, out, fast=True, seed=0)}


def test_every_stand_in_cohort_is_labelled_as_a_stand_in(cohorts: dict[str, StudyCohort]) -> None:
    assert set(cohorts) == {"crc", "weak", "kinds", "foci"}
    for cohort in cohorts.values():
        assert cohort.stand_in
        assert "stand-in" in cohort.title
        assert any("stand-in" in line for line in cohort.notes)


def test_stand_in_cohorts_have_the_metrics_and_protocol_of_the_originals(cohorts: dict[str, StudyCohort]) -> None:
    protocols = {
        name: (c.measures, c.protocol.official, c.protocol.seeds, c.protocol.lr) for name, c in cohorts.items()
    }
    assert protocols == {
        "crc": (("auc", "f1_macro"), False, 1, 2e-4),
        "weak": (("auc", "f1_macro"), False, 1, 2e-4),
        "kinds": (("balanced_accuracy", "f1_macro"), True, 3, 1e-4),
        "foci": (("auc", "auprc_attention"), True, 3, 2e-4),
    }


def test_stand_in_store_has_features_coordinates_and_truth_of_its_nuclei(cohorts: dict[str, StudyCohort]) -> None:
    bags = open_store(cohorts["foci"].bags).bags()
    assert bags.coordinate_unit == "level0_px"
    assert bags.instance_labels is not None
    kinds = bags.features[:, 0].numpy()
    assert ((kinds == TUMOUR) == (bags.instance_labels.numpy() == 1)).all()
    labels = read_labels(cohorts["foci"].labels)
    labels_by_slide = dict(zip(labels.slides, labels.labels, strict=True))
    for i, name in enumerate(bags.ids):
        assert (labels_by_slide[name] == "tumour") == bool((bags[i].features[:, 0] == TUMOUR).any())


def test_bag_of_the_crc_cohort_is_a_patient(cohorts: dict[str, StudyCohort]) -> None:
    bags = open_store(cohorts["crc"].bags).bags()
    for i, name in enumerate(bags.ids):
        assert set(bags[i].features[:, 1].tolist()) == {float(name.removeprefix("patient_"))}


def test_other_encoder_gives_the_same_nuclei_on_the_same_slides(
    crc: Path, out: Path, cohorts: dict[str, StudyCohort]
) -> None:
    pixels = {cohort.name: cohort for cohort in build_stand_in(crc, out, fast=True, seed=0, encoder="pixels")}
    assert pixels["foci"].labels == cohorts["foci"].labels
    one, other = (open_store(each["foci"].bags).bags() for each in (cohorts, pixels))
    assert one.ids == other.ids
    assert other.width == 9 * 9 * 3
    _, patient, number, _ = one.features.float().T
    rows = (patient - 1) * 40 + number  # row in the file; the grey level of a picture is its row
    assert np.allclose(other.features[:, 0].float() * 255, rows % 256, atol=0.2)
    assert np.array_equal(one.coordinates, other.coordinates)


def test_unchanged_stand_in_is_not_rebuilt(crc: Path, out: Path, cohorts: dict[str, StudyCohort]) -> None:
    written = cohorts["weak"].bags / "features.bin"
    before = written.stat().st_mtime_ns
    build_stand_in(crc, out, fast=True, seed=0)
    assert written.stat().st_mtime_ns == before
    index = cohorts["weak"].bags / "index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"signature": "another"}))
    build_stand_in(crc, out, fast=True, seed=0)
    assert written.stat().st_mtime_ns > before


def test_stand_in_for_uni_notes_that_features_are_not_uni(crc: Path, out: Path) -> None:
    for cohort in build_stand_in(crc, out, fast=True, seed=0, encoder="uni"):
        assert cohort.encoder == "resnet50"
        assert any("not UNI" in line for line in cohort.notes)
    with pytest.raises(CarmilError, match="unknown encoder 'virchow'"):
        build_stand_in(crc, out, fast=True, seed=0, encoder="virchow")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("instance_id,patient_id,is_cancerous\n1,1,0\n2,1,1\n", "0 patients have nuclei of known kind, too few"),
        ("patient_id,cell_type,is_cancerous\n1,epithelial,maybe\n2,,1\n", "is_cancerous must be 0 or 1"),
        ("patient_id,cell_type,is_cancerous\n1,neuron,0\n2,,1\n", "cell_type 'neuron' is not one of"),
    ],
)
def test_folder_that_is_not_crc_raises_an_error(tmp_path: Path, text: str, words: str) -> None:
    np.save(tmp_path / "features.npy", np.zeros((2, 4), dtype=np.float16))
    (tmp_path / "instances.csv").write_text(text)
    with pytest.raises(CarmilError, match=words):
        build_stand_in(tmp_path, tmp_path / "out", fast=True, seed=0)
