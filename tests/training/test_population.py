import threading
from functools import partial

import pytest
import torch

from carmil import Bags, create_model
from carmil.counterfactual.branches import CAR
from carmil.errors import CarmilError
from carmil.models.contract import Counterfactual, Prediction
from carmil.models.pooling import Offsets
from carmil.training import TRAIN, UNUSED, VALIDATION, Member, Population, Recipe, fit
from carmil.training.feeder import Feeder
from carmil.training.loop import _batches
from carmil.training.optimizers import OPTIMIZERS, Optimizer
from carmil.training.population import _single
from carmil.training.predict import predict
from carmil.training.step import Stepper

WIDTH = 6


def bags(count=40, sizes=(3, 9), seed=0) -> Bags:
    """Return bags whose class is 1 if some instance has a large first feature."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(*sizes, (count,), generator=generator).tolist()
    labels = torch.randint(0, 2, (count,), generator=generator)
    parts = [torch.randn(size, WIDTH, generator=generator) for size in sizes]
    for part, label in zip(parts, labels, strict=True):
        part[0, 0] = 4.0 if label else -1.0
    return Bags.from_list(parts, labels=labels)


def roles(count=40, validation=10):
    return torch.cat([torch.full((count - validation,), TRAIN), torch.full((validation,), VALIDATION)])


def population(members, name="car/abmil", **options):
    return Population(lambda: create_model(name, WIDTH, 2, hidden=8, attention=5, **options), members)


MEMBERS = [
    Member(seed=3, lr=0.03, coefficients=CAR.coefficients(0.2, 1.0, "l1")),
    Member(seed=4, lr=0.01, coefficients=CAR.coefficients(0.5, 0.3, "cosine")),
    Member(seed=3, lr=0.05, coefficients=CAR.coefficients(0.1, 0.1, "l1")),
    Member(seed=9, lr=0.04, coefficients=CAR.coefficients(1.0, 0.2, "l1")),
]
QUICK = Recipe(epochs=25, batch=7, warmup=2, patience=4, shuffle=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("sizes", [(3, 9), (5, 6)])
@pytest.mark.parametrize("name", ["car/abmil", "cia/abmil.gated"])
def test_population_trains_like_its_members_alone(optimizer, sizes, name):
    """Each model has its own seed, learning rate, loss weights, dropout, random attention, bags and early stopping."""
    data, recipe = bags(sizes=sizes), Recipe(**{**vars(QUICK), "epochs": 16, "optimizer": optimizer})
    members = (
        MEMBERS if name.startswith("car") else [Member(m.seed, m.lr, {"diff": m.coefficients["diff"]}) for m in MEMBERS]
    )
    selected = roles().repeat(4, 1)
    selected[1, :12] = UNUSED
    selected[2, 25:30] = VALIDATION
    together = population(members, name, dropout=0.25)
    history = fit(together, data, selected, recipe)
    assert len(set(history.epochs_run.tolist())) > 1, "no model stopped early: the test would prove less"
    for row, member in enumerate(members):
        alone = population([member], name, dropout=0.25)
        own = fit(alone, data, selected[row], recipe)
        assert own.epochs_run[0] == history.epochs_run[row]
        assert own.best_epoch[0] == history.best_epoch[row]
        # compare predictions, not weights: Adam amplifies rounding noise in a bias that the softmax cancels
        assert torch.allclose(predict(alone, data).values[0], predict(together, data).values[row], atol=1e-3)
        there = history.validation[: len(own.validation), row]
        assert torch.allclose(own.validation[:, 0], there, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("other", ["abmil", "car/abmil"])
def test_models_created_in_another_thread_do_not_change_initial_weights(other):
    """Weights come from torch's global generator, from which a concurrently created model would also draw."""
    created = threading.Event()

    def create_in_thread():
        create_model(other, WIDTH, 2)
        created.set()

    threads = []

    def build():
        threads.append(threading.Thread(target=create_in_thread))
        threads[-1].start()
        created.wait(0.2)  # without the lock, the other model would be created within this time
        created.clear()
        return create_model("car/abmil", WIDTH, 2, hidden=8, attention=5)

    concurrent = Population(build, MEMBERS)
    for thread in threads:
        thread.join()
    assert torch.equal(concurrent.weights, population(MEMBERS).weights)


def test_training_learns_a_simple_rule():
    data, members = bags(120), [Member(seed=s, lr=0.05) for s in range(2)]
    trained = population(members, "abmil")
    fit(trained, data, roles(120, 30), Recipe(epochs=60, batch=8))
    fresh = bags(200, seed=5)
    answers = predict(trained, fresh)
    assert ((answers.values.argmax(-1) == fresh.labels).float().mean(1) > 0.9).all()


def test_training_accepts_features_of_any_floating_type():
    data = bags()
    results = []
    for dtype in (torch.float32, torch.float64):
        trained = population(MEMBERS[:1])
        fit(trained, Bags(data.features.to(dtype), data.offsets, data.labels), roles(), QUICK)
        results.append(trained.weights)
    assert torch.equal(*results)


def test_reported_losses_cover_only_running_models():
    reports = []
    fit(
        population(MEMBERS),
        bags(),
        roles(),
        QUICK,
        on_epoch=lambda epoch, losses, running: reports.append((losses, running)),
    )
    assert all(losses["total"] > 0.05 for losses, _ in reports)
    assert reports[-1][1] == 0 or len(reports) == QUICK.epochs


def test_model_keeps_weights_of_best_validation_epoch():
    data, trained = bags(), population(MEMBERS[2:3])
    history = fit(trained, data, roles(), QUICK)
    best = int(history.best_epoch[0])
    assert best >= QUICK.warmup
    assert history.validation[QUICK.warmup :, 0].nan_to_num(9).argmin() + QUICK.warmup == best
    held_out = data[roles() == VALIDATION]
    trained.train(False)
    losses = trained.losses(trained(held_out.features, Offsets(held_out.offsets)), held_out.labels)
    assert losses["cls"].mean() == pytest.approx(history.validation[best, 0].item(), rel=1e-4)
    assert history.epochs_run[0] in (best + 1 + QUICK.patience, QUICK.epochs)


def test_bags_outside_the_training_set_do_not_affect_weights():
    data = bags()
    own = roles()
    own[:8] = UNUSED
    spoiled = Bags(data.features.clone(), data.offsets, data.labels)
    spoiled.features[: int(data.offsets[8])] = 1e3
    both = torch.stack([own, roles()])
    results = []
    for source in (data, spoiled):
        pair = population(MEMBERS[:2])
        fit(pair, source, both, QUICK)
        results.append(pair.weights)
    assert torch.allclose(results[0][0], results[1][0], atol=1e-5)  # the order of summation may differ
    assert not torch.allclose(results[0][1], results[1][1])


def test_model_without_a_bag_in_the_batch_takes_no_step():
    for optimizer in OPTIMIZERS.values():
        weights = torch.ones(2, 3)
        steps = optimizer(weights, torch.tensor([0.1, 0.1]), weight_decay=0.1)
        steps.step(weights, [torch.ones(2, 3)], torch.tensor([True, True]))
        before = weights.clone()
        steps.step(weights, [torch.ones(2, 1), torch.ones(2, 2)], torch.tensor([True, False]))
        assert torch.equal(weights[1], before[1])
        assert not torch.equal(weights[0], before[0])


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01)),
        ("adam", lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.01)),
    ],
)
@pytest.mark.parametrize("recorded", [False, True])
def test_optimizers_step_like_torch_optimizers(name, make, recorded):
    """Steps run directly as on a CPU, or recorded once and replayed as on a GPU."""
    ours, expected = torch.randn(1, 5), torch.nn.Parameter(torch.empty(5))
    expected.data.copy_(ours[0])
    actual, reference = OPTIMIZERS[name](ours, torch.tensor([0.1]), weight_decay=0.01), make([expected])
    step = partial(Optimizer.step, actual) if recorded else actual.step
    for _ in range(10):
        gradient = torch.randn(5)
        expected.grad = gradient.clone()
        reference.step()
        step(ours, gradient.unsqueeze(0).split([2, 3], dim=1), torch.tensor([True]))
    assert torch.allclose(ours[0], expected.data, atol=1e-5)


def test_bag_order_depends_on_study_seed_and_epoch_only():
    data, train = bags(), torch.ones(1, 40)
    feeder = Feeder(data, torch.device("cpu"))
    every, running = torch.ones(40, dtype=torch.bool), torch.ones(1, dtype=torch.bool)

    def order(recipe, epoch):
        batches = _batches(feeder, train, every, running, every, None, recipe, epoch)
        return [batch.labels.tolist() for batch in batches]

    assert order(QUICK, 3) == order(QUICK, 3)
    assert order(QUICK, 3) != order(QUICK, 4)
    assert order(QUICK, 3) != order(Recipe(**{**vars(QUICK), "study_seed": 1}), 3)
    assert sum(order(Recipe(batch=7), 0), []) == data.labels.tolist()  # unshuffled: in stored order


def test_bag_is_skipped_once_all_models_that_train_on_it_have_stopped(monkeypatch):
    """Two models train on different bags and one stops first: no step runs without an active model."""
    stepped = []
    plain = Stepper._step

    def counted_step(self, batch):
        stepped.append(int((self.state.running & batch.learners).sum()))
        return plain(self, batch)

    monkeypatch.setattr(Stepper, "_step", counted_step)
    own = roles().repeat(2, 1)
    own[0, :15], own[1, 15:30] = UNUSED, UNUSED
    members = [
        Member(seed=3, lr=0.03),
        Member(seed=3, lr=1e-9),
    ]  # the loss of the second model changes by rounding errors only
    history = fit(population(members, "abmil"), bags(), own, Recipe(epochs=12, batch=1, warmup=0, patience=3))
    assert history.epochs_run[0] != history.epochs_run[1], "both models stopped together: the test would prove nothing"
    assert set(stepped) == {1}
    assert len(stepped) == 15 * int(history.epochs_run.sum())


def test_logits_of_many_classes_are_computed_in_32_bits_in_a_population_in_half_precision():
    """Autocast computes products with 16 outputs or more in 16 bits."""
    half, offsets = torch.ones(2, 3, 20, dtype=torch.bfloat16), Offsets(torch.tensor([0, 1, 2, 3]))
    cf = Counterfactual(torch.ones(2, 3, 1, 1), half.unsqueeze(-2))
    single = _single(Prediction(half, offsets, instance_logits=half, counterfactual=cf))
    assert single.logits.dtype == single.instance_logits.dtype == single.counterfactual.logits.dtype == torch.float32


def test_warm_start_copies_the_baseline_but_not_the_branch():
    baseline, car = population([Member(seed=5)], "abmil"), population(MEMBERS, "car/abmil")
    before = car.state()
    car.warm_start(baseline.state())
    for name, tensor in car.state().items():
        if name.startswith("branch."):
            assert torch.equal(tensor, before[name])
        else:
            assert torch.equal(tensor, baseline.state()[name.removeprefix("model.")].expand_as(tensor))
    with pytest.raises(CarmilError, match="the same model without its branch"):
        car.warm_start(population([Member()], "abmil.gated").state())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: population([]), "a population of 0 models"),
        (lambda: Member(lr=0.0), "a learning rate of 0.0"),
        (lambda: Member(lr=float("inf")), "a learning rate of inf"),
        (lambda: population([Member(coefficients={"alpha": 1.0})]), "unknown loss term 'alpha'"),
        (
            lambda: fit(population([Member(lr=1e30)]), bags(), roles(), QUICK),
            "never had a finite validation loss: lower its learning rate (1e+30)",
        ),
        (lambda: Recipe(epochs=0), "epochs is 0: expected at least 1"),
        (lambda: Recipe(epochs=10**12), "expected at most 1,000,000"),
        (lambda: Recipe(optimizer="lion"), "unknown optimizer 'lion'"),
        (lambda: fit(population(MEMBERS), bags(), roles(30), QUICK), "expected (4 models, 40 bags)"),
        (lambda: fit(population(MEMBERS), bags(), torch.full((40,), TRAIN), QUICK), "model 0 has no validation bag"),
        (lambda: population(MEMBERS).load_state({}), "these weights belong to another model"),
    ],
)
def test_invalid_training_inputs_raise_an_error_with_the_reason(make, words):
    with pytest.raises(CarmilError) as raised:
        make()
    assert words in str(raised.value)


def test_cosine_schedule_lowers_every_learning_rate_to_zero():
    recipe = Recipe(epochs=4, schedule="cosine")
    assert [round(recipe.pace(epoch), 4) for epoch in range(5)] == [1.0, 0.8536, 0.5, 0.1464, 0.0]
    weights = torch.zeros(2, 1)
    optimizer = OPTIMIZERS["sgd"](weights, torch.tensor([0.1, 0.2]))
    optimizer.slow_down(recipe.pace(2))
    optimizer.step(weights, [torch.ones(2, 1)], torch.tensor([True, True]))
    assert torch.allclose(weights, torch.tensor([[-0.05], [-0.1]]))
