"""Storage of the features while a population trains, and their transfer to the device. b bags, n instances.

Features are on the device if they fit. Otherwise they stay in memory, or in the memory map of a store, and the next
batch is copied through a pinned buffer during the computation of the current batch.
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

RESIDENT_SHARE = 0.5  # share of the device's free memory for features; the remainder is for the computation


@dataclass(frozen=True)
class DeviceBags:
    """Some bags on the device; `rows` (n) are the positions of their instances in the cohort."""

    features: Tensor
    labels: Tensor
    offsets: Offsets
    rows: Tensor


class Feeder:
    """Feeder of bags that are already on the device: on a CPU, or resident on a GPU in the type of the computation."""

    resident = True

    def __init__(
        self, bags: Bags, device: torch.device, dtype: torch.dtype | None = None, shift: Tensor | None = None
    ) -> None:
        assert bags.labels is not None
        self.bags, self.device = bags, device
        self.features = bags.features.to(device) if dtype is None else _convert(bags.features, device, dtype, shift)
        self.labels = bags.labels.to(device)
        self._consecutive: dict[tuple[int, int], DeviceBags] = {}

    def feed(self, plan: Iterable[Tensor]) -> Iterator[DeviceBags]:
        """Yield the bags of each batch of positions."""
        for chosen in plan:
            if not _are_consecutive(chosen):
                yield self._collect(chosen, None)
                continue
            place = (int(chosen[0]), len(chosen))  # nothing is copied, so that one object serves every epoch
            if place not in self._consecutive:
                self._consecutive[place] = self._collect(chosen, None)
            yield self._consecutive[place]

    def graph_key(self, chosen: Tensor) -> Hashable:
        """Return a key of the CUDA graph that serves this batch: the bag itself, or the bag size; None if it should
        not be recorded.
        """
        if self._same_size:
            return (len(chosen), "bags of one size")
        return int(chosen[0]) if len(chosen) == 1 else None

    @cached_property
    def _same_size(self) -> bool:
        return bool((self.bags.sizes == self.bags.sizes[0]).all())

    def _collect(self, chosen: Tensor, features: Tensor | None) -> DeviceBags:
        first, last = int(chosen[0]), int(chosen[-1]) + 1
        sizes = self.bags.sizes[chosen]
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        if _are_consecutive(chosen):
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
    """Feeder of features on the host. Two buffers alternate: one is filled and sent during the computation on the other."""

    resident = False

    def __init__(self, bags: Bags, device: torch.device, most_rows: int, shift: Tensor | None = None) -> None:
        assert bags.labels is not None
        self.bags, self.device, self.shift = bags, device, shift
        self.labels = bags.labels.to(device)
        shape, dtype = (most_rows, bags.width), bags.features.dtype
        self._pinned = [torch.empty(shape, dtype=dtype, pin_memory=True) for _ in range(2)]
        self._buffers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(2)]
        self._sent, self._used = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
        self._stream = thread_stream("copy")
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="carmil-feeder")

    def graph_key(self, chosen: Tensor) -> Hashable:
        return super().graph_key(chosen) if self._same_size else None  # a bag has no fixed address on the device

    def feed(self, plan: Iterable[Tensor]) -> Iterator[DeviceBags]:
        pending: list[tuple[int, Tensor, Future[Tensor]]] = []
        for turn, chosen in enumerate(plan):
            pending.append((turn % 2, chosen, self._loader.submit(self._send, turn % 2, chosen)))
            if len(pending) == 2:
                yield from self._receive(*pending.pop(0))
        for slot, chosen, sent in pending:
            yield from self._receive(slot, chosen, sent)

    def _receive(self, slot: int, chosen: Tensor, sent: "Future[Tensor]") -> Iterator[DeviceBags]:
        features = sent.result()
        here = torch.cuda.current_stream(self.device)
        here.wait_event(self._sent[slot])
        yield self._collect(chosen, features if self.shift is None else _subtract(features, self.shift, torch.bfloat16))
        self._used[slot].record(here)  # all operations on the batch are queued at this point

    def _send(self, slot: int, chosen: Tensor) -> Tensor:
        """Copy the bags into the pinned buffer and on to the device; runs in a thread parallel to training."""
        self._sent[slot].synchronize()  # the last transfer from this buffer is complete
        end = 0
        for bag in chosen.tolist():
            features = self.bags.features[int(self.bags.offsets[bag]) : int(self.bags.offsets[bag + 1])]
            begin, end = end, end + len(features)
            self._pinned[slot][begin:end].copy_(features)
        destination = self._buffers[slot][:end]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._used[slot])
            destination.copy_(self._pinned[slot][:end], non_blocking=True)
            self._sent[slot].record(self._stream)
        return destination


def _are_consecutive(chosen: Tensor) -> bool:
    """Return whether these bags follow one another in the cohort."""
    return bool((chosen.diff() == 1).all())


def _convert(features: Tensor, device: torch.device, dtype: torch.dtype, shift: Tensor | None) -> Tensor:
    """Copy to the device in another type, part by part, so that the device never holds two copies."""
    converted = torch.empty(features.shape, dtype=dtype, device=device)
    for target, source in zip(converted.split(2**16), features.split(2**16), strict=True):
        sent = source.to(device)
        target.copy_(sent if shift is None else _subtract(sent, shift, dtype))
    return converted


def _subtract(features: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x - c, rounded after the subtraction, since the differences between tiles are small relative to their
    common vector.
    """
    return (features.float() - shift).to(dtype)


def _rows(shifts: Tensor, sizes: Tensor, device: torch.device) -> Tensor:
    """Return the positions in the cohort of the instances of some concatenated bags, computed on the device."""
    count = int(sizes.sum())
    shifts, sizes = shifts.to(device), sizes.to(device)
    return torch.arange(count, device=device) + torch.repeat_interleave(shifts, sizes, output_size=count)


@contextmanager
def open_feeder(population: Population, bags: Bags, batches: Sequence[Tensor]) -> Iterator[Feeder]:
    """Open a feeder of these bags. batches: the largest batches that will be requested.

    If scaled features are computed in 16 bits, a vector common to all models is subtracted before rounding, and the
    model accounts for it within the block: x - mean is then a difference of small numbers.
    """
    model = population.model
    if not (population.in_half and isinstance(model, ScaledModel)):
        yield choose_feeder(population, bags, batches)
        return
    model.shift = population.state()["mean"].mean(0)
    try:
        yield choose_feeder(population, bags, batches, model.shift)
    finally:
        model.shift = None


def choose_feeder(population: Population, bags: Bags, batches: Sequence[Tensor], shift: Tensor | None = None) -> Feeder:
    """Put the features on the population's device if they fit, otherwise stream them; `shift` is subtracted for 16 bits."""
    device, size = population.device, bags.features.numel() * bags.features.element_size()
    to_send = device.type == "cuda" and not bags.features.is_cuda
    if to_send and size > RESIDENT_SHARE * free_memory(device):
        most = max(int(bags.sizes[chosen].sum()) for chosen in batches)
        return StreamingFeeder(bags, device, most, shift)
    return Feeder(bags, device, torch.bfloat16 if population.in_half else None, shift)
