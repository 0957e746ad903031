"""The results of `carmil unit-test`, and those that come with this version, in unit_tests.json beside this file.

`carmil unit-test --all --out FILE` wrote it.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from carmil.datasets.unit_tests import UNIT_TESTS
from carmil.errors import CarmilError, unknown
from carmil.files import write_text
from carmil.provenance import machine_line
from carmil.runs.facts import Range
from carmil.untrusted import parse_as, read_json_as

SHORT_OF_BOUND = 0.02  # AUC; an interval that ends farther below the bound fails
NOT_LEARNED = "FAILS: does not learn the training bags"
PASSES, UNDECIDED = "passes", "undecided: the interval includes 0.5"
FILE = "unit_tests.json"
AGAIN = "run `carmil unit-test` with another --out"


@dataclass(frozen=True)
class UnitTestResult:
    """One model on one test. familiar: the AUC on new bags drawn as in training; reversed_: on bags of the test, whose
    shortcut is reversed; each is the mean over seeds with its 95 % interval over bags. seeds: the AUC of each on the test.
    """

    model: str
    test: str
    familiar: Range
    reversed_: Range
    seeds: tuple[float, ...]

    @property
    def verdict(self) -> str:
        """Return whether the model passes and, if it fails, the shortcut that it has learned."""
        test = UNIT_TESTS[self.test]
        if test.bound is not None:
            short = self.reversed_.high < test.bound - SHORT_OF_BOUND
            return f"FAILS: learns {test.shortcut}" if short else PASSES
        if self.familiar.low <= 0.5:
            return NOT_LEARNED
        if self.reversed_.low > 0.5:
            return PASSES
        return f"FAILS: learns {test.shortcut}" if self.reversed_.high < 0.5 else UNDECIDED

    @property
    def word(self) -> str:
        """Return the verdict in one word."""
        return self.verdict.partition(":")[0]


@dataclass(frozen=True)
class UnitTestFile:
    """The results of some models, the command that computed them, and the machine that it ran on."""

    command: str
    machine: str
    results: tuple[UnitTestResult, ...]


def write_unit_tests(results: Sequence[UnitTestResult], path: Path, *, command: str) -> None:
    """Write the results of some models as JSON."""
    write_text(path, json.dumps(asdict(UnitTestFile(command, machine_line(), tuple(results))), indent=1) + "\n")


def read_unit_tests(path: Path, *, command: str) -> tuple[UnitTestResult, ...]:
    """Return the results that an interrupted command has written; none if the file does not exist. Another file is
    refused.
    """
    if not path.exists():
        return ()
    content = read_json_as(path, UnitTestFile, "is not as `carmil unit-test --out` writes it", AGAIN)
    if content.command != command:
        raise CarmilError(f"{path} was written by {content.command!r}: {AGAIN}")
    for one in content.results:
        if one.test not in UNIT_TESTS:
            raise CarmilError(f"{path}: {unknown('test', one.test, UNIT_TESTS)}; {AGAIN}")
    return content.results


@cache
def known_results() -> tuple[UnitTestResult, ...]:
    """Return the results that come with this version."""
    text = files("carmil.runs").joinpath(FILE).read_text(encoding="utf-8")
    return parse_as(json.loads(text), UnitTestFile, FILE).results


def passed_words(model: str) -> str:
    """Describe which unit tests a model passes in the results of this version; "" if it was not tested."""
    own = [one for one in known_results() if one.model == model]
    passed = [one.test for one in own if one.verdict == PASSES]
    return f"passes {len(passed)} of {len(own)}{': ' * bool(passed)}{', '.join(passed)}" if own else ""
