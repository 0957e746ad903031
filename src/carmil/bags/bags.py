"""Ragged bags of instance features.

n instances of all bags together, b bags, d features, k classes. `offsets` (b+1) contains the first row of each bag:
bag i is rows offsets[i]:offsets[i+1] of `features`. Nothing is padded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carmil.bags.geometry import Unit
from carmil.errors import CarmilError
from carmil.words import plural

_PER_INSTANCE = ("features", "instance_labels", "coordinates")


@dataclass(frozen=True, eq=False)
class Bags:
    """Ragged bags of instance features, with their labels, names and coordinates.

    features        (n, d) floating point, finite
    offsets         (b+1) int64, on the CPU, strictly increasing from 0 to n: no bag is empty
    labels          (b) int64 class of each bag, or (b, t) floats of another kind of target (carmil.targets), or None
    ids             the name of each bag; "0", "1", ... by default
    instance_labels (n) or (n, k) truth about the instances, UNKNOWN where it is not known, or None
    coordinates     (n, 2) x and y of each instance, NaN for the instances of a bag without coordinates, or None if no bag
                    has any
    coordinate_unit the unit of the coordinates: one for all bags, or one per bag, None for a bag without coordinates
    """

    features: Tensor
    offsets: Tensor
    labels: Tensor | None = None
    ids: tuple[str, ...] = ()
    instance_labels: Tensor | None = None
    coordinates: Tensor | None = None
    coordinate_unit: Unit | tuple[Unit | None, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", torch.as_tensor(self.offsets, dtype=torch.int64).cpu())
        if not self.ids:
            object.__setattr__(self, "ids", tuple(str(i) for i in range(len(self.offsets) - 1)))
        _check(self)

    @classmethod
    def from_list(
        cls,
        bags: Sequence[Tensor | np.ndarray],
        *,
        labels: Sequence[int] | Tensor | np.ndarray | None = None,
        ids: Sequence[str] = (),
        instance_labels: Sequence[Tensor | np.ndarray] | None = None,
        coordinates: Sequence[Tensor | np.ndarray] | None = None,
        coordinate_unit: Unit | tuple[Unit | None, ...] | None = None,
    ) -> "Bags":
        """Create bags from one (n_i, d) array per bag."""
        if not bags:
            raise CarmilError("no bags given: expected at least one (instances, features) array")
        features = [torch.as_tensor(bag) for bag in bags]
        for i, bag in enumerate(features):
            name = ids[i] if i < len(ids) else str(i)
            if bag.ndim != 2:
                raise CarmilError(
                    f"bag {name!r} has shape {tuple(bag.shape)}: expected two axes, (instances, features)"
                )
            if bag.shape[1] != features[0].shape[1]:
                raise CarmilError(
                    f"bag {name!r} has {bag.shape[1]} features per instance, the first bag "
                    f"{features[0].shape[1]}: expected the same number of features in all bags"
                )
        for what, given in (("coordinates", coordinates), ("instance labels", instance_labels)):
            for i, (bag, own) in enumerate(zip(features, () if given is None else given, strict=False)):
                if len(own) != len(bag):
                    name = ids[i] if i < len(ids) else str(i)
                    raise CarmilError(
                        f"bag {name!r} has {len(bag)} instances and {what} of {len(own)}: expected as many"
                    )
        sizes = torch.tensor([len(bag) for bag in features])
        return cls(
            features=torch.cat(features),
            offsets=torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]),
            labels=None if labels is None else torch.as_tensor(labels),
            ids=tuple(ids),
            instance_labels=_joined(instance_labels),
            coordinates=_joined(coordinates),
            coordinate_unit=coordinate_unit,
        )

    @classmethod
    def concatenate(cls, parts: Sequence["Bags"]) -> "Bags":
        """Concatenate the bags of all parts in order. Labels and instance labels must be in all parts or in none;
        coordinates may be missing in some.
        """
        if not parts:
            raise CarmilError("nothing to concatenate: expected at least one Bags")
        first = parts[0]
        for i, part in enumerate(parts):
            if part.width != first.width:
                raise CarmilError(f"part {i} has {part.width} features per instance, the first part {first.width}")
            for name in ("labels", "instance_labels"):
                if (getattr(part, name) is None) != (getattr(first, name) is None):
                    raise CarmilError(f"part {i} and the first part disagree: only one of them has {name}")
        sizes = torch.cat([part.sizes for part in parts])
        joined = {
            name: None if getattr(first, name) is None else torch.cat([getattr(part, name) for part in parts])
            for name in ("labels", "features", "instance_labels")
        }
        known = next((part.coordinates for part in parts if part.coordinates is not None), None)
        if known is not None:
            nowhere = known.new_full((1, 2), torch.nan)
            joined["coordinates"] = torch.cat(
                [
                    nowhere.expand(len(part.features), 2) if part.coordinates is None else part.coordinates
                    for part in parts
                ]
            )
        return first._trusted(
            offsets=torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]),
            ids=tuple(name for part in parts for name in part.ids),
            coordinate_unit=shared_unit([unit for part in parts for unit in part.units]),
            **joined,
        )

    @classmethod
    def trusted(cls, features: Tensor, offsets: Tensor, ids: tuple[str, ...], **others: Any) -> "Bags":
        """Create bags from parts that were validated when they were written, without reading them again."""
        new = object.__new__(cls)
        given = {"features": features, "offsets": offsets, "ids": ids, **others}
        for field in fields(cls):
            object.__setattr__(new, field.name, given.get(field.name))
        return new

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, which: int | slice | Sequence[int] | Tensor | np.ndarray) -> "Bags":
        """Return some of the bags in the given order, selected by a position, a slice, positions, or a mask of length b."""
        chosen = self._positions(which)
        offsets, rows = rows_of(self.offsets, chosen)
        picked: dict[str, Any] = {}
        for name in _PER_INSTANCE:
            values = getattr(self, name)
            picked[name] = None if values is None else values[rows.to(values.device)]
        if self.labels is not None:
            picked["labels"] = self.labels[chosen.to(self.labels.device)]
        if isinstance(self.coordinate_unit, tuple):
            picked["coordinate_unit"] = shared_unit([self.coordinate_unit[i] for i in chosen.tolist()])
            if picked["coordinate_unit"] is None:
                picked["coordinates"] = None
        return self._trusted(offsets=offsets, ids=tuple(self.ids[i] for i in chosen.tolist()), **picked)

    def to(self, device: torch.device | str) -> "Bags":
        """Return the bags with their tensors on `device`, except `offsets`, which stays on the CPU, where it can be
        read without synchronisation.
        """
        moved = {
            name: None if (value := getattr(self, name)) is None else value.to(device)
            for name in ("labels", *_PER_INSTANCE)
        }
        return self._trusted(**moved)

    def parts(self, max_instances: int, chosen: Tensor | None = None) -> Iterator["Bags"]:
        """Yield the bags, or those at the positions `chosen`, in order, in groups of at most `max_instances` instances.

        A larger bag forms a group by itself. Only one group is copied at a time.
        """
        if chosen is None:
            chosen = torch.arange(len(self))
        runs = runs_of(self.sizes[chosen].tolist(), max_instances)
        all_bags = len(runs) == 1 and len(chosen) == len(self) and bool((chosen.diff() > 0).all())
        return iter([self]) if all_bags else (self[chosen[first:last]] for first, last in runs)

    @property
    def sizes(self) -> Tensor:
        """Return (b) the number of instances of each bag."""
        return self.offsets.diff()

    @property
    def units(self) -> tuple[Unit | None, ...]:
        """Return (b) the unit of each bag's coordinates, None for a bag without coordinates."""
        return self.coordinate_unit if isinstance(self.coordinate_unit, tuple) else (self.coordinate_unit,) * len(self)

    @property
    def width(self) -> int:
        return self.features.shape[1]

    @property
    def classes(self) -> int:
        """Return the number of classes: the largest label plus one."""
        if self.labels is None:
            raise CarmilError("these bags have no labels")
        return int(self.labels.max()) + 1

    def _positions(self, which: int | slice | Sequence[int] | Tensor | np.ndarray) -> Tensor:
        everything = torch.arange(len(self))
        if isinstance(which, (int, np.integer)):
            if not -len(self) <= which < len(self):
                raise IndexError(f"bag {which}: expected a position below {len(self)}, the number of bags")
            return everything[which].reshape(1)
        if isinstance(which, slice):
            chosen = everything[which]
        else:
            index = torch.as_tensor(which).cpu()
            if index.dtype == torch.bool and len(index) != len(self):
                raise CarmilError(f"the mask has {len(index)} entries: expected {len(self)}, one per bag")
            chosen = everything[index if index.numel() else slice(0)]
        if len(chosen) == 0:
            raise CarmilError(f"none of the {len(self)} bags was selected: expected at least one")
        return chosen

    def _trusted(self, **changes: Any) -> "Bags":
        """Return a copy with changes that need no validation because their parts were validated before."""
        return Bags.trusted(**{field.name: getattr(self, field.name) for field in fields(self)} | changes)


def shared_unit(units: Sequence[Unit | None]) -> Unit | tuple[Unit | None, ...] | None:
    """Return the unit that the coordinates of all bags have in common, or else the unit of each bag."""
    return units[0] if len(set(units)) == 1 else tuple(units)


def rows_of(offsets: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the offsets of the chosen bags after concatenation, and the original row of each of their instances."""
    sizes = offsets.diff()[chosen]
    new_offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    shift = offsets[chosen] - new_offsets[:-1]
    return new_offsets, torch.arange(int(new_offsets[-1])) + torch.repeat_interleave(shift, sizes)


def runs_of(sizes: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Divide a list of sizes into consecutive groups (first, last + 1) with a sum of at most `most`; a larger size
    forms a group by itself.
    """
    runs, first, total = [], 0, 0
    for i, size in enumerate(sizes):
        if i > first and total + size > most:
            runs.append((first, i))
            first, total = i, 0
        total += size
    return [*runs, (first, len(sizes))]


def _joined(parts: Sequence[Tensor | np.ndarray] | None) -> Tensor | None:
    return None if parts is None else torch.cat([torch.as_tensor(part) for part in parts])


def _check(bags: Bags) -> None:
    features, offsets = bags.features, bags.offsets
    if features.ndim != 2 or not features.is_floating_point():
        raise CarmilError(
            f"features have shape {tuple(features.shape)} and type {features.dtype}: "
            "expected a floating-point (instances, features) matrix"
        )
    if offsets.ndim != 1 or len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(features):
        raise CarmilError(
            f"offsets of shape {tuple(offsets.shape)} do not span the {len(features)} instances: expected bags "
            f"+ 1 increasing numbers from 0 to {len(features)}"
        )
    n, b = len(features), len(bags)
    if len(bags.ids) != b:
        raise CarmilError(f"{plural(len(bags.ids), 'id')} for {plural(b, 'bag')}")
    sizes = offsets.diff()
    if (sizes <= 0).any():
        bad = int((sizes <= 0).nonzero()[0])
        raise CarmilError(
            f"bag {bags.ids[bad]!r} has {int(sizes[bad])} instances: expected at least one; leave the bag out"
        )
    if bags.labels is not None:
        if len(bags.labels) != b or bags.labels.ndim > 2:
            raise CarmilError(f"labels have shape {tuple(bags.labels.shape)} for {plural(b, 'bag')}: expected ({b},)")
        if bags.labels.ndim == 1 and (bags.labels.is_floating_point() or (bags.labels < 0).any()):
            raise CarmilError("labels must be class numbers 0, 1, 2, ...")
        object.__setattr__(bags, "labels", bags.labels.long() if bags.labels.ndim == 1 else bags.labels.float())
    if bags.instance_labels is not None and len(bags.instance_labels) != n:
        raise CarmilError(f"{plural(len(bags.instance_labels), 'instance label')} for {plural(n, 'instance')}")
    if bags.coordinates is not None:
        if bags.coordinates.shape != (n, 2):
            raise CarmilError(f"coordinates have shape {tuple(bags.coordinates.shape)}: expected ({n}, 2)")
        if bags.coordinate_unit is None:
            raise CarmilError("coordinates without a unit: give coordinate_unit='level0_px' or 'um'")
        if len(bags.units) != b:
            raise CarmilError(
                f"{plural(len(bags.units), 'unit')} of coordinates for {plural(b, 'bag')}: expected one, or one per bag"
            )
    bad_rows = ~torch.isfinite(features).all(dim=1)
    if bad_rows.any():
        row = int(bad_rows.nonzero()[0])
        bag = int(torch.searchsorted(offsets, row, right=True)) - 1
        raise CarmilError(
            f"bag {bags.ids[bag]!r} has NaN or infinite features (instance {row - int(offsets[bag])} of "
            f"{int(sizes[bag])}; {plural(int(bad_rows.sum()), 'instance')} in all): extract its features again "
            "or leave the bag out"
        )
