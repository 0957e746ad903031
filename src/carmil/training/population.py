"""A population: r models of one architecture whose parameters are rows of one matrix and are stepped together.

r models, p parameters each. A single model is a population of one.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from carmil.errors import CarmilError
from carmil.models.contract import BagModel, Prediction
from carmil.models.noise import Noise, Noisy
from carmil.models.pooling import Offsets


@dataclass(frozen=True)
class Member:
    """What sets one model of a population apart: its seed, its learning rate, and how much each loss term counts."""

    seed: int = 0
    lr: float = 1e-3
    coefficients: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise CarmilError(f"a learning rate of {self.lr}: expected a number > 0")


class Population:
    """`weights` (r, p): row i is model i. `model` is the architecture; bound to the weights it answers for all r at once."""

    def __init__(
        self, build: Callable[[], BagModel], members: Sequence[Member], *, device: torch.device | str = "cpu"
    ) -> None:
        if not members:
            raise CarmilError("a population of 0 models: expected at least one")
        self.build = build
        self.members = list(members)
        with torch.random.fork_rng(devices=[]):
            rows = []
            for member in members:
                torch.manual_seed(member.seed)
                model = build()
                rows.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        self.weights = torch.stack(rows).to(device)
        self.model = model
        self.noise = Noise(torch.tensor([member.seed for member in members], device=device))
        self._slots = _slots(model)
        self.names = [slot.name for slot in self._slots]
        self._release_parameters()
        self.coefficients = {
            term: torch.tensor([member.coefficients.get(term, default) for member in members], device=device)
            for term, default in model.coefficients.items()
        }
        self.terms = {term for term, value in self.coefficients.items() if bool(value.any())}

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def device(self) -> torch.device:
        return self.weights.device

    def __call__(
        self, features: Tensor, offsets: Offsets, *, weights: Tensor | None = None, rows: Tensor | None = None
    ) -> Prediction:
        """What every model answers; all tensors of the prediction have the population's axis in front.

        weights: others than its own, to differentiate by. rows (n): which instances of the cohort these are, for the noise.
        """
        self.noise.rows = rows
        for slot, stacked in zip(self._slots, self._stacked(self.weights if weights is None else weights), strict=True):
            setattr(slot.module, slot.attribute, stacked)
        for module in self._noisy:
            module.noise = self.noise
        return self.model(features, offsets)

    def losses(self, prediction: Prediction, labels: Tensor) -> dict[str, Tensor]:
        """Each loss term for each model and bag, (r, b), and under `total` their weighted sum."""
        losses = self.model.losses(prediction, labels, self.terms)
        weighted = [self.coefficients[term].unsqueeze(-1) * losses[term] for term in losses if term in self.terms]
        losses["total"] = torch.stack(weighted).sum(0)
        return losses

    def train(self, on: bool = True) -> None:
        self.model.train(on)

    def member(self, row: int) -> BagModel:
        """Model `row` by itself, on the population's device, ready to predict."""
        model = self.build().to(self.device)
        model.load_state_dict({name: stacked[row] for name, stacked in self.state().items()})
        return model.eval()

    def state(self) -> dict[str, Tensor]:
        """Every parameter by name, stacked: (r, ...)."""
        stacked = (tensor.detach().clone() for tensor in self._stacked(self.weights))
        return dict(zip(self.names, stacked, strict=True))

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes over stacked parameters that `state` wrote. What does not fit is named."""
        missing, surplus = sorted(set(self.names) - set(state)), sorted(set(state) - set(self.names))
        if missing or surplus:
            raise CarmilError(
                f"these weights are of another model: missing {missing or 'none'}, unknown {surplus or 'none'}"
            )
        self._load_some(state)

    def warm_start(self, state: Mapping[str, Tensor]) -> None:
        """Starts from a trained baseline of the same model without the branch, row by row; the branch stays as it is.

        A baseline of one row serves all models.
        """
        mine = {name.removeprefix("model."): name for name in self.names if not name.startswith("branch.")}
        if set(mine) != set(state):
            raise CarmilError(
                "the baseline is not this model without its branch: "
                f"it has {', '.join(sorted(state))}; expected {', '.join(sorted(mine))}"
            )
        self._load_some({mine[name]: tensor for name, tensor in state.items()})

    def subset(self, rows: Tensor) -> "Population":
        """These models only, in this order, with weights of their own. The architecture is shared: call one at a time."""
        part = copy.copy(self)
        part.members = [self.members[row] for row in rows.tolist()]
        part.weights = self.weights[rows]
        part.noise = Noise(self.noise.seeds[rows], self.noise.steps[rows])
        part.coefficients = {term: value[rows] for term, value in self.coefficients.items()}
        return part

    def _stacked(self, weights: Tensor) -> list[Tensor]:
        # One split, so that the gradient of the whole matrix comes back as one concatenation.
        pieces = weights.split([slot.count for slot in self._slots], dim=1)
        return [piece.unflatten(1, slot.shape) for piece, slot in zip(pieces, self._slots, strict=True)]

    def _load_some(self, state: Mapping[str, Tensor]) -> None:
        stacked = dict(zip(self.names, self._stacked(self.weights), strict=True))
        for name, tensor in state.items():
            wanted = stacked[name].shape
            if tensor.shape[1:] != wanted[1:] or len(tensor) not in (1, len(self)):
                raise CarmilError(f"weights {name!r} have shape {tuple(tensor.shape)}: expected {tuple(wanted)}")
        for name, tensor in state.items():
            stacked[name].copy_(tensor)

    def _release_parameters(self) -> None:
        """From here on the model's parameters are plain attributes, which `__call__` sets to stacked views."""
        for slot in self._slots:
            del slot.module._parameters[slot.attribute]
        self._noisy = [module for module in self.model.modules() if isinstance(module, Noisy)]
        for site, module in enumerate(self._noisy):
            module.site = site


@dataclass(frozen=True)
class _Slot:
    """Where a parameter lives in the architecture."""

    name: str
    module: nn.Module
    attribute: str
    shape: torch.Size
    count: int


def _slots(model: nn.Module) -> list[_Slot]:
    slots = []
    for name, parameter in model.named_parameters():
        path, _, attribute = name.rpartition(".")
        slots.append(_Slot(name, model.get_submodule(path), attribute, parameter.shape, parameter.numel()))
    return slots
