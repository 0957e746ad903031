from carmil.datasets.digit_data import FAST_SIZES
from carmil.reproduce.digit_data import digits_of, training_of
from carmil.reproduce.recipes import Request
from carmil.reproduce.table1 import Settings


def recipe_request(tmp_path, **more):
    return Request(out=tmp_path, shared=tmp_path, **more)


def test_without_a_folder_of_digits_bags_are_drawn_from_the_bundled_ones(tmp_path):
    found = digits_of(recipe_request(tmp_path, data=tmp_path, fast=True, seed=3), ["four_bags"])
    assert found.images.labels.shape == (5000,)
    assert found.about["pool"] == "disjoint"
    assert found.about["seed"] == 3
    assert len(found.studies["four_bags"].train.bags) == FAST_SIZES[0]


def test_a_look_trains_two_models_shortly_and_a_study_as_table_1(tmp_path):
    assert Settings(**training_of(recipe_request(tmp_path))) == Settings()
    assert Settings(**training_of(recipe_request(tmp_path, fast=True))).repetitions == 2


def test_mnist_and_its_features_are_taken_where_they_lie(tmp_path, shared_data):
    found = digits_of(recipe_request(tmp_path, data=shared_data, fast=True), ["four_bags"])
    assert len(found.images.labels) == 70_000
    assert found.about["pool"] == "shared"
    assert found.about["features"].startswith("resnet50_pca256.npy (256 wide")
    assert found.studies["four_bags"].test.bags.width == 256
