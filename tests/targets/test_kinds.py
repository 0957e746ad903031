"""Every kind of target: its strata, columns, answers and figures, against other libraries or values computed by hand."""

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score, cohen_kappa_score, r2_score, roc_auc_score
from sksurv.metrics import concordance_index_censored, concordance_index_ipcw

from carmil.statistics.hazards import breslow
from carmil.statistics.intervals import FoldAnswers
from carmil.statistics.operating import Rule
from carmil.targets import Classes, Labels, Ordinal, Survival, Target, Value
from carmil.targets.decision import NO_ANSWER, joint_decision
from carmil.targets.target import Training

NAN = float("nan")
TARGETS: dict[str, Target] = {
    "classes": Classes(names=("benign", "carcinoma")),
    "ordinal": Ordinal(columns=("grade",), names=("1", "2", "3")),
    "labels": Labels(columns=("er", "pr")),
    "value": Value(columns=("age",)),
    "survival": Survival(columns=("os_months", "death")),
}
OUTCOMES = {
    "classes": np.array([0, 1, 1]),
    "ordinal": np.array([2, 0, 1]),
    "labels": np.array([[1, 0], [0, NAN], [1, 1]]),
    "value": np.array([[61.25], [40], [70]]),
    "survival": np.array([[3.5, 1], [12, 0], [8, 1]]),
}
PREDICTED = {
    "classes": np.array([[0.63, 0.37], [0.4, 0.6], [0.1, 0.9]]),
    "ordinal": np.array([[0.1, 0.3, 0.6], [0.5, 0.5, 0], [0.3, 0.3, 0.4]]),
    "labels": np.array([[0.7, 0.5], [0.2, 0.1], [0.4, 0.9]]),
    "value": np.array([[60], [45.125], [66]]),
    "survival": np.array([[0.5], [-1.25], [0]]),
}
every_kind = pytest.mark.parametrize("kind", TARGETS)


def draw_grades(bags: int, grades: int) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities of grades, and outcomes."""
    rng = np.random.default_rng(0)
    return rng.dirichlet(np.ones(grades), bags), rng.integers(0, grades, bags)


def draw_labels(bags: int) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities of three labels, and outcomes of which a quarter is missing."""
    rng = np.random.default_rng(0)
    outcomes = rng.integers(0, 2, (bags, 3)).astype(float)
    predicted = np.clip(0.3 * outcomes + rng.random((bags, 3)) * 0.7, 0, 1).round(2)
    outcomes[rng.random((bags, 3)) < 0.25] = NAN
    return predicted, outcomes


def draw_times(bags: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return risks, and times that they shorten, about half of them censored."""
    rng = np.random.default_rng(seed)
    risk = rng.normal(size=bags)
    event, censored = rng.exponential(np.exp(-risk)), rng.exponential(1.5, bags)
    return risk[:, None], np.stack([np.minimum(event, censored), event <= censored], axis=1)


@every_kind
def test_outcomes_are_unchanged_after_a_round_trip_through_a_table(kind):
    target, outcomes = TARGETS[kind], OUTCOMES[kind]
    columns = target.label_values(outcomes)
    assert tuple(columns) == target.label_columns
    np.testing.assert_array_equal(target.outcomes_of(columns), outcomes)
    assert target.outcomes_of(columns).dtype == outcomes.dtype


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("classes", {"label": ["benign", "carcinoma", "carcinoma"]}),
        ("ordinal", {"label": ["3", "1", "2"]}),
        ("labels", {"label_er": [1, 0, 1], "label_pr": [0, NAN, 1]}),
        ("value", {"label": [61.25, 40, 70]}),
        ("survival", {"time": [3.5, 12, 8], "event": [1, 0, 1]}),
    ],
)
def test_tables_hold_outcomes_in_label_columns(kind, values):
    np.testing.assert_equal(TARGETS[kind].label_values(OUTCOMES[kind]), values)


@pytest.mark.parametrize(
    ("kind", "columns", "counterfactual"),
    [
        ("classes", ["p_benign", "p_carcinoma"], ["cf_benign", "cf_carcinoma"]),
        ("ordinal", ["p_1", "p_2", "p_3"], ["cf_1", "cf_2", "cf_3"]),
        ("labels", ["p_er", "p_pr"], ["cf_er", "cf_pr"]),
        ("value", ["predicted"], ["cf_predicted"]),
        ("survival", ["risk"], ["cf_risk"]),
    ],
)
def test_tables_hold_predictions_in_columns_of_the_target(kind, columns, counterfactual):
    assert TARGETS[kind].prediction_columns() == columns
    assert TARGETS[kind].prediction_columns("cf") == counterfactual


@every_kind
def test_tables_with_invalid_values_are_not_sound(kind):
    target, columns = TARGETS[kind], TARGETS[kind].prediction_columns()
    table = target.label_values(OUTCOMES[kind]) | dict(zip(columns, PREDICTED[kind].T, strict=True))
    assert target.are_sound(table, columns)
    assert not target.are_sound(table | {target.label_columns[0]: ["?", "?", "?"]}, columns)
    beyond = table | {columns[0]: PREDICTED[kind][:, 0] + 1}
    assert target.are_sound(beyond, columns) == (not target.probabilities)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("classes", ["benign", "carcinoma", "carcinoma"]),
        ("ordinal", ["3", "1", "2"]),
        ("labels", ["er 1, pr 0", "er 0, pr ?", "er 1, pr 1"]),
        ("value", ["61.25", "40", "70"]),
        ("survival", ["3.5 months, death", "12 months, censored", "8 months, death"]),
    ],
)
def test_outcome_is_described_in_words(kind, words):
    assert [TARGETS[kind].describe(outcome) for outcome in OUTCOMES[kind]] == words


def test_unit_of_times_is_described_only_if_the_column_name_contains_it():
    assert Survival(columns=("time", "death")).describe([3.5, 0]) == "3.5, censored"


@pytest.mark.parametrize(
    ("kind", "strata"),
    [
        ("classes", ([0, 1, 1], ("benign", "carcinoma"))),
        ("ordinal", ([2, 0, 1], ("1", "2", "3"))),
        ("survival", ([1, 0, 1], ("censored", "death"))),
    ],
)
def test_folds_are_stratified_by_class_grade_or_event(kind, strata):
    assert TARGETS[kind].strata(OUTCOMES[kind]) == strata


def test_folds_of_numbers_are_stratified_by_quarter():
    values = np.random.default_rng(0).permutation(80).astype(float)
    numbers, names = Value(columns=("x",)).strata(values[:, None])
    assert names == ("0 to 19", "20 to 39", "40 to 59", "60 to 79")
    assert numbers == (values // 20).astype(int).tolist()


@pytest.mark.parametrize(("zeros", "names"), [(79, ("0 to 0", "1 to 1")), (0, ("1 to 1",))])
def test_folds_of_repeated_numbers_are_stratified_by_fewer_ranges(zeros, names):
    values = np.array([[0.0]] * zeros + [[1.0]] * (80 - zeros))
    numbers, found = Value(columns=("x",)).strata(values)
    assert found == names or found == ("0 to 1",)
    assert set(numbers) == set(range(len(found)))


def test_folds_of_labels_are_stratified_by_frequent_combinations():
    target = TARGETS["labels"]
    outcomes = np.repeat(np.array([[0, 0], [0, NAN], [0, 1], [1, 1]]), [15, 10, 25, 30], axis=0)
    numbers, names = target.strata(outcomes)
    assert names == ("er 0, pr 0", "er 0, pr 1", "er 1, pr 1")
    assert numbers == [0] * 25 + [1] * 25 + [2] * 30
    numbers, names = target.strata(outcomes[20:])  # few bags with er 0 and pr 0
    assert names == ("er 0", "er 1") and numbers == [0] * 30 + [1] * 30


@pytest.mark.parametrize(
    ("kind", "threshold", "answers", "rule"),
    [
        (
            "classes",
            0.37,
            ["carcinoma", "carcinoma", "carcinoma"],
            "carcinoma if p(carcinoma) >= 0.37, else benign",
        ),
        ("classes", None, ["benign", "carcinoma", "carcinoma"], "the most probable class"),
        ("ordinal", None, ["3", "1", "2"], "the median grade: the lowest that, with those below it, has p >= 0.5"),
        ("labels", None, ["er, pr", "none", "pr"], "every label with a probability of at least 0.5"),
        ("value", None, ["60", "45.12", "66"], "the predicted age"),
        (
            "survival",
            0.25,
            ["higher risk", "lower risk", "lower risk"],
            "higher risk if risk >= 0.25, else lower risk",
        ),
        (
            "survival",
            -2.0,
            ["higher risk", "higher risk", "higher risk"],
            "higher risk if risk >= -2, else lower risk",
        ),
    ],
)
def test_decision_converts_predictions_to_answers_in_words(kind, threshold, answers, rule):
    decision = TARGETS[kind].decision(threshold)
    assert decision.answers(PREDICTED[kind]) == answers
    assert [decision.answer(row) for row in PREDICTED[kind]] == answers
    assert decision.rule == rule


@pytest.mark.parametrize(
    ("kind", "explained", "words"),
    [
        ("classes", "benign", "probability of benign: 63.0 %"),
        ("ordinal", "grade", "probability of 3: 60.0 %"),
        ("labels", "er", "er: 70.0 %, pr: 50.0 %"),
        ("value", "age", ""),
        ("survival", "risk", "risk: +0.5 log hazard, relative to the mean of the training slides"),
    ],
)
def test_decision_states_the_explained_output_and_its_value(kind, explained, words):
    target, first = TARGETS[kind], PREDICTED[kind][0]
    assert target.decision().explained(first) == explained and explained in target.outputs
    assert target.decision().value_words(first) == words


@pytest.mark.parametrize(
    ("kind", "margins"),
    [
        ("classes", [0.13, 0.1, 0.4]),
        ("labels", [0, 0.3, 0.1]),
        ("value", [60, 45.125, 66]),
        ("survival", [0.5, 1.25, 0]),
    ],
)
def test_margin_is_the_distance_to_another_answer(kind, margins):
    assert TARGETS[kind].decision().margins(PREDICTED[kind]) == pytest.approx(margins)


def test_abstention_is_supported_for_classes_only():
    assert TARGETS["classes"].decision(0.5, 0.2).answers(PREDICTED["classes"])[0] == NO_ANSWER
    for kind in TARGETS.keys() - {"classes"}:
        assert TARGETS[kind].decision(None, 0.99).confident(PREDICTED[kind]).all()


def test_risk_groups_of_several_models_use_the_mean_of_their_thresholds():
    target = TARGETS["survival"]
    joint = joint_decision([target.decision(0.5), target.decision(-1.5)])
    assert joint.threshold == -0.5 and joint.answers(PREDICTED["survival"]) == [
        "higher risk",
        "lower risk",
        "higher risk",
    ]
    assert target.rule_origin("balanced", [joint, joint], folds=[0, 2], level="slide", patients="mean") == (
        "folds 0, 2: mean of 2 models: the median risk of validation slides"
    )


def test_operating_point_exists_for_risks_and_two_classes_only():
    points = {
        kind: TARGETS[kind].operating_point(PREDICTED[kind], OUTCOMES[kind], Rule.parse("balanced")) for kind in TARGETS
    }
    assert points["survival"].threshold == 0 and 0.37 < points["classes"].threshold <= 0.6
    assert {kind for kind, point in points.items() if point is None} == {"ordinal", "labels", "value"}


def test_kappa_of_grades_equals_scikit_learn():
    predicted, outcomes = draw_grades(60, 4)
    target = Ordinal(columns=("grade",), names=("0", "1", "2", "3"))
    answers = [int(answer) for answer in target.decision().answers(predicted)]
    figures = target.figures(predicted, outcomes, [])
    assert figures["kappa"] == pytest.approx(cohen_kappa_score(outcomes, answers, weights="quadratic"))
    assert figures["grade_mae"] == pytest.approx(np.abs(outcomes - answers).mean())
    assert figures["accuracy"] == pytest.approx((outcomes == answers).mean())


def test_kappa_of_grades_equals_value_computed_by_hand():
    predicted = np.eye(3)[[0, 1, 2, 2]]
    figures = TARGETS["ordinal"].figures(predicted, np.array([0, 1, 2, 0]), [])
    # mean squared distances: 4 / 4 of the four pairs, and (5 + 3 + 9 + 9) / 16 of all combinations
    assert figures == pytest.approx({"kappa": 1 - 16 / 26, "grade_mae": 0.5, "accuracy": 0.75})
    assert np.isnan(TARGETS["ordinal"].figures(predicted[:1], np.array([0]), [])["kappa"])


def test_median_grade_of_equal_halves_is_the_lower_grade():
    decision = TARGETS["ordinal"].decision()
    assert decision.answers([[0.5, 0.5, 0], [0.49, 0.02, 0.49], [0, 0.1, 0.3]]) == ["1", "2", "3"]


def test_figures_of_numbers_equal_scipy_and_scikit_learn():
    rng = np.random.default_rng(0)
    outcomes = rng.normal(50, 10, (40, 1)).round()  # with ties
    predicted = outcomes + rng.normal(0, 8, (40, 1))
    figures = TARGETS["value"].figures(predicted, outcomes, [])
    assert figures["spearman"] == pytest.approx(spearmanr(predicted[:, 0], outcomes[:, 0]).statistic)
    assert figures["r2"] == pytest.approx(r2_score(outcomes, predicted))
    assert figures["mae"] == pytest.approx(np.abs(predicted - outcomes).mean())


def test_figures_of_equal_numbers_are_undefined():
    ones, numbers = np.ones((3, 1)), np.arange(3.0)[:, None]
    assert np.isnan(TARGETS["value"].figures(ones, numbers, [])["spearman"])
    figures = TARGETS["value"].figures(numbers, ones, [])
    assert np.isnan(figures["spearman"]) and np.isnan(figures["r2"]) and figures["mae"] == pytest.approx(2 / 3)


def test_figures_of_labels_equal_scikit_learn_on_the_known_labels():
    predicted, outcomes = draw_labels(50)
    figures = Labels(columns=("a", "b", "c")).figures(predicted, outcomes, [])
    for name, score in (("auc", roc_auc_score), ("ap", average_precision_score)):
        each = []
        for i, label in enumerate("abc"):
            known = ~np.isnan(outcomes[:, i])
            each.append(score(outcomes[known, i], predicted[known, i]))
            assert figures[f"{name}_{label}"] == pytest.approx(each[-1])
        assert figures[name] == pytest.approx(np.mean(each))


def test_figures_of_a_label_with_one_value_are_undefined_and_excluded_from_the_mean():
    predicted, outcomes = draw_labels(50)
    outcomes[:, 1] = 1
    figures = Labels(columns=("a", "b", "c")).figures(predicted, outcomes, [])
    assert np.isnan(figures["auc_b"]) and np.isnan(figures["ap_b"])
    assert figures["auc"] == pytest.approx((figures["auc_a"] + figures["auc_c"]) / 2)
    assert np.isnan(Labels(columns=("a", "b", "c")).figures(predicted, np.ones((50, 3)), [])["auc"])


def test_figures_of_times_equal_scikit_survival():
    risk, outcomes = draw_times(200)
    known_risk, known = draw_times(400, seed=1)
    training = Training(known, breslow(known[:, 0], known[:, 1] > 0, known_risk[:, 0]))
    target = TARGETS["survival"]
    figures = target.figures(risk, outcomes, [], training)
    event, time = outcomes[:, 1] > 0, outcomes[:, 0]
    assert figures["c_index"] == pytest.approx(concordance_index_censored(event, time, risk[:, 0])[0])
    kind = [("event", bool), ("time", float)]
    before, after = (np.array(list(zip(y[:, 1] > 0, y[:, 0], strict=True)), dtype=kind) for y in (known, outcomes))
    inside = time < known[known[:, 1] > 0, 0].max()
    tau = np.quantile(time[event & inside], 0.9)
    assert figures["uno_c"] == pytest.approx(concordance_index_ipcw(before, after, risk[:, 0], tau=tau)[0])
    assert figures["ibs"] < figures["ibs_population"] and figures["auc_over_time"] > 0.7
    assert set(target.figures(risk, outcomes, [])) == {"c_index"}


def test_figures_over_time_are_omitted_at_times_preceded_by_few_events():
    risk, outcomes = draw_times(20)
    outcomes[1:, 1] = 0
    training = Training(outcomes, breslow(outcomes[:, 0], outcomes[:, 1] > 0, risk[:, 0]))
    assert set(TARGETS["survival"].figures(risk, outcomes, [], training)) == {"c_index"}


@pytest.mark.parametrize("kind", [kind for kind in TARGETS if kind != "classes"])
def test_intervals_surround_the_mean_over_folds(kind):
    target = TARGETS[kind]
    predicted, outcomes = {
        "ordinal": lambda: draw_grades(60, 3),
        "labels": lambda: tuple(drawn[:, :2] for drawn in draw_labels(60)),
        "value": lambda: tuple(np.random.default_rng(0).normal(size=(2, 60, 1))),
        "survival": lambda: draw_times(60),
    }[kind]()
    folds = np.arange(60) % 3
    intervals = target.intervals(FoldAnswers.of(outcomes, predicted, np.zeros(60, dtype=int), folds=folds))
    each = [target.figures(predicted[folds == fold], outcomes[folds == fold], []) for fold in range(3)]
    assert set(intervals) == set(target.measures)
    for name, interval in intervals.items():
        assert interval.value == pytest.approx(np.mean([figures[name] for figures in each]))
        assert interval.low < interval.value < interval.high


@every_kind
def test_key_figure_has_an_interval_and_a_chance_level(kind):
    target = TARGETS[kind]
    if kind == "classes":
        assert target.key_figure == "auc" and target.chance == 0.5
    else:
        key = next(iter(target.measures))
        assert target.key_figure == key
        assert target.chance == {"ordinal": 0, "labels": 0.5, "value": 0, "survival": 0.5}[kind]
