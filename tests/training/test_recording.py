"""Recording on a GPU, as far as it can be seen without one."""

import gc
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch

from carmil import Bags, Member, Population, Recipe, create_model, fit, recording
from carmil.recording import Recorder, out_of_memory, release_cached_memory
from carmil.training import TRAIN, VALIDATION


def test_where_memory_does_not_suffice_what_is_kept_is_given_back_and_it_is_tried_once_more(monkeypatch):
    given_back, tried = [], []

    def short_of_memory(self, work):
        tried.append(work)
        if len(given_back) < enough:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return work

    monkeypatch.setattr(Recorder, "_capture", short_of_memory)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    enough, recorder = 1, Recorder()
    assert recorder.record(len) is len
    assert not recorder.full
    given_back.clear(), tried.clear()
    enough = 9
    assert recorder.record(len) is None
    assert recorder.full and len(tried) == 2


class NoGraph:
    """A recording on a machine without a GPU: it does the work."""

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
    told = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("given back"))
    return told


def test_memory_is_given_back_when_nobody_records(no_gpu):
    """While anybody does, torch could not."""
    other = threading.Thread(target=release_cached_memory)

    def work():
        other.start()
        other.join(0.1)
        no_gpu.append("recorded")
        return torch.zeros(1)

    assert Recorder().record(work) is not None
    other.join()
    assert no_gpu == ["recorded", "given back"]


def test_after_a_recording_that_could_not_be_ended_nothing_is_given_back(no_gpu, monkeypatch):
    """To torch it is under way still, and to ask would be an error in every training that comes."""
    monkeypatch.setattr(NoGraph, "ends", False)

    def looks_at_its_numbers():
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        Recorder().record(looks_at_its_numbers)
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
def test_memory_that_does_not_suffice_is_known_by_whoever_says_it(error, is_memory):
    assert out_of_memory(error) is is_memory


def test_nothing_holds_a_recorder_when_a_training_has_ended(monkeypatch):
    """What it recorded could not be given back before Python happens to look for circles."""
    made = []

    def seen(self):
        plain(self)
        made.append(weakref.ref(self))

    plain = Recorder.__init__
    monkeypatch.setattr(Recorder, "__init__", seen)
    population = Population(
        lambda: create_model("abmil", 4, 2, hidden=6, attention=3), [Member(seed=0), Member(seed=1)]
    )
    bags = Bags.from_list([torch.randn(5, 4) for _ in range(6)], labels=torch.arange(6) % 2)
    gc.disable()
    try:
        fit(population, bags, torch.tensor([TRAIN] * 4 + [VALIDATION] * 2), Recipe(epochs=2, batch=1))
        assert len(made) == 2 and all(one() is None for one in made)  # of the steps and of validation
    finally:
        gc.enable()
