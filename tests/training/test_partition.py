"""Training a population in parts gives the same result as training it as a whole."""

import json
from functools import partial

import pytest
import torch
from safetensors import safe_open

from carmil import Bags, create_model
from carmil.errors import CarmilError
from carmil.training import TRAIN, UNUSED, VALIDATION, Member, Population, Recipe, fit
from carmil.training import partition as module
from carmil.training.checkpoint import Checkpoint
from carmil.training.partition import Part, fit_in_parts, partition

WIDTH, MODELS, BAGS = 6, 9, 24
RECIPE = Recipe(epochs=9, batch=1, warmup=1, patience=2, shuffle=True, optimizer="adam")


def bags() -> Bags:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (BAGS,), generator=generator)
    features = [torch.randn(int(5 + 3 * label), WIDTH, generator=generator) for label in labels]
    for one, label in zip(features, labels, strict=True):
        one[0, 0] = 3.0 if label else -1.0
    return Bags.from_list(features, labels=labels)


def roles() -> torch.Tensor:
    """Roles of three folds, repeated every third row."""
    result = torch.full((MODELS, BAGS), TRAIN)
    for row in range(MODELS):
        fold = row % 3
        result[row, fold * 8 : fold * 8 + 8] = UNUSED
        result[row, (fold * 8 + 8) % BAGS : (fold * 8 + 8) % BAGS + 5] = VALIDATION
    return result


WIDTHS = {"hidden": 32, "attention": 32, "dropout": 0.25}


def population(name="car/abmil.gated", **options) -> Population:
    """Create the population; widths other than 32 leave a remainder whose sigmoid depends on its position in torch."""
    members = [Member(seed=row // 3, lr=0.02 / (1 + row % 4)) for row in range(MODELS)]
    return Population(partial(create_model, name, WIDTH, 2, **(options or WIDTHS)), members)


def same(first, second) -> bool:
    """Compare weights, buffers and histories bit by bit."""
    (actual, history), (expected, other) = first, second
    tables = {**history.train, "validation": history.validation}
    others = {**other.train, "validation": other.validation}
    return (
        torch.equal(actual.weights, expected.weights)
        and torch.equal(actual.buffers, expected.buffers)
        and tables.keys() == others.keys()
        and all(torch.equal(tables[name].nan_to_num(-9), others[name].nan_to_num(-9)) for name in tables)
        and torch.equal(history.best_epoch, other.best_epoch)
        and torch.equal(history.epochs_run, other.epochs_run)
    )


@pytest.fixture(scope="module")
def whole():
    trained = population()
    return trained, fit(trained, bags(), roles(), RECIPE)


@pytest.mark.parametrize("at_most", [2, 4, 7, None])
def test_training_in_parts_is_bitwise_equal_to_training_as_a_whole(whole, at_most):
    assert len(set(whole[1].epochs_run.tolist())) > 2, "all models stopped together: the test would prove less"
    assert same(fit_in_parts(population(), bags(), roles(), RECIPE, at_most=at_most), whole)


def test_training_in_parts_returns_buffers_such_as_running_statistics():
    trained = population("additive", hidden=32)
    history = fit(trained, bags(), roles(), RECIPE)
    assert trained.buffers.numel() > 0
    assert same(fit_in_parts(population("additive", hidden=32), bags(), roles(), RECIPE, at_most=4), (trained, history))


@pytest.mark.parametrize("at_most", [1, 2, 3, 4, 5, 8, 9, 100, None])
@pytest.mark.parametrize("models", [1, 2, 3, 5, 9])
def test_parts_are_nearly_equal_in_size_and_hold_at_least_two_models(models, at_most):
    parts = partition(roles()[:models], at_most)
    most = models if at_most is None else max(2, at_most)
    assert sorted({row for part in parts for row in part.tolist()}) == list(range(models))
    assert all(min(2, models) <= len(part) <= most for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert len(parts) == -(-models // most)


def test_models_with_the_same_training_bags_share_a_part():
    assert sorted(part.tolist() for part in partition(roles(), 3)) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


@pytest.mark.parametrize("at_most", [3, 4, 5, 6])
def test_remaining_models_keep_their_partition(at_most):
    parts = [part.tolist() for part in partition(roles(), at_most)]
    for finished in range(len(parts)):
        left = [part.tolist() for part in partition(roles(), at_most, done=parts[finished])]
        assert left == parts[:finished] + parts[finished + 1 :]
    assert partition(roles(), at_most, done=range(MODELS)) == []


class KilledError(Exception):
    pass


def test_interrupted_training_resumes_its_part_and_repeats_no_finished_part(whole, tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.safetensors"
    epochs: list[int] = []

    def kill_after_13_epochs(epoch, losses, running):
        epochs.append(epoch)
        if len(epochs) == 13:
            raise KilledError

    def train(at_most, on_epoch):
        where = Checkpoint(path, "mine", every=0.0)
        return fit_in_parts(population(), bags(), roles(), RECIPE, at_most=at_most, on_epoch=on_epoch, checkpoint=where)

    with pytest.raises(KilledError):
        train(3, kill_after_13_epochs)
    folder = Checkpoint(path, "mine").parts
    (begun,) = folder.glob("*.begun.safetensors")
    ended = {name: name.stat().st_mtime_ns for name in folder.glob("*.ended.safetensors")}
    assert ended, "no part had ended: the test would prove less"
    with safe_open(begun, framework="pt") as file:
        stopped = json.loads(file.metadata()["carmil"])["epoch"]
    recorded: list[list[int]] = []
    inner = module.fit

    def counted_fit(*given, on_epoch, **others):
        recorded.append([])
        own = recorded[-1].append
        return inner(*given, on_epoch=lambda epoch, *rest: (own(epoch), on_epoch(epoch, *rest)), **others)

    monkeypatch.setattr(module, "fit", counted_fit)
    assert same(train(3, lambda *reports: None), whole)
    assert len(recorded) == 3 - len(ended)
    assert recorded[0][0] == stopped + 1
    assert all(name.stat().st_mtime_ns == written for name, written in ended.items())
    assert not list(folder.glob("*.begun.safetensors"))
    assert same(train(3, lambda *reports: None), whole)  # all parts are finished
    assert len(recorded) == 3 - len(ended)
    Checkpoint(path, "mine").remove()
    assert not folder.exists()


def test_resuming_with_another_part_size_keeps_finished_parts(whole, tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    for stop, at_most in ((2, 2), (4, 5), (99, None)):
        trained = 0

        def engine(parts, stop=stop):
            for part in parts:
                nonlocal trained
                if trained == stop:
                    raise KilledError
                trained += 1
                yield part.train(bags(), "cpu")

        try:
            ended = fit_in_parts(
                population(),
                bags(),
                roles(),
                RECIPE,
                at_most=at_most,
                engine=engine,
                checkpoint=Checkpoint(path, "mine"),
            )
        except KilledError:
            assert stop == 2
    assert same(ended, whole)


def test_checkpoint_parts_of_another_training_raise_an_error(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    train = partial(fit_in_parts, population(), bags(), roles(), Recipe(epochs=1), at_most=5)
    train(checkpoint=Checkpoint(path, "mine"))
    with pytest.raises(CarmilError, match="belongs to another training"):
        train(checkpoint=Checkpoint(path, "theirs"))


def test_checkpoint_folder_missing_on_a_worker_raises_an_error_naming_it(tmp_path):
    where = Checkpoint(tmp_path / "nowhere" / "checkpoint.safetensors", "mine")
    part = Part(torch.tensor([0, 1]), population().subset(torch.tensor([0, 1])), roles()[:2], RECIPE, where)
    with pytest.raises(CarmilError, match=r"checkpoint.parts does not exist on this machine: put the run's folder"):
        part.train(bags(), "cpu")


def test_progress_over_parts_never_decreases():
    reports: list[tuple[int, int]] = []
    recipe = Recipe(epochs=10, batch=1, warmup=1, patience=100)
    fit_in_parts(
        population(),
        bags(),
        roles(),
        recipe,
        at_most=4,
        on_epoch=lambda epoch, losses, running: reports.append((epoch, running)),
    )
    assert len(reports) == 30
    assert [epoch for epoch, _ in reports] == sorted(epoch for epoch, _ in reports)
    assert reports[0] == (0, 9) and reports[-1] == (9, 3)
    assert reports[10][1] == 6  # three models are finished


def test_population_of_one_model_is_trained_as_one_part():
    one = population().subset(torch.tensor([4]))
    alone = population().subset(torch.tensor([4]))
    history = fit(alone, bags(), roles()[4:5], RECIPE)
    assert same(fit_in_parts(one, bags(), roles()[4:5], RECIPE, at_most=2), (alone, history))
