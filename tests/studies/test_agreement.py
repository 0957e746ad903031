"""Maps are scored only on instances whose truth is known."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, ndcg_score, roc_auc_score

from carmil import Member, Population, create_model
from carmil.bags.bags import Bags
from carmil.bags.sources import Bag
from carmil.bags.writers import write_bag
from carmil.evidence import explain
from carmil.runs.settings import Settings
from carmil.studies import agreement as agreements
from carmil.studies.agreement import agreement, known_instances, localisation_figures, map_figures, run_agreement
from carmil.studies.subjects import Subject, open_run_store
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


def test_known_instances_exclude_unknown_truth_and_empty_bags():
    truth = torch.tensor([1, UNKNOWN, 0, 0, UNKNOWN, UNKNOWN, 1, 0])
    known, offsets = known_instances(truth, torch.tensor([0, 4, 6, 8]))
    assert known.tolist() == [True, False, True, True, False, False, True, True]
    assert offsets.starts.tolist() == [0, 3, 5]  # no truth is known for the second bag
    by_class, _ = known_instances(torch.tensor([[1, -1], [UNKNOWN, 0], [0, 0]]), torch.tensor([0, 3]))
    assert by_class.tolist() == [True, False, True]


def test_agreement_of_every_model_and_bag_equals_scikit_learn(bags):
    population = population_of()
    models = [population.member(row) for row in range(3)]
    (result,) = agreement(models, bags, torch.arange(5), ["path"])
    assert (result.explainer, result.rule) == ("path", "mirror")
    assert result.measures["auprc_plus"].shape == (3, 5, 1)
    for row, model in enumerate(models):
        evidence = explain(model, bags, "path")[:, 1].double().numpy()
        for i in range(5):
            at = slice(int(bags.offsets[i]), int(bags.offsets[i + 1]))
            truth = bags.instance_labels[at].numpy()
            scores, truth = evidence[at][truth != UNKNOWN], truth[truth != UNKNOWN]
            values = [float(result.measures[name][row, i, 0]) for name in ("auprc_plus", "auprc_both", "auroc", "ndcg")]
            if len(set(truth)) < 2:
                assert np.isnan(values).all()
                continue
            precision = average_precision_score(truth, scores)
            expected = [precision, precision, roc_auc_score(truth, scores), ndcg_score([truth], [scores])]
            assert values == pytest.approx(expected)


def test_attention_agreement_with_signed_truth_has_one_result_per_negative_rule():
    truth = torch.tensor([[1, -1], [0, 1], [-1, 0], [1, 1], [0, -1]])
    bags = Bags(torch.randn(5, 4), torch.tensor([0, 3, 5]), instance_labels=truth)
    population = population_of("car/abmil", models=2)
    result = agreement([population.member(row) for row in range(2)], bags, torch.arange(2), ["attention", "path"])
    assert [(one.explainer, one.rule) for one in result] == [
        ("attention", "mirror"),
        ("attention", "self"),
        ("attention", "counterfactual"),
        ("path", "mirror"),
    ]
    assert result[0].measures["auprc_both"].shape == (2, 2, 2)
    model = population.member(1)
    u, u_cf = (explain(model, bags, name)[:3, 0].numpy() for name in ("attention", "counterfactual_attention"))
    for one, refuting in zip(result, (-u, u, u_cf), strict=False):
        both = average_precision_score([1, 0, 0], u), average_precision_score([0, 0, 1], refuting)
        assert float(one.measures["auprc_both"][1, 0, 0]) == pytest.approx(np.mean(both))


def test_agreement_is_empty_without_known_truth(bags):
    model = population_of(classes=3).member(0)
    assert agreement([model], bags, torch.arange(5), ["path"]) == []
    unknown = Bags(torch.randn(12, 4), torch.tensor([0, 12]))
    assert agreement([population_of().member(0)], unknown, torch.arange(1), ["path"]) == []


def test_map_figures_are_means_over_models_for_any_batch_size(monkeypatch, bags):
    population, chosen = population_of(), torch.tensor([4, 0, 3, 1])
    models = [population.member(row) for row in (0, 2)]
    (whole,) = agreement(models, bags, torch.arange(5), ["path"])
    for at_once in (1, 5, 100):
        monkeypatch.setattr(agreements, "AT_ONCE", at_once)
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
    monkeypatch.setattr(agreements, "explain", lambda *given: pytest.fail("measured again"))
    again = run_agreement(run, ["path"])[0].measures["auprc_plus"]
    torch.testing.assert_close(again, tested, equal_nan=True)


def test_localisation_excludes_slides_and_tiles_without_truth(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    truth = torch.tensor([1, UNKNOWN, 0, 0, UNKNOWN, UNKNOWN, 1, 0])
    scores = torch.tensor([0.8, 0.9, 0.1, 0.2, 0.7, 0.3, 0.4, 0.5])
    bags = Bags(torch.zeros(8, 2), torch.tensor([0, 4, 6, 8]), instance_labels=truth)
    files = [tmp_path / f"{i}.parquet" for i in range(3)]
    for path, part in zip(files, scores.split([4, 2, 2]), strict=True):
        pq.write_table(pa.table({"evidence_b": part.numpy()}), path)
    subjects = [Subject(str(i), i, (0,)) for i in range(3)]
    result = localisation_figures(bags, subjects, files, {"path": "evidence_b"}, {})["path"]
    assert result["auprc_plus"].value == 0.75
    assert result["auprc_plus"].slides == 2
    assert result["froc"].slides == 2
    assert "auprc_both_mirror" not in result  # unknown truth is not negative truth
