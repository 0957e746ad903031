"""A run's maps are scored on the bags that each of its models was tested or validated on."""

import numpy as np
import pytest
import torch

from carmil import Member, Population, create_model
from carmil.bags.bags import Bags
from carmil.bags.sources import Bag
from carmil.bags.writers import write_bag
from carmil.evidence import map_agreement
from carmil.evidence.map_agreement import agreement
from carmil.runs.settings import Settings
from carmil.studies.agreement import map_figures, run_agreement
from carmil.studies.subjects import open_run_store
from carmil.studies.train import run_study
from carmil.truth import UNKNOWN


def population_of(name="abmil", classes=2, models=3):
    return Population(
        lambda: create_model(name, 4, classes, hidden=6, attention=3), [Member(seed=i) for i in range(models)]
    )


@pytest.fixture
def bags():
    truth = torch.tensor([1, 0, 0, 1, 0, UNKNOWN, 0, 1, 0, 1, 0, 0])
    return Bags(torch.randn(12, 4), torch.tensor([0, 3, 5, 7, 10, 12]), instance_labels=truth)


def test_map_figures_are_means_over_models_for_any_batch_size(monkeypatch, bags):
    population, chosen = population_of(), torch.tensor([4, 0, 3, 1])
    models = [population.member(row) for row in (0, 2)]
    (whole,) = agreement(models, bags, torch.arange(5), ["path"])
    for at_once in (1, 5, 100):
        monkeypatch.setattr(map_agreement, "AT_ONCE", at_once)
        result = map_figures(population, [0, 2], bags, chosen)
        assert list(result) == ["auprc_attention", "auprc_path"]
        expected = whole.measures["auprc_plus"].mean(0)[chosen, 0]
        torch.testing.assert_close(torch.from_numpy(result["auprc_path"]), expected, equal_nan=True)


def test_run_agreement_uses_the_bags_of_each_model_and_is_cached(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    lines = ["slide,patient,label"]
    for i in range(24):
        truth = np.array([i % 2, 0, 0, 0])
        features = rng.normal(size=(4, 4)).astype(np.float32) + 5 * truth[:, None]
        write_bag(Bag(id=f"s{i:02d}", features=features, instance_labels=truth), tmp_path / "bags", "npz")
        lines.append(f"s{i:02d},p{i:02d},{'ab'[i % 2]}")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    where = {"bags": tmp_path / "bags", "labels": tmp_path / "labels.csv", "out": tmp_path / "run", "device": "cpu"}
    options = {"hidden": 6, "attention": 3}
    run = run_study(Settings(**where, model="abmil", options=options, folds=3, seeds=2, epochs=3, validation=0.25))
    store, frame = open_run_store(run), run.predictions()
    tested, checked = (
        run_agreement(run, ["attention", "path"], bags=part)[1].measures["auprc_plus"]
        for part in ("test", "validation")
    )
    assert tested.shape == (6, 24, 1)
    for row, model in enumerate(run.models):
        rows_of_model = frame[(frame["fold"] == model.fold) & (frame["seed"] == model.seed)].set_index("slide")
        for place, slide in enumerate(store.ids):
            expected = rows_of_model["auprc_path"].get(slide, np.nan)
            assert float(tested[row, place, 0]) == pytest.approx(expected, nan_ok=True)
    assert not (~tested.isnan() & ~checked.isnan()).any()
    assert (~checked.isnan()).any(1).all()
    monkeypatch.setattr(map_agreement, "explain", lambda *given: pytest.fail("measured again"))
    again = run_agreement(run, ["path"])[0].measures["auprc_plus"]
    torch.testing.assert_close(again, tested, equal_nan=True)
