import pytest

from carmil.bags.store import open_store
from carmil.datasets.digit_cohorts import FAST_SIZES
from carmil.errors import CarmilError
from carmil.reproduce.digits import Point, digit_cohorts, digit_methods
from carmil.reproduce.recipes import Request


def request_in(tmp_path, **more):
    return Request(out=tmp_path, shared=tmp_path, **more)


def test_without_a_folder_of_digits_bags_are_drawn_from_the_bundled_ones(tmp_path):
    (cohort,) = digit_cohorts(request_in(tmp_path, data=tmp_path, fast=True, seed=3), ["four_bags"])
    assert "5,000 of MNIST" in cohort.notes[0] and "pool disjoint; data seed 3" in cohort.notes[0]
    assert len(open_store(cohort.bags).ids) == sum(FAST_SIZES)


def test_a_look_trains_two_models_shortly_and_a_study_as_table_1(tmp_path):
    (look,) = digit_cohorts(request_in(tmp_path, fast=True), ["four_bags"])
    (study,) = digit_cohorts(request_in(tmp_path), ["four_bags"])
    assert (look.protocol.seeds, look.protocol.fast.epochs) == (2, 12)
    assert (study.protocol.seeds, study.protocol.epochs, study.protocol.lr) == (10, 1000, 1e-3)
    assert look.folder != study.folder


def test_mnist_and_its_features_are_taken_where_they_lie(tmp_path, shared_data):
    (cohort,) = digit_cohorts(request_in(tmp_path, data=shared_data, fast=True), ["four_bags"])
    assert "70,000 images" in cohort.notes[0] and "resnet50_pca256.npy (256 wide" in cohort.notes[0]
    assert "pool shared" in cohort.notes[0] and open_store(cohort.bags).width == 256


def test_every_combination_of_weights_is_a_method_of_a_model_with_a_branch():
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


def test_the_run_of_table_1s_point_is_table_1s():
    assert Point().method.settings == {}
    assert Point(lambda_=0.2, distance="cosine").method.settings == {"lambda_": 0.2, "distance": "cosine"}
