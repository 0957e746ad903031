import pytest

from carmil.bags.store import open_store
from carmil.datasets.digit_cohorts import FAST_SIZES
from carmil.errors import CarmilError
from carmil.reproduce.digits import Point, digit_cohorts, digit_methods
from carmil.reproduce.recipes import Request


def request_in(tmp_path, **more):
    return Request(out=tmp_path, shared=tmp_path, **more)


def test_digit_cohort_uses_bundled_digits_without_an_mnist_folder(tmp_path):
    (cohort,) = digit_cohorts(request_in(tmp_path, data=tmp_path, fast=True, seed=3), ["four_bags"])
    assert "5,000 of MNIST" in cohort.notes[0] and "pool disjoint; data seed 3" in cohort.notes[0]
    assert len(open_store(cohort.bags).ids) == sum(FAST_SIZES)


def test_fast_protocol_is_short_and_the_full_protocol_is_that_of_table_1(tmp_path):
    (fast,) = digit_cohorts(request_in(tmp_path, fast=True), ["four_bags"])
    (study,) = digit_cohorts(request_in(tmp_path), ["four_bags"])
    assert (fast.protocol.seeds, fast.protocol.fast.epochs) == (2, 12)
    assert (study.protocol.seeds, study.protocol.epochs, study.protocol.lr) == (10, 1000, 1e-3)
    assert fast.folder != study.folder


def test_digit_cohort_uses_mnist_and_its_features_from_the_data_folder(tmp_path, shared_data):
    (cohort,) = digit_cohorts(request_in(tmp_path, data=shared_data, fast=True), ["four_bags"])
    assert "70,000 images" in cohort.notes[0] and "resnet50_pca256.npy (256 wide" in cohort.notes[0]
    assert "pool shared" in cohort.notes[0] and open_store(cohort.bags).width == 256


def test_every_combination_of_loss_weights_is_a_method_of_models_with_a_branch():
    methods = digit_methods(["abmil", "car/abmil"], alpha=(0.0, 0.8), lambda_=(0.2,), distance="cosine")
    assert [(one.model, dict(one.settings)) for one in methods] == [
        ("abmil", {}),
        ("car/abmil", {"alpha": 0.0, "lambda_": 0.2, "distance": "cosine"}),
        ("car/abmil", {"alpha": 0.8, "lambda_": 0.2, "distance": "cosine"}),
    ]
    with pytest.raises(CarmilError, match="unknown model 'nomil'"):
        digit_methods(["abmil", "nomil"])
    with pytest.raises(CarmilError, match="no model named"):
        digit_methods([])


def test_default_point_has_the_settings_of_table_1():
    assert Point().method.settings == {}
    assert Point(lambda_=0.2, distance="cosine").method.settings == {"lambda_": 0.2, "distance": "cosine"}
