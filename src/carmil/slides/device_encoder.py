"""An encoder on its device, and batches of tiles through it.

A CPU is faster, and finer, in float32. A GPU computes in half precision, unless a number in between is too large for it, and what
it computes is recorded as a CUDA graph: a network is some hundred operations, and while threads read pictures each of them would
wait for Python's lock before it is asked for. A graph is asked for at once.

b tiles of p x p tile pixels, d features.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carmil.recording import Recorder, Recording
from carmil.slides.encoders import Encoder

_AT_ONCE = {"cuda": 256, "cpu": 16}  # tiles a batch


@dataclass(frozen=True, eq=False)
class Computed:
    """features (b, d); seconds: how long the device took, whoever waited for whom."""

    features: NDArray[np.float16]
    seconds: float


class DeviceEncoder:
    """`batch`: how many tiles it takes at once, at most."""

    def __init__(self, encoder: Encoder, device: str, *, batch: int | None = None) -> None:
        self.device = torch.device(device)
        self.encoder = encoder.on(device)
        self.batch = batch or _AT_ONCE[self.device.type]
        # By p: what is read, and the pass that reads it; None for a network that cannot be recorded.
        self._recorded: dict[int, tuple[Tensor, Recording] | None] = {}

    def pictures(self, count: int, pixels: int) -> Tensor:
        """Room for tiles (b, p, p, 3); on its way to a GPU in memory that is never moved."""
        pinned = self.device.type == "cuda"
        return torch.empty((count, pixels, pixels, 3), dtype=torch.uint8, pin_memory=pinned)

    @torch.inference_mode()
    def __call__(self, pictures: Tensor) -> Computed:
        """uint8 (b, p, p, 3) -> (b, d)."""
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                return self._on_gpu(pictures)
        begun = time.perf_counter()
        features = _halved(self.encoder(pictures))
        return Computed(features, time.perf_counter() - begun)

    def _on_gpu(self, pictures: Tensor) -> Computed:
        if pictures.shape[1] not in self._recorded:
            self._recorded[pictures.shape[1]] = self._record(pictures.shape[1])
        recorded = self._recorded[pictures.shape[1]]
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        if recorded is None:
            found = self._in_half(pictures.to(self.device, non_blocking=True))
        else:
            read, again = recorded
            read[: len(pictures)].copy_(pictures, non_blocking=True)
            found = again()[: len(pictures)]
        ended.record()
        features = found.cpu().numpy()
        if not np.isfinite(features).all():
            features = _halved(self.encoder(pictures.to(self.device)))
            ended.record()
            ended.synchronize()
        return Computed(features, begun.elapsed_time(ended) / 1000)

    def _in_half(self, pictures: Tensor) -> Tensor:
        # A weight that was cast and kept would be read where it lay when the graph was recorded.
        with torch.autocast("cuda", torch.float16, cache_enabled=False):
            return self.encoder(pictures).half()

    def _record(self, pixels: int) -> tuple[Tensor, Recording] | None:
        """A whole batch, recorded. A network that looks at its numbers on the way cannot be: it is asked for bit by bit."""
        pictures = torch.zeros((self.batch, pixels, pixels, 3), dtype=torch.uint8, device=self.device)
        self._in_half(pictures)  # the first time libraries make their plans
        if not _never_waits(lambda: self._in_half(pictures)):
            return None
        recorded = Recorder().record(lambda: self._in_half(pictures))
        return None if recorded is None else (pictures, recorded)


def _never_waits(work: Callable[[], Tensor]) -> bool:
    """Whether the GPU is asked for all of it without a look at a result."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return True


def _halved(features: Tensor) -> NDArray[np.float16]:
    """What is too large becomes infinite; who asked for the features looks."""
    with np.errstate(over="ignore"):
        return features.float().cpu().numpy().astype(np.float16)
