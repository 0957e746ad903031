import numpy as np

from carmil.bags.labels import read_labels
from carmil.bags.store import open_store
from carmil.datasets.digit_cohorts import DIGITS, load_digits, template
from carmil.datasets.digits import TASKS


def test_digit_cohort_contains_bags_labels_split_truth_and_pictures(tmp_path):
    data = load_digits(sizes=(12, 4, 6))
    cohort, study = data.cohort("four_bags", tmp_path), data.study("four_bags")
    store, labels = open_store(cohort.bags), read_labels(cohort.labels)
    bags, parts = store.bags(), (study.train, study.validation, study.test)
    assert np.array_equal(bags.features, np.concatenate([part.bags.features for part in parts]))
    assert np.array_equal(bags.instance_labels, np.concatenate([part.bags.instance_labels for part in parts]))
    assert labels.classes == store.truth_classes == TASKS["four_bags"].class_names
    numbers = [labels.classes.index(label) for label in labels.labels]
    assert numbers == np.concatenate([part.bags.labels for part in parts]).tolist()
    assert list(labels.official) == ["train"] * 12 + ["validation"] * 4 + ["test"] * 6
    image_numbers = np.concatenate([part.images for part in parts])
    digits = np.concatenate([part.digits for part in parts])
    pictures = store.pictures()
    for row in (0, 100, 659):
        assert np.array_equal(pictures.rgb(row)[..., 0], 255 - data.images.images[image_numbers[row]])
    assert (np.diff(digits[np.argsort(pictures.index)]) >= 0).all()  # pictures are ordered by digit


def test_class_names_are_sorted_like_class_numbers():
    assert all(list(task.class_names) == sorted(task.class_names) for task in TASKS.values())


def test_digit_cohort_is_reused_and_another_seed_makes_another_cohort(tmp_path):
    first = load_digits(sizes=(6, 2, 2)).cohort("adjacent_pairs", tmp_path)
    modified = (first.bags / "index.json").stat().st_mtime_ns
    assert load_digits(sizes=(6, 2, 2)).cohort("adjacent_pairs", tmp_path) == first
    assert (first.bags / "index.json").stat().st_mtime_ns == modified
    other = load_digits(sizes=(6, 2, 2), seed=1).cohort("adjacent_pairs", tmp_path)
    assert other.bags != first.bags and other.folder != first.folder


def test_digit_template_has_twenty_units_and_a_full_branch():
    assert template("car/abmil").options == {
        "hidden": 20,
        "attention": 20,
        "output_layers": 1,
        "dropout": 0.0,
        "branch": "full",
    }
    assert (template("abmil").optimizer, template("car/transmil").optimizer) == ("sgd", "adam")
    assert "hidden" not in template("dsmil.official").options
    assert (DIGITS.batch, DIGITS.weight_decay, DIGITS.official) == (16, 0.0, True)
