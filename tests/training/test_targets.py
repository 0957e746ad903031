"""Training for targets other than classes: what is fitted on outcomes, steps without events, and independence of models."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from carmil import Bags, create_model, list_models
from carmil.errors import CarmilError
from carmil.models import BagModel, registered_models
from carmil.models.contract import Prediction
from carmil.models.layers import Linear
from carmil.models.pooling import Offsets, bag_mean
from carmil.targets.links import Cox, CumulativeLogits, DiscreteTime, Link, Scale, Sigmoids
from carmil.training import TRAIN, UNUSED, VALIDATION, Member, Population, Recipe, fit
from carmil.training.checkpoint import Checkpoint
from carmil.training.outcomes import training_outputs
from carmil.training.partition import fit_in_parts
from carmil.training.predict import predict
from carmil.training.protocol import GridPoint, train_protocol

WIDTH, BAGS, FOLDS = 6, 40, 5
SMALL = {"hidden": 32, "attention": 32}


def survival(signal: Tensor, generator: torch.Generator) -> Tensor:
    """Return times in whole months, shorter for a large signal, and whether the event occurred."""
    time = (12 * torch.exp(-signal + 0.3 * torch.randn(len(signal), generator=generator))).ceil()
    return torch.stack([time, (torch.rand(len(signal), generator=generator) < 0.6).float()], dim=-1)


def several_labels(signal: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(len(signal), 2, generator=generator)
    labels = (signal.unsqueeze(-1) + 0.3 * noise > 0).float()
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = float("nan")
    return labels


Outcomes = Callable[[Tensor, torch.Generator], Tensor]
# For each kind: the link, the number of outputs, and outcomes that depend on a signal (b).
KINDS: dict[str, tuple[Callable[[], Link], int, Outcomes]] = {
    "cox": (Cox, 1, survival),
    "discrete": (DiscreteTime, 1, survival),
    "value": (Scale, 1, lambda signal, _: (50 + 9 * signal).unsqueeze(-1)),
    "huber": (partial(Scale, robust=True), 1, lambda signal, _: (50 + 9 * signal).unsqueeze(-1)),
    "ordinal": (
        partial(CumulativeLogits, 4),
        1,
        lambda signal, _: torch.bucketize(signal.contiguous(), torch.tensor([-1.0, 0, 1])),
    ),
    "labels": (Sigmoids, 2, several_labels),
}
RECIPE = Recipe(epochs=5, batch=8, optimizer="adam", weight_decay=1e-3, warmup=1, patience=5, shuffle=True)


def bags(kind: str, *, noisy: Tensor | None = None) -> Bags:
    """Return bags whose outcome depends on their first feature; bags `noisy` (b, bool) have other outcomes at random."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(3, 9, (BAGS,), generator=generator).tolist()
    signal = torch.randn(BAGS, generator=generator)
    features = [torch.randn(size, WIDTH, generator=generator) for size in sizes]
    for instances, value in zip(features, signal.tolist(), strict=True):
        instances[:, 0] += 2 * value
    outcomes = KINDS[kind][2](signal, generator)
    if noisy is not None:
        other = KINDS[kind][2](signal[torch.randperm(BAGS, generator=generator)], generator)
        outcomes[noisy] = other[noisy]
    return Bags.from_list(features, labels=outcomes)


def fold_roles() -> Tensor:
    """Return (folds, b): an eighth of each fold's remaining bags validate."""
    fold_of = torch.arange(BAGS) % FOLDS
    roles = torch.full((FOLDS, BAGS), TRAIN)
    for fold in range(FOLDS):
        roles[fold, fold_of == fold] = UNUSED
        roles[fold, fold_of == (fold + 1) % FOLDS] = VALIDATION
    return roles


def build(kind: str, name: str = "car/abmil", **options) -> BagModel:
    link, outputs, _ = KINDS[kind]
    return create_model(name, WIDTH, outputs, link=link(), **options)


def population(kind: str, members: list[Member], name: str = "car/abmil", **options) -> Population:
    return Population(lambda: build(kind, name, **(options or SMALL)), members)


def test_folds_of_all_kinds_of_targets_have_informative_bags():
    for kind, (link, _, _) in KINDS.items():
        informative = link().informative(bags(kind).labels)
        assert all((informative & (row == role)).sum() >= 2 for row in fold_roles() for role in (TRAIN, VALIDATION))


@pytest.mark.parametrize("patience", [100, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_noise_in_the_outcomes_of_a_test_fold_does_not_change_a_bit_of_its_training(kind, patience):
    """The models of 5 folds and 2 seeds form one population; test bags of a fold are training bags of the others."""
    fold, roles = 2, fold_roles()
    trained = [
        train_protocol(
            partial(build, kind, **SMALL),
            bags(kind, noisy=noisy),
            roles,
            recipe=replace(RECIPE, epochs=12, patience=patience),
            seeds=(0, 1),
            grid=(GridPoint(lr=0.01),),
        )
        for noisy in (None, roles[fold] == UNUSED)
    ]
    own = torch.arange(2 * FOLDS) % FOLDS == fold
    stopped = [one.history.epochs_run < 12 for one in trained]
    assert not stopped[0].any() if patience == 100 else (stopped[0] | stopped[1])[~own].any()
    before, after = (
        {
            "weights": one.population.weights.T,
            "buffers": one.population.buffers.T,
            "best epoch": one.history.best_epoch.unsqueeze(0),
            **one.history.tables,
        }
        for one in trained
    )
    for name in before:
        # curves end with the last model, and are NaN after a model's end
        last = min(len(before[name]), len(after[name]))
        first, second = before[name][:last, own], after[name][:last, own]
        assert torch.equal(first.isnan(), second.isnan()) and torch.equal(first.nan_to_num(), second.nan_to_num()), name
    assert not torch.isclose(before["weights"], after["weights"]).all(0)[~own].any(), "the noise reached no other fold"


@pytest.mark.parametrize("kind", KINDS)
def test_population_trains_like_its_members_alone(kind):
    members = [Member(seed=3, lr=0.03), Member(seed=4, lr=0.01), Member(seed=3, lr=0.02)]
    data, roles = bags(kind), fold_roles()[[0, 3, 1]]
    recipe = Recipe(**{**vars(RECIPE), "epochs": 12, "patience": 3})
    together = population(kind, members, dropout=0.25, **SMALL)
    history = fit(together, data, roles, recipe)
    for row, member in enumerate(members):
        alone = population(kind, [member], dropout=0.25, **SMALL)
        own = fit(alone, data, roles[row], recipe)
        assert own.epochs_run[0] == history.epochs_run[row]
        assert own.best_epoch[0] == history.best_epoch[row]
        scale = 9 if kind in ("value", "huber") else 1
        given, expected = predict(together, data).values[row], predict(alone, data).values[0]
        assert torch.allclose(given, expected, atol=1e-3 * scale)
        there = history.validation[: len(own.validation), row]
        assert torch.allclose(own.validation[:, 0], there, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_training_learns_the_target(kind):
    data, roles = bags(kind), torch.where(torch.arange(BAGS) % 4 == 0, VALIDATION, TRAIN)
    trained = population(kind, [Member(seed=0, lr=0.01)])
    recipe = Recipe(**{**vars(RECIPE), "epochs": 40, "patience": 40})
    history = fit(trained, data, roles, recipe)
    assert history.validation[:, 0].min() < 0.95 * history.validation[0, 0]


# What is fitted on outcomes


def test_each_model_uses_the_mean_and_deviation_of_its_own_training_bags():
    data, roles = bags("value"), fold_roles()
    trained = population("value", [Member(seed=0)] * FOLDS)
    fit(trained, data, roles, RECIPE)
    state = trained.state()
    for row in range(FOLDS):
        own = data.labels[roles[row] == TRAIN, 0].double()
        assert state["model.link.mean"][row].item() == pytest.approx(own.mean().item(), rel=1e-6)
        assert state["model.link.deviation"][row].item() == pytest.approx(own.std(correction=0).item(), rel=1e-6)
    assert len(set(state["model.link.mean"].flatten().tolist())) == FOLDS


@pytest.mark.parametrize("kind", ["ordinal", "discrete"])
def test_cut_points_and_baselines_are_initialised_from_the_training_bags_of_each_model(kind):
    data, roles = bags(kind), fold_roles()
    trained = population(kind, [Member(seed=0, lr=1e-12)] * FOLDS)
    fit(trained, data, roles, RECIPE)
    state = trained.state()
    for row in range(FOLDS):
        for name, value in KINDS[kind][0]().fitted(data.labels[roles[row] == TRAIN]).items():
            assert torch.allclose(state[f"model.link.{name}"][row], value.float(), atol=1e-6)


def test_a_warm_start_keeps_the_cut_points_of_the_baseline():
    data, roles = bags("ordinal"), fold_roles()
    baseline = population("ordinal", [Member(seed=0, lr=0.05)] * FOLDS, "abmil")
    fit(baseline, data, roles, RECIPE)
    started = population("ordinal", [Member(seed=0, lr=1e-12)] * FOLDS)
    started.warm_start(baseline.state())
    fit(started, data, roles, RECIPE)
    assert torch.allclose(started.state()["model.link.first"], baseline.state()["link.first"], atol=1e-6)


@pytest.mark.parametrize("kind", ["cox", "discrete"])
def test_risks_are_centred_on_the_training_bags_of_each_model(kind):
    """The centre is computed with the weights that are kept, and does not depend on the other models."""
    data, roles = bags(kind), fold_roles()
    trained = population(kind, [Member(seed=seed, lr=0.01) for seed in range(FOLDS)])
    fit(trained, data, roles, RECIPE)
    risks = predict(trained, data).values
    centres = trained.state()["model.link.centre"]
    for row, outputs in enumerate(training_outputs(trained, data, roles == TRAIN)):
        own = roles[row] == TRAIN
        assert risks[row, own].mean().abs() < 1e-6
        assert torch.allclose(outputs - centres[row], risks[row, own], atol=1e-6)
    assert centres.unique().numel() == FOLDS


@pytest.mark.parametrize("kind", ["cox", "discrete"])
def test_survival_training_in_parts_equals_training_as_a_whole(kind):
    data, roles, members = bags(kind), fold_roles(), [Member(seed=seed, lr=0.01) for seed in range(FOLDS)]
    whole = population(kind, members)
    fit(whole, data, roles, RECIPE, trained_on=(roles == TRAIN).any(0))
    parts, _ = fit_in_parts(population(kind, members), data, roles, RECIPE, at_most=3)
    assert torch.allclose(predict(parts, data).values, predict(whole, data).values, atol=1e-3)
    assert torch.allclose(parts.buffers, whole.buffers, atol=1e-3)


class KilledError(Exception):
    pass


@pytest.mark.parametrize("kind", ["cox", "discrete"])
def test_survival_training_resumed_from_a_checkpoint_is_bitwise_equal(kind, tmp_path):
    data, roles, members = bags(kind), fold_roles(), [Member(seed=seed, lr=0.01) for seed in range(FOLDS)]
    whole = population(kind, members)
    expected = fit(whole, data, roles, RECIPE)

    def kill(epoch, losses, running):
        if epoch == 2:
            raise KilledError

    where = Checkpoint(tmp_path / "checkpoint.safetensors", "mine", every=0.0)
    with pytest.raises(KilledError):
        fit(population(kind, members), data, roles, RECIPE, checkpoint=where, on_epoch=kill)
    epochs: list[int] = []
    resumed = population(kind, members)
    history = fit(
        resumed, data, roles, RECIPE, checkpoint=where, on_epoch=lambda epoch, losses, running: epochs.append(epoch)
    )
    assert epochs == [2, 3, 4]
    assert torch.equal(resumed.weights, whole.weights) and torch.equal(resumed.buffers, whole.buffers)
    for name, table in expected.tables.items():
        assert torch.equal(table, history.tables[name])


# Cox's likelihood


class LinearMean(BagModel):
    """F = mean_j w . x_j."""

    def __init__(self) -> None:
        super().__init__()
        self.classes, self.link = 1, Cox()
        self.classifier = Linear(3, 1, bias=False)

    def forward(self, features: Tensor, offsets: Offsets | Tensor) -> Prediction:
        offsets = Offsets.of(offsets, features.device)
        return Prediction(bag_mean(self.classifier(features), offsets), offsets)


@pytest.mark.filterwarnings("ignore:Starting with pandas version")
def test_linear_model_of_single_instances_learns_the_coefficients_of_lifelines():
    lifelines, pd = pytest.importorskip("lifelines"), pytest.importorskip("pandas")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150, 3, generator=generator)
    outcomes = survival(x @ torch.tensor([0.8, -0.5, 0.0]), generator)
    assert len(outcomes[:, 0].unique()) < 100, "no ties: the test would prove less"
    roles = torch.tensor([[TRAIN] * 130 + [VALIDATION] * 20, [VALIDATION] * 20 + [TRAIN] * 130])
    trained = Population(LinearMean, [Member(seed=seed, lr=0.3) for seed in range(2)])
    recipe = Recipe(epochs=300, batch=150, warmup=299, shuffle=True)
    fit(trained, Bags(x, torch.arange(151), outcomes), roles, recipe)
    for row in range(2):
        own = roles[row] == TRAIN
        columns = {"time": outcomes[own, 0], "event": outcomes[own, 1]} | {f"x{i}": x[own, i] for i in range(3)}
        frame = pd.DataFrame({name: values.numpy().astype(float) for name, values in columns.items()})
        expected = lifelines.CoxPHFitter().fit(frame, "time", "event").params_[["x0", "x1", "x2"]].to_numpy()
        assert trained.state()["classifier.weight"][row, 0].tolist() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", ["abmil", "additive"])
def test_a_step_without_an_event_changes_nothing(name, optimizer):
    """Weights, momentum and statistics of batch normalisation stay as if its bags were not used for training."""
    data = bags("cox")
    data.labels[:, 1] = 1.0
    data.labels[9:16, 1] = 0.0  # the second batch has one event, and only the third model trains on it
    roles = fold_roles()[[0, 0, 0]]
    roles[:2, 8] = UNUSED
    roles[1, 8:16] = roles[1, 8:16].where(roles[1, 8:16] == VALIDATION, UNUSED)
    recipe = Recipe(**{**vars(RECIPE), "optimizer": optimizer, "shuffle": False, "patience": 1})
    options = SMALL if name == "abmil" else {"hidden": 32}
    trained = population("cox", [Member(seed=1, lr=0.01)] * 3, name, **options)
    history = fit(trained, data, roles, recipe)
    state = trained.state()
    assert not torch.equal(state.pop("link.centre")[0], trained.state()["link.centre"][1])
    for parameter, values in state.items():
        assert torch.allclose(values[0], values[1], atol=1e-6), parameter
    assert torch.allclose(history.tables["total"][:, 0], history.tables["total"][:, 1], atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"recipe": Recipe(batch=1)},
            "batch is 1: expected at least 2, better 32, as the loss of this target compares",
        ),
        ({"recipe": Recipe(class_weights="balanced")}, "class_weights is balanced: expected none"),
        ({"recipe": Recipe(label_smoothing=0.1)}, "label_smoothing is 0.1: expected 0"),
        ({"event": VALIDATION}, "model 0 has no validation bag with an event"),
        ({"event": TRAIN}, "model 0 has no training bag with an event"),
        ({"labels": torch.arange(BAGS) % 2}, "expected a finite time and an event per bag"),
    ],
)
def test_data_unsuitable_for_the_cox_likelihood_are_refused_in_one_line(change, words):
    data, roles = bags("cox"), fold_roles()[0]
    if "event" in change:
        data.labels[roles == change["event"], 1] = 0.0
    if "labels" in change:
        data = Bags(data.features, data.offsets, change["labels"])
    with pytest.raises(CarmilError) as raised:
        fit(population("cox", [Member()]), data, roles, change.get("recipe", RECIPE))
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_a_batch_of_one_trains_every_target_whose_loss_needs_no_other_bags():
    for kind in set(KINDS) - {"cox"}:
        trained = population(kind, [Member(seed=0)])
        history = fit(trained, bags(kind), fold_roles()[0], Recipe(**{**vars(RECIPE), "batch": 1, "epochs": 1}))
        assert history.validation.isfinite().all()


# Every registered model

TINY = {
    "rrt": {"hidden": 16, "heads": 2, "attention": 8, "regions": 2},
    "weno": {"hidden": 8, "teacher": 8, "attention": 4, "student": 8},
    "dsmil.official": {},
}
CLASSES_ONLY = {"clam.sb", "clam.mb", "weno", "dsmil.official"}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "huber"])
@pytest.mark.parametrize("name", list_models())
def test_every_model_trains_on_every_target_or_raises_an_error_naming_it(name, kind):
    branch, _, plain = name.rpartition("/")
    make = partial(build, kind, name, **TINY.get(plain, {"hidden": 16}))
    if plain in CLASSES_ONLY or branch == "targeted":
        with pytest.raises(CarmilError, match="predicts classes only") as raised:
            make()
        assert repr(plain) in str(raised.value) or repr(name) in str(raised.value)
        assert "\n" not in str(raised.value)
        return
    trained = Population(make, [Member(seed=0), Member(seed=1)])
    recipe = Recipe(epochs=1, batch=20, warmup=0, optimizer="adam")
    history = fit(trained, bags(kind), fold_roles()[:2], recipe)
    assert all(table.isfinite().all() for table in history.tables.values())
    assert predict(trained, bags(kind), maps=False).values.isfinite().all()


def test_models_that_need_classes_declare_it():
    needing = {name for name, entry in registered_models().items() if entry.build.needs_classes(entry.options)}
    assert needing == CLASSES_ONLY
