"""How long a step takes and how much memory it holds; and what the machine can do at best, measured likewise."""

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

from .plain import float32_products
from .records import Fact

Step = Callable[[], None]
LEAST_ROUND = 0.05  # seconds; shorter steps are timed several at once
LEAST_ROUNDS, MOST_ROUNDS = 3, 50
WARM_STEPS = 3


@dataclass(frozen=True)
class Timing:
    """Seconds a step: the median of all rounds, the fastest and the slowest; and the most memory held, in bytes."""

    seconds: float
    fastest: float
    slowest: float
    rounds: int
    memory: int


class DoesNotFitError(Exception):
    """It needs more memory than there is."""


def measured(build: Callable[[], Step], *, device: str, seconds: float) -> Timing:
    """Builds a step, warms it up, and times it for about this long. DoesNotFitError where memory does not suffice."""
    return measured_in_turn([build], device=device, seconds=seconds)[0]


def measured_in_turn(builds: Sequence[Callable[[], Step]], *, device: str, seconds: float) -> list[Timing]:
    """Times several steps round by round in turn, so that a machine that slows down slows all of them."""
    warmed = [_warmed(build, device) for build in builds]
    steps = [step for step, _, _ in warmed]
    together = [max(1, round(LEAST_ROUND / seconds_a_step)) for _, seconds_a_step, _ in warmed]
    times: list[list[float]] = [[] for _ in steps]
    begun = time.perf_counter()
    while len(times[0]) < MOST_ROUNDS:
        for step, count, own in zip(steps, together, times, strict=True):
            own.append(_round(step, count, device))
        spent = time.perf_counter() - begun
        if spent > 5 * seconds or (spent > seconds and len(times[0]) >= LEAST_ROUNDS):
            break
    return [
        Timing(statistics.median(own), min(own), max(own), len(own), memory)
        for own, (_, _, memory) in zip(times, warmed, strict=True)
    ]


def _warmed(build: Callable[[], Step], device: str) -> tuple[Step, float, int]:
    """The step, ready; the seconds it took when last warmed up; and the most memory that building and taking it held."""
    with shortage_told(), peak_memory(device) as peak:
        step = build()
        begun = time.perf_counter()
        for _ in range(WARM_STEPS):
            seconds = _round(step, 1, device)
            if time.perf_counter() - begun > 1:
                break
    return step, seconds, peak[0]


@contextmanager
def shortage_told() -> Iterator[None]:
    """Whatever torch says when memory does not suffice, as DoesNotFitError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if _is_shortage(error):
            raise DoesNotFitError(str(error).splitlines()[0]) from None
        raise


def _is_shortage(error: BaseException | None) -> bool:
    """Also where a shortage led to another error, as one does while a CUDA graph is recorded."""
    if error is None:
        return False
    short = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
    return short or _is_shortage(error.__context__)


def _round(step: Step, count: int, device: str) -> float:
    """Seconds a step, of `count` steps that the device has finished."""
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return (time.perf_counter() - begun) / count


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def peak_memory(device: str) -> Iterator[list[int]]:
    """A list that holds, when the block has ended, by how many bytes it raised the memory in use at most.

    On a CPU that is the process's own memory (RssAnon), looked at a hundred times a second; 0 where the system does not say.
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
    before, seen, over = _anonymous(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            seen.append(_anonymous())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()
    peak.append(max(0, max([*seen, _anonymous()]) - before))


def release(device: str) -> None:
    """Gives back what is free already: what earlier measurements held is not to be seen in the next."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def room(device: str) -> int:
    """Bytes that may still be taken."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    free = _kilobytes("/proc/meminfo", "MemAvailable")
    return sys.maxsize if free is None else free


def _anonymous() -> int:
    return _kilobytes("/proc/self/status", "RssAnon") or 0


def _kilobytes(file: str, name: str) -> int | None:
    """A line of one of the system's files, in bytes."""
    try:
        found = re.search(rf"{name}:\s+(\d+) kB", Path(file).read_text())
    except OSError:
        return None
    return int(found.group(1)) * 1024 if found else None


def floors(device: str, *, seconds: float) -> list[Fact]:
    """Large matrix products in the types that training uses, and copies of large blocks. The first is what ours is held against."""

    def product(name: str, size: int, dtype: torch.dtype) -> Fact:
        return Fact("floors", f"matrix product, {name}", _product(size, dtype, device, seconds), "TFLOP/s")

    def copy(name: str, size: int, source: str) -> Fact:
        return Fact("floors", f"copy {name}", _copy(size, source, device, seconds), "GB/s", "each byte counted once")

    if device == "cpu":
        return [product("float32", 2048, torch.float32), copy("in memory", 2**28, device)]
    found = [product("bfloat16", 8192, torch.bfloat16)]
    for name, tf32 in (("TF32", True), ("float32", False)):
        with float32_products(tf32=tf32):
            found.append(product(name, 8192, torch.float32))
    return [*found, copy("on the device", 2**30, device), copy("to the device, from pageable memory", 2**28, "cpu")]


def _product(size: int, dtype: torch.dtype, device: str, seconds: float) -> float:
    """TFLOP/s of a product of square matrices, at its fastest: this is about what the machine can do."""

    def build() -> Step:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)

        def step() -> None:
            torch.mm(a, b, out=out)

        return step

    return 2 * size**3 / measured(build, device=device, seconds=seconds).fastest / 1e12


def _copy(size: int, source: str, device: str, seconds: float) -> float:
    """GB/s of a copy of `size` bytes, each byte counted once, at its fastest."""

    def build() -> Step:
        here, there = torch.ones(size // 4, device=source), torch.empty(size // 4, device=device)

        def step() -> None:
            there.copy_(here)

        return step

    return size / measured(build, device=device, seconds=seconds).fastest / 1e9
