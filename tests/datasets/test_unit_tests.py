import numpy as np
import pytest

from carmil.datasets.unit_tests import BOUND, UNIT_TESTS, draw_bags
from carmil.statistics.performance import bag_auc


def features_of(bags):
    return [part.numpy() for part in bags.features.split(bags.sizes.tolist())]


def near(bag, value):
    """Return the number of instances of which all features are within 1 of a value: N(value, 0.1)."""
    return int((np.abs(bag - value) < 1).all(1).sum())


@pytest.mark.parametrize("name", ["single-concept", "multi-concept", "threshold"])
def test_poison_is_in_negative_training_bags_and_in_positive_test_bags(name):
    for tested in (False, True):
        bags = draw_bags(UNIT_TESTS[name], 40, tested=tested)
        poison = [near(bag, -10) for bag in features_of(bags)]
        assert poison == [int(label == int(tested)) for label in bags.labels.tolist()]


def test_labels_depend_on_the_concepts_and_not_on_the_poison():
    for tested in (False, True):
        bags = draw_bags(UNIT_TESTS["multi-concept"], 60, tested=tested)
        for bag, label in zip(features_of(bags), bags.labels.tolist(), strict=True):
            a, b = ((np.abs(bag.mean(1) - value) < 0.2).sum() for value in (2, 3))
            assert (a > 0 and b > 0) == bool(label)
        bags = draw_bags(UNIT_TESTS["threshold"], 60, tested=tested)
        for bag, label in zip(features_of(bags), bags.labels.tolist(), strict=True):
            count = int((np.abs(bag.mean(1) - 2) < 0.2).sum())
            assert (4 <= count <= 6) if label else (1 <= count <= 3)


def test_concept_is_frequent_only_in_negative_test_bags_of_the_false_frequency_test():
    for tested in (False, True):
        bags = draw_bags(UNIT_TESTS["false-frequency"], 60, tested=tested)
        for bag, label in zip(features_of(bags), bags.labels.tolist(), strict=True):
            counts = sorted(int((np.abs(bag.mean(1) - value) < 0.2).sum()) for value in (2, 3))
            if label:
                assert counts == [1, 1]
            elif tested:
                assert counts[0] == 0 and 35 <= counts[1] <= 45
            else:
                assert counts == [0, 1]


def test_sum_of_all_features_reaches_the_bound_of_the_shifted_mean_test_and_single_tiles_do_not():
    bags = draw_bags(UNIT_TESTS["shifted-mean"], 2000, tested=True, seed=3)
    labels, tiles = bags.labels.numpy(), features_of(bags)
    for score, expected in (([bag.sum() for bag in tiles], BOUND), ([bag.sum(1).max() for bag in tiles], 0.765)):
        auc = bag_auc(np.stack([-np.array(score), score], 1), labels)
        assert auc == pytest.approx(expected, abs=0.02)
    assert pytest.approx(0.95, abs=0.001) == BOUND


def test_bags_depend_only_on_the_seed_and_differ_between_training_and_test():
    test = UNIT_TESTS["threshold"]
    one, again, other = draw_bags(test, 6), draw_bags(test, 6), draw_bags(test, 6, seed=1)
    assert one.features.equal(again.features)
    assert not np.isclose(one.features[:5], other.features[:5]).any()
    assert one.labels.tolist() == [0, 1, 0, 1, 0, 1]
