"""The distance from the training bags: small bags are not far, shifted ones are, and few patients have no limit."""

from dataclasses import replace

import numpy as np

from carmil.statistics.scope import FEWEST, BagMoments, fit_scope

WIDTH = 30


def draw_bags(count: int, sizes: tuple[int, int], *, seed: int, shift: float = 0.0, blur: float = 1.0) -> BagMoments:
    """Draw bags whose means differ along three directions, of instances that differ far more."""
    rng = np.random.default_rng(seed)
    directions = np.linalg.qr(np.random.default_rng(9).normal(size=(WIDTH, 4)))[0].T
    bags = []
    for _ in range(count):
        n = int(rng.integers(*sizes))
        centre = rng.normal(size=3) @ directions[:3] * 2 + shift * directions[3]
        bags.append(centre + blur * rng.normal(size=(n, WIDTH)) * 2)
    halves = [x[::2].mean(0) - x[1::2].mean(0) for x in bags]
    sizes_of = np.array([len(x) for x in bags], dtype=float)
    return BagMoments(
        sizes_of, *(np.array(a) for a in ([x.mean(0) for x in bags], [(x**2).mean(0) for x in bags], halves))
    )


def test_few_bags_of_the_training_cohort_are_flagged_at_any_size():
    scope = fit_scope(draw_bags(80, (20, 400), seed=0), np.arange(80))
    for seed, sizes in enumerate([(20, 400), (6, 7), (1000, 1001)], 1):
        assert (scope.distance(draw_bags(100, sizes, seed=seed)) > 1).mean() < 0.1


def test_small_shift_orthogonal_to_the_directions_of_variation_is_far():
    scope = fit_scope(draw_bags(80, (100, 400), seed=0), np.arange(80))
    near, far = (scope.distance(draw_bags(100, (100, 400), seed=1, shift=shift)) for shift in (0.0, 2.0))
    assert np.median(near) < 0.8
    assert (far > 1).mean() > 0.95


def test_distance_along_a_direction_is_measured_in_standard_deviations():
    scope = fit_scope(draw_bags(200, (100, 400), seed=0), np.arange(200))
    bags = draw_bags(1, (300, 301), seed=2)
    step = scope.directions[0] * scope.deviation * np.sqrt(scope.between[0])
    distances = [
        float(scope.distance(BagMoments(bags.sizes, (scope.centre + k * step)[None], bags.squares, bags.halves))[0])
        for k in (2, 4, 8)
    ]
    assert np.allclose(np.array(distances) / distances[0], [1, 2, 4], rtol=0.05)


def test_slides_of_a_patient_are_left_out_together():
    bags = draw_bags(30, (100, 400), seed=0)
    twice = bags[np.repeat(np.arange(30), 2)]
    one, two = fit_scope(bags, np.arange(30)), fit_scope(twice, np.repeat(np.arange(30), 2))
    assert np.allclose(two.terms, one.terms, rtol=0.1)  # a twin in the fit would make its own distance too small


def test_no_scope_is_fitted_to_too_few_patients():
    bags = draw_bags(2 * FEWEST, (5, 9), seed=0)
    assert fit_scope(bags, np.repeat(np.arange(FEWEST - 1), 3)[: 2 * FEWEST]) is None


def test_rounding_of_constant_features_in_a_stored_scope_flags_no_slides():
    def drawn(seed: int) -> BagMoments:
        bags = draw_bags(60, (100, 400), seed=seed)
        for values, constant in ((bags.means, 3.7), (bags.squares, 3.7**2), (bags.halves, 0.0)):
            values[:, 10:] = constant
        return bags

    scope = fit_scope(drawn(0), np.arange(60))
    stored = replace(scope, **{name: np.float32(values).astype(float) for name, values in vars(scope).items()})
    new = drawn(1)
    assert np.allclose(stored.distance(new), scope.distance(new), atol=0.03)
    assert (scope.rest >= 0).all()  # otherwise the file would be refused
    assert (stored.distance(new) > 1).mean() < 0.1
    new.means[:, 20] += 1
    assert (stored.distance(new) > 1).all()
