"""Links: from the outputs F of a model to its loss and to its predictions, one per kind of target.

A link is a part of the model. Learned values (cut points, baseline) are parameters; values that are only fitted to the
training bags (the unit of a number) are buffers. Both are saved with the weights.

b bags, k outputs, p predictions. Outputs are (..., b, k): the bags are always second to last, so that a link may compare
them. Leading axes, such as those of a population's models, are carried through.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from carmil.errors import CarmilError
from carmil.words import plural

HUBER = 1.0  # standard deviations, beyond which the Huber loss is linear
BINS = 10  # intervals of discrete time
MASKED = -1e30  # a log risk that adds nothing to a sum of risks


class Link(nn.Module):
    """The base class. counted (..., b): the bags that each model trains on in this step, set by the population; None: all."""

    compares_bags = False  # whether the loss of a bag depends on the other bags
    centred = False  # whether predictions are relative to a buffer `centre`, the mean output for the training bags
    smooths_labels = False  # whether the loss can spread a share of each label over the others
    informative_bag = "bag"  # the bags that `informative` counts, in words
    counted: Tensor | None = None

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return the predictions: F (..., b, k) -> (..., b, p)."""
        raise NotImplementedError

    def per_output(self, outputs: Tensor) -> Tensor:
        """Return F on the scale that users read, (..., b, k) -> (..., b, k): probabilities, or F itself."""
        return outputs

    def loss(self, outputs: Tensor, outcomes: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the loss of each bag: F (..., b, k) -> (..., b). outcomes (b) or (b, t)."""
        raise NotImplementedError

    def informative(self, outcomes: Tensor) -> Tensor:
        """Return a mask (b) of the bags that have a loss of their own; a mean over bags counts only these."""
        return torch.ones(len(outcomes), dtype=torch.bool, device=outcomes.device)

    def fitted(self, outcomes: Tensor) -> dict[str, Tensor]:
        """Return the parameters and buffers that are fitted on the outcomes of the training bags, before training."""
        return {}

    def check(self, outcomes: Tensor, outputs: int) -> None:
        """Refuse outcomes that do not belong to this link and a model with this number of outputs."""


class Softmax(Link):
    """Classes: predictions are their probabilities, softmax(F), and the loss is the cross-entropy."""

    smooths_labels = True

    def predictions(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(-1)

    def per_output(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(-1)

    def loss(self, outputs: Tensor, outcomes: Tensor, smoothing: float = 0.0) -> Tensor:
        return cross_entropy(outputs, outcomes, smoothing)

    def check(self, outcomes: Tensor, outputs: int) -> None:
        if outcomes.ndim != 1 or outcomes.is_floating_point():
            raise CarmilError("labels must be class numbers 0, 1, 2, ...")
        if int(outcomes.max()) >= outputs:
            raise CarmilError(
                f"labels go up to {int(outcomes.max())}: expected at most {outputs - 1}, as the model has {outputs} classes"
            )


class Sigmoids(Link):
    """Several labels, each 0 or 1, or NaN if missing: predictions are their probabilities, sigmoid(F).

    The loss is the mean cross-entropy over the known labels of a bag.
    """

    smooths_labels = True
    informative_bag = "bag with a known label"

    def predictions(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def per_output(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def loss(self, outputs: Tensor, outcomes: Tensor, smoothing: float = 0.0) -> Tensor:
        known = ~outcomes.isnan()
        wanted = outcomes.nan_to_num() * (1 - smoothing) + smoothing / 2
        each = functional.binary_cross_entropy_with_logits(outputs, wanted.expand_as(outputs), reduction="none")
        return (each * known).sum(-1) / known.sum(-1).clamp_min(1)

    def informative(self, outcomes: Tensor) -> Tensor:
        return ~outcomes.isnan().all(-1)

    def check(self, outcomes: Tensor, outputs: int) -> None:
        _check_numbers(outcomes.nan_to_num(), outputs, (outputs, outputs), "a column of 0, 1 or NaN for each output")


class Scale(Link):
    """A number: the prediction is mean + deviation F, in its own unit; mean and deviation are those of the training bags.

    The loss is (F - y)^2 / 2 of the standardised number y, or Huber's, which is linear beyond one deviation.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, *, robust: bool = False) -> None:
        super().__init__()
        self.robust = robust
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("deviation", torch.ones(1))

    def predictions(self, outputs: Tensor) -> Tensor:
        return _along(self.mean, outputs) + _along(self.deviation, outputs) * outputs

    def loss(self, outputs: Tensor, outcomes: Tensor, smoothing: float = 0.0) -> Tensor:
        wanted = ((outcomes - _along(self.mean, outputs)) / _along(self.deviation, outputs)).expand_as(outputs)
        if self.robust:
            return functional.huber_loss(outputs, wanted, reduction="none", delta=HUBER).squeeze(-1)
        return (outputs - wanted).square().squeeze(-1) / 2

    def fitted(self, outcomes: Tensor) -> dict[str, Tensor]:
        mean, deviation = outcomes.double().mean(0), outcomes.double().std(0, correction=0)
        return {"mean": mean, "deviation": torch.where(deviation > 0, deviation, 1.0)}

    def check(self, outcomes: Tensor, outputs: int) -> None:
        _check_numbers(outcomes, outputs, (1, 1), "a finite number per bag and one output")


class CumulativeLogits(Link):
    """Ordered grades 0 to g-1: P(grade > i) = sigmoid(F - c_i) with increasing cut points c; predictions are the g probabilities.

    P(grade = i) = sigmoid(F - c_(i-1)) - sigmoid(F - c_i) = sigmoid(F - c_(i-1)) sigmoid(c_i - F) sigmoid(s_i)
    with c_i = c_(i-1) + softplus(s_i). The logarithm of this product is finite however far F is from the cut points.
    """

    def __init__(self, grades: int) -> None:
        super().__init__()
        self.grades = grades
        self.first = nn.Parameter(torch.full((1,), -(grades - 2) / 2))
        self.steps = nn.Parameter(torch.full((grades - 2,), math.log(math.expm1(1.0))))

    @property
    def cuts(self) -> Tensor:
        """Return the cut points (..., g-1)."""
        return torch.cat([self.first, self.first + functional.softplus(self.steps).cumsum(-1)], dim=-1)

    def log_probabilities(self, outputs: Tensor) -> Tensor:
        """Return log P(grade = i): F (..., b, 1) -> (..., b, g)."""
        beyond = outputs - _along(self.cuts, outputs)
        certain = torch.zeros_like(outputs)
        at_least = torch.cat([certain, functional.logsigmoid(beyond)], dim=-1)
        at_most = torch.cat([functional.logsigmoid(-beyond), certain], dim=-1)
        end = torch.zeros_like(self.first)
        width = torch.cat([end, functional.logsigmoid(self.steps), end], dim=-1)
        return at_least + at_most + _along(width, outputs)

    def predictions(self, outputs: Tensor) -> Tensor:
        return self.log_probabilities(outputs).exp()

    def loss(self, outputs: Tensor, outcomes: Tensor, smoothing: float = 0.0) -> Tensor:
        grade = outcomes.expand(outputs.shape[:-1]).unsqueeze(-1)
        return -self.log_probabilities(outputs).gather(-1, grade).squeeze(-1)

    def fitted(self, outcomes: Tensor) -> dict[str, Tensor]:
        """Return cut points at which F = 0 predicts the grades' frequencies, with half a bag added to each count."""
        counts = torch.bincount(outcomes, minlength=self.grades).double() + 0.5
        cuts = -torch.logit(1 - counts.cumsum(0)[:-1] / counts.sum())
        return {"first": cuts[:1], "steps": cuts.diff().expm1().log()}

    def check(self, outcomes: Tensor, outputs: int) -> None:
        if outcomes.ndim != 1 or outcomes.is_floating_point() or outputs != 1:
            raise CarmilError(
                "outcomes must be the numbers of ordered grades 0, 1, 2, ..., and the model must have one output"
            )
        if int(outcomes.max()) >= self.grades:
            raise CarmilError(f"grades go up to {int(outcomes.max())}: expected at most {self.grades - 1}")


class _TimeToEvent(Link):
    """A time to an event: F is the log risk r; outcomes (b, 2) are the time, and 1 for an event or 0 if censored.

    Predictions are r - `centre`, the mean of the training bags: risks of several models can then be averaged.
    """

    centred = True
    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(1))

    def predictions(self, outputs: Tensor) -> Tensor:
        return outputs - _along(self.centre, outputs)

    def check(self, outcomes: Tensor, outputs: int) -> None:
        _check_numbers(outcomes, outputs, (2, 1), "a finite time and an event per bag, and one output")


class Cox(_TimeToEvent):
    """A time to an event by Cox's partial likelihood.

    The loss of a bag with an event at t is -(r - log of the summed risks of all bags still at risk at t), with Efron's
    correction for ties; other bags have no loss of their own. A bag is compared with the model's own bags only
    (`counted`).
    """

    compares_bags = True
    informative_bag = "bag with an event"

    def loss(self, outputs: Tensor, outcomes: Tensor, smoothing: float = 0.0) -> Tensor:
        time, event = outcomes.unbind(-1)
        order = time.argsort(descending=True, stable=True)
        ascending = -time[order]  # the bags at risk at a time are all up to the last one with this time
        first = torch.searchsorted(ascending, ascending)
        last = torch.searchsorted(ascending, ascending, right=True) - 1
        risk = outputs.squeeze(-1).index_select(-1, order)
        happened = (event[order] > 0).expand(risk.shape)
        if self.counted is not None:
            own = _along(self.counted, risk).index_select(-1, order)
            risk, happened = risk.where(own, MASKED), happened & own
        at_risk = risk.logcumsumexp(-1).index_select(-1, last)  # log of the summed risks
        events = happened.to(risk.dtype)
        count = events.cumsum(-1)
        before = count.index_select(-1, first) - events.index_select(-1, first)
        ties = count.index_select(-1, last) - before
        share = (count - 1 - before).clamp_min(0) / ties.clamp_min(1)  # of the tied risks, which leave one by one
        relative = (risk - at_risk).exp() * events
        tied = torch.zeros_like(risk).index_add(-1, first, relative).index_select(-1, first)
        loss = (at_risk + torch.log1p(-share * tied) - risk).where(happened, 0.0)
        return torch.zeros_like(loss).index_copy(-1, order, loss)

    def informative(self, outcomes: Tensor) -> Tensor:
        return outcomes[:, 1] > 0


class DiscreteTime(_TimeToEvent):
    """A time to an event in intervals: an event in interval i, if none occurred before, has the log-odds b_i + F.

    The baseline b is learned; the intervals hold equally many events of the training bags. The loss is the negative
    log-likelihood, in which a censored bag counts for half of its last interval; it needs no other bags.
    """

    edges: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.baseline = nn.Parameter(torch.zeros(BINS))
        self.register_buffer("edges", torch.arange(1.0, BINS))

    def loss(self, outputs: Tensor, outcomes: Tensor, smoothing: float = 0.0) -> Tensor:
        time, event = outcomes[:, :1], outcomes[:, 1]
        interval = (time > _along(self.edges, outputs)).sum(-1, keepdim=True)
        logits = outputs + _along(self.baseline, outputs)
        survived = torch.arange(BINS, device=logits.device) < interval
        passed = (functional.logsigmoid(-logits) * survived).sum(-1)
        own = logits.gather(-1, interval.expand(*logits.shape[:-1], 1)).squeeze(-1)
        end = event * functional.logsigmoid(own) + (1 - event) * functional.logsigmoid(-own) / 2
        return -(passed + end)

    def fitted(self, outcomes: Tensor) -> dict[str, Tensor]:
        """Fit the edges to the times of events, and the baseline to the hazards, so that F = 0 predicts them."""
        time, event = outcomes.double().unbind(-1)
        times = time[event > 0]
        edges = torch.quantile(times if len(times) else time, torch.arange(1, BINS, dtype=torch.float64) / BINS)
        interval = (time.unsqueeze(-1) > edges).sum(-1)
        events = torch.bincount(interval, event, minlength=BINS)
        leaving = torch.bincount(interval, minlength=BINS).double()
        at_risk = leaving.flip(0).cumsum(0).flip(0) - (leaving - events) / 2
        hazard = ((events + 0.5) / (at_risk + 1)).clamp(1e-3, 1 - 1e-3)
        return {"edges": edges, "baseline": torch.logit(hazard)}


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return -log softmax(logits)_y, with the share `smoothing` of y spread over all classes.

    logits (..., b, k), labels (b) or (..., b) -> (..., b).
    """
    labels = labels.expand(logits.shape[:-1]).unsqueeze(-1)
    surprise = -torch.log_softmax(logits, dim=-1)
    loss = surprise.gather(-1, labels).squeeze(-1)
    return loss if smoothing == 0 else (1 - smoothing) * loss + smoothing * surprise.mean(-1)


def _along(values: Tensor, outputs: Tensor) -> Tensor:
    """Insert axes into values of each model (r, x), or of one model (x), so that they match outputs (r, ..., b, k)."""
    return values.reshape(*values.shape[:-1], *[1] * (outputs.ndim - values.ndim), values.shape[-1])


def _check_numbers(outcomes: Tensor, outputs: int, shape: tuple[int, int], expected: str) -> None:
    """Refuse outcomes that are not finite. shape: the expected numbers of their columns and of the model's outputs."""
    found = outcomes.shape[-1] if outcomes.ndim == 2 else 0, outputs
    if found != shape or not outcomes.isfinite().all():
        raise CarmilError(
            f"outcomes of shape {tuple(outcomes.shape)} for a model with {plural(outputs, 'output')}: expected {expected}"
        )
