"""What a risk adds to covariates is measured in the same folds, and knows no test case before it is measured."""

import json

import numpy as np
import pandas as pd
import pytest

from carmil.bags.labels import read_labels
from carmil.errors import CarmilError
from carmil.statistics.hazards import fit_cox
from carmil.statistics.survival import concordance
from carmil.studies.adjustment import Design, FoldCases, check_covariates, hazard_ratios, measure_adjustment
from carmil.targets import Survival

TARGET = Survival(columns=("months", "died"))


def test_design_has_numbers_and_one_column_per_further_category():
    fitted = pd.DataFrame({"age": ["40", "", "60"], "stage": ["II", "I", ""]})
    design = Design.of(fitted)
    assert design.names == ["age", "stage: II", "stage: missing"]
    assert design.matrix(fitted).tolist() == [[40, 1, 0], [50, 0, 0], [60, 0, 1]]
    other = pd.DataFrame({"age": ["", "x"], "stage": ["III", "missing"]})
    assert design.matrix(other[:1]).tolist() == [[50, 0, 0]], "the mean and no category of other cases"


def test_a_cell_without_a_number_does_not_change_the_cells_of_other_cases():
    design = Design.of(pd.DataFrame({"stage": ["1", "2", "3"]}))
    assert design.matrix(pd.DataFrame({"stage": ["1", "X", "3", "inf"]}))[:, 0].tolist() == [1, 2, 3, 2]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (["1", "2", "3", "4"], "--adjust x: 'p0' has several values of it: expected one per patient"),
        (["1", "1", "1", "1"], "--adjust x: the column is the same for all slides: leave it out"),
    ],
)
def test_covariates_that_cannot_be_used_raise_an_error_of_one_line(column, message):
    with pytest.raises(CarmilError) as error:
        check_covariates(pd.DataFrame({"x": column}), ["p0", "p0", "p1", "p2"])
    assert str(error.value) == message
    texts = pd.DataFrame({"x": [f"text {i}" for i in range(12)]})
    with pytest.raises(CarmilError, match="12 different texts: expected numbers, or at most 10 categories"):
        check_covariates(texts, [f"p{i}" for i in range(12)])


def made_folds(effect: float, folds: int = 4, cases: int = 200) -> list[FoldCases]:
    """Return folds of cases whose hazard rises with an age in years and, by `effect`, with the risk."""
    rng = np.random.default_rng(0)

    def part(n: int, first: int) -> pd.DataFrame:
        age, risk = rng.normal(60, 10, n), rng.normal(size=n)
        time, end = rng.exponential(np.exp(-(age - 60) / 10 - effect * risk)), rng.exponential(2, n)
        names = [f"p{first + i}" for i in range(n)]
        frame = pd.DataFrame({"case": names, "patient": names, "time": np.minimum(time, end), "event": time <= end})
        return frame.assign(event=frame["event"].astype(int), age=[f"{value:.2f}" for value in age], risk=risk)

    made = []
    for fold in range(folds):
        validation, test = part(cases, 10_000 * fold), part(cases // 2, 10_000 * fold + 5_000)
        training = pd.concat([part(cases, 10_000 * fold + 2_000), validation])
        made.append(FoldCases(fold, 0, training.drop(columns="risk"), validation, test))
    return made


def test_informative_risk_improves_on_the_covariates_and_noise_does_not():
    useful = measure_adjustment(made_folds(1.0), TARGET, ["age"])
    assert useful.gain.low > 0.03
    assert useful.c_index["both"].value - useful.c_index["covariates"].value == pytest.approx(useful.gain.value)
    noise = measure_adjustment(made_folds(0.0), TARGET, ["age"])
    assert noise.gain.low < 0 < noise.gain.high + 0.02
    assert abs(noise.c_index["risk"].value - 0.5) < 0.06
    (age, risk) = useful.hazard_ratios
    assert (age.name, risk.name) == ("age", "risk, per standard deviation")
    assert age.value == pytest.approx(np.exp(0.1), rel=0.05), "shrunk by the penalizer"
    assert risk.value == pytest.approx(np.e, rel=0.25)
    assert noise.hazard_ratios[1].low < 1 < noise.hazard_ratios[1].high


def test_weights_of_covariates_and_risk_are_fitted_on_the_validation_cases():
    folds = made_folds(1.0, folds=1)
    (one,) = folds
    age = {
        name: getattr(one, name)["age"].astype(float).to_numpy()[:, None] for name in ("training", "validation", "test")
    }
    happened = one.training["event"] > 0
    slope = fit_cox(age["training"], one.training["time"], happened, penalizer=0.01).coefficients
    both = np.column_stack([age["validation"] @ slope, one.validation["risk"]])
    weights = fit_cox(both, one.validation["time"], one.validation["event"] > 0, penalizer=0.01).coefficients
    scores = np.column_stack([age["test"] @ slope, one.test["risk"]]) @ weights
    expected = concordance(one.test["time"], one.test["event"] > 0, scores)
    assert measure_adjustment(folds, TARGET, ["age"]).c_index["both"].value == pytest.approx(expected, abs=1e-12)


def test_fold_with_equal_risks_does_not_distort_the_hazard_ratio_of_the_risk():
    folds = made_folds(1.0)
    constant = folds[0].test.assign(risk=0.3)
    tests = pd.concat([one.assign(fold=i, seed=0) for i, one in enumerate([constant, *(f.test for f in folds[1:])])])
    age, risk = hazard_ratios(tests, TARGET, ["age"])
    assert (age.name, risk.name) == ("age", "risk, per standard deviation")
    assert risk.value == pytest.approx(np.e, rel=0.25)


def test_words_for_a_missing_covariate_are_read_as_empty_cells(tmp_path):
    (tmp_path / "labels.csv").write_text("slide,months,died,age\na,1,1,60\nb,2,0,NA\nc,3,1,nan\nd,4,1,70\n")
    table = read_labels(tmp_path / "labels.csv", target=("months", "died"), others=("age",))
    assert table.others == (("60",), ("",), ("",), ("70",))


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    home, rng = tmp_path_factory.mktemp("adjusted"), np.random.default_rng(0)
    (home / "bags").mkdir()
    rows = ["slide,patient,months,died,age,stage"]
    for i in range(60):
        signal = rng.normal()
        features = rng.normal(size=(6, 4))
        features[:, 0] += 2 * signal
        np.save(home / "bags" / f"s{i}.npy", features.astype(np.float32))
        time, end = rng.exponential(20 * np.exp(-signal)), rng.exponential(40)
        stage = ["I", "II", ""][i % 3]
        rows.append(f"s{i},p{i},{min(time, end):.1f},{int(time <= end)},{40 + i},{stage}")
    (home / "labels.csv").write_text("\n".join(rows))
    return home


def train(run_cli, cohort, out, *options):
    given = ["--bags", str(cohort / "bags"), "--labels", str(cohort / "labels.csv"), "--device", "cpu", "--folds", "3"]
    return run_cli("train", *given, "--epochs", "3", "--out", str(cohort / out), *options)


def test_train_writes_the_improvement_of_the_risk_over_the_covariates(cohort, run_cli):
    options = ["--target", "months", "--event", "died", "--model", "abmil"]
    code, out, _ = train(run_cli, cohort, "adjusted", *options, "--adjust", "age,stage")
    assert code == 0 and "what the risk adds" in " ".join(out.split())
    assert train(run_cli, cohort, "plain", *options)[0] == 0
    metrics, plain = (json.loads((cohort / out / "metrics.json").read_text()) for out in ("adjusted", "plain"))
    adjustment = metrics.pop("adjustment")
    assert adjustment["covariates"] == ["age", "stage"] and adjustment["missing"] == {"age": 0, "stage": 20}
    names = [ratio["name"] for ratio in adjustment["hazard_ratios"]]
    assert names == ["age", "stage: II", "stage: missing", "risk, per standard deviation"]
    assert adjustment["c_index"]["risk"]["value"] == pytest.approx(metrics["intervals"]["c_index"]["value"])
    assert metrics == plain, "the figures of the model do not depend on the covariates"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--label", "stage", "--adjust", "age"], "is for survival: expected --target TIME --event EVENT"),
        (["--target", "months", "--event", "died", "--adjust", "height"], "height"),
        (["--target", "months", "--event", "died", "--adjust", "months"], "--adjust months: the column is predicted"),
    ],
)
def test_invalid_adjustments_exit_with_one_line(cohort, run_cli, options, message):
    code, _, err = train(run_cli, cohort, "refused", *options)
    assert code == 2 and message in err.strip().splitlines()[-1] and not (cohort / "refused" / "metrics.json").exists()
