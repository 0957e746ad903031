"""Where the features are while a population trains, and how they come to the device. b bags, n instances.

On the device if they fit; otherwise they stay where they are, in memory or mapped from a store, and the next batch travels
through a pinned buffer while the present one is computed on.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.models.pooling import Offsets
from carmil.models.scaled_model import ScaledModel
from carmil.recording import thread_stream
from carmil.training.memory import free_memory
from carmil.training.population import Population

RESIDENT_SHARE = 0.5  # of the device's free memory that features may take; the rest is for what is computed


@dataclass(frozen=True)
class DeviceBags:
    """Some bags on the device: `rows` (n) are their instances in the cohort."""

    features: Tensor
    labels: Tensor
    offsets: Offsets
    rows: Tensor


class Feeder:
    """Hands out bags that are where they are computed on: on a CPU, or resident on a GPU as the type they are computed in."""

    resident = True

    def __init__(
        self, bags: Bags, device: torch.device, dtype: torch.dtype | None = None, shift: Tensor | None = None
    ) -> None:
        assert bags.labels is not None
        self.bags, self.device = bags, device
        self.features = bags.features.to(device) if dtype is None else _as_type(bags.features, device, dtype, shift)
        self.labels = bags.labels.to(device)
        self._neighbours: dict[tuple[int, int], DeviceBags] = {}

    def feed(self, plan: Iterable[Tensor]) -> Iterator[DeviceBags]:
        """The bags at these positions, one handful after the other."""
        for chosen in plan:
            if not _adjoin(chosen):
                yield self._fed(chosen, None)
                continue
            place = (int(chosen[0]), len(chosen))  # nothing is copied, and what is known of them serves every epoch
            if place not in self._neighbours:
                self._neighbours[place] = self._fed(chosen, None)
            yield self._neighbours[place]

    def like(self, chosen: Tensor) -> Hashable:
        """What a handful has in common with others, so that a step on it can be recorded: the bag itself, or its sizes."""
        if self._alike:
            return (len(chosen), "bags of one size")
        return int(chosen[0]) if len(chosen) == 1 else None

    @cached_property
    def _alike(self) -> bool:
        return bool((self.bags.sizes == self.bags.sizes[0]).all())

    def _fed(self, chosen: Tensor, features: Tensor | None) -> DeviceBags:
        first, last = int(chosen[0]), int(chosen[-1]) + 1
        sizes = self.bags.sizes[chosen]
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        if _adjoin(chosen):
            begin, end = int(self.bags.offsets[first]), int(self.bags.offsets[last])
            rows = torch.arange(begin, end, device=self.device)
            features = self.features[begin:end] if features is None else features
            labels = self.labels[first:last]
        else:
            rows = _rows(self.bags.offsets[chosen] - offsets[:-1], sizes, self.device)
            features = self.features[rows] if features is None else features
            labels = self.labels[chosen.to(self.device)]
        return DeviceBags(features, labels, Offsets(offsets, self.device), rows)


class StreamingFeeder(Feeder):
    """Features stay on the host; two buffers take turns: one is filled and sent while the other is computed on."""

    resident = False

    def __init__(self, bags: Bags, device: torch.device, most_rows: int, shift: Tensor | None = None) -> None:
        assert bags.labels is not None
        self.bags, self.device, self.shift = bags, device, shift
        self.labels = bags.labels.to(device)
        shape, dtype = (most_rows, bags.width), bags.features.dtype
        self._pinned = [torch.empty(shape, dtype=dtype, pin_memory=True) for _ in range(2)]
        self._there = [torch.empty(shape, dtype=dtype, device=device) for _ in range(2)]
        self._sent, self._used = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
        self._road = thread_stream("road")
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="carmil-feeder")

    def like(self, chosen: Tensor) -> Hashable:
        return super().like(chosen) if self._alike else None  # a bag has no place of its own on the device

    def feed(self, plan: Iterable[Tensor]) -> Iterator[DeviceBags]:
        under_way: list[tuple[int, Tensor, Future[Tensor]]] = []
        for turn, chosen in enumerate(plan):
            under_way.append((turn % 2, chosen, self._loader.submit(self._send, turn % 2, chosen)))
            if len(under_way) == 2:
                yield from self._handed_over(*under_way.pop(0))
        for slot, chosen, sent in under_way:
            yield from self._handed_over(slot, chosen, sent)

    def _handed_over(self, slot: int, chosen: Tensor, sent: "Future[Tensor]") -> Iterator[DeviceBags]:
        features = sent.result()
        here = torch.cuda.current_stream(self.device)
        here.wait_event(self._sent[slot])
        yield self._fed(chosen, features if self.shift is None else _shifted(features, self.shift, torch.bfloat16))
        self._used[slot].record(here)  # what was asked for the batch is in the queue by now

    def _send(self, slot: int, chosen: Tensor) -> Tensor:
        """Runs beside the training: copies the bags into the pinned buffer, and from there to the device."""
        self._sent[slot].synchronize()  # what was last sent from this buffer has left it
        end = 0
        for bag in chosen.tolist():
            features = self.bags.features[int(self.bags.offsets[bag]) : int(self.bags.offsets[bag + 1])]
            begin, end = end, end + len(features)
            self._pinned[slot][begin:end].copy_(features)
        there = self._there[slot][:end]
        with torch.cuda.stream(self._road):
            self._road.wait_event(self._used[slot])
            there.copy_(self._pinned[slot][:end], non_blocking=True)
            self._sent[slot].record(self._road)
        return there


def _adjoin(chosen: Tensor) -> bool:
    """Do these bags lie one behind the other?"""
    return bool((chosen.diff() == 1).all())


def _as_type(features: Tensor, device: torch.device, dtype: torch.dtype, shift: Tensor | None) -> Tensor:
    """On the device in another type, a part after the other: nothing there is twice as large as it must be."""
    there = torch.empty(features.shape, dtype=dtype, device=device)
    for mine, theirs in zip(there.split(2**16), features.split(2**16), strict=True):
        sent = theirs.to(device)
        mine.copy_(sent if shift is None else _shifted(sent, shift, dtype))
    return there


def _shifted(features: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
    """x - c, rounded after the difference is taken: what tells tiles apart is small beside what they have in common."""
    return (features.float() - shift).to(dtype)


def _rows(shifts: Tensor, sizes: Tensor, device: torch.device) -> Tensor:
    """Where in the cohort the instances of some bags lie, that are laid end to end; computed where it is wanted."""
    count = int(sizes.sum())
    shifts, sizes = shifts.to(device), sizes.to(device)
    return torch.arange(count, device=device) + torch.repeat_interleave(shifts, sizes, output_size=count)


@contextmanager
def open_feeder(population: Population, bags: Bags, handfuls: Sequence[Tensor]) -> Iterator[Feeder]:
    """A feeder of these bags. handfuls: what will be asked for.

    Where scaled features are computed on in 16 bits, one vector that all models share is subtracted before they are rounded,
    and the models are told of it while the block lasts: x - mean is then a difference of small numbers.
    """
    model = population.model
    if not (population.in_half and isinstance(model, ScaledModel)):
        yield choose_feeder(population, bags, handfuls)
        return
    model.shift = population.state()["mean"].mean(0)
    try:
        yield choose_feeder(population, bags, handfuls, model.shift)
    finally:
        model.shift = None


def choose_feeder(
    population: Population, bags: Bags, handfuls: Sequence[Tensor], shift: Tensor | None = None
) -> Feeder:
    """Features on the population's device if they fit there, otherwise streamed; less `shift`, which 16 bits need."""
    device, size = population.device, bags.features.numel() * bags.features.element_size()
    to_send = device.type == "cuda" and not bags.features.is_cuda
    if to_send and size > RESIDENT_SHARE * free_memory(device):
        most = max(int(bags.sizes[chosen].sum()) for chosen in handfuls)
        return StreamingFeeder(bags, device, most, shift)
    return Feeder(bags, device, torch.bfloat16 if population.in_half else None, shift)
