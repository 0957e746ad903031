"""A population: r models of one architecture, whose parameters are the rows of one matrix and are updated together.

r models, p parameters each, q buffered values (running statistics). A single model is a population of one.
"""

import copy
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from carmil.errors import CarmilError, unknown
from carmil.models.contract import BagModel, Prediction
from carmil.models.layers import BatchNorm, Linear, in_half
from carmil.models.noise import Noise, Noisy
from carmil.models.pooling import Offsets
from carmil.models.registry import seed_lock
from carmil.targets.links import Link

# bfloat16: on a GPU, matrix products over instances in 16 bits; softmax, scores, logits, losses and the optimizer stay in
# float32, as does everything on a CPU, where 16 bits would be slower.
PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Member:
    """The properties that distinguish one model of a population: its seed, its learning rate, and the weights of its loss terms."""

    seed: int = 0
    lr: float = 1e-3
    coefficients: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise CarmilError(f"a learning rate of {self.lr}: expected a number > 0")


class Population:
    """A population of models.

    `weights` (r, p): row i is model i. `model` is the architecture; bound to the weights it computes all r models at
    once.
    """

    def __init__(
        self,
        build: Callable[[], BagModel],
        members: Sequence[Member],
        *,
        device: torch.device | str = "cpu",
        precision: str = "float32",
    ) -> None:
        if not members:
            raise CarmilError("a population of 0 models: expected at least one")
        if precision not in PRECISIONS:
            raise CarmilError(unknown("precision", precision, PRECISIONS))
        self.build = build
        self.precision = precision
        self.members = list(members)
        with seed_lock, torch.random.fork_rng(devices=[]):
            rows, buffers = [], []
            for member in members:
                torch.manual_seed(member.seed)
                model = build()
                rows.append(_flat(model.parameters()))
                buffers.append(_flat(model.buffers()))
        self.weights = torch.stack(rows).to(device)
        self.buffers = torch.stack(buffers).to(device)
        self.model = model
        self.noise = Noise(torch.tensor([member.seed for member in members], device=device))
        self._weight_slots = _slots(model, model.named_parameters())
        self._buffer_slots = _slots(model, model.named_buffers())
        self._release()
        for member in members:
            for term in member.coefficients:
                if term not in model.coefficients:
                    raise CarmilError(unknown("loss term", term, model.coefficients))
        self.coefficients = {
            term: torch.tensor([member.coefficients.get(term, default) for member in members], device=device)
            for term, default in model.coefficients.items()
        }
        self.terms = {term for term, value in self.coefficients.items() if bool(value.any())}
        self.pass_key: Hashable = None
        self.warm = False  # whether the weights are those of a trained baseline

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def in_half(self) -> bool:
        """Return whether matrix products are computed in 16 bits."""
        return self.precision == "bfloat16" and self.weights.is_cuda

    def instances_per_pass(self, models: int | None = None) -> int:
        """Return how many instances a pass of this many models (by default all) may have: few enough for memory,
        enough to be fast.

        On a CPU the number is the same for any number of models, since the last bits of the logits depend on it.
        """
        return max(1, 2**20 // (models or len(self))) if self.weights.is_cuda else 2**12

    def __call__(
        self,
        features: Tensor,
        offsets: Offsets,
        *,
        leaves: Sequence[Tensor] | None = None,
        rows: Tensor | None = None,
        counted: Tensor | None = None,
    ) -> Prediction:
        """Return the predictions of all models; every tensor has the population's axis in front.

        leaves: the result of `leaves()`, to differentiate with respect to them. rows (n): positions of the instances
        in the cohort, for the noise. counted (r, b): the bags that a model may learn statistics from, by default all.
        """
        self.noise.rows = rows
        self.bind(leaves)
        for normed in self._normed:
            normed.counted = None if counted is None else counted[:, offsets.bag_of].unsqueeze(-1)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.in_half):
            prediction: Prediction = self.model(features, offsets)
        return _single(prediction) if self.in_half else prediction

    def losses(self, prediction: Prediction, labels: Tensor, counted: Tensor | None = None) -> dict[str, Tensor]:
        """Return each loss term for each model and bag, (r, b).

        counted (r, b): the bags that each model trains on, by default all; a loss compares these only.
        """
        self.link.counted = counted
        losses = self.model.losses(prediction, labels, self.terms)
        self.link.counted = None
        return losses

    @property
    def link(self) -> Link:
        """Return the link of the architecture, bound to the weights of the last pass."""
        return self.model.link

    def total(self, terms: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted sum of each model's loss terms (r): its training objective."""
        weighted = [self.coefficients[name] * value for name, value in terms.items() if name in self.terms]
        return torch.stack(weighted).sum(0) if weighted else torch.zeros_like(next(iter(terms.values())))

    def train(self, on: bool = True) -> None:
        self.model.train(on)

    def smooth_labels(self, share: float) -> None:
        for module in self.model.modules():
            if isinstance(module, BagModel):
                module.label_smoothing = share

    def begin(self, phase: str, epoch: int) -> None:
        """Call `begin` of the architecture before a pass, which may reset its buffers; `pass_key` then identifies
        the kind of pass.
        """
        self.bind()
        self.pass_key = phase, self.model.begin(phase, epoch)

    def member(self, row: int) -> BagModel:
        """Return model `row` as a separate module, on the population's device, in evaluation mode."""
        with seed_lock, torch.random.fork_rng(devices=[]):
            model = self.build().to(self.device)
        model.load_state_dict({name: stacked[row] for name, stacked in self.state().items()})
        return model.eval()

    def state(self) -> dict[str, Tensor]:
        """Return every parameter and buffer by name, stacked: (r, ...)."""
        return {name: tensor.detach().clone() for name, tensor in self._named().items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load stacked parameters from a `state`; names that do not match are refused."""
        names = set(self._named())
        missing, surplus = sorted(names - set(state)), sorted(set(state) - names)
        if missing or surplus:
            raise CarmilError(
                f"these weights belong to another model: missing {missing or 'none'}, unknown {surplus or 'none'}"
            )
        self._load_some(state)

    def warm_start(self, state: Mapping[str, Tensor]) -> None:
        """Start from a trained baseline, the same model without the branch, row by row; the branch keeps its weights.

        A baseline with one row is used for all models.
        """
        names = list(self._named())
        outer = "model." if any(name.startswith("model.branch.") for name in names) else ""  # inside a ScaledModel
        renamed = {
            outer + name.removeprefix(outer + "model.") if name.startswith(outer + "model.") else name: name
            for name in names
            if not name.startswith(outer + "branch.")
        }
        if set(renamed) != set(state):
            raise CarmilError(
                "the baseline must be the same model without its branch: "
                f"it has {', '.join(sorted(state))}; expected {', '.join(sorted(renamed))}"
            )
        self._load_some({renamed[name]: tensor for name, tensor in state.items()})
        self.warm = True

    def set_link(self, rows: Tensor, values: Mapping[str, Tensor]) -> None:
        """Set parameters and buffers of the link, by name, for some models."""
        slots = [*_stacked(self.weights, self._weight_slots), *_stacked(self.buffers, self._buffer_slots)]
        for slot, stacked in slots:
            if slot.module is self.link and slot.attribute in values:
                stacked[rows.to(stacked.device)] = values[slot.attribute].to(stacked)

    def subset(self, rows: Tensor, *, indices: Sequence[int] | None = None) -> "Population":
        """Return a population of these models only, in this order, with their own weights.

        The architecture is shared, so that only one of the two populations can be used at a time. indices: the same
        rows on the CPU, which avoids a synchronisation with the device.
        """
        part = copy.copy(self)
        part.members = [self.members[row] for row in (rows.tolist() if indices is None else indices)]
        part.weights, part.buffers = self.weights.index_select(0, rows), self.buffers.index_select(0, rows)
        part.noise = Noise(self.noise.seeds[rows], self.noise.steps[rows])
        part.coefficients = {term: value[rows] for term, value in self.coefficients.items()}
        return part

    def to(self, device: torch.device | str) -> "Population":
        """Return the population on this device: itself if it is there already, otherwise a copy."""
        if self.device.type == torch.device(device).type:
            return self
        copied = self.subset(torch.arange(len(self), device=self.device))
        copied.weights, copied.buffers = copied.weights.to(device), copied.buffers.to(device)
        copied.noise = Noise(copied.noise.seeds.to(device), copied.noise.steps.to(device))
        copied.coefficients = {term: value.to(device) for term, value in copied.coefficients.items()}
        return copied

    def leaves(self) -> list[Tensor]:
        """Return the parameters one by one, stacked (r, ...), as leaves for autograd; matrices are in bfloat16 if their
        products are computed in 16 bits.
        """
        return [
            (stacked.to(torch.bfloat16) if self.in_half and slot.of_products else stacked.detach()).requires_grad_()
            for slot, stacked in _stacked(self.weights, self._weight_slots)
        ]

    def bind(self, leaves: Sequence[Tensor] | None = None) -> None:
        """Bind the architecture to this population's weights (or leaves), buffers and noise."""
        stacked_weights = (
            _stacked(self.weights, self._weight_slots)
            if leaves is None
            else list(zip(self._weight_slots, leaves, strict=True))
        )
        for slot, stacked in [*stacked_weights, *_stacked(self.buffers, self._buffer_slots)]:
            setattr(slot.module, slot.attribute, stacked)
        for noisy in self._noisy:
            noisy.noise = self.noise

    def _named(self) -> dict[str, Tensor]:
        """Return views of all parameters and buffers by name."""
        pairs = [*_stacked(self.weights, self._weight_slots), *_stacked(self.buffers, self._buffer_slots)]
        return {slot.name: stacked for slot, stacked in pairs}

    def _load_some(self, state: Mapping[str, Tensor]) -> None:
        views = self._named()
        for name, tensor in state.items():
            wanted = views[name].shape
            if tensor.shape[1:] != wanted[1:] or len(tensor) not in (1, len(self)):
                raise CarmilError(f"weights {name!r} have shape {tuple(tensor.shape)}: expected {tuple(wanted)}")
        for name, tensor in state.items():
            views[name].copy_(tensor)

    def _release(self) -> None:
        """Turn the model's parameters and buffers into plain attributes, which `__call__` sets to stacked views."""
        for slot in self._weight_slots:
            del slot.module._parameters[slot.attribute]
        for slot in self._buffer_slots:
            del slot.module._buffers[slot.attribute]
        self._normed = [module for module in self.model.modules() if isinstance(module, BatchNorm)]
        self._noisy = [module for module in self.model.modules() if isinstance(module, Noisy)]
        for site, module in enumerate(self._noisy):
            module.site = site


def _single(prediction: Prediction) -> Prediction:
    """Return the prediction with logits in 32 bits: autocast computes those of many classes in 16."""
    cf, instance_logits = prediction.counterfactual, prediction.instance_logits
    return replace(
        prediction,
        logits=prediction.logits.float(),
        instance_logits=None if instance_logits is None else instance_logits.float(),
        counterfactual=None if cf is None else replace(cf, logits=cf.logits.float()),
    )


@dataclass(frozen=True)
class _Slot:
    """The position of a parameter or buffer in the architecture."""

    name: str
    module: nn.Module
    attribute: str
    shape: torch.Size
    count: int

    @property
    def of_products(self) -> bool:
        """Return whether this is the weight matrix of a product that autocast computes in 16 bits."""
        module = self.module
        return (
            isinstance(module, Linear) and not module.precise and self.attribute == "weight" and in_half(self.shape[0])
        )


def _slots(model: nn.Module, named: Iterable[tuple[str, Tensor]]) -> list[_Slot]:
    slots = []
    for name, tensor in named:
        path, _, attribute = name.rpartition(".")
        slots.append(_Slot(name, model.get_submodule(path), attribute, tensor.shape, tensor.numel()))
    return slots


def _stacked(matrix: Tensor, slots: list[_Slot]) -> list[tuple[_Slot, Tensor]]:
    """Return views of the columns of the matrix, one (r, *shape) tensor per slot."""
    pieces = matrix.split([slot.count for slot in slots], dim=1) if slots else []
    return [(slot, piece.unflatten(1, slot.shape)) for slot, piece in zip(slots, pieces, strict=True)]


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0), *(tensor.detach().flatten() for tensor in tensors)])
