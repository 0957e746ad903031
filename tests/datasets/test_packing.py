import json

import numpy as np
import pytest
import torch

from carmil.bags.finding import find_bags
from carmil.bags.pictures import Pictures
from carmil.bags.readers import read_bag
from carmil.bags.sources import Bag
from carmil.bags.store import open_store
from carmil.bags.writers import write_bag
from carmil.datasets.packing import is_made_from, regroup, write_store
from carmil.errors import CarmilError
from carmil.truth import UNKNOWN

SIGNED = np.array([[1, -1, 0], [0, 0, 0], [-1, 1, 1]], dtype=np.int8)
CLASSES = ("a", "b", "c")
FEATURES = np.arange(12, dtype=np.float32).reshape(3, 4) / 3


def bags() -> list[Bag]:
    return [Bag("b", FEATURES, instance_labels=SIGNED), Bag("a", 1 + FEATURES, instance_labels=-SIGNED)]


def pictures() -> Pictures:
    images = np.arange(2 * 2 * 2, dtype=np.uint8).reshape(2, 2, 2, 1)
    return Pictures(images, np.array([0, 1, 1, 0, 0, 1]))


def test_store_keeps_signed_truth_features_and_pictures(tmp_path):
    store = write_store(bags(), tmp_path / "store", dtype="float32", truth_classes=CLASSES, pictures=pictures())
    held = store.bags()
    assert store.truth_classes == CLASSES
    assert held.ids == ("b", "a") and held.instance_labels.dtype == torch.int8
    assert np.array_equal(held.instance_labels, np.concatenate([SIGNED, -SIGNED]))
    assert np.array_equal(held.features, np.concatenate([FEATURES, 1 + FEATURES]))
    assert np.array_equal(held[1].instance_labels, -SIGNED)
    assert np.array_equal(store.pictures().rgb(4), np.repeat([[[0], [1]], [[2], [3]]], 3, axis=2))
    assert np.array_equal(store.pictures().rgb(5)[..., 0], [[4, 5], [6, 7]])


def test_store_keeps_one_label_per_instance(tmp_path):
    store = write_store([Bag("a", FEATURES, instance_labels=np.array([1, 0, -1]))], tmp_path / "store")
    assert store.bags().instance_labels.tolist() == [1, 0, -1] and store.pictures() is None


def test_store_is_identified_by_the_key_that_it_was_built_with(tmp_path):
    write_store(bags(), tmp_path / "store", truth_classes=CLASSES, key={"seed": 0, "sizes": (2, 1)})
    assert is_made_from(tmp_path / "store", {"seed": 0, "sizes": [2, 1]})
    assert not is_made_from(tmp_path / "store", {"seed": 1, "sizes": [2, 1]})
    assert not is_made_from(tmp_path / "other", {"seed": 0, "sizes": [2, 1]})


@pytest.mark.parametrize("name", ["instance_labels.bin", "pictures.bin", "picture_index.bin"])
def test_truncated_truth_or_pictures_raise_an_error_naming_the_file(tmp_path, name):
    path = write_store(bags(), tmp_path / "store", truth_classes=CLASSES, pictures=pictures()).path / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CarmilError, match=f"{name} has .* expected"):
        open_store(tmp_path / "store")


@pytest.mark.parametrize("change", [{"truth_classes": []}, {"pictures": [2, 0, 2, 1]}])
def test_index_with_impossible_sizes_raises_an_error(tmp_path, change):
    index = write_store(bags(), tmp_path / "store", truth_classes=CLASSES, pictures=pictures()).path / "index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | change))
    with pytest.raises(CarmilError, match="expected"):
        open_store(tmp_path / "store")


def test_truth_of_a_bag_without_instance_labels_is_unknown(tmp_path):
    store = write_store([*bags(), Bag("c", FEATURES)], tmp_path / "store", truth_classes=CLASSES)
    assert [entry.truth for entry in store.entries] == [True, True, False]
    assert (store.bags()[2].instance_labels == UNKNOWN).all()


def test_mixing_kinds_of_instance_labels_in_a_store_raises_an_error(tmp_path):
    for others in ([Bag("c", FEATURES, instance_labels=np.zeros(3))], []):
        with pytest.raises(CarmilError, match=r"instance labels of the shape .* expected"):
            write_store([*bags(), *others], tmp_path / "store", truth_classes=CLASSES if others else None)


def test_pictures_of_other_instances_raise_an_error(tmp_path):
    with pytest.raises(CarmilError, match="pictures of 6 instances; expected 3"):
        write_store(bags()[:1], tmp_path / "store", truth_classes=CLASSES, pictures=pictures())
    with pytest.raises(CarmilError, match="refer to pictures 0 to 1: expected 0 to 0"):
        Pictures(pictures().images[:1], pictures().index)


def test_regrouped_bags_keep_their_signed_truth(tmp_path):
    store = write_store(bags(), tmp_path / "store", truth_classes=CLASSES, pictures=pictures())
    group = regroup(store, {"a": "patient", "b": "patient"}, tmp_path / "grouped")
    assert np.array_equal(group.bags().instance_labels, np.concatenate([SIGNED, -SIGNED]))
    assert group.pictures() is None


def test_exported_bag_omits_signed_truth(tmp_path):
    store = write_store(bags(), tmp_path / "store", dtype="float32", truth_classes=CLASSES)
    write_bag(store.bag(0), tmp_path / "files", "npz")
    (source,) = find_bags(tmp_path / "files").sources
    assert read_bag(source).instance_labels is None
