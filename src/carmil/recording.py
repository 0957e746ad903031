"""What a GPU is asked for again and again, recorded as a CUDA graph.

A pass is hundreds of operations, which take longer to ask for than to compute unless bags and population are large. What comes
again is run the first time, recorded the second, and replayed from then on.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_BROKEN: list[torch.cuda.CUDAGraph] = []  # recordings that could not be ended: torch goes on asking after them
_RECORDING = threading.Lock()  # meanwhile torch can give no memory back, whichever thread asks for it

_MINE = threading.local()  # the streams of each thread

_NO_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")


@dataclass(frozen=True, eq=False)
class Recording:
    """Calling it does the work again, on whatever lies by now where it read when it was recorded: keep that. The next call
    overwrites its result."""

    graph: torch.cuda.CUDAGraph
    outputs: Tensor

    def __call__(self) -> Tensor:
        self.graph.replay()
        return self.outputs


class Recorder:
    """Recordings that share their memory, since one is replayed at a time. `full`: it does not suffice for another one."""

    def __init__(self) -> None:
        self.full = False
        self._pool: Any = None

    def record(self, work: Callable[[], Tensor]) -> Recording | None:
        """The work, which must have been done before, recorded and not done; None if memory does not suffice."""
        for _ in range(2):
            try:
                return self._recorded(work)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
            release_cached_memory()
        self.full = True
        return None

    def _recorded(self, work: Callable[[], Tensor]) -> Recording:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # One stream for all: what was used on one is kept for that one, and would be taken anew for another.
        graph, here, side = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), thread_stream("recording")
        side.wait_stream(here)
        with _RECORDING, torch.cuda.stream(side):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = work()
            except BaseException:
                try:  # a recording left open would spoil everything after it
                    graph.capture_end()
                except RuntimeError:
                    _BROKEN.append(graph)
                raise
            graph.capture_end()
        here.wait_stream(side)
        return Recording(graph, outputs)


def release_cached_memory() -> None:
    """Gives memory of the GPU back that torch keeps and nothing uses: trainings that have ended leave most of theirs so."""
    with _RECORDING:
        if not _BROKEN:  # to torch, these are being recorded still
            torch.cuda.empty_cache()


def out_of_memory(error: RuntimeError) -> bool:
    """Is it memory that does not suffice, the GPU's or the machine's? Drivers and libraries say so in their own words."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _NO_MEMORY)


def thread_stream(use: str) -> "torch.cuda.Stream":
    """Return this thread's stream for `use` on the current GPU: always the same one.

    torch hands out the same 32 streams again and again. Threads that took a new one for every purpose would share one, and the
    operations of one thread would become part of what another records.
    """
    mine: dict[tuple[str, int], torch.cuda.Stream] = _MINE.__dict__.setdefault("streams", {})
    key = (use, torch.cuda.current_device())
    if key not in mine:
        mine[key] = torch.cuda.Stream()
    return mine[key]
