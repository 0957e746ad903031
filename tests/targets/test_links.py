"""Links against plain formulas, one bag at a time, in 64 bits."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from carmil.counterfactual import create_model
from carmil.errors import CarmilError
from carmil.models.pooling import Offsets
from carmil.targets.links import BINS, HUBER, Cox, CumulativeLogits, DiscreteTime, Link, Scale, Sigmoids, Softmax

B = 14
NAN = float("nan")


def times(seed: int = 0, bags: int = B) -> Tensor:
    """Return times with many ties, and about two events in three."""
    generator = torch.Generator().manual_seed(seed)
    time = torch.randint(1, 7, (bags,), generator=generator)
    event = torch.rand(bags, generator=generator) < 2 / 3
    event[0] = True
    return torch.stack([time.double(), event.double()], dim=-1)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def incomplete_labels(seed: int = 0) -> Tensor:
    outcomes = (draw(seed, B, 3) > 0).double()
    outcomes[draw(seed + 1, B, 3) > 0.7] = NAN
    outcomes[2] = NAN
    return outcomes


# For each kind: the link, the number of outputs, and outcomes.
KINDS: dict[str, tuple[Callable[[], Link], int, Callable[[int], Tensor]]] = {
    "classes": (Softmax, 3, lambda seed: torch.randint(0, 3, (B,), generator=torch.Generator().manual_seed(seed))),
    "labels": (Sigmoids, 3, incomplete_labels),
    "value": (Scale, 1, lambda seed: 40 + 7 * draw(seed, B, 1)),
    "huber": (partial(Scale, robust=True), 1, lambda seed: 40 + 7 * draw(seed, B, 1)),
    "ordinal": (
        partial(CumulativeLogits, 4),
        1,
        lambda seed: torch.randint(0, 4, (B,), generator=torch.Generator().manual_seed(seed)),
    ),
    "cox": (Cox, 1, times),
    "discrete": (DiscreteTime, 1, times),
}


def fitted_link(kind: str, seed: int = 0) -> Link:
    """Return a link of 64 bits, fitted on outcomes, with some noise on what it learns."""
    build, _, outcomes = KINDS[kind]
    link = build().double()
    for name, value in link.fitted(outcomes(seed)).items():
        getattr(link, name).data = value.double()
    for i, parameter in enumerate(link.parameters()):
        parameter.data += 0.3 * draw(seed + i, *parameter.shape)
    return link


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def plain_losses(link: Link, F: Tensor, outcomes: Tensor, own: Tensor | None = None) -> list[float]:
    """Return the loss of each bag by the textbook formula. F (b, k)."""
    return [_plain_loss(link, F.tolist(), outcomes.tolist(), i, [True] * len(F) if own is None else own.tolist())
            for i in range(len(F))]  # fmt: skip


def _plain_loss(link: Link, F: list, y: list, i: int, own: list[bool]) -> float:
    match link:
        case Softmax():
            return math.log(sum(math.exp(value) for value in F[i])) - F[i][y[i]]
        case Sigmoids():
            known = [(f, label) for f, label in zip(F[i], y[i], strict=True) if not math.isnan(label)]
            each = [-math.log(sigmoid(f) if label else 1 - sigmoid(f)) for f, label in known]
            return sum(each) / max(1, len(each))
        case Scale():
            error = abs(F[i][0] - (y[i][0] - link.mean.item()) / link.deviation.item())
            return HUBER * (error - HUBER / 2) if link.robust and error > HUBER else error**2 / 2
        case CumulativeLogits():
            cuts = [-math.inf, *link.cuts.tolist(), math.inf]
            above = [sigmoid(F[i][0] - cut) if math.isfinite(cut) else float(cut < 0) for cut in cuts]
            return -math.log(above[y[i]] - above[y[i] + 1])
        case Cox():
            time, event = y[i]
            if not event or not own[i]:
                return 0.0
            at_risk = [j for j in range(len(F)) if own[j] and y[j][0] >= time]
            tied = [j for j in at_risk if y[j] == [time, 1.0]]
            share = tied.index(i) / len(tied)
            total = sum(math.exp(F[j][0]) for j in at_risk) - share * sum(math.exp(F[j][0]) for j in tied)
            return math.log(total) - F[i][0]
        case DiscreteTime():
            time, event = y[i]
            edges = [*link.edges.tolist(), math.inf]
            interval = next(number for number, edge in enumerate(edges) if time <= edge)
            hazards = [sigmoid(F[i][0] + b) for b in link.baseline.tolist()]
            passed = sum(math.log(1 - hazard) for hazard in hazards[:interval])
            last = hazards[interval]
            return -(passed + (math.log(last) if event else math.log(1 - last) / 2))
    raise TypeError(link)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_loss_equals_the_plain_formula(kind, seed):
    _, outputs, outcomes = KINDS[kind]
    link, F, y = fitted_link(kind, seed), 2 * draw(seed, B, outputs), outcomes(seed)
    expected = torch.tensor(plain_losses(link, F, y), dtype=torch.float64)
    torch.testing.assert_close(link.loss(F, y), expected, rtol=1e-9, atol=1e-12)
    assert link.loss(F.float(), y if y.ndim == 1 else y.float()).shape == (B,)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_finite_differences(kind):
    _, outputs, outcomes = KINDS[kind]
    link, y = fitted_link(kind), outcomes(0)
    F = (2 * draw(0, B, outputs)).requires_grad_()
    parameters = tuple(link.parameters())  # changed in place by the test
    assert torch.autograd.gradcheck(lambda F, *_: link.loss(F, y), (F, *parameters))


def stacked(links: list[Link]) -> Link:
    """Return one link with the values of all links stacked, as a population binds them."""
    states, link = [one.state_dict() for one in links], links[0]
    for own in (link._parameters, link._buffers):
        own.clear()
    for name in states[0]:
        setattr(link, name, torch.stack([state[name] for state in states]))
    return link


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_predictions_of_several_models_and_maps_equal_those_of_each_alone(kind):
    _, outputs, outcomes = KINDS[kind]
    models, maps, y = 3, 2, outcomes(0)
    F, counted = 2 * draw(0, models, maps, B, outputs), draw(1, models, B) > -0.5
    alone = [fitted_link(kind, seed) for seed in range(models)]
    together = stacked([fitted_link(kind, seed) for seed in range(models)])
    together.counted = counted
    losses, predictions = together.loss(F, y), together.predictions(F)
    flat = together.loss(F[:, 0], y)
    for row, link in enumerate(alone):
        link.counted = counted[row]
        for m in range(maps):
            torch.testing.assert_close(losses[row, m], link.loss(F[row, m], y))
            torch.testing.assert_close(predictions[row, m], link.predictions(F[row, m]))
        torch.testing.assert_close(flat[row], link.loss(F[row, 0], y))


@pytest.mark.parametrize("kind", KINDS)
def test_car_objective_uses_the_loss_of_the_target(kind):
    """L = l(F(u), y) + alpha l(F(u) - F(u_cf), y) + lambda D(u, u_cf): only outputs are subtracted, no cut points."""
    _, outputs, outcomes = KINDS[kind]
    link, y = fitted_link(kind), outcomes(0)
    starts = torch.arange(B + 1) * 4
    model = create_model("car/abmil", 6, outputs, link=link, hidden=5, attention=4, dropout=0.0).double().train()
    prediction = model(draw(3, 4 * B, 6), Offsets(starts))
    losses = model.losses(prediction, y, ("cls", "diff", "l1"))
    F, F_cf = prediction.logits.detach(), prediction.counterfactual.logits[:, 0].detach()
    for term, given in (("cls", F), ("diff", F - F_cf)):
        torch.testing.assert_close(losses[term], torch.tensor(plain_losses(link, given, y), dtype=torch.float64))
    distance = (prediction.scores - prediction.counterfactual.scores[..., 0]).abs()
    torch.testing.assert_close(losses["l1"], distance.reshape(B, 4).mean(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_of_large_outputs_is_finite_with_finite_gradients(kind):
    _, outputs, outcomes = KINDS[kind]
    link, y = fitted_link(kind).float(), outcomes(0)
    y = y if y.ndim == 1 else y.float()
    for size in (50.0, 100.0):
        F = (size * draw(0, B, outputs).sign().float()).requires_grad_()
        loss = link.loss(F, y)
        gradients = torch.autograd.grad(loss.sum(), [F, *link.parameters()])
        assert loss.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)
        assert loss.max() < 10 * BINS * size**2


class WithoutSynchronisation(TorchDispatchMode):
    """Refuse operations that wait for the device or whose result has a size that depends on values.

    A step that contains one cannot be recorded as a CUDA graph.
    """

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.name().partition(".")[0]
        assert name not in {
            f"aten::{op}" for op in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique")
        }
        if name in ("aten::index", "aten::index_put", "aten::index_put_"):
            assert not any(index is not None and index.dtype == torch.bool for index in args[1])
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_can_be_recorded_as_a_cuda_graph(kind):
    _, outputs, outcomes = KINDS[kind]
    link, y = fitted_link(kind), outcomes(0)
    link.counted = draw(1, B) > -0.5
    F = draw(0, B, outputs).requires_grad_()
    with WithoutSynchronisation():
        torch.autograd.grad(link.loss(F, y).sum(), [F, *link.parameters()])
    with WithoutSynchronisation(), pytest.raises(AssertionError):
        F[link.counted]


# Probabilities


@pytest.mark.parametrize("kind", ["classes", "ordinal"])
def test_probabilities_of_a_bag_sum_to_one(kind):
    link, outputs, _ = fitted_link(kind), KINDS[kind][1], None
    p = link.predictions(20 * draw(0, 200, outputs))
    assert (p >= 0).all()
    torch.testing.assert_close(p.sum(-1), torch.ones(200, dtype=torch.float64))


def test_probabilities_of_several_labels_are_independent():
    F = draw(0, B, 3)
    torch.testing.assert_close(Sigmoids().predictions(F), 1 / (1 + torch.exp(-F)))
    torch.testing.assert_close(Sigmoids().predictions(F)[:, 1:], Sigmoids().predictions(F[:, 1:]))


def test_a_missing_label_adds_nothing_to_the_loss():
    y = torch.tensor([[1.0, NAN, 0.0], [NAN, NAN, NAN]])
    F = torch.tensor([[0.3, 5.0, -0.2], [1.0, 2.0, 3.0]], requires_grad=True)
    link = Sigmoids()
    loss = link.loss(F, y)
    torch.testing.assert_close(loss[0], link.loss(F[:1, [0, 2]], y[:1, [0, 2]])[0])
    assert loss[1] == 0
    (gradient,) = torch.autograd.grad(loss.sum(), F)
    assert gradient[0, 1] == 0 and (gradient[1] == 0).all() and (gradient[0, [0, 2]] != 0).all()
    assert link.informative(y).tolist() == [True, False]


def test_smoothing_moves_labels_towards_one_half():
    F = draw(0, B, 3)
    smoothed = Sigmoids().loss(F, torch.ones(B, 3).double(), 0.2)
    expected = 0.9 * Sigmoids().loss(F, torch.ones(B, 3).double()) + 0.1 * Sigmoids().loss(
        F, torch.zeros(B, 3).double()
    )
    torch.testing.assert_close(smoothed, expected)


# Ordered grades


def test_grades_keep_a_positive_probability_when_counterfactual_outputs_are_subtracted():
    """F(u) - F(u_cf) is another latent score; the cut points are not subtracted and do not cancel."""
    link = fitted_link("ordinal")
    p = link.predictions(torch.linspace(-15, 15, 31, dtype=torch.float64).unsqueeze(-1))
    assert (p > 0).all()
    difference = link.predictions(torch.zeros(1, 1, dtype=torch.float64))  # F(u) = F(u_cf)
    assert (difference[0, 1:-1] > 0.05).all()


def test_loss_is_finite_for_a_grade_whose_cut_points_coincide():
    link = CumulativeLogits(3)
    link.steps.data.fill_(-60.0)
    F = torch.tensor([[-100.0], [0.0], [100.0]], requires_grad=True)
    loss = link.loss(F, torch.tensor([1, 1, 1]))
    gradients = torch.autograd.grad(loss.sum(), [F, link.first, link.steps])
    assert loss.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)


def test_two_grades_are_equivalent_to_two_classes():
    link, F = CumulativeLogits(2), draw(0, B, 1).float()
    torch.testing.assert_close(link.predictions(F)[:, 1:], (F - link.first).sigmoid())


def test_cut_points_start_at_the_frequencies_of_the_grades():
    grades = torch.tensor([0] * 40 + [1] * 10 + [2] * 30 + [3] * 20)
    link = CumulativeLogits(4)
    for name, value in link.fitted(grades).items():
        getattr(link, name).data = value
    p = link.predictions(torch.zeros(1, 1, dtype=torch.float64))[0]
    torch.testing.assert_close(p, (torch.bincount(grades) + 0.5).double() / 102)
    absent = link.fitted(torch.tensor([0, 0, 3]))
    assert all(value.isfinite().all() for value in absent.values())


# A number


def test_value_is_predicted_in_its_original_unit():
    y = torch.tensor([[10.0], [14.0], [18.0]])
    link = Scale()
    for name, value in link.fitted(y).items():
        getattr(link, name).data = value
    assert link.mean.item() == 14 and link.deviation.item() == pytest.approx(math.sqrt(32 / 3))
    F = (y - link.mean) / link.deviation
    torch.testing.assert_close(link.predictions(F), y.double())
    assert link.loss(F, y).abs().max() < 1e-12
    assert Scale().fitted(torch.full((3, 1), 5.0))["deviation"] == 1


# A time to an event


@pytest.mark.parametrize("seed", range(50))
def test_cox_loss_of_random_sets_equals_efrons_partial_likelihood(seed):
    y = times(seed, bags=5 + seed)
    F = 3 * draw(seed, len(y), 1)
    torch.testing.assert_close(
        Cox().loss(F, y), torch.tensor(plain_losses(Cox(), F, y), dtype=torch.float64), rtol=1e-9, atol=1e-10
    )


@pytest.mark.filterwarnings("ignore:Starting with pandas version")
@pytest.mark.parametrize("seed", range(3))
def test_cox_loss_equals_lifelines(seed):
    lifelines, pd = pytest.importorskip("lifelines"), pytest.importorskip("pandas")
    y, x = times(seed, bags=60), draw(seed, 60, 2)
    frame = pd.DataFrame({"x": x[:, 0], "z": x[:, 1], "time": y[:, 0], "event": y[:, 1]})
    fitted = lifelines.CoxPHFitter().fit(frame, "time", "event")
    risk = (x * torch.tensor(fitted.params_.to_numpy())).sum(-1, keepdim=True)
    assert Cox().loss(risk, y).sum().item() == pytest.approx(-fitted.log_likelihood_, rel=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_risk_set_contains_only_bags_of_the_model(seed):
    y, F, link = times(seed), draw(seed, B, 1), Cox()
    own = draw(seed + 1, B) > 0
    link.counted = own
    loss = link.loss(F, y)
    torch.testing.assert_close(loss, torch.tensor(plain_losses(link, F, y, own), dtype=torch.float64))
    link.counted = None
    torch.testing.assert_close(loss[own], link.loss(F[own], y[own]))
    assert (loss[~own] == 0).all()


def test_outcomes_of_excluded_bags_do_not_change_a_bit_of_the_loss():
    link, F = Cox(), draw(0, B, 1).float().requires_grad_()
    own = torch.arange(B) % 3 > 0
    link.counted = own
    results = []
    for noise in (0, 1):
        y = times(0).float()
        y[~own] = times(9 + noise).float()[~own] * 1.7
        loss = link.loss(F, y)
        results.append((loss, torch.autograd.grad(loss.sum(), F)[0]))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_cox_loss_of_extreme_risks_has_no_nan():
    y = times(0).float()
    for own in (None, torch.arange(B) > 3, torch.zeros(B, dtype=torch.bool)):
        link = Cox()
        link.counted = own
        F = (50 * draw(0, B, 1).sign().float()).requires_grad_()
        loss = link.loss(F, y)
        (gradient,) = torch.autograd.grad(loss.sum(), F)
        assert loss.isfinite().all() and gradient.isfinite().all()
        assert loss.max() > 49 or own is not None


@pytest.mark.parametrize(
    "y",
    [torch.tensor([[1.0, 0.0], [2.0, 0.0], [2.0, 0.0]]), torch.tensor([[3.0, 1.0]])],
    ids=["no event", "one bag"],
)
def test_step_without_comparable_bags_has_no_loss_and_no_gradient(y):
    F = torch.randn(len(y), 1, requires_grad=True)
    loss = Cox().loss(F, y)
    (gradient,) = torch.autograd.grad(loss.sum(), F)
    assert (loss == 0).all() and (gradient == 0).all()


def test_a_constant_added_to_all_risks_changes_no_cox_loss():
    F, y = draw(0, B, 1), times()
    torch.testing.assert_close(Cox().loss(F, y), Cox().loss(F + 11, y))


def test_intervals_have_equal_numbers_of_events_and_start_at_their_hazards():
    y = torch.stack([draw(0, 4000).exp(), (draw(1, 4000) > 0).double()], dim=-1)
    link = DiscreteTime().double()
    for name, value in link.fitted(y).items():
        getattr(link, name).data = value
    interval = (y[:, :1] > link.edges).sum(-1)
    events = torch.bincount(interval, y[:, 1], minlength=BINS)
    assert (events - y[:, 1].sum() / BINS).abs().max() <= 1
    gradient = torch.autograd.grad(link.loss(torch.zeros(4000, 1, dtype=torch.float64), y).mean(), link.baseline)[0]
    assert gradient.abs().max() < 1e-3  # F = 0 has the observed hazards


def test_intervals_of_few_events_are_finite():
    for y in (times(0)[:1], torch.tensor([[4.0, 0.0], [6.0, 0.0]]), torch.tensor([[3.0, 1.0]] * 5)):
        link = DiscreteTime()
        for name, value in link.fitted(y).items():
            getattr(link, name).data = value.float()
        assert link.loss(torch.zeros(len(y), 1), y.float()).isfinite().all()


@pytest.mark.parametrize("build", [Cox, DiscreteTime])
def test_risks_are_relative_to_the_centre(build):
    link = build()
    link.centre = torch.tensor([1.5])
    torch.testing.assert_close(link.predictions(torch.tensor([[1.5], [4.0]])), torch.tensor([[0.0], [2.5]]))


@pytest.mark.parametrize(
    ("link", "outcomes", "outputs", "words"),
    [
        (Softmax(), torch.rand(5, 2), 3, "labels must be class numbers"),
        (Softmax(), torch.tensor([0, 4]), 3, "labels go up to 4: expected at most 2"),
        (Sigmoids(), torch.zeros(5, 2), 3, "outcomes of shape (5, 2) for a model with 3 outputs: expected a column of"),
        (Scale(), torch.zeros(5), 1, "expected a finite number per bag and one output"),
        (Scale(), torch.full((5, 1), NAN), 1, "expected a finite number per bag"),
        (CumulativeLogits(3), torch.tensor([0, 3]), 1, "grades go up to 3: expected at most 2"),
        (CumulativeLogits(3), torch.zeros(5, 1), 1, "numbers of ordered grades"),
        (Cox(), torch.tensor([0, 1]), 2, "outcomes of shape (2,) for a model with 2 outputs: expected a finite time"),
        (DiscreteTime(), torch.zeros(5, 2), 2, "one output"),
    ],
)
def test_outcomes_of_another_kind_of_target_are_refused(link, outcomes, outputs, words):
    with pytest.raises(CarmilError) as raised:
        link.check(outcomes, outputs)
    assert words in str(raised.value)


@pytest.mark.parametrize("kind", KINDS)
def test_outcomes_of_the_right_kind_are_accepted(kind):
    build, outputs, outcomes = KINDS[kind]
    assert build().check(outcomes(0), outputs) is None  # and raises no error
