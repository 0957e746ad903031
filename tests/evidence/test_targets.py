"""Every explainer for every target, model and branch of the registries, and the signs of evidence.

Bags are small and weights random; links are fitted on outcomes as before training.
"""

from functools import cache

import pytest
import torch

from carmil import Bags, create_model, list_models
from carmil.counterfactual.branches import BRANCHES
from carmil.errors import CarmilError
from carmil.evidence import EXPLAINERS, explain, explainers_of
from carmil.evidence.counterfactual_search import search_counterfactual
from carmil.evidence.path import relative_residual
from carmil.models.pooling import Offsets, bag_sum
from carmil.models.registry import registered_models
from carmil.targets import Labels, Ordinal, Survival, Value
from carmil.training import Member, Population, Recipe, fit
from carmil.training.recipe import TRAIN, VALIDATION

WIDTH, SIZES = 6, (4, 1)
TARGETS = {
    "survival": Survival(columns=("months", "recurrence")),
    "survival.discrete": Survival(columns=("months", "recurrence"), loss="discrete"),
    "value": Value(columns=("age",)),
    "ordinal": Ordinal(columns=("grade",), names=("low", "middle", "high")),
    "labels": Labels(columns=("node", "her2")),
}
TIMES = torch.tensor([[4.0, 1.0], [2.0, 0.0], [7.0, 1.0]])  # of training bags, to which links are fitted
OUTCOMES = {
    "survival": TIMES,
    "survival.discrete": TIMES,
    "value": torch.tensor([[40.0], [70.0], [55.0]]),
    "ordinal": torch.tensor([0, 2, 1]),
    "labels": torch.tensor([[1.0, 0.0], [0.0, 1.0], [torch.nan, 1.0]]),
}
SMALL = {
    "rrt": {"hidden": 8, "heads": 2, "attention": 4, "regions": 2},
    "transmil": {"hidden": 8, "heads": 2, "landmarks": 4},
    "dsmil": {"hidden": 8, "query_size": 4},
}
FOR_CLASSES = {"targeted", "margin_sensitivity"}


def needs_classes(name):
    prefix, _, plain = name.rpartition("/")
    entry = registered_models()[plain]
    return bool(entry.build.needs_classes(entry.options)) or (bool(prefix) and BRANCHES[prefix][0].needs_classes)


def fresh(target, name, **options):
    """Return a model with small random weights whose link is fitted."""
    torch.manual_seed(3)
    options = SMALL.get(name.rpartition("/")[2], {"hidden": 8}) | options
    model = create_model(name, WIDTH, len(TARGETS[target].outputs), link=TARGETS[target].link(), **options)
    for fitted, values in model.link.fitted(OUTCOMES[target]).items():
        getattr(model.link, fitted).data = values.to(torch.float32)
    if model.link.centred:
        model.link.centre += 0.7
    return model.double().eval()


@cache
def bags():
    torch.manual_seed(4)
    return Bags.from_list([torch.randn(size, WIDTH, dtype=torch.float64) for size in SIZES])


model_of = cache(fresh)
SUITED = [name for name in list_models() if not needs_classes(name)]


@pytest.mark.parametrize("method", EXPLAINERS)
@pytest.mark.parametrize("name", SUITED)
@pytest.mark.parametrize("target", sorted(set(TARGETS) - {"survival.discrete"}))  # its outputs are those of survival
def test_every_explainer_gives_evidence_in_units_of_the_outputs(target, name, method):
    model = model_of(target, name)
    if method not in explainers_of(model):
        with pytest.raises(CarmilError, match=f"^'{method}' (needs a model that declares|compares classes)") as refused:
            explain(model, bags(), method)
        assert "\n" not in str(refused.value)
        return
    assert method not in FOR_CLASSES
    evidence = explain(model, bags(), method)
    assert evidence.shape == (sum(SIZES), len(TARGETS[target].outputs))
    assert evidence.isfinite().all()
    if EXPLAINERS[method].total is not None:
        total = EXPLAINERS[method].total(model, bags().features, Offsets(bags().offsets))
        assert relative_residual(evidence, total, Offsets(bags().offsets)).max() <= 1e-4


@pytest.mark.parametrize("name", sorted(set(list_models()) - set(SUITED)))
@pytest.mark.parametrize("target", TARGETS)
def test_models_that_need_classes_raise_an_error_naming_them(target, name):
    with pytest.raises(CarmilError, match=f"'({name}|{name.rpartition('/')[2]})' predicts classes only") as refused:
        fresh(target, name)
    assert "\n" not in str(refused.value)


def test_most_models_and_all_branches_except_the_targeted_one_support_every_target():
    assert {name.rpartition("/")[0] for name in SUITED} == {"", "car", "cia"}
    assert {"abmil", "abmil.gated", "acmil", "additive", "dsmil", "max", "mean", "rrt", "transmil"} <= set(SUITED)


@pytest.mark.parametrize("target", TARGETS)
def test_relevance_sums_to_the_output_from_which_predictions_are_computed(target):
    model = model_of(target, "abmil")
    total = bag_sum(explain(model, bags(), "lrp"), Offsets(bags().offsets))
    outputs = model(bags().features, bags().offsets).logits
    assert torch.allclose(model.link.predictions(total), model.link.predictions(outputs))


@pytest.mark.parametrize("target", TARGETS)
def test_single_is_the_prediction_for_the_instance_alone_on_the_scale_of_the_link(target):
    model = model_of(target, "abmil")
    alone = model(bags().features, torch.arange(sum(SIZES) + 1)).logits
    expected = alone.sigmoid() if target == "labels" else alone
    assert torch.allclose(explain(model, bags(), "single"), expected)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("method", sorted(set(EXPLAINERS) - FOR_CLASSES))
def test_descriptions_use_the_terms_of_the_target(target, method):
    words = EXPLAINERS[method].describe(TARGETS[target])
    assert "class" not in words.replace("classifier", "")
    assert "{" not in words
    if target.startswith("survival") and method in ("path", "single", "coalition", "lrp", "leave_one_out"):
        assert "the log hazard" in words


@pytest.mark.parametrize("target", TARGETS)
def test_a_counterfactual_search_without_classes_is_refused(target):
    with pytest.raises(CarmilError, match="a counterfactual search needs another class"):
        search_counterfactual(model_of(target, "abmil"), bags().features, bags().offsets)


def planted_bags(target, *, reverse=False):
    """Return 60 bags whose outcome follows the share of instances with a large first feature, and their marks.

    reverse: large shares have late events, small values, low grades and no label.
    """
    generator = torch.Generator().manual_seed(5)
    parts, marks, shares = [], [], []
    for i in range(60):
        marked = torch.arange(10) < i % 6
        features = torch.randn(10, WIDTH, generator=generator)
        features[:, 0] += 3.0 * marked
        parts.append(features)
        marks.append(marked)
        shares.append(i % 6 / 5)
    share = torch.tensor(shares)
    share = 1 - share if reverse else share
    noise = 0.05 * torch.rand(60, generator=generator)
    outcomes = {
        "survival": torch.stack([2 - share + noise, torch.ones(60)], dim=1),
        "survival.discrete": torch.stack([2 - share + noise, torch.ones(60)], dim=1),
        "value": (50 + 10 * share + noise).unsqueeze(-1),
        "ordinal": (share * 2.9).long(),
        "labels": torch.stack([share > 0.5, share > 0.3], dim=1).float(),
    }[target]
    return Bags.from_list(parts, labels=outcomes), torch.cat(marks)


def trained(target, planted):
    make = TARGETS[target]
    population = Population(
        lambda: create_model("abmil", WIDTH, len(make.outputs), link=make.link(), hidden=8, attention=4),
        [Member(seed=0, lr=1e-2)],
    )
    roles = torch.where(torch.arange(60) % 5 == 0, VALIDATION, TRAIN)
    fit(population, planted, roles, Recipe(epochs=20, batch=16 if target == "survival" else 4))
    return population.member(0)


@pytest.mark.parametrize("target", TARGETS)
def test_evidence_has_the_sign_of_the_effect_of_the_planted_instances(target):
    """Evidence for an earlier event, larger value, higher grade or label is positive; reversed outcomes reverse it."""
    for reverse, sign in ((False, 1), (True, -1)):
        planted, marked = planted_bags(target, reverse=reverse)
        model = trained(target, planted)
        for method in ("path.uniform", "coalition", "integrated_gradients"):
            evidence = sign * explain(model, planted, method)
            assert (evidence[marked] > 0).float().mean() > 0.9, (method, reverse)
            assert evidence[marked].mean() > evidence[~marked].mean() + 0.01, (method, reverse)
