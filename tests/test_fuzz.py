"""A fast version of `python tools/fuzz.py --mutants 20000`: a few reproducible mutants of the files of every reader."""

import signal
import sys
import warnings
from pathlib import Path

import pytest

pytest.importorskip("tifffile")
pytest.importorskip("openslide")
pytest.importorskip("starlette")

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import fuzz
from fuzzing.mutations import mutated
from fuzzing.targets import TARGETS

MUTANTS = 15


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    return tmp_path_factory.mktemp("seeds")


@pytest.fixture
def alarm():
    before = signal.signal(signal.SIGPROF, fuzz._late)
    yield
    signal.signal(signal.SIGPROF, before)


@pytest.mark.finding(n=14)
@pytest.mark.parametrize("name", TARGETS)
def test_mutants_are_rejected_in_one_line_or_accepted(name, seeds, tmp_path, alarm):
    with warnings.catch_warnings(action="ignore"):
        cases = fuzz.Cases(TARGETS[name], seeds, tmp_path, seed=0)
        cases.read_good()
        results = {number: fuzz.tried(cases, number) for number in range(MUTANTS)}
    failed = {
        number: actual for number, actual in results.items() if actual.result not in (fuzz.REFUSED, fuzz.ACCEPTED)
    }
    assert not failed
    assert any(actual.result == fuzz.REFUSED for actual in results.values())


def test_mutant_depends_on_its_number_only(seeds, tmp_path):
    def contents(run):
        cases = fuzz.Cases(TARGETS["labels"], seeds, tmp_path / run, seed=3)
        return [cases.place(number)[2] for number in range(20)]

    first, again = contents("first"), contents("again")
    assert first == again and len(set(first)) > 15


def test_unexpected_exception_of_a_reader_is_a_failure(seeds, tmp_path, alarm):
    def broken(folder, file):
        raise KeyError("x")

    target = TARGETS["settings-yaml"]
    cases = fuzz.Cases(type(target)("settings-yaml", target.make, broken), seeds, tmp_path, seed=0)
    actual = fuzz.tried(cases, 0)
    assert actual.result.startswith("KeyError at ") and actual.message == "'x'"
    assert (cases.work / "a" / "study.yaml").read_bytes() == cases.good["a"][Path("study.yaml")]


def test_mutations_change_the_file():
    from random import Random

    content = b'{"a": [1, 2, {"b": null}], "c": "x"}'
    variants = {mutated(content, ".json", Random(i)) for i in range(200)}
    assert len(variants - {content}) > 100
