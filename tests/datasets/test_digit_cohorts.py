import numpy as np

from carmil.bags.labels import read_labels
from carmil.bags.store import open_store
from carmil.datasets.digit_cohorts import DIGITS, load_digits, template
from carmil.datasets.digits import TASKS


def test_a_cohort_holds_the_bags_of_the_study_with_labels_split_truth_and_pictures(tmp_path):
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
    shown = np.concatenate([part.images for part in parts])
    digits = np.concatenate([part.digits for part in parts])
    pictures = store.pictures()
    for row in (0, 100, 659):
        assert np.array_equal(pictures.rgb(row)[..., 0], 255 - data.images.images[shown[row]])
    assert (np.diff(digits[np.argsort(pictures.index)]) >= 0).all()  # sorted by picture is sorted by digit


def test_class_names_are_in_the_order_in_which_a_study_numbers_them():
    assert all(list(task.class_names) == sorted(task.class_names) for task in TASKS.values())


def test_a_cohort_is_found_again_and_other_bags_are_another_cohort(tmp_path):
    first = load_digits(sizes=(6, 2, 2)).cohort("adjacent_pairs", tmp_path)
    made = (first.bags / "index.json").stat().st_mtime_ns
    assert load_digits(sizes=(6, 2, 2)).cohort("adjacent_pairs", tmp_path) == first
    assert (first.bags / "index.json").stat().st_mtime_ns == made
    other = load_digits(sizes=(6, 2, 2), seed=1).cohort("adjacent_pairs", tmp_path)
    assert other.bags != first.bags and other.folder != first.folder


def test_the_template_has_twenty_units_and_a_whole_second_attention():
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
