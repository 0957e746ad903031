"""Modules that know nothing of carmil, audited through functions of the user."""

import copy
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

import carmil
from carmil.errors import CarmilError
from carmil.models.contract import Ability
from carmil.models.outside import OutsideFunctions, wrap_module
from carmil.runs.faithfulness import UNKNOWN

WIDTH = 6
FAST = {"steps": 10, "random_orders": 1}


class Attending(nn.Module):
    """Attention pooling with an embedding, in a style that carmil does not use: one bag, outputs in a tuple."""

    def __init__(self, outputs=2, heads=1):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Dropout(0.5))
        self.gaze = nn.Linear(8, heads)
        self.answer = nn.Linear(8 * heads, outputs)
        self.last = None

    def forward(self, x):
        z = self.body(x)
        self.last = self.gaze(z).softmax(0)  # many modules keep their attention
        return self.answer((self.last.T @ z).flatten()), self.last


class Ordered(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(WIDTH, 4)
        self.answer = nn.Linear(4, 2)

    def forward(self, x):
        return self.answer(self.rnn(x)[0][-1])


def predict(module, x):
    return module(x)[0]


def first(module, x):
    return predict(module, x)[:1]


ATTENTION = {
    "embed": lambda module, x: module.body(x),
    "attend": lambda module, z: module.gaze(z),
    "classify": lambda module, Z: module.answer(Z.flatten()),
}


def planted(bags, seed=0, sizes=(5, 12)):
    """Return bags whose first two instances have one large feature: the first in class 1, another in class 0."""
    rng = np.random.default_rng(seed)
    made = [rng.normal(size=(int(rng.integers(*sizes)), WIDTH)).astype(np.float32) for _ in range(bags)]
    labels = [i % 2 for i in range(bags)]
    for bag, label in zip(made, labels, strict=True):
        bag[:2, 0 if label else rng.integers(1, WIDTH)] += 5
    return made, labels


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    module, (bags, labels) = Attending(), planted(60)
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    for _ in range(4):
        for bag, label in zip(bags, labels, strict=True):
            loss = nn.functional.cross_entropy(module(torch.from_numpy(bag))[0], torch.tensor(label))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return module  # in training mode, with a graph in `last` and gradients


@pytest.fixture(scope="module")
def found(trained):
    bags, labels = planted(16, seed=1)
    return carmil.audit(trained, bags, predict=predict, labels=labels, **ATTENTION, **FAST)


@pytest.fixture(scope="module")
def found_alone(trained):
    bags, labels = planted(16, seed=1)
    methods = ("single", "coalition", "input_x_gradient")
    return carmil.audit(trained, bags, predict=predict, labels=labels, methods=methods, **FAST)


def test_all_maps_of_a_module_with_attention_find_the_planted_instances(found):
    assert list(found.evidence) == [
        "path",
        "attention",
        "coalition",
        "single",
        "input_x_gradient",
        "integrated_gradients",
    ]
    for method in ("path", "coalition", "single"):
        for i in range(1, 16, 2):
            assert set(found.evidence[method][i][:, 1].argsort()[-2:]) == {0, 1}
    assert found.verdicts["path"] == "passes ✓"
    path = found.faithfulness.maps[0]
    assert path.learned and path.figures["aopc_gain"].low > 0
    assert path.figures["deletion_area"].slides == found.faithfulness.rightly_answered == 16


def test_audit_gives_the_same_predictions_as_the_module(trained, found):
    bags, _ = planted(16, seed=1)
    module = copy.deepcopy(_without_graph(trained)).eval()
    with torch.no_grad():
        wanted = torch.stack([module(torch.from_numpy(bag))[0].softmax(0) for bag in bags])
    assert found.predictions == pytest.approx(wanted.numpy(), abs=1e-6)


def test_maps_and_figures_are_the_same_with_predict_alone_as_with_attention(found, found_alone):
    for method in ("single", "coalition", "input_x_gradient"):
        for one, other in zip(found.evidence[method], found_alone.evidence[method], strict=True):
            assert one == pytest.approx(other, abs=1e-4)
        with_attention, alone = (
            next(one for one in audit.faithfulness.maps if one.method == method) for audit in (found, found_alone)
        )
        assert alone.deletion.mean == pytest.approx(with_attention.deletion.mean, abs=1e-4)
        assert alone.figures["randomisation"].value == pytest.approx(
            with_attention.figures["randomisation"].value, abs=1e-3
        )


def test_deletion_curve_equals_the_curve_from_a_loop_over_the_module(trained, found_alone):
    bags, labels = planted(16, seed=1)
    module, curves = copy.deepcopy(_without_graph(trained)).eval().double(), []
    for bag, label, evidence in zip(bags, labels, found_alone.evidence["single"], strict=True):
        order, n = np.argsort(-evidence[:, label], kind="stable"), len(bag)
        kept = [np.delete(bag, order[: s * n // 10], axis=0) for s in range(10)] + [np.zeros_like(bag)]
        with torch.no_grad():
            curves.append([float(module(torch.from_numpy(x).double())[0].softmax(0)[label]) for x in kept])
    assert found_alone.faithfulness.maps[0].deletion.mean == pytest.approx(np.mean(curves, axis=0).tolist(), abs=1e-5)


def test_audit_leaves_the_module_of_the_user_unchanged(trained):
    bags, labels = planted(4)
    module, calls = _without_graph(trained), []
    module.body.requires_grad_(False)
    module.body[1].eval()
    module.register_forward_hook(lambda *_: calls.append(1) and None)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    modes = [part.training for part in module.modules()]

    def check():
        assert [part.training for part in module.modules()] == modes
        assert [parameter.requires_grad for parameter in module.parameters()] == [False, False, True, True, True, True]
        assert all(parameter.grad is None for parameter in module.parameters())
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        assert len(module._forward_hooks) == 1 and module.last is None

    carmil.audit(module, bags, predict=predict, labels=labels, methods=("single",), **FAST)
    check()
    with pytest.raises(CarmilError, match=r"predict failed.*ZeroDivisionError"):
        carmil.audit(
            module, bags, predict=lambda module, x: module(x)[0] / (1 // (len(x) > 4)) if len(x) < 9 else 1 / 0
        )
    check()


def _without_graph(module):
    other = Attending()
    other.load_state_dict(module.state_dict())
    return other


def test_module_that_keeps_a_tensor_of_its_last_pass_can_be_audited(trained):
    assert trained.last.grad_fn is not None
    with pytest.raises(RuntimeError):
        copy.deepcopy(trained)
    kept = trained.last
    carmil.audit(trained, planted(3)[0], predict=predict, methods=("input_x_gradient",), **FAST)
    assert trained.last is kept


def tried(module, bags=None, **functions):
    made = [torch.from_numpy(bag) for bag in (planted(3)[0] if bags is None else bags)]
    return wrap_module(module, OutsideFunctions(**functions), made, pair=True)


def test_abilities_are_found_by_trying_the_functions():
    torch.manual_seed(0)
    small = Ability.SMALL_BAGS | Ability.GRADIENTS
    pools = small | Ability.ATTENDS | Ability.POOLS_BY_ATTENTION | Ability.INSTANCE_WISE
    model, notes = tried(Attending(), predict=predict)
    assert (model.abilities, notes) == (small, ())
    model, notes = tried(Attending(), predict=predict, **ATTENTION)
    assert (model.abilities, notes) == (pools, ())
    assert model.together == {"predict", "classify"}
    model, notes = tried(Attending(), predict=predict, embed=ATTENTION["embed"], attend=ATTENTION["attend"])
    assert model.abilities == small | Ability.ATTENDS and "give classify" in notes[0]
    model, notes = tried(Attending(), predict=predict, attend=lambda module, x: module.gaze(module.body(x)))
    assert model.abilities == small | Ability.ATTENDS and "differs from predict" in notes[0]
    model, notes = tried(Ordered(), predict=lambda module, x: module(x))
    assert model.abilities == small and not model.permutation_invariant and "order of the instances" in notes[0]
    model, notes = tried(Attending(), predict=lambda module, x: module(x.detach())[0])
    assert model.abilities == Ability.SMALL_BAGS and "no gradients" in notes[0]


def test_path_evidence_of_a_module_without_embedding_needs_only_the_attend_function():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.gaze, self.answer = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 2)

        def forward(self, x):
            return self.answer(self.gaze(x).softmax(0).T @ x)  # (1, 2)

    bags, _ = planted(4)
    found = carmil.audit(Plain(), bags, attend=lambda module, x: module.gaze(x), methods=("path", "attention"), **FAST)
    module = found.evidence["path"]
    assert [one.shape for one in module] == [(len(bag), 2) for bag in bags]
    assert any("no labels" in note for note in found.notes)
    assert {one.verdict for one in found.faithfulness.maps} <= {UNKNOWN, "FAILS ✗"}


def test_one_map_per_class_is_recognised():
    class PerClass(nn.Module):
        def __init__(self):
            super().__init__()
            self.gaze = nn.Linear(WIDTH, 2)
            self.answers = nn.ModuleList([nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)])

        def forward(self, x):
            return classify(self, self.gaze(x).softmax(0).T @ x)

    def classify(module, Z):
        return torch.cat([answer(one) for answer, one in zip(module.answers, Z, strict=True)])

    functions = {"predict": lambda module, x: module(x), "attend": lambda module, x: module.gaze(x)}
    assert Ability.MAP_PER_CLASS in tried(PerClass(), **functions, classify=classify)[0].abilities
    both, _ = tried(Attending(heads=2), predict=predict, **ATTENTION)
    assert Ability.POOLS_BY_ATTENTION in both.abilities and Ability.MAP_PER_CLASS not in both.abilities


def test_single_logit_belongs_to_the_second_of_two_classes():
    torch.manual_seed(0)
    module, (bags, _) = Attending(outputs=1), planted(3)
    found = carmil.audit(module, bags, predict=predict, methods=("input_x_gradient",), **FAST)
    with torch.no_grad():
        wanted = [float(_without_dropout(module)(torch.from_numpy(bag))[0].sigmoid()) for bag in bags]
    assert found.predictions[:, 1] == pytest.approx(wanted, abs=1e-6)
    assert found.evidence["input_x_gradient"][0][:, 0] == pytest.approx(-found.evidence["input_x_gradient"][0][:, 1])


def _without_dropout(module):
    return copy.deepcopy(module).eval()


@pytest.mark.parametrize(
    ("target", "outputs", "labels", "figure"),
    [
        ("value", 1, [0.3, 1.2, -0.5, 0.9, 2.0, 0.1], "Spearman correlation"),
        ("survival", 1, [[3, 1], [5, 0], [2, 1], [9, 1], [4, 1], [8, 0]], "C-index"),
        ("labels", 3, [[0, 1, 1], [1, 0, 1], [1, 1, 0], [0, 0, math.nan], [1, 0, 0], [0, 1, 1]], "AUC"),
    ],
)
def test_audit_of_another_target_uses_the_key_figure_and_predictions_of_that_target(target, outputs, labels, figure):
    torch.manual_seed(1)
    module, (bags, _) = Attending(outputs=outputs), planted(6)
    functions = {"predict": predict, **ATTENTION}
    found = carmil.audit(module, bags, target=target, labels=labels, methods=("path", "single"), **functions, **FAST)
    assert found.faithfulness.words.figure == figure
    assert found.faithfulness.rightly_answered == 6
    with torch.no_grad():
        raw = torch.stack([_without_dropout(module)(torch.from_numpy(bag))[0] for bag in bags]).numpy()
    if target == "value":
        assert found.predictions == pytest.approx(raw, abs=1e-5)
    elif target == "survival":
        assert found.predictions == pytest.approx(raw - raw.mean(), abs=1e-5)
    assert found.evidence["path"][0].shape == (len(bags[0]), outputs)


def test_table_text_and_tiles_show_the_maps(trained):
    bags, labels = planted(4)
    places = [np.stack([np.arange(len(bag)), np.zeros(len(bag))], 1) * 256.0 for bag in bags]
    found = carmil.audit(
        trained,
        bags,
        predict=predict,
        labels=["calm" if label == 0 else "crowded" for label in labels],
        outputs=("calm", "crowded"),
        coordinates=places,
        patients=["a", "a", "b", "b"],
        methods=("single",),
        **FAST,
    )
    assert [*found.tiles("1").columns] == ["x", "y", "single.calm", "single.crowded"]
    assert found.tiles(1)["x"].tolist() == places[1][:, 0].tolist()
    lines = str(found).splitlines()
    assert lines[0].startswith("Attending: probability of the label, over correctly answered slides")
    assert re.match(r"map +verdict +deletion area", lines[1]) and lines[3].startswith("single")
    assert found.table.lines[0][0] == "single"
    assert {"SRG ↑", "MSK ↓", "AUKC ↑"} < set(found.table.heads)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"predict": lambda module, x: module.body(x)}, r"predict returned shape \(\d+, 8\) for a bag of \d+ instances: expected"),
        ({"predict": lambda module, x: module.body(x)[:, 0]}, r"predict returned shape \(\d+,\) for a bag .* expected \(\d+,\)"),
        ({"predict": lambda module, x: module(x)}, "predict returned a tuple: expected one tensor"),
        ({"predict": lambda module, x: module(x)[0] * math.nan}, "predict returned NaN or infinity for bag '0'"),
        ({"predict": lambda module, x: module(x)[0].softmax(0)}, "predict returned probabilities.* before the softmax"),
        ({"predict": lambda module, x: module(x)[0].sigmoid()}, r"from 0 to 1 .* before the sigmoid"),
        ({"predict": lambda module, x: module(x)[0][:1].sigmoid()}, r"from 0 to 1 .* before the sigmoid"),
        ({"predict": lambda module, x: module(x)[0].sigmoid(), "target": "labels"}, r"from 0 to 1 .* before the sigmoid"),
        ({"predict": lambda module, x: predict(module, x.topk(3, 0).values)}, "no answer for a bag of one instance .*out of range"),
        ({"predict": lambda module, x: predict(module, x) + x.std(0, correction=min(1, len(x) - 1)).sum() / (len(x) - 1)},
         "no answer for a bag of one instance .it returns NaN"),
        ({"predict": lambda module, x: predict(module, x / x.norm(dim=1, keepdim=True))}, "no answer for a bag of zeros"),
        ({"predict": lambda module, x: module(x)[0] + torch.rand(2)}, "the same bag gives different outputs"),
        ({"predict": lambda module, x: OUTSIDE(x)[0]}, "predict uses your module directly"),
        ({"predict": predict, "attend": lambda module, x: OUTSIDE.gaze(OUTSIDE.body(x))}, "attend uses your module directly"),
        ({"predict": predict, "attend": lambda module, x: module.last}, "attend returned attention weights"),
        ({"predict": predict, "attend": lambda module, x: x}, None),
        ({"predict": predict, "attend": lambda module, x: x.T}, "attend returned shape"),
        ({"predict": predict, "embed": ATTENTION["embed"]}, "embed without attend"),
        ({"predict": predict, "target": "value"}, "predict returned 2 outputs: expected one for target='value'"),
        ({"predict": predict, "target": "grades"}, "unknown target 'grades'"),
        ({"predict": predict, "labels": [0, 1]}, r"labels have shape \(2,\) for 3 bags"),
        ({"predict": predict, "labels": [0, 1, 2]}, "labels must be the numbers of the 2 classes"),
        ({"predict": predict, "target": "labels", "labels": [[0, 2]] * 3}, "must be 0, 1 or NaN"),
        ({"predict": first, "target": "survival", "labels": [[3, 2]] * 3}, "1 for an event or 0"),
        ({"predict": first, "target": "survival", "labels": [[-3, 1]] * 3}, "a time of 0 or more"),
        ({"predict": predict, "coordinates": [torch.zeros(n, 2) for n in (8, 7, 9)]}, "bag '0' has 7 .* coordinates of 8"),
        ({"predict": predict, "device": "gpu"}, "device 'gpu' cannot be used"),
        ({"predict": predict, "patients": ["a"]}, "1 patient for 3 bags"),
        ({"predict": predict, "outputs": ("a", "b", "c")}, r"3 names in outputs \(a, b, c\): expected 2 different"),
        ({"predict": predict, "outputs": ("a", "a")}, r"2 names in outputs \(a, a\): expected 2 different"),
        ({"predict": predict, "methods": ("path",)}, "'path' does not fit this module: expected one of"),
        ({"predict": predict, "methods": ("paths",)}, "unknown explainer 'paths'"),
        ({"predict": predict, "steps": 15}, "a multiple of 10"),
    ],
)  # fmt: skip
def test_module_or_input_that_cannot_be_audited_raises_an_error_of_one_line(given, message):
    global OUTSIDE
    OUTSIDE = Attending().eval()
    with torch.no_grad():
        OUTSIDE(torch.zeros(9, WIDTH))  # of the size of the largest bag
    bags = [np.random.default_rng(i).normal(size=(7 + i, WIDTH)).astype(np.float32) for i in range(3)]
    if message is None:
        assert "attention" in carmil.audit(OUTSIDE, bags, methods=("attention",), **given, **FAST).evidence
        return
    with pytest.raises(CarmilError, match=message) as refused:
        carmil.audit(OUTSIDE, bags, **{**FAST, **given})
    assert "\n" not in str(refused.value)


def test_logits_that_happen_to_be_between_0_and_1_are_not_taken_for_probabilities():
    torch.manual_seed(0)
    module = Attending(outputs=1)
    with torch.no_grad():
        module.answer.weight.mul_(0.05)
        module.answer.bias.fill_(0.5)
    found = carmil.audit(module, planted(3)[0], predict=predict, methods=("single",), **FAST)
    assert (found.predictions[:, 1] > 0.5).all() and (found.predictions[:, 1] < 0.73).all()


def test_audit_of_a_function_or_of_invalid_bags_raises_an_error():
    with pytest.raises(CarmilError, match="with parameters, whose shuffling tests the maps"):
        carmil.audit(lambda x: x, planted(2)[0])
    with pytest.raises(CarmilError, match=r"bag 0 is a str: expected an array or tensor \(n, d\) of numbers"):
        carmil.audit(Attending(), "features", predict=predict)
    with pytest.raises(CarmilError, match="bags is one array"):
        carmil.audit(Attending(), planted(2)[0][0], predict=predict)


class Running(Attending):
    """Attention pooling whose instances hold the mean of those before them."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = scale

    def embed(self, x):
        z = self.body(x)
        return z + z.cumsum(0) / torch.arange(1, len(z) + 1).unsqueeze(-1)

    def forward(self, x):
        z = self.embed(x)
        return self.scale * self.answer(self.gaze(z).softmax(0).T @ z).flatten()


def test_instances_that_depend_on_earlier_instances_are_not_computed_independently():
    bags = [torch.from_numpy(bag) for bag in planted(3)[0]]
    functions = OutsideFunctions(
        lambda module, x: module(x),
        lambda module, x: module.embed(x),
        ATTENTION["attend"],
        ATTENTION["classify"],
    )
    model, _ = wrap_module(Running(), functions, bags)
    assert Ability.POOLS_BY_ATTENTION in model.abilities
    assert Ability.INSTANCE_WISE not in model.abilities
    offsets = torch.tensor([0, *np.cumsum([len(bag) for bag in bags])])
    with torch.no_grad():
        wanted = torch.stack([model.module(bag) for bag in bags])
        assert torch.allclose(model(torch.cat(bags), offsets).logits, wanted, atol=1e-6)


def test_module_with_other_operations_for_large_bags_is_evaluated_bag_by_bag(trained):
    def cautious(module, x):
        assert len(x) < 4 or x.sum().item() > -1e9  # vmap does not support item()
        return predict(module, x)

    bags, labels = planted(4)
    given = {"labels": labels, "methods": ("single",), **FAST}
    found, plain = (carmil.audit(trained, bags, predict=one, **given) for one in (cautious, predict))
    assert found.predictions == pytest.approx(plain.predictions, abs=1e-6)
    assert found.faithfulness.maps[0].deletion.mean == pytest.approx(plain.faithfulness.maps[0].deletion.mean, abs=1e-6)


def test_functions_that_disagree_with_predict_are_detected_even_if_outputs_are_small():
    functions = OutsideFunctions(
        lambda module, x: 0.003 * module.answer(module.body(x).mean(0)),
        ATTENTION["embed"],
        ATTENTION["attend"],
        lambda module, Z: 0.003 * module.answer(Z.flatten()),
    )
    torch.manual_seed(0)
    model, notes = wrap_module(Attending(), functions, [torch.from_numpy(bag) for bag in planted(3)[0]])
    assert Ability.POOLS_BY_ATTENTION not in model.abilities
    assert any("no path evidence" in note for note in notes)


def test_difference_from_predict_is_detected_even_if_the_first_bag_has_one_instance(trained):
    bags, _ = planted(3)
    bags[0] = bags[0][:1]
    given = {**ATTENTION, "predict": lambda module, x: module.answer(module.body(x).mean(0))}
    found = carmil.audit(trained, bags, methods=("attention",), **given, **FAST)
    assert any("differs from predict" in note for note in found.notes)
