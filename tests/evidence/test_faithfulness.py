from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from carmil.bags.bags import Bags
from carmil.counterfactual.branches import create_model
from carmil.errors import CarmilError
from carmil.evidence import bag_auc, explain
from carmil.evidence import faithfulness as module
from carmil.evidence.faithfulness import (
    Faithfulness,
    at_equal_steps,
    auc_curve,
    deletion_logits,
    deletion_orders,
    evidence_of_class,
    faithfulness_of,
    removal_counts,
)
from carmil.models import registry
from carmil.models.scaled_model import ScaledModel

WIDTH = 6
SMALL = {
    "abmil": {"hidden": 8, "attention": 4},
    "abmil.gated": {"hidden": 8, "attention": 4, "output_layers": 1},
    "acmil": {"hidden": 8, "attention": 4},
    "abmil.mlp": {"hidden": 8, "attention": 4, "mlp": 6},
    "clam.sb": {"hidden": 8, "attention": 4},
    "clam.mb": {"hidden": 8, "attention": 4},
    "dsmil": {"hidden": 8, "query_size": 4},
    "dsmil.official": {"query_size": 4},
    "rrt": {"hidden": 8, "heads": 2, "attention": 4},
    "transmil": {"hidden": 8, "heads": 2, "landmarks": 4},
}
PLAIN = {"additive": {"hidden": 8}, "mean": {"hidden": 8}, "max": {"hidden": 8}}
WENO = {"hidden": 8, "teacher": 8, "attention": 4, "student": 8, "init_std": None}  # for two classes
FAST = {"abmil", "abmil.gated", "abmil.mlp", "acmil", "clam.sb", "clam.mb"}


def model_of(name="abmil", classes=3, **options):
    options = {**{**SMALL, **PLAIN}.get(name.rpartition("/")[2], {}), **options}
    model = create_model(name, WIDTH, classes, **options).double().eval()
    with torch.no_grad():  # larger weights, so that attention is far from uniform
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


def bags_of(*sizes):
    return Bags.from_list([torch.randn(size, WIDTH, dtype=torch.float64) for size in sizes])


def reduced_bag_by_bag(model, bags, maps, steps):
    """Compute deletion logits naively, with one forward pass for every map, bag and step."""
    curves = []
    for one in maps:
        for i, j in zip(bags.offsets[:-1].tolist(), bags.offsets[1:].tolist(), strict=True):
            order = sorted(range(i, j), key=lambda row: (-float(one[row]), row))
            for s in range(steps):
                kept = sorted(order[(j - i) * s // steps :])
                curves.append(model(bags.features[kept], torch.tensor([0, len(kept)])).logits)
            curves.append(model(torch.zeros_like(bags.features[i:j]), torch.tensor([0, j - i])).logits)
    return torch.cat(curves).view(len(maps), len(bags), steps + 1, -1)


def test_all_models_that_can_carry_a_branch_are_tested():
    assert set(SMALL) == {name for name, entry in registry.registered_models().items() if entry.carries_branch}


@pytest.mark.parametrize("name", [*SMALL, *PLAIN, "car/abmil", "targeted/clam.mb", "car/dsmil", "car/transmil"])
def test_deletion_curves_equal_forward_passes_of_reduced_bags(name):
    model, bags = model_of(name), bags_of(70, 9, 1)
    maps = torch.randn(2, 80, dtype=torch.float64)
    steps = 60 if name in FAST else 9
    with torch.no_grad():
        expected = reduced_bag_by_bag(model, bags, maps, steps)
    assert expected[:, :2].std(2).min() > 1e-3  # the curves are not constant
    ours = deletion_logits(model, bags, maps, steps=steps)
    assert torch.allclose(ours, expected, atol=1e-9, rtol=0)
    assert torch.allclose(deletion_logits(model, bags, maps, steps=steps, fast=False), expected, atol=1e-9, rtol=0)
    assert torch.allclose(
        deletion_logits(model, bags, maps, steps=steps, max_instances=10), expected, atol=1e-9, rtol=0
    )


@pytest.mark.parametrize("name", [*SMALL, "car/abmil", "car/rrt", "scaled"])
def test_only_instance_wise_models_skip_forward_passes_of_reduced_bags(name, monkeypatch):
    model = ScaledModel(model_of("abmil"), WIDTH).double() if name == "scaled" else model_of(name)
    passes = []
    monkeypatch.setattr(module, "_by_passes", lambda *given: passes.append(1) or by_passes(*given))
    deletion_logits(model, bags_of(3, 70), torch.randn(1, 73), steps=2)
    assert bool(passes) != (name in FAST | {"car/abmil", "scaled"})


by_passes = module._by_passes


def test_maps_processed_one_by_one_or_together_give_the_same_curves(monkeypatch):
    model, bags, maps = model_of("acmil"), bags_of(200, 30), torch.randn(5, 230)
    together = deletion_logits(model, bags, maps)
    monkeypatch.setattr(module, "ROWS", 1)
    assert torch.allclose(deletion_logits(model, bags, maps), together, atol=1e-12)
    assert torch.allclose(deletion_logits(model, bags[0], maps[:, :200]), together[:, :1], atol=1e-12)


def test_deleting_dominant_instances_first_loses_no_precision():
    model, bags = model_of("abmil").float(), bags_of(500)
    with torch.no_grad():
        model.attention.score.weight.mul_(200)  # scores hundreds apart, so that exp(u) of the rest is zero in float32
        u = model.attend(model.embed(bags.features.float(), bags.offsets), bags.offsets)[:, 0]
        assert u.max() - u.min() > 200
        expected = reduced_bag_by_bag(model, bags, u[None], 100)
    ours = deletion_logits(model, bags, u[None])
    assert torch.allclose(ours, expected, atol=1e-4)


def test_equally_relevant_instances_are_deleted_in_input_order():
    model, bags = model_of(), bags_of(20)
    flat, falling = torch.zeros(1, 20), -torch.arange(20.0)[None]
    assert torch.equal(deletion_logits(model, bags, flat), deletion_logits(model, bags, falling))


def test_evidence_for_the_prediction_is_faithful_and_its_reverse_is_not():
    model, bags = model_of("mean"), bags_of(*[40] * 12)
    classes = deletion_logits(model, bags, torch.zeros(1, 480), steps=1)[0, :, 0].argmax(-1)
    evidence = evidence_of_class(explain(model.float(), bags, "patch_scores"), classes, bags.offsets)
    result = faithfulness_of(model.double(), bags, torch.stack([evidence, -evidence]), classes)
    assert result.right.all()
    good, bad = result.aopc_over_random.mean(1)
    assert good > 0.02 > -0.02 > bad
    assert (result.deletion_area[0] < result.deletion_area[1]).all()
    assert (result.insertion_area[0] > result.insertion_area[1]).all()
    assert (result.necessity(0.2)[0] > 0).all()
    assert (result.sufficiency(0.2)[0] > 0).all()
    assert torch.allclose(result.most_first[0], result.least_first[1])
    assert torch.allclose(result.most_first[..., 0], result.insertion[..., -1])


def curves_of(most_first, *, right=(True,)):
    """Return the curves (e, 5) of one bag of four instances; the least relevant are removed in the reverse order."""
    curves = torch.as_tensor(most_first)[:, None]
    return Faithfulness(
        curves,
        curves.flip(-1),
        torch.full((3, 1, 5), 0.7),
        unchanged=torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0]]).bool()[:, None],
        kept_counts=torch.tensor([[1, 2, 3, 4]]),
        kept=curves[..., :-1],
        right=torch.tensor(right),
    )


def test_curve_metrics_equal_values_computed_by_hand():
    falling, wobbling = [0.9, 0.5, 0.5, 0.1, 0.6], [0.8, 0.4, 0.6, 0.2, 0.6]
    result = curves_of([falling, wobbling])
    assert result.deletion_area[:, 0].tolist() == pytest.approx([0.52, 0.52])
    least_first = torch.tensor([0.9, 0.9, 0.8, 0.7, 0.6]).expand(2, 1, 5)
    assert replace(result, least_first=least_first).srg[:, 0].tolist() == pytest.approx([0.26, 0.26])
    assert result.aopc[:, 0].tolist() == pytest.approx([0.38, 0.28])
    assert result.aopc_over_random[:, 0].tolist() == pytest.approx([0.18, 0.18])
    assert result.monotonicity[:, 0].tolist() == pytest.approx([1.0, 0.8])  # the all-zero bag is excluded
    assert result.necessity(0.25)[:, 0].tolist() == pytest.approx([0.4, 0.4])
    assert result.sufficiency(0.75)[:, 0].tolist() == pytest.approx([0.1 - 0.6, 0.2 - 0.6])
    fewer = replace(result, kept_counts=torch.tensor([[1, 2, 3, 3]]))  # a quarter of three instances is none
    assert fewer.necessity(0.25).isnan().all()
    assert not fewer.necessity(0.5).isnan().any()
    assert result.robustness(0.5).tolist() == pytest.approx([2 / 3])
    assert torch.equal(result.insertion, torch.tensor([falling, wobbling])[:, None])
    assert result.over(~result.right).deletion_area.shape == (2, 0)
    with pytest.raises(CarmilError, match=r"a fraction of 0\.3 at 4 steps: expected a multiple of"):
        result.necessity(0.3)


def test_figures_of_kept_instances_equal_values_computed_by_hand():
    result = curves_of([[0.9, 0.8, 0.2, 0.3, 0.5], [0.5, 0.8, 0.7, 0.3, 0.5]])
    result = replace(result, kept=torch.tensor([[0.3, 0.2, 0.8, 0.9], [0.95, 0.2, 0.8, 0.5]])[:, None])
    assert result.msk(0.8)[0, 0] == 3
    assert result.msk(0.9)[0, 0] == 4
    assert result.msk(0.9)[1, 0].isnan()  # the whole bag is below it
    assert result.msk(0.9, relative=True)[:, 0].tolist() == [4, 1]
    expected = 0.25 * np.log(2) + 0.5 * np.log(3 / 2) + 0.85 * np.log(4 / 3)
    assert result.aukc[0, 0].item() == pytest.approx(expected / np.log(4))
    below = replace(result, kept=-result.kept)
    assert below.msk(relative=True).isnan().all()  # on the other side of the middle


def test_monotonicity_of_a_curve_that_is_constant_up_to_rounding_is_nan():
    assert curves_of([[0.5] * 5, [0.5, 0.5 + 1e-8, 0.5, 0.5 + 1e-8, 0.5]]).monotonicity.isnan().all()
    assert curves_of([[0.5, 0.4, 0.4 + 1e-8, 0.4, 0.5]]).monotonicity.item() == 1


def test_steps_at_the_ends_remove_single_instances_and_are_never_coarser_than_equal_steps():
    removed = removal_counts(torch.tensor([10_000, 40, 1]), 100, ends=True)
    assert removed[0, :15].tolist() == [0, *range(1, 11), 12, 15, 18, 22]
    assert set((10_000 - removed[0]).tolist()) == set(removed[0].tolist())  # the same at both ends
    widths = dict(zip(removed[0].tolist(), removed[0].diff().tolist(), strict=False))
    assert all(width <= min(max(1, count / 4), 100) for count, width in widths.items() if count < 5000)
    assert removed[1].unique().tolist() == list(range(41))
    assert removed[2].unique().tolist() == [0, 1]
    equal = removal_counts(torch.tensor([10_000, 40, 1]), 100)
    assert torch.equal(at_equal_steps(removed[None], removed, 100)[0], equal)


def loop_figures(model, features, evidence, output, chance, *, steps, confidence):
    """Compute all figures of one bag and map in float64, with one forward pass per step, by their definitions."""
    n = len(features)

    @cache
    def logits(rows):
        x = features[list(rows)] if rows else torch.zeros_like(features)
        return model(x, torch.tensor([0, len(x)])).logits[0]

    def p(rows):
        return float(model.link.per_output(logits(tuple(sorted(rows))))[output])

    def curve(order):
        return [p(order[n * s // steps :]) for s in range(steps + 1)]

    best = sorted(range(n), key=lambda row: (-float(evidence[row]), row))
    worst = sorted(range(n), key=lambda row: (float(evidence[row]), row))
    random = [sorted(range(n), key=lambda row, one=one: -float(one[row])) for one in chance]
    deletion, insertion = curve(best), curve(worst)[::-1]
    changes = [b - a for a, b in pairwise(deletion[:-1]) if abs(b - a) > 1e-6 * max(deletion[:-1])]
    falls, moves = [-change for change in changes if change < 0], [abs(change) for change in changes]
    keep = {k: p(worst[n - k :]) for k in range(1, n + 1)}
    area = sum((keep[k] + keep[k + 1]) / 2 * np.log((k + 1) / k) for k in range(1, n))
    halves = [logits(tuple(sorted(order[n * (steps // 2) // steps :]))) for order in random]
    whole = logits(tuple(range(n)))
    return {
        "deletion_area": np.mean(deletion),
        "insertion_area": np.mean(insertion),
        "srg": np.mean(insertion) - np.mean(deletion),
        "aopc_over_random": np.mean([curve(order) for order in random]) - np.mean(deletion),
        "monotonicity": sum(falls) / sum(moves) if sum(moves) else np.nan,
        "necessity": deletion[0] - deletion[steps // 10] if n >= 10 else np.nan,
        "sufficiency": insertion[steps // 10] - insertion[-1],
        "msk": min(k for k in keep if keep[k] >= confidence) if keep[n] >= confidence else np.nan,
        "aukc": area / np.log(n),
        "robustness": np.mean([int(half.argmax()) == int(whole.argmax()) for half in halves]),
    }


def compare_with_loop(model, bags, *, steps=20):
    """Assert that all figures of all bags equal those of the loop; return them."""
    evidence = torch.randn(1, len(bags.features), dtype=torch.float64)
    with torch.no_grad():
        logits = model(bags.features, bags.offsets).logits
        outputs = logits.argmax(-1)
        confidence = float(model.link.per_output(logits).amax(-1).quantile(0.3))  # 7 of 10 bags are surer
        found = faithfulness_of(model, bags, evidence, outputs, steps=steps, random_orders=2)
        figures = found.figures(confidence=confidence) | {"robustness": found.robustness()[None]}
        *_, first, second = deletion_orders(evidence, random_orders=2)
        for b, (start, end) in enumerate(pairwise(bags.offsets.tolist())):
            chance = (first[start:end], second[start:end])
            given = (model, bags.features[start:end], evidence[0, start:end], outputs[b], chance)
            expected = loop_figures(*given, steps=steps, confidence=confidence)
            assert {key: float(values[0, b]) for key, values in figures.items()} == pytest.approx(
                expected, abs=1e-6, nan_ok=True
            )
    return figures


@pytest.mark.parametrize("name", [*registry.registered_models(), "car/abmil"])
def test_all_figures_of_50_bags_equal_a_loop_of_one_forward_pass_per_step(name):
    model = model_of(name, classes=2, **WENO) if name == "weno" else model_of(name)
    figures = compare_with_loop(model, bags_of(*(2 + i % 19 for i in range(50))))
    assert (figures["msk"] >= 1).any()
    assert figures["srg"].abs().max() > 1e-2


@pytest.mark.parametrize("name", ["abmil", "clam.mb", "dsmil"])
def test_regions_are_removed_together_in_the_order_of_their_mean(name):
    model, bags = model_of(name), bags_of(23, 5)
    evidence = torch.randn(2, 28, dtype=torch.float64)
    regions = torch.tensor([*(i * 7 % 6 for i in range(23)), 0, 0, 1, 1, 1])
    found = faithfulness_of(model, bags, evidence, torch.zeros(2, dtype=torch.long), steps=10, regions=regions)
    assert found.kept_counts[0].unique().tolist() == [1, 2, 3, 4, 5, 6]
    with torch.no_grad():
        for e, (b, start, end) in product(range(2), ((0, 0, 23), (1, 23, 28))):
            own, of = evidence[e, start:end], regions[start:end]
            count = int(of.max()) + 1
            ranked = sorted(range(count), key=lambda r: -float(own[of == r].mean()))
            for s in range(10):
                rows = [start + i for i in range(end - start) if int(of[i]) in ranked[count * s // 10 :]]
                logits = model(bags.features[rows], torch.tensor([0, len(rows)])).logits
                assert found.most_first[e, b, s].item() == pytest.approx(float(logits.softmax(-1)[0, 0]), abs=1e-9)


def test_regions_of_single_tiles_give_the_curves_of_tiles():
    model, bags, maps = model_of("acmil"), bags_of(30, 4), torch.randn(2, 34, dtype=torch.float64)
    alone = torch.cat([torch.arange(30), torch.arange(4)])
    ours = deletion_logits(model, bags, maps, steps=7, ends=True, regions=alone)
    assert torch.allclose(ours, deletion_logits(model, bags, maps, steps=7, ends=True), atol=1e-12)


def test_only_correctly_predicted_bags_are_marked_right():
    model, bags = model_of(), bags_of(5, 6, 7, 8)
    answers = deletion_logits(model, bags, torch.zeros(1, 26), steps=1)[0, :, 0].argmax(-1)
    labels = answers.clone()
    labels[1] = (labels[1] + 1) % 3
    result = faithfulness_of(model, bags, torch.zeros(1, 26), labels, random_orders=2)
    assert result.right.tolist() == [True, False, True, True]
    assert result.over(result.right).most_first.shape == (1, 3, 101)
    assert torch.equal(
        result.at_random, faithfulness_of(model, bags, torch.zeros(1, 26), labels, random_orders=2).at_random
    )


@pytest.mark.parametrize("labels", [[0, 1, 0, 1, 1, 1, 0, 0], [0, 1, 2, 1, 0, 2, 2, 0]])
def test_auc_curve_equals_auc_of_predictions_at_every_step(labels):
    logits = torch.randn(2, 8, 4, max(labels) + 1)
    logits[:, :, 3] = logits[:, :1, 3]  # with no instances left, all bags get the same prediction
    curve = auc_curve(logits, labels)
    assert curve[:, 3].tolist() == [0.5, 0.5]
    assert curve.shape == (2, 4)
    for e in range(2):
        for s in range(4):
            assert curve[e, s] == pytest.approx(bag_auc(logits[e, :, s].softmax(-1).numpy(), labels))
    assert np.isnan(auc_curve(logits, [1] * 8)).all()


def test_invalid_maps_raise_an_error_and_training_mode_is_preserved():
    model, bags = model_of().train(), bags_of(5)
    with pytest.raises(CarmilError, match=r"maps have shape \(5, 3\) for 5 instances"):
        deletion_logits(model, bags, torch.zeros(5, 3))
    with pytest.raises(CarmilError, match="a map contains NaN"):
        deletion_logits(model, bags, torch.full((1, 5), torch.nan))
    with pytest.raises(CarmilError, match="0 steps"):
        deletion_logits(model, bags, torch.zeros(1, 5), steps=0)
    deletion_logits(model, bags, torch.zeros(1, 5))
    assert model.training
