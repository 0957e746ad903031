"""An encoder on its device, which encodes batches of tiles.

A CPU computes in the encoder's precision, one batch per core. A GPU computes in half precision, unless a value overflows, and
replays a CUDA graph: a network has hundreds of operations, and while threads read pictures each launch would wait for
Python's lock, whereas a graph needs one launch.

b tiles of p x p tile pixels, d features.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carmil.errors import CarmilError
from carmil.recording import Recorder, Recording
from carmil.slides.encoders import Encoder

_BATCH = {"cuda": 256, "cpu": 16}  # tiles


@dataclass(frozen=True, eq=False)
class EncodedBatch:
    """Features (b, d), and the time on the device in seconds."""

    features: NDArray[np.float16]
    seconds: float


class DeviceEncoder:
    """An encoder on a device.

    batch: largest number of tiles per call. at_once: number of threads that may call it at the same time, each of which
    computes on one core; 1 on a GPU.
    """

    def __init__(self, encoder: Encoder, device: str, *, batch: int | None = None, at_once: int | None = None) -> None:
        self.device = torch.device(device)
        if encoder.precision != "float32" and self.device.type != "cpu":
            raise CarmilError(f"--precision {encoder.precision} is for CPUs: a GPU computes in float16; leave it out")
        self.encoder = encoder.on(device)
        self.batch = batch or _BATCH[self.device.type]
        self.at_once = at_once or (torch.get_num_threads() if self.device.type == "cpu" else 1)
        # The input buffer and the recorded pass, by p; None for a network that cannot be recorded.
        self._recorded: dict[int, tuple[Tensor, Recording] | None] = {}

    def pictures(self, count: int, pixels: int) -> Tensor:
        """Allocate a buffer for tiles (b, p, p, 3), in pinned memory for a GPU."""
        pinned = self.device.type == "cuda"
        return torch.empty((count, pixels, pixels, 3), dtype=torch.uint8, pin_memory=pinned)

    @torch.inference_mode()
    def __call__(self, pictures: Tensor) -> EncodedBatch:
        """Encode pictures: uint8 (b, p, p, 3) -> (b, d)."""
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                return self._on_gpu(pictures)
        begun = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.encoder.precision == "bfloat16"):
            features = _to_half(self.encoder(pictures))
        return EncodedBatch(features, time.perf_counter() - begun)

    def _on_gpu(self, pictures: Tensor) -> EncodedBatch:
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
            features = _to_half(self.encoder(pictures.to(self.device)))
            ended.record()
            ended.synchronize()
        return EncodedBatch(features, begun.elapsed_time(ended) / 1000)

    def _in_half(self, pictures: Tensor) -> Tensor:
        # A cached cast of a weight would be read from its address at the time of the capture.
        with torch.autocast("cuda", torch.float16, cache_enabled=False):
            return self.encoder(pictures).half()

    def _record(self, pixels: int) -> tuple[Tensor, Recording] | None:
        """Record the pass of a whole batch; None for a network that synchronises with the CPU, which cannot be captured."""
        pictures = torch.zeros((self.batch, pixels, pixels, 3), dtype=torch.uint8, device=self.device)
        self._in_half(pictures)  # libraries plan on the first call
        if not _is_asynchronous(lambda: self._in_half(pictures)):
            return None
        recorded = Recorder().record(lambda: self._in_half(pictures))
        return None if recorded is None else (pictures, recorded)


def _is_asynchronous(work: Callable[[], Tensor]) -> bool:
    """Return whether the work is launched without synchronising with the GPU."""
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


def _to_half(features: Tensor) -> NDArray[np.float16]:
    """Convert to float16; values that are too large become infinite, which the caller checks."""
    with np.errstate(over="ignore"):
        return features.float().cpu().numpy().astype(np.float16)
