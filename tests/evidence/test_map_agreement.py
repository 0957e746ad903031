"""Maps are scored only on instances whose truth is known."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, ndcg_score, roc_auc_score

from carmil import Member, Population, create_model
from carmil.bags.bags import Bags
from carmil.evidence import explain
from carmil.evidence.map_agreement import agreement, known_instances
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
