"""Recording on a GPU, as far as it can be seen without one."""

import gc
import threading
import weakref

import torch

from carmil import Bags, Member, Population, Recipe, create_model, fit
from carmil.training import TRAIN, VALIDATION, recording
from carmil.training.recording import Recorder, give_back
from carmil.training.stepping import Stepper


def test_where_memory_does_not_suffice_what_is_kept_is_given_back_and_it_is_tried_once_more(monkeypatch):
    given_back, tried = [], []

    def short_of_memory(self, work):
        tried.append(work)
        if len(given_back) < enough:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return work

    monkeypatch.setattr(Recorder, "_recorded", short_of_memory)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    enough, recorder = 1, Recorder()
    assert recorder.record(len) is len
    assert not recorder.full
    given_back.clear(), tried.clear()
    enough = 9
    assert recorder.record(len) is None
    assert recorder.full and len(tried) == 2


def test_memory_is_given_back_when_nobody_records(monkeypatch):
    """While anybody does, torch would not."""
    told = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("given back"))
    with recording._NOBODY_RECORDS:
        other = threading.Thread(target=give_back)
        other.start()
        other.join(0.1)
        told.append("recorded")
    other.join()
    assert told == ["recorded", "given back"]


def test_nothing_holds_what_was_recorded_when_a_training_has_ended(monkeypatch):
    """Its memory could not be given back before Python happens to look for circles."""
    made, begin = [], Stepper._begin

    def seen(self):
        begin(self)
        made.append(weakref.ref(self._recorder))

    monkeypatch.setattr(Stepper, "_begin", seen)
    population = Population(
        lambda: create_model("abmil", 4, 2, hidden=6, attention=3), [Member(seed=0), Member(seed=1)]
    )
    bags = Bags.from_list([torch.randn(5, 4) for _ in range(6)], labels=torch.arange(6) % 2)
    gc.disable()
    try:
        fit(population, bags, torch.tensor([TRAIN] * 4 + [VALIDATION] * 2), Recipe(epochs=2, batch=1))
        assert made and all(one() is None for one in made)
    finally:
        gc.enable()
