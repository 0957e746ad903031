import itertools

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr

from carmil.counterfactual.branches import create_model
from carmil.errors import CarmilError
from carmil.evidence.counterfactual_change import correlations, count_choices, counterfactual_change
from carmil.models.contract import Counterfactual, Prediction
from carmil.models.pooling import Offsets

STARTS = torch.tensor([0, 5, 6, 17])


def prediction_of(logits, scores, starts, **others):
    return Prediction(logits=torch.tensor(logits), offsets=Offsets(starts), scores=torch.tensor(scores), **others)


def test_counterfactual_change_equals_values_computed_by_hand():
    quarter = np.log(0.25)
    u = [[quarter]] * 4
    u_cf = torch.tensor([0.85, 0.05, 0.05, 0.05]).log()[:, None, None]
    cf = Counterfactual(u_cf, torch.tensor([[[3.0, 2.0, 4.0]]]))
    result = counterfactual_change(prediction_of([[3.0, 0.0, 2.5]], u, torch.tensor([0, 4]), counterfactual=cf))
    assert (int(result.answer), int(result.counterfactual_answer), int(result.grown)) == (0, 2, 1)
    assert result.flipped.all()
    assert result.logit_change.flatten().tolist() == pytest.approx([0, 2, 1.5])
    assert float(result.distance) == pytest.approx(2.5)
    assert float(result.attention_moved) == pytest.approx(
        1.2
    )  # 0.6 gained by the first, 0.2 lost by each other instance
    assert float(result.carriers) == pytest.approx(1.0)
    half = counterfactual_change(prediction_of([[3.0, 0.0, 2.5]], u, torch.tensor([0, 4])), cf, carried=0.5)
    assert float(half.carriers) == pytest.approx(0.25)  # the first instance alone carries half of the change


def test_unchanged_attention_has_no_carriers():
    u = torch.randn(17, 2)
    factual = Prediction(logits=torch.randn(3, 2), offsets=Offsets(STARTS), scores=u)
    result = counterfactual_change(factual, Counterfactual(u.unsqueeze(-2), factual.logits.unsqueeze(-2)))
    assert (result.attention_moved == 0).all() and result.carriers.isnan().all() and not result.flipped.any()


def test_change_of_all_bags_equals_change_bag_by_bag():
    logits, u = torch.randn(2, 3, 4), torch.randn(2, 17, 2)
    cf = Counterfactual(torch.randn(2, 17, 3, 2), torch.randn(2, 3, 3, 4))
    together = counterfactual_change(Prediction(logits=logits, offsets=Offsets(STARTS), scores=u), cf)
    for r, b, m in itertools.product(range(2), range(3), range(3)):
        rows = slice(STARTS[b], STARTS[b + 1])
        size = int(STARTS[b + 1] - STARTS[b])
        own = Prediction(logits=logits[r, b : b + 1], offsets=Offsets(torch.tensor([0, size])), scores=u[r, rows])
        alone = counterfactual_change(
            own, Counterfactual(cf.scores[r, rows, m : m + 1], cf.logits[r, b : b + 1, m : m + 1])
        )
        for name in ("counterfactual_answer", "grown", "distance", "attention_moved", "carriers"):
            assert float(getattr(together, name)[r, b, m]) == pytest.approx(float(getattr(alone, name)), nan_ok=True)
        moved = (cf.scores[r, rows, m].softmax(0) - u[r, rows].softmax(0)).abs().mean(-1)
        assert float(together.attention_moved[r, b, m]) == pytest.approx(float(moved.sum()), abs=1e-6)
        ranked = moved.double().sort(descending=True).values.cumsum(0)
        needed = int((ranked < 0.9 * ranked[-1]).sum()) + 1
        assert float(together.carriers[r, b, m]) == pytest.approx(needed / size if size > 1 else np.nan, nan_ok=True)


def test_change_supports_learned_branches_and_scores_without_softmax():
    x = torch.randn(17, 6)
    for name in ("car/abmil", "targeted/clam.mb"):
        model = create_model(name, 6, 3, hidden=8, attention=4).eval()
        result = counterfactual_change(model(x, STARTS))
        assert result.attention_moved.shape == (3, 3 if "targeted" in name else 1)
    model = create_model("car/transmil", 6, 3, hidden=8, heads=2, landmarks=4).eval()
    prediction = model(x, STARTS)
    result = counterfactual_change(prediction, softmax=False)
    change = (prediction.counterfactual.scores[:, 0] - prediction.scores).abs().detach()
    assert float(result.attention_moved[2, 0]) == pytest.approx(float(change[6:].sum()), rel=1e-5)
    with pytest.raises(CarmilError, match="no counterfactual to compare with"):
        counterfactual_change(create_model("abmil", 6, 3, hidden=8)(x, STARTS))


def test_class_shift_counts_largest_logit_increases_of_correct_bags():
    logits = torch.randn(2, 40, 3)
    cf, labels = torch.randn(2, 40, 3), torch.randint(0, 3, (40,))
    result = count_choices((cf - logits).argmax(-1), logits, labels)
    for r in range(2):
        expected = np.zeros((3, 3), dtype=int)
        for b in range(40):
            if logits[r, b].argmax() == labels[b]:
                expected[labels[b], (cf[r, b] - logits[r, b]).argmax()] += 1
        assert result[r].tolist() == expected.tolist()


def test_correlations_cover_every_pair_of_maps():
    maps = {name: torch.randn(17, 1, dtype=torch.float64) for name in ("factual", "counterfactual", "baseline")}
    result = correlations(maps, STARTS)
    assert list(result) == list(itertools.combinations(maps, 2))
    for (first, second), correlation in result.items():
        x, y = (maps[name][6:, 0].numpy() for name in (first, second))
        assert float(correlation.spearman[2, 0]) == pytest.approx(spearmanr(x, y)[0])
        assert float(correlation.pearson[2, 0]) == pytest.approx(pearsonr(x, y)[0])
        assert correlation.pearson[1].isnan().all()
