"""A module trained elsewhere as a model of carmil, which declares exactly the abilities that were found by trying them.

The user's functions describe one bag. The first argument of each is the module, so that they can also be called with
shuffled weights:

    predict(module, x) -> F      features (n, d) -> (k,)
    embed(module, x) -> z        features (n, d) -> instances (n, e); without it z = x
    attend(module, z) -> u       instances (n, e) -> scores (n,) or (n, h), before the softmax
    classify(module, Z) -> F     pool (h, e) -> (k,); without it and without embed, predict of Z as a bag of one instance

The module is copied: the user's own is never run in another mode, and its weights, flags and hooks stay as they are.
n instances, b bags, d features, k outputs, h heads.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from carmil.errors import CarmilError
from carmil.models.contract import Ability, BagModel, Prediction
from carmil.models.pooling import Offsets, bag_softmax, bag_weighted_sum
from carmil.words import plural

Function = Callable[[nn.Module, Tensor], Any]

NUMBERS = 2**22  # features that are given to a function at once
CLOSE = 1e-3  # relative difference below which two outputs are equal but for rounding
SMALL = 1e-2  # outputs below this are compared with it


@dataclass(frozen=True)
class OutsideFunctions:
    """The functions that apply a module to one bag; see the head of this file."""

    predict: Function
    embed: Function | None = None
    attend: Function | None = None
    classify: Function | None = None

    def __post_init__(self) -> None:
        for name in ("embed", "classify"):
            if getattr(self, name) is not None and self.attend is None:
                raise CarmilError(f"{name} without attend: give attend, the attention scores, too, or leave {name} out")


class OutsideModel(BagModel):
    """A module and its functions as a `BagModel`, always in eval mode. `wrap_module` finds its abilities.

    paired: the module has one logit F for two classes, whose logits are then -F/2 and F/2.
    together: the functions that torch.vmap computes for several bags of equal size at once.
    """

    middle: Tensor

    def __init__(self, module: nn.Module, functions: OutsideFunctions, outputs: int, *, paired: bool = False) -> None:
        super().__init__()
        self.module, self.functions, self.paired = module, functions, paired
        self.classes = 2 if paired else outputs
        self.outputs = outputs
        self.abilities = Ability.SMALL_BAGS
        self.together: frozenset[str] = frozenset()
        self.register_buffer("middle", torch.zeros(1))
        self.eval()

    def train(self, mode: bool = True) -> "OutsideModel":
        return super().train(False)

    @property
    def method(self) -> str:
        return type(self.module).__name__

    def forward(self, features: Tensor, offsets: Offsets | Tensor) -> Prediction:
        offsets = Offsets.of(offsets, features.device)
        if Ability.ATTENDS not in self.abilities:
            return Prediction(self.predict(features, offsets), offsets)
        z = self.embed(features, offsets)
        u = self.attend(z, offsets)
        if Ability.POOLS_BY_ATTENTION not in self.abilities:
            return Prediction(self.predict(features, offsets), offsets, scores=u)
        a = bag_softmax(u, offsets)
        pool = bag_weighted_sum(a, z, offsets).to(z.dtype)
        return Prediction(self.classify(pool), offsets, scores=u, instances=z, pooled=pool, weights=a)

    def predict(self, features: Tensor, offsets: Offsets) -> Tensor:
        """Return F (b, k), as computed by the user's `predict`."""
        return self._logits(self._per_bag("predict", features, offsets))

    def embed(self, features: Tensor, offsets: Offsets) -> Tensor:
        return features if self.functions.embed is None else self._per_instance("embed", features, offsets)

    def attend(self, instances: Tensor, offsets: Offsets) -> Tensor:
        return self._per_instance("attend", instances, offsets)

    def classify(self, pooled: Tensor) -> Tensor:
        flat = pooled.flatten(0, -3)
        name = "predict" if self.functions.classify is None else "classify"  # of a bag of one instance, (1, e)
        return self._logits(self._each(name, flat)).unflatten(0, pooled.shape[:-2])

    def _logits(self, outputs: Tensor) -> Tensor:
        return torch.cat([-outputs, outputs], dim=-1) / 2 if self.paired else outputs - self.middle.to(outputs)

    def _per_instance(self, name: str, values: Tensor, offsets: Offsets) -> Tensor:
        """Return a function's result for every instance, (n, d) -> (n, c): all bags at once if it does not depend on
        the bag.
        """
        if Ability.INSTANCE_WISE in self.abilities:
            return self._each(name, values.unsqueeze(0)).squeeze(0)
        return self._per_bag(name, values, offsets)

    def _per_bag(self, name: str, values: Tensor, offsets: Offsets) -> Tensor:
        """Return a function's result for every bag, bags of equal size together, in the order of the bags or instances."""
        results, order = [], []
        starts = offsets.starts[:-1]
        lengths = torch.tensor(offsets.lengths, device=starts.device)
        for size in sorted(set(offsets.lengths)):
            bags = (lengths == size).nonzero().squeeze(-1)
            rows = starts[bags].unsqueeze(-1) + torch.arange(size, device=starts.device)
            result = self._each(name, values[rows])
            results.append(result if name == "predict" else result.flatten(0, 1))
            order.append(bags if name == "predict" else rows.flatten())
        return torch.cat(results)[torch.cat(order).argsort()]

    def _each(self, name: str, bags: Tensor) -> Tensor:
        """Return a function's results for bags of equal size, (m, n, d) -> (m, ...)."""
        ask = partial(self._ask, name)
        with _undisturbed(self.module):
            if name in self.together and len(bags) > 1:
                try:
                    return torch.cat([_vmap(ask, part) for part in bags.split(max(1, NUMBERS // bags[0].numel()))])
                except CarmilError:  # operations for large bags, which were not met when the abilities were tried
                    self.together -= {name}
            return torch.stack([ask(bag) for bag in bags])

    def ask(self, name: str, values: Tensor) -> Tensor:
        """Return a function's result for one bag, in the expected shape."""
        with _undisturbed(self.module):
            return self._ask(name, values)

    def _ask(self, name: str, values: Tensor) -> Tensor:
        try:
            result = getattr(self.functions, name)(self.module, values)
        except CarmilError:
            raise
        except Exception as error:
            shape = tuple(values.shape)
            raise CarmilError(
                f"{name} failed on a tensor of shape {shape} ({type(error).__name__}: {error}): expected a function of the "
                f"module and of one bag, such as {name}=lambda module, x: module(x)"
            ) from error
        if not isinstance(result, Tensor):
            raise CarmilError(
                f"{name} returned a {type(result).__name__}: expected one tensor, for instance module(x)[0] of a tuple"
            )
        result = result.float() if result.dtype in (torch.float16, torch.bfloat16) else result
        if name in ("predict", "classify"):
            return self._as_outputs(name, result, len(values))
        return _as_instances(name, result, len(values))

    def _as_outputs(self, name: str, result: Tensor, instances: int) -> Tensor:
        outputs = result.flatten() if result.ndim == 0 or (result.ndim == 2 and len(result) == 1) else result
        known = self.outputs or len(outputs)
        if outputs.ndim != 1 or len(outputs) != known:
            of = f"a bag of {plural(instances, 'instance')}" if name == "predict" else f"a pool of {instances} rows"
            expected = f"({self.outputs},) or (1, {self.outputs})" if self.outputs else "(k,) or (1, k)"
            raise CarmilError(
                f"{name} returned shape {tuple(result.shape)} for {of}: expected {expected}, the outputs of the bag"
            )
        return outputs


def _as_instances(name: str, result: Tensor, instances: int) -> Tensor:
    """Return instances or scores as (n, c)."""
    rows = result.squeeze(0) if result.ndim > 1 and len(result) == 1 and instances > 1 else result
    rows = rows.unsqueeze(-1) if name == "attend" and rows.ndim == 1 else rows
    if rows.ndim != 2 or len(rows) != instances:
        expected = "(n,) or (n, heads), one score per instance" if name == "attend" else "(n, e), one row per instance"
        raise CarmilError(
            f"{name} returned shape {tuple(result.shape)} for a bag of {plural(instances, 'instance')}: expected {expected}"
        )
    return rows


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """Restore the attributes that a module sets on itself in a pass, such as its last attention map."""
    before = [(part, dict(vars(part))) for part in module.modules()]
    try:
        yield
    finally:
        for part, state in before:
            now = vars(part)
            if len(now) != len(state) or any(now.get(name) is not value for name, value in state.items()):
                now.clear()
                now.update(state)


class _Watch(TorchFunctionMode):
    """Records whether any of the given tensors takes part in an operation."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.ids, self.met = {id(tensor) for tensor in tensors}, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.met |= any(id(leaf) in self.ids for leaf in tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module in eval mode."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        for value in vars(part).values():
            for tensor in value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
                if isinstance(tensor, Tensor) and not tensor.is_leaf:  # of an earlier pass; torch refuses to copy these
                    memo[id(tensor)] = tensor.detach().clone()
    try:
        return copy.deepcopy(module, memo).eval()
    except Exception as error:
        raise CarmilError(
            f"{type(module).__name__} cannot be copied ({type(error).__name__}: {error}): expected a module that copy.deepcopy "
            "copies, as its copies are asked with shuffled weights"
        ) from error


def wrap_module(
    module: nn.Module,
    functions: OutsideFunctions,
    bags: Sequence[Tensor],
    *,
    pair: bool = False,
    device: torch.device | str | None = None,
) -> tuple[OutsideModel, tuple[str, ...]]:
    """Return the module as a model, and notes about the abilities that it lacks. The abilities are tried on some bags
    (n, d).

    pair: whether a single output is the logit of two classes. device: by default that of the module.
    """
    try:
        asked = OutsideModel(_copied(module).to(device), functions, 0)
    except RuntimeError as error:
        raise CarmilError(
            f"device {str(device)!r} cannot be used ({str(error).splitlines()[0]}): expected 'cpu', or 'cuda' with an NVIDIA GPU"
        ) from error
    bags = [bag.to(next(asked.parameters())) for bag in bags]
    with torch.no_grad():
        own = [*module.parameters(), *module.buffers()]
        outputs = _own_module(asked, "predict", bags[0], own)
        model = OutsideModel(asked.module, functions, len(outputs), paired=pair and len(outputs) == 1)
        for bag in bags[1:]:
            model.ask("predict", bag)
        again = model.ask("predict", bags[0])
        if not _close(outputs.nan_to_num(), again.nan_to_num()):
            raise CarmilError(
                f"the same bag gives different outputs, up to {(outputs - again).abs().max():.3g} apart, in eval mode: does "
                "predict sample instances, or does the module use dropout that eval() does not turn off? Make it deterministic"
            )
        if outputs.isfinite().all():
            _check_least_bags(model, bags[0])
        model.permutation_invariant = _close(outputs, model.ask("predict", bags[0].flip(0)))
    notes = (
        [] if model.permutation_invariant else ["the output depends on the order of the instances: bags keep theirs"]
    )
    notes += _find_gradients(model, bags[0])
    if functions.attend is not None:
        notes += _find_attention(model, bags, own)
    model.together = frozenset(name for name in ("predict", "classify") if _vmaps(model, name, bags))
    return model, tuple(notes)


def _own_module(model: OutsideModel, name: str, values: Tensor, own: Sequence[Tensor]) -> Tensor:
    """Return a function's result; refuse a function that uses the user's module instead of the one that it is given."""
    with _Watch(own) as watch:
        result = model.ask(name, values)
    if watch.met:
        raise CarmilError(
            f"{name} uses your module directly: expected it to use its first argument, {name}=lambda module, x: module(x), as "
            "it is also called with copies of the module whose weights are shuffled"
        )
    return result


def _check_least_bags(model: OutsideModel, bag: Tensor) -> None:
    """Refuse a module without a finite output for bags of one or two instances, or of zeros: removal curves end with
    these.
    """
    for words, x in (
        ("a bag of one instance", bag[:1]),
        ("a bag of two instances", bag[:2]),
        ("a bag of zeros", torch.zeros_like(bag)),
    ):
        try:
            trouble = "" if model.ask("predict", x).isfinite().all() else "it returns NaN or infinity"
        except CarmilError as error:
            trouble = str(error).partition(": expected ")[0]
        if trouble:
            raise CarmilError(
                f"predict has no answer for {words} ({trouble}), but instances are removed one after the other, until a bag of "
                "zeros is left: let predict answer these too, for instance by repeating the instances of a small bag"
            )


def _find_gradients(model: OutsideModel, bag: Tensor) -> list[str]:
    x = bag.detach().clone().requires_grad_()
    with torch.enable_grad():
        outputs = model.ask("predict", x)
        found = torch.autograd.grad(outputs.sum(), x, allow_unused=True)[0] if outputs.requires_grad else None
    if found is None or not found.isfinite().all():
        return ["no gradients: the output of predict cannot be differentiated with respect to the features"]
    model.abilities |= Ability.GRADIENTS
    return []


def _find_attention(model: OutsideModel, bags: Sequence[Tensor], own: Sequence[Tensor]) -> list[str]:
    functions, bag = model.functions, bags[0]
    whole = Offsets(torch.tensor([0, len(bag)]), bag.device)
    with torch.no_grad():
        z = bag if functions.embed is None else _own_module(model, "embed", bag, own)
        u = _own_module(model, "attend", z, own)
        for name, values in (("embed", z), ("attend", u)):
            if not values.isfinite().all():
                raise CarmilError(f"{name} returned values that are not finite: expected a number for every instance")
        if len(bag) > 1 and (u >= 0).all() and _close(u.sum(0), torch.ones_like(u[0])):
            raise CarmilError(
                "attend returned attention weights, which sum to 1 over a bag: expected the scores before the softmax"
            )
        model.heads = u.shape[1]
        model.abilities |= Ability.ATTENDS
        pool = bag_weighted_sum(bag_softmax(u, whole), z, whole).to(z.dtype)
        if functions.classify is None and (functions.embed is not None or model.heads > 1):
            return ["no path evidence: give classify, the function of the pool (heads, e)"]
        if functions.classify is not None:
            _own_module(model, "classify", pool[0], own)
        try:
            in_double = copy.deepcopy(model).double().classify(pool.double())
        except CarmilError as error:
            return [f"no path evidence: classify does not work in double precision ({error})"]
        wanted = model.predict(bag, whole)
        if not _close(model.classify(pool), wanted) or not _close(in_double.to(wanted), wanted):
            apart = (model.classify(pool) - wanted).abs().max()
            return [
                f"no path evidence: classify of sum_j softmax(attend)_j embed_j differs from predict, by up to {apart:.3g}, so "
                "these functions are not what predict computes"
            ]
        model.abilities |= Ability.POOLS_BY_ATTENTION
        if _instance_wise(model, bags):
            model.abilities |= Ability.INSTANCE_WISE
        if model.heads == model.classes > 1 and _map_per_class(model, pool):
            model.abilities |= Ability.MAP_PER_CLASS
    return []


def _instance_wise(model: OutsideModel, bags: Sequence[Tensor]) -> bool:
    """Return whether z and u of some instances stay the same without the other instances, and at other positions in a
    bag with further ones.
    """
    bag = bags[0]
    half = len(bag) // 2
    alone, some = bag[half:], torch.cat([bag[half:], bag[:half], bags[-1]])  # at other places, with others behind them
    for name in ("embed", "attend"):
        if name == "embed" and model.functions.embed is None:
            continue
        try:
            results = [model.ask(name, values) for values in (bag, alone, some)]
        except CarmilError:
            return False
        if not all(_close(results[0][half:], other[: len(alone)]) for other in results[1:]):
            return False
        if name == "embed":
            bag, alone, some = results
    return True


def _map_per_class(model: OutsideModel, pool: Tensor) -> bool:
    """Return whether output c depends on the pool of map c alone. pool (1, h, e)."""
    before = model.classify(pool)
    for head in range(model.heads):
        changed = pool.clone()
        changed[:, head] = pool[:, head] * 1.5 + 0.1
        moved = (model.classify(changed) - before).abs().squeeze(0)
        others = torch.arange(model.heads, device=pool.device) != head
        if not moved[head] > 0 or (moved[others] > CLOSE * moved[head]).any():
            return False
    return True


def _vmaps(model: OutsideModel, name: str, bags: Sequence[Tensor]) -> bool:
    """Return whether torch.vmap gives the same results and gradients as one bag after the other."""
    if name == "predict":
        size = min(2, *(len(bag) for bag in bags))
        values = torch.stack([bags[0][:size], bags[-1][-size:]])
    elif model.functions.classify is not None and Ability.POOLS_BY_ATTENTION in model.abilities:
        width = bags[0].shape[1] if model.functions.embed is None else model.ask("embed", bags[0]).shape[1]
        values = torch.linspace(-1, 1, 2 * model.heads * width).view(2, model.heads, width).to(bags[0])
    else:
        return False
    ask, results = partial(model._ask, name), []
    try:
        for each in (lambda x: torch.stack([ask(one) for one in x]), partial(_vmap, ask)):
            x = values.clone().requires_grad_(Ability.GRADIENTS in model.abilities)
            with _undisturbed(model.module):
                result = each(x)
            slope = torch.autograd.grad(result.sum(), x)[0] if x.requires_grad else torch.zeros(1)
            results.append((result.detach(), slope))
    except Exception:  # whatever vmap does not support is asked one by one
        return False
    return all(_close(one, other) for one, other in zip(*results, strict=True))


def _vmap(function: Callable[[Tensor], Tensor], bags: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")  # for single operations only
        return torch.vmap(function)(bags)


def _close(first: Tensor, second: Tensor) -> bool:
    """Return whether two results are equal up to rounding."""
    scale = max(SMALL, float(first.abs().max()), float(second.abs().max()))
    return bool((first - second).abs().max() <= CLOSE * scale)
