"""Recording of CUDA graphs, as far as it can be tested without a GPU."""

import gc
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch

from carmil import Bags, Member, Population, Recipe, create_model, fit, recording
from carmil.recording import Recorder, out_of_memory, release_cached_memory
from carmil.training import TRAIN, VALIDATION


def test_recording_releases_cached_memory_and_retries_once_when_out_of_memory(monkeypatch):
    releases, tried = [], []

    def fail_without_memory(self, work):
        tried.append(work)
        if len(releases) < enough:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return work

    monkeypatch.setattr(Recorder, "_capture", fail_without_memory)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: releases.append(True))
    enough, recorder = 1, Recorder()
    assert recorder.record(len) is len
    assert not recorder.full
    releases.clear(), tried.clear()
    enough = 9
    assert recorder.record(len) is None
    assert recorder.full and len(tried) == 2


class NoGraph:
    """A stand-in for a CUDA graph on a machine without a GPU: the work runs directly."""

    ends = True

    def capture_begin(self, **given):
        pass

    def capture_end(self):
        if not self.ends:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def replay(self):
        pass


class NoStream:
    def wait_stream(self, other):
        pass


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", NoGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(recording, "thread_stream", lambda use: NoStream())
    monkeypatch.setattr(recording, "_BROKEN", [])
    events = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("released"))
    return events


def test_cached_memory_is_released_only_while_no_thread_records(no_gpu):
    """torch cannot release memory during a capture."""
    other = threading.Thread(target=release_cached_memory)

    def work():
        other.start()
        other.join(0.1)
        no_gpu.append("recorded")
        return torch.zeros(1)

    assert Recorder().record(work) is not None
    other.join()
    assert no_gpu == ["recorded", "released"]


def test_no_memory_is_released_after_a_capture_that_failed_to_end(no_gpu, monkeypatch):
    """torch still considers the capture active, and a release would fail in every later training."""
    monkeypatch.setattr(NoGraph, "ends", False)

    def synchronise():
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        Recorder().record(synchronise)
    release_cached_memory()
    assert no_gpu == []


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8000000000000 bytes"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
    ],
)
def test_out_of_memory_errors_are_recognised_by_their_messages(error, is_memory):
    assert out_of_memory(error) is is_memory


def test_recorders_are_freed_when_training_ends(monkeypatch):
    """Reference cycles would delay the release of recorded memory until garbage collection."""
    recorders = []

    def track(self):
        plain(self)
        recorders.append(weakref.ref(self))

    plain = Recorder.__init__
    monkeypatch.setattr(Recorder, "__init__", track)
    population = Population(
        lambda: create_model("abmil", 4, 2, hidden=6, attention=3), [Member(seed=0), Member(seed=1)]
    )
    bags = Bags.from_list([torch.randn(5, 4) for _ in range(6)], labels=torch.arange(6) % 2)
    gc.disable()
    try:
        fit(population, bags, torch.tensor([TRAIN] * 4 + [VALIDATION] * 2), Recipe(epochs=2, batch=1))
        assert len(recorders) == 2 and all(one() is None for one in recorders)  # one for the steps, one for validation
    finally:
        gc.enable()
