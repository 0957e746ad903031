"""Training gives the same result from every file format."""

from dataclasses import replace

import numpy as np
import pytest

from carmil.bags.finding import find_bags
from carmil.bags.readers import read_bag
from carmil.bags.writers import write_bag
from carmil.runs.settings import Settings
from carmil.studies.train import run_study

LAYOUTS = ("clam", "trident", "stamp", "torchmil", "slideflow", "npy", "npz", "pt", "safetensors")


@pytest.fixture(scope="module")
def crc_patients(tmp_path_factory):
    """Return a folder with labels and bags of forty crc patients with random coordinates."""
    from tests.conftest import SHARED

    if not SHARED.is_dir():
        pytest.skip("needs ../shared/data, which is not part of the repository")
    folder = tmp_path_factory.mktemp("crc")
    rng = np.random.default_rng(0)
    sources = find_bags(SHARED / "crc", truth="is_cancerous").sources[:40]
    bags = [replace(read_bag(source), instance_labels=None, encoder="resnet50") for source in sources]
    placed = [replace(bag, coordinates=rng.integers(0, 9999, (len(bag.features), 2)).astype("f4")) for bag in bags]
    lines = [f"{source.id},{source.label}" for source in sources]
    (folder / "labels.csv").write_text("\n".join(["slide,label", *lines]))
    return folder, placed


@pytest.fixture(scope="module")
def answers(crc_patients):
    folder, bags = crc_patients
    results = {}
    for layout in LAYOUTS:
        unit, size = ("um", 112.0) if layout == "stamp" else ("level0_px", 256.0)
        for bag in bags:
            write_bag(replace(bag, coordinate_unit=unit, tile_size=size), folder / layout, layout)
        settings = Settings(
            bags=folder / layout,
            labels=folder / "labels.csv",
            out=folder / f"run_{layout}",
            model="abmil",
            options={"hidden": 16, "attention": 8},
            folds=2,
            epochs=3,
            device="cpu",
        )
        results[layout] = run_study(settings).predictions().set_index("slide")["p_1"].sort_index()
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_format_gives_the_same_predictions(answers, layout):
    assert len(answers[layout]) == 40
    assert np.allclose(answers[layout], answers["npy"], atol=1e-3)
    assert answers[layout].std() > 0
