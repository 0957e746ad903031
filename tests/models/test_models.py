"""What every registered model must do, with every branch in front."""

import itertools

import pytest
import torch

from carmil import create_model, list_models
from carmil.errors import CarmilError
from carmil.models import entries
from carmil.models.layers import Dropout
from carmil.models.noise import Noise
from carmil.training import Member, Population

SIZES = [[5], [1, 1], [3, 1, 7], [4, 4, 4], [2, 30, 1, 6]]
NAMES = list(list_models())
WIDTH, CLASSES = 12, 3


def fresh(name):
    torch.manual_seed(1)
    return create_model(name, WIDTH, CLASSES).eval()


def starts_of(sizes):
    return torch.tensor([0, *sizes]).cumsum(0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", SIZES)
def test_a_bag_alone_and_in_company_gets_the_same_answer(name, sizes):
    model, x, starts = fresh(name), torch.randn(sum(sizes), WIDTH), starts_of(sizes)
    together = model(x, starts)
    for i, (first, last) in enumerate(itertools.pairwise(starts)):
        alone = model(x[first:last], torch.tensor([0, last - first]))
        assert torch.allclose(alone.logits[0], together.logits[i], atol=1e-5)
        assert torch.allclose(alone.scores, together.scores[first:last], atol=1e-5)
        if together.counterfactual is not None:
            assert torch.allclose(alone.counterfactual.logits[0], together.counterfactual.logits[i], atol=1e-5)
            assert torch.allclose(alone.counterfactual.scores, together.counterfactual.scores[first:last], atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_permuting_instances_permutes_the_attention_and_leaves_the_answer(name):
    model, x, starts = fresh(name), torch.randn(9, WIDTH), torch.tensor([0, 9])
    order = torch.randperm(9)
    before, after = model(x, starts), model(x[order], starts)
    assert torch.allclose(before.logits, after.logits, atol=1e-5)
    assert torch.allclose(before.scores[order], after.scores, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_every_parameter_but_an_inert_attention_bias(name):
    model, x, starts = fresh(name).train(), torch.randn(10, WIDTH), torch.tensor([0, 4, 10])
    losses = model.losses(model(x, starts), torch.tensor([0, 2]), model.coefficients)
    sum(model.coefficients[term] * value.mean() for term, value in losses.items()).backward()
    # a constant added to all scores of a bag leaves their softmax as it is; so does a uniform factor the distance alone sees
    inert = {name for name, p in model.named_parameters() if p.grad is None or p.grad.abs().max() < 1e-7}
    assert all(name.endswith("score.bias") for name in inert), inert


@pytest.mark.parametrize("name", NAMES)
def test_scores_shapes_and_verbs_agree_with_forward(name):
    from carmil.models.pooling import Offsets, bag_softmax, bag_weighted_sum

    model, x, offsets = fresh(name), torch.randn(10, WIDTH), Offsets(torch.tensor([0, 4, 10]))
    prediction = model(x, offsets)
    z = model.embed(x, offsets)
    u = model.attend(z, offsets)
    logits = model.classify(bag_weighted_sum(bag_softmax(u, offsets), z, offsets))
    assert torch.allclose(prediction.scores, u)
    assert torch.allclose(prediction.logits, logits, atol=1e-6)
    assert prediction.logits.shape == (2, CLASSES)


@pytest.mark.parametrize("name", NAMES)
def test_a_population_answers_as_its_members(name):
    population = Population(lambda: create_model(name, WIDTH, CLASSES), [Member(seed=s) for s in range(3)])
    population.train(False)
    x, starts = torch.randn(10, WIDTH), torch.tensor([0, 3, 10])
    from carmil.models.pooling import Offsets

    together = population(x, Offsets(starts))
    for row in range(3):
        alone = population.member(row)(x, starts)
        assert torch.allclose(together.logits[row], alone.logits, atol=1e-5)
        assert torch.allclose(together.scores[row], alone.scores, atol=1e-5)
    assert not torch.allclose(together.logits[0], together.logits[1])


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_a_population_answers_the_same(name, tmp_path):
    from safetensors.torch import load_file, save_file

    from carmil.models.pooling import Offsets

    make = lambda seed: Population(lambda: create_model(name, WIDTH, CLASSES), [Member(seed=seed)])  # noqa: E731
    first, second = make(0), make(1)
    save_file(first.state(), tmp_path / "weights.safetensors")
    second.load_state(load_file(tmp_path / "weights.safetensors"))
    x, offsets = torch.randn(6, WIDTH), Offsets(torch.tensor([0, 6]))
    first.train(False)
    second.train(False)
    assert torch.equal(first(x, offsets).logits, second(x, offsets).logits)


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("abmil.gated", {}, 657_283),
        ("abmil", {}, 591_619),
        ("car/abmil.gated", {}, 657_412),
        ("car/abmil.gated", {"branch": "full"}, 788_740),
        ("abmil.gated", {"attention_bias": False}, 657_026),
        ("abmil.gated", {"embedding_bias": False}, 656_771),
        ("cia/abmil.gated", {}, 657_283),
    ],
)
def test_parameter_counts_are_the_published_ones(name, options, count):
    assert sum(p.numel() for p in create_model(name, 1024, 2, **options).parameters()) == count


@pytest.mark.parametrize(
    ("layers", "classes", "count"), [(1, 4, 11_205), (1, 2, 11_163), (0, 4, 10_785), (0, 2, 10_743)]
)
def test_the_digit_template_has_the_published_parameter_counts(layers, classes, count):
    model = create_model("abmil", 512, classes, hidden=20, attention=20, output_layers=layers)
    assert sum(p.numel() for p in model.parameters()) == count


def test_gated_attention_is_the_published_formula():
    model, z = create_model("abmil.gated", 4, 2, hidden=6, attention=5), torch.randn(7, 6)
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
    ],
)
def test_a_wrong_name_is_answered_with_what_there_is(make, words):
    with pytest.raises(CarmilError) as raised:
        make()
    assert words in str(raised.value)


def test_every_model_says_what_it_is():
    assert all(entry.description for entry in entries().values())


def test_noise_belongs_to_a_model_and_a_step():
    both, one = Noise(torch.tensor([7, 8])), Noise(torch.tensor([8]))
    a, b = both.uniform((1000, 10), site=2), one.uniform((1000, 10), site=2)
    assert torch.equal(a[1], b[0])
    assert not torch.equal(a[0], a[1])
    assert not torch.equal(a, both.uniform((1000, 10), site=3))
    both.rows = torch.arange(1000).flip(0)
    assert torch.equal(a.flip(1), both.uniform((1000, 10), site=2))  # a draw follows its instance
    both.rows = None
    both.steps += 1
    assert not torch.equal(a, both.uniform((1000, 10), site=2))
    assert abs(a.mean() - 0.5) < 0.01
    assert a.min() >= 0
    assert a.max() < 1
    assert abs(torch.corrcoef(torch.stack([a[0].flatten(), a[1].flatten()]))[0, 1]) < 0.03
    assert torch.histc(a, 10, 0, 1).min() > 0.9 * a.numel() / 10


def test_dropout_keeps_the_mean_and_rests_when_not_training():
    layer, x = Dropout(0.25), torch.ones(400, 100)
    dropped = layer(x)
    assert abs((dropped == 0).float().mean() - 0.25) < 0.01
    assert abs(dropped.mean() - 1) < 0.02
    assert torch.equal(layer.eval()(x), x)
