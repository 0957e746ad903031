import json
import re
from pathlib import Path

import pytest
import torch

from carmil.datasets.unit_tests import UNIT_TESTS
from carmil.errors import CarmilError
from carmil.explanations.unit_tests import models_under_test, unit_test_results, unit_test_tables, verdicts_table
from carmil.models import registry
from carmil.models.contract import Prediction
from carmil.models.max import MaxMIL
from carmil.models.pooling import Offsets
from carmil.runs.facts import Range
from carmil.runs.unit_tests import NOT_LEARNED, PASSES, UNDECIDED, UnitTestResult, known_results

DOCS = Path(__file__).parents[2] / "docs"


def result(test, familiar, reversed_):
    return UnitTestResult("mean", test, Range(*familiar), Range(*reversed_), (0.1, 0.9))


@pytest.mark.parametrize(
    ("test", "familiar", "reversed_", "verdict"),
    [
        ("threshold", (1.0, 0.98, 1.0), (0.9, 0.86, 0.93), PASSES),
        ("threshold", (1.0, 0.98, 1.0), (0.1, 0.05, 0.2), f"FAILS: learns {UNIT_TESTS['threshold'].shortcut}"),
        ("threshold", (1.0, 0.98, 1.0), (0.52, 0.46, 0.58), UNDECIDED),
        ("threshold", (0.53, 0.47, 0.59), (0.9, 0.86, 0.93), NOT_LEARNED),
        ("shifted-mean", (0.94, 0.9, 0.96), (0.92, 0.9, 0.94), PASSES),
        ("shifted-mean", (0.8, 0.7, 0.9), (0.75, 0.7, 0.79), f"FAILS: learns {UNIT_TESTS['shifted-mean'].shortcut}"),
    ],
)
def test_verdict_depends_on_the_confidence_intervals(test, familiar, reversed_, verdict):
    assert result(test, familiar, reversed_).verdict == verdict


class Standard(MaxMIL):
    """The standard assumption: a bag's logit is that of its most positive instance, and nothing speaks against it."""

    def forward(self, features, offsets):
        given = super().forward(features, Offsets.of(offsets, features.device))
        positive = given.logits[..., 1:]
        return Prediction(torch.cat([torch.zeros_like(positive), positive], -1), given.offsets)


@pytest.fixture(scope="module")
def results():
    """Return the results of two models on two tests, by model and test."""
    before = dict(registry._MODELS)
    registry.register("standard", Standard, "the standard assumption")
    try:
        tests = [UNIT_TESTS[name] for name in ("single-concept", "shifted-mean")]
        found = [one for model in ("mean", "standard") for one in unit_test_results(model, seeds=2, tests=tests)]
    finally:
        registry._MODELS.clear()
        registry._MODELS.update(before)
    return {(one.model, one.test): one for one in found}


def test_mean_pooling_learns_the_absence_of_the_poison_and_passes_the_shifted_mean_test(results):
    poisoned, shifted = results["mean", "single-concept"], results["mean", "shifted-mean"]
    assert poisoned.familiar.value > 0.95 and poisoned.reversed_.high < 0.5
    assert poisoned.verdict.startswith("FAILS: learns the absence of the poison")
    assert shifted.verdict == PASSES and 0.9 < shifted.reversed_.value < 0.97
    assert len(poisoned.seeds) == 2


def test_model_with_the_standard_assumption_passes_the_poison_test_and_fails_the_shifted_mean_test(results):
    assert results["standard", "single-concept"].verdict == PASSES
    assert results["standard", "shifted-mean"].word == "FAILS"


def test_tables_show_figures_and_verdicts(results):
    first, second = unit_test_tables([*results.values()])
    assert (first.lines[0][0], first.lines[0][-1]) == ("single-concept", results["mean", "single-concept"].verdict)
    assert first.lines[1][2].endswith("best 0.95")
    assert second.title.startswith("standard: unit tests")
    assert verdicts_table([*results.values()]).lines[0][1].startswith("FAILS 0.")


def test_packaged_results_cover_known_models_on_every_unit_test():
    known = known_results()
    models = dict.fromkeys(one.model for one in known)
    assert set(models) <= set(models_under_test())
    assert [(one.model, one.test) for one in known] == [(model, test) for model in models for test in UNIT_TESTS]
    assert all(0 <= value <= 1 for one in known for value in (one.familiar.value, *one.seeds))


def test_page_shows_the_verdicts_of_the_packaged_results():
    page = (DOCS / "unit-tests.md").read_text()
    rows = verdicts_table(known_results()).markdown().splitlines()
    assert [line for line in rows if line.startswith("| ") and line not in page] == []
    poisoned = [one for one in known_results() if one.test in ("single-concept", "multi-concept", "threshold")]
    assert "No model in the table passes a test with poison" in page and PASSES not in {one.verdict for one in poisoned}


def test_models_command_shows_the_verdicts(run_cli):
    status, out, _ = run_cli("models")
    assert status == 0
    assert re.search(r"mean .*passes \d of 5", " ".join(out.split()))


def test_command_prints_a_table_writes_json_and_resumes(run_cli, tmp_path, monkeypatch):
    monkeypatch.setattr("carmil.explanations.unit_tests.UNIT_TESTS", {"threshold": UNIT_TESTS["threshold"]})
    out = tmp_path / "mean.json"
    status, text, _ = run_cli("unit-test", "mean", "--seeds", "1", "--out", str(out))
    assert status == 0 and "FAILS: learns" in text
    content = json.loads(out.read_text())
    assert content["command"] == "carmil unit-test mean --seeds 1" and content["machine"]
    content["results"][0]["reversed_"] = {"value": 0.9, "low": 0.8, "high": 0.95}
    out.write_text(json.dumps(content))
    assert "passes" in run_cli("unit-test", "mean", "--seeds", "1", "--out", str(out))[1]  # read, not trained again
    status, _, error = run_cli("unit-test", "mean", "--seeds", "2", "--out", str(out))
    assert status == 2 and "was written by 'carmil unit-test mean --seeds 1'" in error
    content["results"][0]["test"] = "luck"
    out.write_text(json.dumps(content))
    status, _, error = run_cli("unit-test", "mean", "--seeds", "1", "--out", str(out))
    assert status == 2 and "unknown test 'luck'" in error


def test_unit_test_command_refuses_invalid_models_and_seeds_in_one_line(run_cli):
    for words, message in (
        ((), "expected the name of one model, or --all"),
        (("mean", "--all"), "expected the name of one model, or --all"),
        (("meen",), "unknown model 'meen'; did you mean 'mean'?"),
        (("mean", "--seeds", "0"), "--seeds 0: expected 1 to 1000"),
    ):
        status, _, error = run_cli("unit-test", *words)
        assert status == 2 and message in error and error.count("\n") == 1
    with pytest.raises(CarmilError, match="unknown model"):
        unit_test_results("meen")
