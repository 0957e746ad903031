"""Repeated GPU work, recorded as CUDA graphs.

A pass is hundreds of operations, which take longer to launch than to compute unless bags and population are large.
Repeated work runs normally the first time, is recorded the second time, and replayed from then on.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_BROKEN: list[torch.cuda.CUDAGraph] = []  # captures that could not be ended: torch still refers to them
_RECORDING = threading.Lock()  # held during a capture, in which no thread may release memory

_THREAD = threading.local()  # the streams of each thread

_NO_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")


@dataclass(frozen=True, eq=False)
class Recording:
    """A recorded pass. Calling it repeats the work on the current contents of its input memory, which the recording
    keeps allocated.

    The next call overwrites its result.
    """

    graph: torch.cuda.CUDAGraph
    outputs: Tensor

    def __call__(self) -> Tensor:
        self.graph.replay()
        return self.outputs


class Recorder:
    """Recordings that share their memory, since only one is replayed at a time. `full`: whether memory for another
    one is missing.
    """

    def __init__(self) -> None:
        self.full = False
        self._pool: Any = None

    def record(self, work: Callable[[], Tensor]) -> Recording | None:
        """Record the work, which must have run before, without running it; None if memory does not suffice."""
        for _ in range(2):
            try:
                return self._capture(work)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
            release_cached_memory()
        self.full = True
        return None

    def _capture(self, work: Callable[[], Tensor]) -> Recording:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # One stream for all recordings: torch's allocator caches memory per stream.
        graph, here, side = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), thread_stream("recording")
        side.wait_stream(here)
        with _RECORDING, torch.cuda.stream(side):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = work()
            except BaseException:
                try:  # an open capture would break all later work
                    graph.capture_end()
                except RuntimeError:
                    _BROKEN.append(graph)
                raise
            graph.capture_end()
        here.wait_stream(side)
        return Recording(graph, outputs)


def release_cached_memory() -> None:
    """Release GPU memory that torch caches and nothing uses, such as that of finished trainings."""
    with _RECORDING:
        if not _BROKEN:  # torch treats these as captures that are still open
            torch.cuda.empty_cache()


def out_of_memory(error: RuntimeError) -> bool:
    """Return whether the error is a shortage of memory, of the GPU or the machine, as reported by any driver or library."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _NO_MEMORY)


def thread_stream(use: str) -> "torch.cuda.Stream":
    """Return this thread's stream for `use` on the current GPU: always the same one.

    torch reuses a pool of 32 streams. If threads requested a new stream each time, two of them would share one, and
    the operations of one thread would become part of the other's recording.
    """
    streams: dict[tuple[str, int], torch.cuda.Stream] = _THREAD.__dict__.setdefault("streams", {})
    key = (use, torch.cuda.current_device())
    if key not in streams:
        streams[key] = torch.cuda.Stream()
    return streams[key]
