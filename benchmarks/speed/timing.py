"""Timing of steps, and memory of the process or the device."""

import ctypes
import gc
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

Step = Callable[[], object]
SHORTEST_ROUND = 0.05  # seconds; shorter steps are timed several at once
FEWEST_ROUNDS, MOST_ROUNDS = 3, 50
WARM_UP_STEPS = 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Timing:
    """Seconds per step (median, fastest and slowest round) and the peak of memory in bytes."""

    seconds: float
    fastest: float
    slowest: float
    rounds: int
    memory: int


class DoesNotFitError(Exception):
    """More memory is needed than there is."""


def time_step(build: Callable[[], Step], *, device: str, seconds: float) -> Timing:
    """Build a step, warm it up and time it for about `seconds`. Raises DoesNotFitError if memory does not suffice."""
    return time_in_turn([build], device=device, seconds=seconds)[0]


def time_in_turn(builds: Sequence[Callable[[], Step]], *, device: str, seconds: float) -> list[Timing]:
    """Time several steps round by round in turn, so that a machine that slows down slows all of them."""
    warm = [_warm_up(build, device) for build in builds]
    counts = [max(1, round(SHORTEST_ROUND / duration)) for _, duration, _ in warm]
    times: list[list[float]] = [[] for _ in builds]
    begin = time.perf_counter()
    while len(times[0]) < MOST_ROUNDS:
        for (step, _, _), count, durations in zip(warm, counts, times, strict=True):
            durations.append(_time_round(step, count, device))
        elapsed = time.perf_counter() - begin
        if elapsed > 5 * seconds or (elapsed > seconds and len(times[0]) >= FEWEST_ROUNDS):
            break
    return [
        Timing(statistics.median(durations), min(durations), max(durations), len(durations), memory)
        for durations, (_, _, memory) in zip(times, warm, strict=True)
    ]


def _warm_up(build: Callable[[], Step], device: str) -> tuple[Step, float, int]:
    """Return the step, the seconds of its last warm-up and the peak of memory of building and warming it up."""
    with refuse_shortage(), peak_memory(device) as peak:
        step = build()
        begin = time.perf_counter()
        for _ in range(WARM_UP_STEPS):
            seconds = _time_round(step, 1, device)
            if time.perf_counter() - begin > 1:
                break
    return step, seconds, peak[0]


def _time_round(step: Step, count: int, device: str) -> float:
    """Seconds per step, over `count` steps that the device has finished."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return (time.perf_counter() - begin) / count


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def refuse_shortage() -> Iterator[None]:
    """Raise DoesNotFitError for every error with which torch reports a shortage of memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if _is_shortage(error):
            raise DoesNotFitError(str(error).splitlines()[0]) from None
        raise


def _is_shortage(error: BaseException | None) -> bool:
    """A shortage may also have led to another error, for example while a CUDA graph is captured."""
    if error is None:
        return False
    short = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
    return short or _is_shortage(error.__context__)


@contextmanager
def peak_memory(device: str) -> Iterator[list[int]]:
    """Yield a list that holds, after the block, by how many bytes the block raised the memory in use at most.

    On a CPU that is the anonymous memory of the process, sampled a hundred times per second; 0 where it is not known.
    """
    release(device)
    peak: list[int] = []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield peak
        synchronize(device)
        peak.append(torch.cuda.max_memory_allocated() - before)
        return
    before, samples, stop = anonymous_memory(), [0], threading.Event()

    def sample() -> None:
        while not stop.wait(0.01):
            samples.append(anonymous_memory())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield peak
    finally:
        stop.set()
        sampler.join()
    peak.append(max(0, *samples, anonymous_memory()) - before)


def release(device: str) -> None:
    """Return free memory to the system, so that earlier measurements do not show in the next one."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def available_memory(device: str) -> int:
    """Bytes that can still be allocated."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return _kernel_bytes("/proc/meminfo", "MemAvailable") or sys.maxsize


def anonymous_memory(process: int | str = "self") -> int:
    """Bytes that the process itself holds (RssAnon), without mapped files; 0 where the system does not report it."""
    return _kernel_bytes(f"/proc/{process}/status", "RssAnon") or 0


def _kernel_bytes(file: str, name: str) -> int | None:
    try:
        line = re.search(rf"{name}:\s+(\d+) kB", Path(file).read_text())
    except OSError:
        return None
    return int(line.group(1)) * 1024 if line else None
