import threading
from functools import partial

import pytest
import torch

from carmil import Bags, create_model
from carmil.counterfactual.branches import CAR
from carmil.errors import CarmilError
from carmil.models.pooling import Offsets
from carmil.training import TRAIN, UNUSED, VALIDATION, Member, Population, Recipe, fit
from carmil.training.feeder import Feeder
from carmil.training.loop import _batches
from carmil.training.optimizers import OPTIMIZERS, Optimizer
from carmil.training.predict import predict
from carmil.training.step import Stepper

WIDTH = 6


def bags(count=40, sizes=(3, 9), seed=0) -> Bags:
    """Bags whose class is 1 if some instance has a large first feature."""
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
def test_a_population_trains_as_its_members_would_alone(optimizer, sizes, name):
    """Each model has its own seed, learning rate, loss weights, dropout, random attention, bags and early stopping."""
    data, recipe = bags(sizes=sizes), Recipe(**{**vars(QUICK), "optimizer": optimizer})
    members = (
        MEMBERS if name.startswith("car") else [Member(m.seed, m.lr, {"diff": m.coefficients["diff"]}) for m in MEMBERS]
    )
    mine = roles().repeat(4, 1)
    mine[1, :12] = UNUSED
    mine[2, 25:30] = VALIDATION
    together = population(members, name, dropout=0.25)
    history = fit(together, data, mine, recipe)
    assert len(set(history.epochs_run.tolist())) > 1, "nobody stopped early: the test would prove less"
    for row, member in enumerate(members):
        alone = population([member], name, dropout=0.25)
        own = fit(alone, data, mine[row], recipe)
        assert own.epochs_run[0] == history.epochs_run[row]
        assert own.best_epoch[0] == history.best_epoch[row]
        # answers, not weights: Adam makes something of the rounding noise of a bias that the softmax cancels
        assert torch.allclose(
            predict(alone, data).probabilities[0], predict(together, data).probabilities[row], atol=1e-3
        )
        there = history.validation[: len(own.validation), row]
        assert torch.allclose(own.validation[:, 0], there, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("other", ["abmil", "car/abmil"])
def test_models_created_in_another_thread_do_not_change_initial_weights(other):
    """All weights come from torch's global generator: a model created between seeding and drawing would consume its numbers."""
    made = threading.Event()

    def elsewhere():
        create_model(other, WIDTH, 2)
        made.set()

    threads = []

    def build():
        threads.append(threading.Thread(target=elsewhere))
        threads[-1].start()
        made.wait(0.2)  # it would be made long since if it had not to wait
        made.clear()
        return create_model("car/abmil", WIDTH, 2, hidden=8, attention=5)

    beside = Population(build, MEMBERS)
    for thread in threads:
        thread.join()
    assert torch.equal(beside.weights, population(MEMBERS).weights)


def test_training_learns_the_rule():
    data, members = bags(120), [Member(seed=s, lr=0.05) for s in range(2)]
    trained = population(members, "abmil")
    fit(trained, data, roles(120, 30), Recipe(epochs=60, batch=8))
    fresh = bags(200, seed=5)
    answers = predict(trained, fresh)
    assert ((answers.probabilities.argmax(-1) == fresh.labels).float().mean(1) > 0.9).all()


def test_features_of_any_floating_type_are_trained_on():
    data = bags()
    results = []
    for dtype in (torch.float32, torch.float64):
        trained = population(MEMBERS[:1])
        fit(trained, Bags(data.features.to(dtype), data.offsets, data.labels), roles(), QUICK)
        results.append(trained.weights)
    assert torch.equal(*results)


def test_reported_losses_are_those_of_running_models():
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


def test_a_model_keeps_the_weights_of_its_best_validation_epoch():
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


def test_bags_a_model_does_not_train_on_do_not_reach_its_weights():
    data = bags()
    mine = roles()
    mine[:8] = UNUSED
    spoiled = Bags(data.features.clone(), data.offsets, data.labels)
    spoiled.features[: int(data.offsets[8])] = 1e3
    both = torch.stack([mine, roles()])
    results = []
    for source in (data, spoiled):
        pair = population(MEMBERS[:2])
        fit(pair, source, both, QUICK)
        results.append(pair.weights)
    assert torch.allclose(results[0][0], results[1][0], atol=1e-5)  # the order of summation may differ
    assert not torch.allclose(results[0][1], results[1][1])


def test_a_model_without_a_bag_in_the_batch_takes_no_step():
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
def test_optimizers_step_like_those_of_torch(name, make, recorded):
    """Tested as on a CPU and as on a GPU, where a step is recorded once and replayed."""
    ours, theirs = torch.randn(1, 5), torch.nn.Parameter(torch.empty(5))
    theirs.data.copy_(ours[0])
    mine, reference = OPTIMIZERS[name](ours, torch.tensor([0.1]), weight_decay=0.01), make([theirs])
    step = partial(Optimizer.step, mine) if recorded else mine.step
    for _ in range(10):
        gradient = torch.randn(5)
        theirs.grad = gradient.clone()
        reference.step()
        step(ours, gradient.unsqueeze(0).split([2, 3], dim=1), torch.tensor([True]))
    assert torch.allclose(ours[0], theirs.data, atol=1e-5)


def test_bag_order_is_a_function_of_study_seed_and_epoch():
    data, train = bags(), torch.ones(1, 40)
    feeder = Feeder(data, torch.device("cpu"))
    running = torch.ones(len(train), dtype=torch.bool)

    def order(recipe, epoch):
        return [batch.labels.tolist() for batch in _batches(feeder, train, running, None, recipe, epoch)]

    assert order(QUICK, 3) == order(QUICK, 3)
    assert order(QUICK, 3) != order(QUICK, 4)
    assert order(QUICK, 3) != order(Recipe(**{**vars(QUICK), "study_seed": 1}), 3)
    assert sum(order(Recipe(batch=7), 0), []) == data.labels.tolist()  # unshuffled: as they lie


def test_a_bag_is_skipped_once_all_its_learners_have_stopped(monkeypatch):
    """Two models with their own bags, one of which stops first: no step is run without a learner."""
    stepped = []
    plain = Stepper._step

    def seen(self, batch):
        stepped.append(int((self.state.running & batch.learners).sum()))
        return plain(self, batch)

    monkeypatch.setattr(Stepper, "_step", seen)
    mine = roles().repeat(2, 1)
    mine[0, :15], mine[1, 15:30] = UNUSED, UNUSED
    members = [Member(seed=3, lr=0.03), Member(seed=3, lr=1e-9)]  # the second's loss hardly moves, and by rounding only
    history = fit(population(members, "abmil"), bags(), mine, Recipe(epochs=12, batch=1, warmup=0, patience=3))
    assert history.epochs_run[0] != history.epochs_run[1], "both stopped at once: the test would prove nothing"
    assert set(stepped) == {1}
    assert len(stepped) == 15 * int(history.epochs_run.sum())


def test_a_warm_start_copies_the_baseline_but_not_the_branch():
    baseline, car = population([Member(seed=5)], "abmil"), population(MEMBERS, "car/abmil")
    before = car.state()
    car.warm_start(baseline.state())
    for name, tensor in car.state().items():
        if name.startswith("branch."):
            assert torch.equal(tensor, before[name])
        else:
            assert torch.equal(tensor, baseline.state()[name.removeprefix("model.")].expand_as(tensor))
    with pytest.raises(CarmilError, match="not this model without its branch"):
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
def test_an_invalid_population_is_refused_with_the_reason(make, words):
    with pytest.raises(CarmilError) as raised:
        make()
    assert words in str(raised.value)


def test_a_cosine_schedule_lowers_every_learning_rate_to_zero():
    recipe = Recipe(epochs=4, schedule="cosine")
    assert [round(recipe.pace(epoch), 4) for epoch in range(5)] == [1.0, 0.8536, 0.5, 0.1464, 0.0]
    weights = torch.zeros(2, 1)
    optimizer = OPTIMIZERS["sgd"](weights, torch.tensor([0.1, 0.2]))
    optimizer.slow_down(recipe.pace(2))
    optimizer.step(weights, [torch.ones(2, 1)], torch.tensor([True, True]))
    assert torch.allclose(weights, torch.tensor([[-0.05], [-0.1]]))
