"""Requirements on every registered model, with every counterfactual branch that it supports."""

import itertools

import pytest
import torch

from carmil import Bags, create_model, list_models
from carmil.errors import CarmilError
from carmil.models import Ability, registered_models
from carmil.models.layers import BatchNorm, LayerNorm, Linear
from carmil.models.noise import Dropout, Noise
from carmil.models.pooling import Offsets, bag_softmax, bag_weighted_sum
from carmil.training import TRAIN, VALIDATION, Member, Population, Recipe, fit
from carmil.training.predict import predict

SIZES = [[5], [1, 1], [3, 1, 7], [4, 4, 4], [2, 30, 1, 6]]
NAMES = list(list_models())
WIDTH = 12
SMALL = {
    "rrt": {"hidden": 16, "heads": 2, "attention": 8, "regions": 2},
    "weno": {"hidden": 8, "teacher": 8, "attention": 4, "student": 8, "init_std": None},
}


def plain(name):
    return name.rpartition("/")[2]


def entry(name):
    return registered_models()[plain(name)]


def classes_of(name):
    return 2 if plain(name) == "weno" else 3


def fresh(name, seed=1):
    torch.manual_seed(seed)
    options = SMALL.get(plain(name), {} if plain(name) == "dsmil.official" else {"hidden": 16})
    return create_model(name, WIDTH, classes_of(name), **options)


def population(name, members):
    return Population(lambda: fresh(name, int(torch.randint(0, 10_000, ()))), members)


def starts_of(sizes):
    return torch.tensor([0, *sizes]).cumsum(0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", SIZES)
def test_a_bag_alone_and_in_company_gets_the_same_answer(name, sizes):
    model, x, starts = fresh(name).eval(), torch.randn(sum(sizes), WIDTH), starts_of(sizes)
    together = model(x, starts)
    for i, (first, last) in enumerate(itertools.pairwise(starts.tolist())):
        alone = model(x[first:last], torch.tensor([0, last - first]))
        assert torch.allclose(alone.logits[0], together.logits[i], atol=1e-5)
        if together.scores is not None:
            assert torch.allclose(alone.scores, together.scores[first:last], atol=1e-5)
        if together.counterfactual is not None:
            assert torch.allclose(alone.counterfactual.logits[0], together.counterfactual.logits[i], atol=1e-5)
            assert torch.allclose(alone.counterfactual.scores, together.counterfactual.scores[first:last], atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_permuting_instances_permutes_attention_and_preserves_logits(name):
    model, x, starts = fresh(name).eval(), torch.randn(9, WIDTH), torch.tensor([0, 9])
    order = torch.tensor([3, 7, 1, 8, 0, 2, 6, 5, 4])
    before, after = model(x, starts), model(x[order], starts)
    same = torch.allclose(before.logits, after.logits, atol=1e-5)
    if not entry(name).build.permutation_invariant:
        assert not same, "it says that it depends on the order"
        return
    assert same
    if before.scores is not None:
        assert torch.allclose(before.scores[order], after.scores, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_every_parameter_not_declared_inert(name):
    model, x, starts = fresh(name).train(), torch.randn(40, WIDTH), torch.tensor([0, 15, 40])
    for phase in model.phases:
        model.begin(phase, 0)
        losses = model.losses(model(x, starts), torch.tensor([0, 1]), model.coefficients)
        sum(model.coefficients[term] * value.mean() for term, value in losses.items()).backward()
    untouched = {name for name, p in model.named_parameters() if p.grad is None or p.grad.abs().max() < 1e-8}
    assert all(parameter.endswith(entry(name).build.inert_parameters) for parameter in untouched), untouched


@pytest.mark.parametrize("name", [name for name in NAMES if entry(name).carries_branch])
def test_embed_attend_and_classify_agree_with_forward(name):
    model, x, offsets = fresh(name).eval(), torch.randn(10, WIDTH), Offsets(torch.tensor([0, 4, 10]))
    if Ability.POOLS_BY_ATTENTION not in model.abilities:
        pytest.skip("its pooling is its own")
    prediction = model(x, offsets)
    z = model.embed(x, offsets)
    u = model.attend(z, offsets)
    logits = model.classify(bag_weighted_sum(bag_softmax(u, offsets), z, offsets))
    assert torch.allclose(prediction.scores, u)
    assert torch.allclose(prediction.logits, logits, atol=1e-6)
    assert prediction.logits.shape == (2, classes_of(name))
    assert prediction.scores.shape == (10, model.heads)


@pytest.mark.parametrize("name", NAMES)
def test_prediction_has_the_fields_that_the_model_declares(name):
    model = fresh(name).eval()
    prediction, abilities = model(torch.randn(10, WIDTH), torch.tensor([0, 4, 10])), model.abilities
    assert (prediction.scores is not None) == (Ability.ATTENDS in abilities)
    assert (prediction.instance_logits is not None) == (Ability.INSTANCE_LOGITS in abilities)
    maps = {name: getattr(Ability, name) in abilities for name in ("COUNTERFACTUAL_MAP", "TARGET_MAPS")}
    expected = 1 if maps["COUNTERFACTUAL_MAP"] else model.classes if maps["TARGET_MAPS"] else 0
    cf = prediction.counterfactual
    assert (0 if cf is None else cf.scores.shape[-2]) == expected
    if Ability.MAP_PER_CLASS in abilities:
        assert prediction.scores.shape[-1] == model.heads == model.classes


@pytest.mark.parametrize("name", [name for name in NAMES if Ability.POOLS_BY_ATTENTION in fresh(name).abilities])
def test_instance_scores_are_independent_of_the_bag_only_where_declared(name):
    model, x = fresh(name).eval().double(), torch.randn(70, WIDTH).double()
    whole, single = Offsets(torch.tensor([0, 70])), Offsets(torch.arange(71))
    z, z_single = model.embed(x, whole), model.embed(x, single)
    same = torch.allclose(z, z_single) and torch.allclose(model.attend(z, whole), model.attend(z_single, single))
    assert same == (Ability.INSTANCE_WISE in model.abilities)


def separable(name, count=8, seed=0):
    """Return bags whose class is visible in the mean of one feature."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes_of(name)
    parts = [torch.randn(5 + i % 4, WIDTH, generator=generator) for i in range(count)]
    for part, label in zip(parts, labels.tolist(), strict=True):
        part[:, label] += 3
    return Bags.from_list(parts, labels=labels)


@pytest.mark.parametrize("name", NAMES)
def test_every_model_overfits_eight_bags(name):
    data = separable(name)
    twice = Bags.concatenate([data, data])
    roles = torch.tensor([TRAIN] * 8 + [VALIDATION] * 8)
    trained = population(name, [Member(seed=0, lr=0.01)])
    fit(trained, twice, roles, Recipe(epochs=30, batch=8, optimizer="adam", warmup=0, patience=30))
    assert predict(trained, data).values[0].argmax(-1).tolist() == data.labels.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_population_predicts_and_trains_like_its_members(name):
    members = [Member(seed=s, lr=0.01) for s in (3, 5)]
    together = population(name, members)
    x, starts = torch.randn(10, WIDTH), torch.tensor([0, 3, 10])
    together.train(False)
    answers = together(x, Offsets(starts))
    for row in range(2):
        alone = together.member(row)(x, starts)
        assert torch.allclose(answers.logits[row], alone.logits, atol=1e-5)
        if alone.scores is not None:
            assert torch.allclose(answers.scores[row], alone.scores, atol=1e-5)
    data = separable(name, 12)
    roles = torch.tensor([[TRAIN] * 9 + [VALIDATION] * 3, [TRAIN] * 5 + [0] * 4 + [VALIDATION] * 3])
    recipe = Recipe(epochs=3, batch=4, warmup=0, shuffle=True)
    fit(together, data, roles, recipe)
    for row, member in enumerate(members):
        alone = population(name, [member])
        fit(alone, data, roles[row], recipe)
        assert torch.allclose(alone.weights[0], together.weights[row], atol=1e-4)
        assert torch.allclose(alone.buffers[0], together.buffers[row], atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_bag_of_thirty_thousand_instances_gets_finite_logits(name):
    x = torch.randn(30_000, WIDTH)
    with torch.no_grad():
        prediction = fresh(name).eval()(x, torch.tensor([0, 30_000]))
    assert torch.isfinite(prediction.logits).all()


@pytest.mark.parametrize("name", NAMES)
def test_population_predicts_the_same_after_saving_and_loading(name, tmp_path):
    from safetensors.torch import load_file, save_file

    first, second = population(name, [Member(seed=0)]), population(name, [Member(seed=1)])
    save_file(first.state(), tmp_path / "weights.safetensors")
    second.load_state(load_file(tmp_path / "weights.safetensors"))
    x, offsets = torch.randn(6, WIDTH), Offsets(torch.tensor([0, 6]))
    first.train(False)
    second.train(False)
    assert torch.equal(first(x, offsets).logits, second(x, offsets).logits)


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("mean", {}, 525_826),
        ("max", {}, 525_826),
        ("abmil.gated", {}, 657_283),
        ("abmil", {}, 591_619),
        ("car/abmil.gated", {}, 657_412),
        ("car/abmil.gated", {"branch": "full"}, 788_740),
        ("abmil.gated", {"attention_bias": False}, 657_026),
        ("abmil.gated", {"embedding_bias": False}, 656_771),
        ("cia/abmil.gated", {}, 657_283),
        ("clam.sb", {}, 790_791),
        ("clam.mb", {}, 791_048),
        ("additive", {}, 658_179),
        ("additive", {"hidden": 512}, 1_578_499),
        ("dsmil", {}, 593_540),
        ("dsmil", {"query": "nonlinear"}, 610_052),
        ("dsmil.official", {}, 153_860),
        ("car/dsmil", {}, 659_204),
        ("acmil", {}, 662_417),
        ("transmil", {}, 2_672_146),
        ("car/transmil", {}, 3_722_522),
        ("rrt", {}, 2_697_474),
        ("weno", {}, 2_628_099 + 18_890_754),
    ],
)
def test_parameter_counts_equal_published_counts(name, options, count):
    assert sum(p.numel() for p in create_model(name, 1024, 2, **options).parameters()) == count


@pytest.mark.parametrize(
    ("name", "options", "classes", "count"),
    [
        ("abmil", {"attention": 20, "output_layers": 1}, 4, 11_205),
        ("abmil", {"attention": 20, "output_layers": 1}, 2, 11_163),
        ("abmil", {"attention": 20}, 4, 10_785),
        ("abmil", {"attention": 20}, 2, 10_743),
        ("additive", {}, 4, 21_545),
        ("transmil", {}, 4, 15_332),
    ],
)
def test_digit_models_have_published_parameter_counts(name, options, classes, count):
    model = create_model(name, 512, classes, hidden=20, **options)
    assert sum(p.numel() for p in model.parameters()) == count


def test_gated_attention_equals_published_formula():
    model, z = create_model("abmil.gated", 4, 2, hidden=6, attention=5).eval(), torch.randn(7, 6)
    a = model.attention
    gate = torch.sigmoid(z @ a.U.weight.T + a.U.bias)
    expected = (torch.tanh(z @ a.V.weight.T + a.V.bias) * gate) @ a.score.weight.T + a.score.bias
    assert torch.allclose(a(z), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: create_model("abmill"), "unknown model 'abmill'; did you mean 'abmil'?"),
        (lambda: create_model("carr/abmil"), "unknown branch 'carr'; did you mean 'car'?"),
        (lambda: create_model("abmil", 3, 2, width=5), "'abmil': unknown option 'width'"),
        (lambda: create_model("car/abmil", branch="half"), "unknown kind of branch 'half'"),
        (lambda: create_model("abmil", 0, 2), "at least one feature"),
        (lambda: create_model("abmil", 5, 1), "two classes"),
        (lambda: create_model("weno", 5, 3), "weno separates positive from negative bags: expected 2 classes, not 3"),
        (lambda: create_model("car/mean"), "'car/mean': mean does not support counterfactual branches; abmil"),
        (lambda: create_model("targeted/additive"), "additive does not support counterfactual branches"),
    ],
)
def test_invalid_models_and_options_raise_a_specific_error(make, words):
    with pytest.raises(CarmilError) as raised:
        make()
    assert words in str(raised.value)


def test_every_model_that_can_carry_a_branch_is_registered_with_branches():
    attending = {name for name, one in registered_models().items() if one.carries_branch}
    assert {
        "abmil",
        "abmil.gated",
        "abmil.mlp",
        "clam.sb",
        "clam.mb",
        "dsmil",
        "dsmil.official",
        "acmil",
        "transmil",
        "rrt",
    } == attending
    assert {plain(name) for name in NAMES if "/" in name} == attending
    assert all(one.description for one in registered_models().values())


def test_noise_depends_only_on_model_seed_site_step_and_instance():
    both, one = Noise(torch.tensor([7, 8])), Noise(torch.tensor([8]))
    a, b = both.uniform((1000, 10), site=2), one.uniform((1000, 10), site=2)
    assert torch.equal(a[1], b[0])
    assert not torch.equal(a[0], a[1])
    assert not torch.equal(a, both.uniform((1000, 10), site=3))
    both.rows = torch.arange(1000).flip(0)
    assert torch.equal(a.flip(1), both.uniform((1000, 10), site=2))  # random numbers are tied to instances
    both.rows = None
    both.steps += 1
    assert not torch.equal(a, both.uniform((1000, 10), site=2))
    assert abs(a.mean() - 0.5) < 0.01
    assert a.min() >= 0
    assert a.max() < 1
    assert abs(torch.corrcoef(torch.stack([a[0].flatten(), a[1].flatten()]))[0, 1]) < 0.03
    assert torch.histc(a, 10, 0, 1).min() > 0.9 * a.numel() / 10


@pytest.mark.parametrize("half", [0, 1])
def test_dropout_masks_of_different_models_are_uncorrelated(half):
    """Two columns share 32 random bits; both halves must be uncorrelated between models."""
    kept = Noise(torch.arange(60)).kept((2000, 64), 0.75, site=1)[..., half::2].float().flatten(1)
    related = torch.corrcoef(kept)[~torch.eye(60, dtype=torch.bool)]
    chance = kept.shape[1] ** -0.5
    assert related.std() < 1.05 * chance
    assert related.abs().max() < 5 * chance
    assert abs(kept.mean() - 0.75) < 0.001


def test_dropout_preserves_mean_and_is_off_outside_training():
    layer, x = Dropout(0.25), torch.ones(400, 100)
    dropped = layer(x)
    assert abs((dropped == 0).float().mean() - 0.25) < 0.01
    assert abs(dropped.mean() - 1) < 0.02
    assert torch.equal(layer.eval()(x), x)


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (Linear(6, 4), torch.nn.Linear(6, 4)),
        (LayerNorm(6), torch.nn.LayerNorm(6)),
        (BatchNorm(6), torch.nn.BatchNorm1d(6)),
    ],
)
def test_layers_match_torch_layers(ours, expected):
    ours.load_state_dict(expected.state_dict(), strict=False)
    state = {name: value for name, value in expected.state_dict().items() if name != "num_batches_tracked"}
    ours.load_state_dict(state)
    for _ in range(3):
        x = torch.randn(9, 6) * 2 + 1
        assert torch.allclose(ours(x), expected(x), atol=1e-5)
    ours.eval()
    expected.eval()
    assert torch.allclose(ours(x), expected(x), atol=1e-5)


def test_batch_norm_updates_statistics_from_counted_instances_only():
    layer, x = BatchNorm(3), torch.randn(2, 8, 3)
    layer.running_mean, layer.running_var = torch.zeros(2, 3), torch.ones(2, 3)
    counted = torch.zeros(2, 8, 1, dtype=torch.bool)
    counted[0, :5] = True
    layer.counted = counted
    layer(x)
    assert torch.allclose(layer.running_mean[0], 0.1 * x[0, :5].mean(0), atol=1e-6)
    assert torch.equal(
        layer.running_mean[1], torch.zeros(3)
    )  # a model without a bag in this batch keeps its statistics
    assert torch.equal(layer.running_var[1], torch.ones(3))
