"""The parts specific to each method, against explicit computations bag by bag."""

import math

import pytest
import torch
import torch.nn.functional as nnf

from carmil import create_model
from carmil.models.pooling import Offsets, bag_argmax

X, STARTS, Y = torch.randn(31, 10), torch.tensor([0, 20, 26, 31]), torch.tensor([2, 0, 1])
BAGS = [(0, 20), (20, 26), (26, 31)]


def create(name, **options):
    torch.manual_seed(3)
    return create_model(name, 10, 3, hidden=8, **options)


@pytest.mark.parametrize("subtyping", [False, True])
@pytest.mark.parametrize("name", ["clam.sb", "clam.mb"])
def test_clam_instance_loss_equals_published_loss(name, subtyping):
    model = create(name, attention=6, dropout=0.0, sampled=4, subtyping=subtyping).train()
    p = model(X, STARTS)
    ours = model.losses(p, Y, ("cls", "instance"))["instance"]
    W, c = model.instance_classifiers.weight, model.instance_classifiers.bias
    for i, (first, last) in enumerate(BAGS):
        z, total = p.instances[first:last], 0.0
        for k in range(3):
            u = p.scores[first:last, k if name == "clam.mb" else 0]
            order = u.argsort(descending=True)
            top, bottom = order[:4], order.flip(0)[:4]
            judge = lambda rows, k=k, z=z: z[rows] @ W[k].T + c[k]  # noqa: E731
            if k == Y[i]:
                logits = torch.cat([judge(top), judge(bottom)])
                total = total + nnf.cross_entropy(logits, torch.tensor([1] * 4 + [0] * 4))
            elif subtyping:
                total = total + nnf.cross_entropy(judge(top), torch.zeros(4, dtype=torch.long))
        assert torch.isclose(ours[i], total / (3 if subtyping else 1), atol=1e-5)


def test_clam_instance_loss_uses_every_instance_of_small_bags():
    model = create("clam.sb", attention=6, dropout=0.0, sampled=8).train()
    loss = model.losses(model(X, STARTS), Y, ("instance",))["instance"]
    alone = model.losses(model(X[26:], torch.tensor([0, 5])), Y[2:], ("instance",))["instance"]
    assert torch.isfinite(loss).all()
    assert torch.isclose(loss[2], alone[0], atol=1e-5)


def test_clam_multi_branch_computes_each_logit_from_that_class_attention_map():
    model = create("clam.mb", attention=6, dropout=0.0).eval()
    p = model(X, STARTS)
    for k in range(3):
        Z = (p.scores[:20, k].softmax(0).unsqueeze(-1) * p.instances[:20]).sum(0)
        expected = model.classifier.weight[k, 0] @ Z + model.classifier.bias[k, 0]
        assert torch.isclose(p.logits[0, k], expected, atol=1e-5)


@pytest.mark.parametrize("name", ["dsmil", "dsmil.official"])
def test_dsmil_scores_are_similarities_to_critical_instance(name):
    torch.manual_seed(3)
    options = {} if name == "dsmil.official" else {"hidden": 8}
    model = create_model(name, 10, 3, query_size=6, **options).eval()
    p = model(X, STARTS)
    for i, (first, last) in enumerate(BAGS):
        z = p.instances[first:last]
        student_outputs, q = model.instance_classifier(z), model.query(z)
        pooled = []
        for k in range(3):
            u = q @ q[student_outputs[:, k].argmax()] / math.sqrt(6)
            assert torch.allclose(p.scores[first:last, k], u, atol=1e-5)
            pooled.append(u.softmax(0) @ z)
        assert torch.allclose(p.logits[i], model.classifier(torch.cat(pooled).unsqueeze(0))[0], atol=1e-5)


def test_dsmil_loss_is_mean_of_bag_loss_and_critical_instance_loss():
    model = create("dsmil").eval()
    p = model(X, STARTS)
    losses = model.losses(p, Y, ())
    largest = torch.stack([p.instance_logits[first:last].amax(0) for first, last in BAGS])
    assert torch.allclose(losses["cls"], nnf.cross_entropy(p.logits, Y, reduction="none"))
    assert torch.allclose(losses["max"], nnf.cross_entropy(largest, Y, reduction="none"))
    assert model.coefficients == {"cls": 0.5, "max": 0.5}


def test_car_on_dsmil_compares_unscaled_scores_of_predicted_class():
    model = create("car/dsmil", query_size=6, dropout=0.0).train()
    p = model(X, STARTS)
    ours = model.losses(p, Y, ("l1",))["l1"]
    for i, (first, last) in enumerate(BAGS):
        k = p.logits[i].argmax()
        gap = p.scores[first:last, k] - p.counterfactual.scores[first:last, 0, k]
        assert torch.isclose(ours[i], (gap * math.sqrt(6)).abs().mean(), atol=1e-5)
    assert model.coefficients["diff"] == pytest.approx(0.1)  # the branch's terms are halved with the bag's


def test_cia_on_dsmil_draws_critical_instances_at_random():
    model = create("cia/dsmil", query_size=6, dropout=0.0).train()
    p = model(X, STARTS)
    q = model.model.query(p.instances)
    similarity = q @ q.T / math.sqrt(6)
    for k in range(3):
        column = p.counterfactual.scores[:20, 0, k]
        assert (similarity[:20, :20] - column).abs().amax(1).min() < 1e-5  # similarities to one instance of the bag


def test_additive_mil_bag_logits_are_sum_of_instance_logits():
    model = create_model("additive", 10, 3, hidden=8).eval()
    p = model(X, STARTS)
    a = p.scores[:20].softmax(0)
    hidden = (a * X[:20]) @ model.first.weight.T + model.first_bias
    assert torch.allclose(p.instance_logits[:20], model.rest(hidden), atol=1e-5)
    assert torch.allclose(p.logits[0], p.instance_logits[:20].sum(0), atol=1e-5)


def test_acmil_masks_six_of_top_ten_instances_of_every_map_in_training():
    model = create("acmil", attention=6).train()
    p = model(X, STARTS)
    for first, last in BAGS:
        candidates = min(10, last - first)
        for h in range(5):
            hidden = p.weights[first:last, h] == 0
            assert hidden.sum() == int(candidates * 0.6)
            assert set(hidden.nonzero().flatten().tolist()) <= set(
                p.scores[first:last, h].topk(candidates).indices.tolist()
            )
    again = model(X, STARTS)
    assert not torch.equal(p.weights == 0, again.weights == 0)
    assert (model.eval()(X, STARTS).weights > 0).all()


def test_acmil_losses_are_head_classification_losses_and_map_similarity():
    model = create("acmil", attention=6, masked_share=0.0).train()
    p = model(X, STARTS)
    losses = model.losses(p, Y, ())
    a = p.weights[:20]
    pairs = [nnf.cosine_similarity(a[:, i], a[:, j], dim=0) for i in range(5) for j in range(i)]
    assert torch.isclose(losses["diversity"][0], torch.stack(pairs).mean(), atol=1e-5)
    W, c = model.head_classifiers.weight, model.head_classifiers.bias
    heads = [nnf.cross_entropy(W[h] @ p.pooled[0, h] + c[h], Y[0]) for h in range(5)]
    assert torch.isclose(losses["branch"][0], torch.stack(heads).mean(), atol=1e-5)


def test_mean_and_max_models_pool_instance_logits():
    for name, pool in (("mean", lambda x: x.mean(0)), ("max", lambda x: x.amax(0))):
        model = create(name).eval()
        p = model(X, STARTS)
        assert torch.allclose(p.logits[1], pool(p.instance_logits[20:26]), atol=1e-6)
        assert p.scores is None


def weno():
    torch.manual_seed(3)
    return create_model(
        "weno", 10, 2, hidden=8, teacher=8, attention=6, student=8, dropout=0.0, smooth_epochs=1, init_std=None
    ).train()


def test_weno_student_learns_from_teacher_scores_and_negative_bags():
    model, labels = weno(), torch.tensor([1, 0, 1])
    model.begin("teacher", 0)
    model(X, STARTS)
    model.begin("student", 0)
    p = model(X, STARTS)
    loss = model.losses(p, labels, ())["student"]
    u = p.scores.detach().squeeze(-1)
    target = ((u - model.lowest) / (model.highest - model.lowest)).clamp(1e-5, 1 - 1e-5)
    target = target * labels[Offsets(STARTS).bag_of]
    log_p = p.instance_logits.log_softmax(-1)
    expected = -(0.1 * (1 - target) * log_p[:, 0] + 0.9 * target * log_p[:, 1])
    assert torch.allclose(loss, torch.stack([expected[first:last].mean() for first, last in BAGS]), atol=1e-5)


def test_each_weno_pass_trains_encoder_and_either_teacher_or_student():
    model = weno()
    for phase, trained, untrained in (("teacher", "teacher", "student"), ("student", "student", "teacher")):
        model.zero_grad(set_to_none=True)
        model.begin(phase, 0)
        sum(model.losses(model(X, STARTS), torch.tensor([1, 0, 1]), ()).values()).sum().backward()
        with_gradient = {name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None}
        assert {"encoder", trained} <= with_gradient
        assert untrained not in with_gradient


def test_weno_student_runs_only_when_its_output_is_used():
    model, phases_run = weno(), []
    model.student.register_forward_hook(lambda *given: phases_run.append(model.phase))
    for phase, epoch in (("teacher", 0), ("student", 0), ("teacher", 2), ("student", 2)):
        model.begin(phase, epoch)
        model(X, STARTS)
    assert phases_run == ["student", "teacher", "student"]  # before mining starts, the teacher learns alone
    model.eval()
    model.begin("validation", 0)
    assert model(X, STARTS).instance_logits is not None


def test_weno_restricts_attention_to_instances_hard_for_student():
    model = weno()
    model.begin("teacher", 2)
    p = model(X, STARTS)
    student_outputs = p.instance_logits.softmax(-1)[:, 1]
    for i, (first, last) in enumerate(BAGS):
        hard = student_outputs[first:last] <= 0.5
        if not hard.any():
            hard = student_outputs[first:last] == student_outputs[first:last].max()
        a = p.scores[first:last, 0].masked_fill(~hard, float("-inf")).softmax(0)
        assert torch.allclose(
            p.extras["mined_logits"][i], model.classifier(a @ p.instances[first:last][None])[0], atol=1e-5
        )


def test_bag_argmax_returns_row_of_largest_value_in_every_bag():
    x = torch.randint(0, 4, (31, 2)).float()
    rows = bag_argmax(x, Offsets(STARTS))
    assert rows.tolist() == [(x[first:last].argmax(0) + first).tolist() for first, last in BAGS]
    even = Offsets(torch.tensor([0, 10, 20, 30]))
    assert bag_argmax(x[:30], even).tolist() == [(x[i : i + 10].argmax(0) + i).tolist() for i in (0, 10, 20)]


def test_abmil_mlp_output_is_added_to_linear_classifier():
    model = create("abmil.mlp", attention=6, dropout=0.0, mlp=5).eval()
    p = model(X, STARTS)
    Z, (norm, first, _, second) = p.pooled.squeeze(-2), model.mlp
    normed = nnf.layer_norm(Z, (8,)) * norm.weight + norm.bias
    hidden = nnf.relu(normed @ first.weight.T + first.bias)
    linear = model.classifier[0]
    expected = Z @ linear.weight.T + linear.bias + hidden @ second.weight.T + second.bias
    assert torch.allclose(p.logits, expected, atol=1e-6)
