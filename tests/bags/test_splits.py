import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from carmil.bags.labels import read_labels
from carmil.bags.split_files import read_splits, write_splits
from carmil.bags.splits import NAMES, TEST, TRAIN, UNUSED, VALIDATION, Splits, audit, make_splits, official_splits
from carmil.errors import CarmilError


def cohort(patients: int = 20, classes: int = 2, slides: int = 2) -> tuple[list[str], list[str], list[int]]:
    """Return slides p00_0, p00_1, ... of patients p00, p01, ... with alternating classes."""
    owners = [f"p{i:02}" for i in range(patients) for _ in range(slides)]
    return (
        [f"{owner}_{i % slides}" for i, owner in enumerate(owners)],
        owners,
        [int(owner[1:]) % classes for owner in owners],
    )


def part(splits: Splits, row: int, role: int) -> set[str]:
    return {splits.slides[i] for i in np.flatnonzero(splits.roles[row] == role)}


@st.composite
def cohorts(draw):
    """Draw patients with one to four slides, some with several classes; at least six patients per class."""
    classes = draw(st.integers(2, 4))
    slides, patients, labels = [], [], []
    for number in range(draw(st.integers(6, 10)) * classes):
        for slide in range(draw(st.integers(1, 4))):
            other_class = slide > 0 and draw(st.integers(0, 9)) == 0
            slides.append(f"s{number}-{slide}")
            patients.append(f"p{number}")
            labels.append(draw(st.integers(0, classes - 1)) if other_class else number % classes)
    return slides, patients, labels


@settings(max_examples=20, deadline=None)
@given(cohorts(), st.integers(2, 5), st.integers(1, 3), st.integers(0, 9))
def test_patients_are_never_split_and_every_slide_is_tested_once(given_cohort, folds, inner, seed):
    slides, patients, labels = given_cohort
    try:
        splits = make_splits(slides, patients, labels, folds=folds, inner=inner, seed=seed)
    except CarmilError as error:
        if inner > 1 and "inner folds in the training part of fold" in str(error):
            reject()  # folds balance slides, so a patient with many slides can leave too few patients, which is an error
        raise
    assert splits.roles.shape == (folds * inner, len(slides))
    assert splits.folds == folds
    for roles in splits.roles:
        parts = {}
        for patient, role in zip(patients, roles.tolist(), strict=True):
            assert parts.setdefault(patient, role) == role
        assert set(roles.tolist()) == {TRAIN, VALIDATION, TEST}
        assert set(np.asarray(labels)[roles == TRAIN]) == set(labels)
    assert ((splits.roles[::inner] == TEST).sum(axis=0) == 1).all()
    assert audit(splits, labels, [str(c) for c in range(max(labels) + 1)])[0] == []


@settings(max_examples=12, deadline=None)
@given(cohorts(), st.integers(1, 2), st.randoms(use_true_random=False))
def test_splits_do_not_depend_on_row_order(given_cohort, inner, random):
    rows = list(zip(*given_cohort, strict=True))
    shuffled = random.sample(rows, len(rows))
    one, other = (make_splits(*map(list, zip(*order, strict=True)), folds=3, inner=inner) for order in (rows, shuffled))
    where = [other.slides.index(slide) for slide in one.slides]
    assert one.roles.tolist() == other.roles[:, where].tolist()


def test_equal_seeds_give_equal_splits_and_different_seeds_different_splits():
    one, again, other = (make_splits(*cohort(), seed=seed) for seed in (0, 0, 1))
    assert one.roles.tolist() == again.roles.tolist()
    assert one.roles.tolist() != other.roles.tolist()


def test_classes_are_balanced_over_test_parts():
    slides, patients, labels = cohort(patients=50, classes=2, slides=1)
    splits = make_splits(slides, patients, labels)
    for roles in splits.roles:
        assert np.bincount(np.asarray(labels)[roles == TEST]).tolist() == [5, 5]
        assert np.bincount(np.asarray(labels)[roles == VALIDATION]).tolist() == [3, 3]


@pytest.mark.parametrize("validation", [0.01, 0.15, 0.99])
def test_class_with_two_training_patients_has_one_for_training_and_one_for_validation(validation):
    slides, patients, labels = cohort(patients=33, slides=1)
    labels = [int(i < 3) for i in range(33)]
    splits = make_splits(slides, patients, labels, folds=3, validation=validation)
    for roles in splits.roles:
        assert [int((np.asarray(labels)[roles == r] == 1).sum()) for r in (TRAIN, VALIDATION, TEST)] == [1, 1, 1]


def test_inner_folds_validate_each_slide_once_and_share_the_test_part():
    splits = make_splits(*cohort(patients=30), folds=3, inner=4)
    assert (splits.roles.shape[0], splits.folds) == (12, 3)
    by_fold = splits.roles.reshape(3, 4, -1)
    assert ((by_fold == TEST) == (by_fold[:, :1] == TEST)).all()
    selected = (by_fold == VALIDATION).sum(axis=1)
    assert (selected == (by_fold[:, 0] != TEST)).all()


def test_patients_with_slides_of_both_classes_can_be_split():
    slides, patients, _ = cohort(patients=10)
    splits = make_splits(slides, patients, [i % 2 for i in range(20)])
    assert audit(splits, [i % 2 for i in range(20)], ["normal", "tumor"]) == ([], [])


def test_site_is_tested_in_one_fold_only():
    slides, patients, labels = cohort(patients=40)
    sites = [f"site {int(patient[1:]) // 2 % 7}" for patient in patients]
    splits = make_splits(slides, patients, labels, folds=3, sites=sites)
    for site in set(sites):
        here = np.asarray(sites) == site
        assert Counter((splits.roles[:, here] == TEST).sum(axis=1).tolist()) == {0: 2, int(here.sum()): 1}
    assert "7 sites, each in the test part of one fold only" in splits.notes


def test_site_with_most_patients_is_named_in_a_warning():
    slides, patients, labels = cohort(patients=40)
    sites = ["big" if int(patient[1:]) < 30 else patient[2] for patient in patients]
    splits = make_splits(slides, patients, labels, folds=3, sites=sites)
    assert "WARNING: site 'big' has 30 of 40 patients: the fold that tests it trains on little" in splits.notes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"folds": 1}, "1 fold: expected at least 2"),
        ({"folds": 11}, "class '0' has 10 patients for 11 folds: expected at least one per fold (patients by class"),
        ({"folds": 11}, "'1': 10); use --folds 10, or leave the class out"),
        ({"inner": 9}, "'1': 8); use --inner 8, or leave the class out"),
        ({"labels": [0] * 36 + [1] * 4}, "class '1' has 2 patients for 5 folds"),
        ({"labels": [0] * 36 + [1] * 4}, "; add patients, or leave the class out"),
        ({"folds": 11}, "(patients by class: '0': 10, '1': 10)"),
        ({"inner": 0}, "0 inner folds"),
        ({"inner": 9}, "for 9 inner folds in the training part of fold 0"),
        ({"validation": 1.0}, "validation share 1.0: expected between 0 and 1"),
        ({"seed": -1}, "seed -1"),
        ({"labels": [0] * 40}, "a split needs at least two classes"),
        ({"labels": [0] * 39 + [1]}, "class '1' has 1 patient for 5 folds"),
        ({"labels": [0] * 39 + [-1]}, "slide 'p19_1' has class -1"),
        ({"labels": [0, 1]}, "40 slides, 40 patients and 2 labels"),
        ({"slides": ["same"] * 40}, "slide 'same' appears twice"),
        ({"sites": ["a"] * 40}, "1 site for 5 folds"),
        ({"sites": ["a", "b"] * 20}, "patient 'p00' has slides of the sites 'a' and 'b'"),
        ({"sites": ["a"]}, "1 site for 40 slides"),
        (
            {"folds": 2, "sites": [f"{i // 2 % 2}" for i in range(40)]},
            "no way found to divide 20 patients into 2 folds by site",
        ),
    ],
)
def test_impossible_split_raises_an_error_of_one_line(change, words):
    slides, patients, labels = cohort()
    with pytest.raises(CarmilError) as raised:
        make_splits(**{"slides": slides, "patients": patients, "labels": labels, **change})
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_class_with_three_patients_allows_three_folds():
    slides, patients, labels = cohort()
    labels = [0] * 34 + [1] * 6
    with pytest.raises(CarmilError, match=r"class '1' has 3 patients for 5 folds.*; use --folds 3,"):
        make_splits(slides, patients, labels)
    assert make_splits(slides, patients, labels, folds=3).folds == 3


def test_two_patients_per_class_are_too_few_for_train_validation_and_test():
    with pytest.raises(CarmilError, match=r"fold 0 has no val slides.*add patients"):
        make_splits(*cohort(patients=4), folds=2)


def test_official_split_accepts_all_spellings_of_its_parts():
    words = ["Train", "training", "VAL", "valid", "validation", "dev", "test", "Testing", "", "train"]
    splits = official_splits(list("abcdefghij"), list("abcdefghij"), [0, 1] * 5, words)
    assert splits.roles.tolist() == [[1, 1, 2, 2, 2, 2, 3, 3, 0, 1]]
    assert splits.notes == ("1 of 10 slides is in no fold ('i')",)


def test_official_split_without_validation_takes_it_from_training():
    slides, patients, labels = cohort()
    splits = official_splits(slides, patients, labels, ["test" if p < "p04" else "train" for p in patients])
    assert part(splits, 0, TEST) == {slide for slide in slides if slide < "p04"}
    assert len(part(splits, 0, VALIDATION)) == 4  # one patient of each class, with two slides
    assert splits.notes == (
        "1 of 1 fold without a validation part: 15% of the training patients of each class are taken for it (seed 0)",
    )


def test_official_split_of_bracs_is_read(shared_data):
    table = read_labels(shared_data / "tables" / "bracs_acmil.csv")
    labels = [table.classes.index(label) for label in table.labels]
    splits = official_splits(table.slides, table.patients, labels, table.official)
    assert [int((splits.roles == role).sum()) for role in (TRAIN, VALIDATION, TEST)] == [395, 65, 87]
    assert audit(splits, labels, table.classes) == ([], [])
    assert splits.notes == ()


def test_camelyon_is_split_by_patient(shared_data):
    table = read_labels(shared_data / "tables" / "camelyon16_acmil.csv")
    labels = [int(label) for label in table.labels]
    splits = make_splits(table.slides, table.patients, labels)
    assert audit(splits, labels, table.classes) == ([], [])
    assert [len(part(splits, fold, TEST)) for fold in range(5)] == [80, 80, 80, 80, 79]


def test_clam_split_of_camelyon_is_read_with_one_patient_per_slide(shared_data):
    table = read_labels(shared_data / "tables" / "camelyon16_acmil.csv")
    labels = [int(label) for label in table.labels]
    splits = read_splits(shared_data / "tables" / "clam_splits_0.csv", table.slides, table.slides, labels)
    assert [int((splits.roles == role).sum()) for role in (TRAIN, VALIDATION, TEST)] == [243, 27, 129]
    assert "tumor_010" in part(splits, 0, TRAIN)
    assert "tumor_016" in part(splits, 0, VALIDATION)
    assert "test_079" in part(splits, 0, TEST)
    assert splits.notes == ()


def test_clam_split_of_camelyon_raises_an_error_for_patients_in_two_parts(shared_data):
    table = read_labels(shared_data / "tables" / "camelyon16_acmil.csv")
    path = shared_data / "tables" / "clam_splits_0.csv"
    with pytest.raises(CarmilError) as raised:
        read_splits(path, table.slides, table.patients, [int(label) for label in table.labels])
    assert f"{path}: patient 'patient_15' is in train and val of fold 0" in str(raised.value)
    assert "(2 more like this)" in str(raised.value)


@pytest.mark.parametrize(("form", "name"), [("carmil", "splits.tsv"), ("clam", "folder"), ("patho-bench", "k=all.tsv")])
def test_written_splits_are_read_back_unchanged(tmp_path, form, name):
    slides, patients, labels = cohort(classes=3)
    splits = make_splits(slides, patients, labels, folds=3)
    write_splits(tmp_path / name, splits, form=form, labels=labels, classes=["a", "b", "c"])
    again = read_splits(tmp_path / name, slides, patients, labels)
    assert again.roles.tolist() == splits.roles.tolist()
    assert again.notes == ()


def test_nested_split_is_read_back_as_nested(tmp_path):
    slides, patients, labels = cohort()
    splits = make_splits(slides, patients, labels, folds=3, inner=2)
    write_splits(tmp_path, splits)
    again = read_splits(tmp_path, slides, patients, labels)
    assert (again.inner, again.folds) == (2, 3)
    assert again.roles.tolist() == splits.roles.tolist()


def test_carmil_format_has_one_row_per_slide(tmp_path):
    splits = Splits(("a", "b", "c"), ("p", "q", "q"), np.array([[TRAIN, TEST, TEST], [VALIDATION, UNUSED, TRAIN]]))
    write_splits(tmp_path / "own.tsv", splits)
    assert (tmp_path / "own.tsv").read_text() == (
        "slide\tpatient\tfold_0\tfold_1\na\tp\ttrain\tval\nb\tq\ttest\t\nc\tq\ttest\ttrain\n"
    )


def test_clam_format_has_three_files_per_fold(tmp_path):
    splits = Splits(("a", "b", "c"), ("a", "b", "c"), np.array([[TRAIN, TRAIN, TEST]]))
    write_splits(tmp_path / "clam", splits, form="clam", labels=[0, 1, 1], classes=["no", "yes"])
    written = {file.name: file.read_text() for file in (tmp_path / "clam").iterdir()}
    assert written == {
        "splits_0.csv": ",train,val,test\n0,a,,c\n1,b,,\n",
        "splits_0_bool.csv": ",train,val,test\na,True,False,False\nb,True,False,False\nc,False,False,True\n",
        "splits_0_descriptor.csv": ",train,val,test\nno,1,0,0\nyes,1,0,1\n",
    }


def test_patho_bench_format_has_labels_and_class_names(tmp_path):
    splits = Splits(("a", "b"), ("p", "q"), np.array([[TRAIN, TEST]]))
    write_splits(tmp_path, splits, form="patho-bench", labels=[1, 0], classes=["no", "yes: much"])
    assert (tmp_path / "k=all.tsv").read_text() == "case_id\tslide_id\tlabel\tfold_0\np\ta\t1\ttrain\nq\tb\t0\ttest\n"
    assert '  0: "no"\n  1: "yes: much"\n' in (tmp_path / "config.yaml").read_text()


def test_stamp_format_has_patients_and_no_validation_part(tmp_path):
    slides, patients, labels = cohort()
    splits = make_splits(slides, patients, labels, folds=2)
    write_splits(tmp_path, splits, form="stamp")
    folds = json.loads((tmp_path / "splits.json").read_text())["splits"]
    assert [sorted(fold["train_patients"] + fold["test_patients"]) for fold in folds] == [sorted(set(patients))] * 2
    again = read_splits(tmp_path / "splits.json", slides, patients, labels)
    assert ((again.roles == TEST) == (splits.roles == TEST)).all()
    assert again.notes == (
        "the ids of splits.json are patients",
        "2 of 2 folds without a validation part: 15% of the training patients of each class are taken for it (seed 0)",
    )


def written(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def test_clam_boolean_split_is_read(tmp_path):
    slides, patients, labels = cohort()
    splits = make_splits(slides, patients, labels)
    write_splits(tmp_path, splits, form="clam")
    again = read_splits(tmp_path / "splits_3_bool.csv", slides, patients, labels)
    assert again.roles.tolist() == splits.roles[3:4].tolist()


def test_numeric_slide_ids_in_clam_boolean_split_are_not_taken_for_row_numbers(tmp_path):
    rows = "0,True,False,False\n1,True,False,False\n2,False,True,False\n3,False,False,True\n"
    path = written(tmp_path / "splits_0_bool.csv", ",train,val,test\n" + rows)
    splits = read_splits(path, ["3", "2", "1", "0"], ["3", "2", "1", "0"], [0, 0, 1, 0])
    assert splits.roles.tolist() == [[TEST, VALIDATION, TRAIN, TRAIN]]


def test_clam_folds_are_sorted_by_number(tmp_path):
    for number, test in ((2, "a"), (10, "b")):
        others = [slide for slide in "abcdef" if slide != test]
        rows = [f"{i},{name},{test if i == 0 else ''}\n" for i, name in enumerate(others)]
        written(tmp_path / f"splits_{number}.csv", ",train,test\n" + "".join(rows))
    splits = read_splits(tmp_path, list("abcdef"), list("abcdef"), [0, 1] * 3)
    assert [part(splits, row, TEST) for row in (0, 1)] == [{"a"}, {"b"}]
    assert "some numbers are missing" in splits.notes[0]


def test_torchmil_split_is_read(tmp_path):
    path = written(tmp_path / "splits.csv", "bag_name,split\na,train\nb,train\nc,val\nd,test\n")
    splits = read_splits(path, list("abcd"), list("abcd"), [0, 1, 0, 1])
    assert splits.roles.tolist() == [[TRAIN, TRAIN, VALIDATION, TEST]]


def test_split_of_patients_applies_to_all_their_slides(tmp_path):
    path = written(tmp_path / "k=all.tsv", "case_id\tslide_id\tfold_0\np\tx1\ttrain\nq\tx2\ttest\nr\tx3\tval\n")
    splits = read_splits(path, ["p1", "p2", "q1", "r1"], ["p", "p", "q", "r"], [0, 1, 0, 1])
    assert splits.roles.tolist() == [[TRAIN, TRAIN, TEST, VALIDATION]]
    assert splits.notes == ("the ids of k=all.tsv are patients",)


def test_ids_saved_as_floats_are_repaired_and_noted(tmp_path):
    path = written(tmp_path / "splits_0.csv", ",train,val,test\n0,11.0,13.0,14.0\n1,12.0,,\n")
    splits = read_splits(path, ["11", "12", "13", "14"], ["11", "12", "13", "14"], [0, 1, 0, 1])
    assert splits.roles.tolist() == [[TRAIN, TRAIN, VALIDATION, TEST]]
    assert splits.notes == ("4 ids end in '.0' (saved as numbers): '11.0' read as '11'",)


def test_unknown_ids_and_slides_in_no_fold_are_noted(tmp_path):
    path = written(
        tmp_path / "splits.csv", "bag_name,split\na.svs,train\nb,train\nc,val\nd,test\nx,train\ny,test\nz,val\n"
    )
    splits = read_splits(path, list("abcde"), list("abcde"), [0, 1, 0, 1, 1])
    assert splits.roles.tolist() == [[TRAIN, TRAIN, VALIDATION, TEST, UNUSED]]
    assert splits.notes == (
        "3 of 7 ids of splits.csv not in the cohort ('x', 'y' and 1 more)",
        "1 of 5 slides is in no fold ('e')",
    )


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("splits.csv", "bag_name,split\na,train\nb,tset\n", "line 3, column 'split' has 'tset': expected train, val"),
        ("splits.csv", "bag_name,split\na,train\nb,train\nb,test\n", "slide 'b' is in train and test of fold 0"),
        ("splits.csv", "bag_name,split\nx,train\ny,test\n", "it has ids like 'x', the cohort slides like 'a'"),
        ("splits.csv", "bag_name,split\na,\nb,\n", "lists no ids"),
        ("splits.csv", "bag_name,split\na,train\nb,train\nc,val\n", "fold 0 has no test slides"),
        (
            "splits.csv",
            "bag_name,split\na,train\nc,train\nb,val\nd,test\n",
            "class '1' has no slide in train of fold 0",
        ),
        ("splits.csv", "who,split\na,train\n", "no column of slide ids found among 'who', 'split'"),
        ("splits.csv", "slide,label\na,0\n", "not a known form of splits, with columns 'slide', 'label'"),
        ("splits.csv", "bag_name,split\na,train\nb\n", "line 3 has 1 cell, the header 2"),
        ("splits.csv", "", "is empty"),
        ("splits_0.csv", ",train,val,test\n0,a,b,c\n1,e,d,f\n", "patient 'r' is in train and test of fold 0"),
        ("splits_0.csv", ",train,val,test\n0,a,b,c\n1,b,d,e\n", "slide 'b' is in train and val of fold 0"),
        (
            "splits_0.csv",
            "train,val,test\nTrue,False,False\n",
            "columns of True and False without a column of slide ids",
        ),
        (
            "own.tsv",
            "slide\tfold_0.0\tfold_0.1\tfold_1.0\na\ttrain\t\t\n",
            "3 columns of folds are not 2 outer x 2 inner",
        ),
        ("own.tsv", "slide\tfold_0\na\tyes\n", "line 2, column 'fold_0' has 'yes'"),
        ("splits.json", "{", "cannot be read as JSON"),
        ("splits.json", "[]", "no splits in it; expected"),
        ("splits.json", '{"splits": [{"train_patients": "p"}]}', "split 0 has no list of train_patients"),
        ("splits.json", '{"splits": [["p"]]}', "split 0 has no list of train_patients"),
        (
            "splits.json",
            '{"splits": [{"train_patients": ["p", "q"], "test_patients": ["q"]}]}',
            "patient 'q' is in train and test",
        ),
    ],
)
def test_invalid_split_file_raises_an_error_of_one_line(tmp_path, name, content, words):
    path = written(tmp_path / name, content)
    with pytest.raises(CarmilError) as raised:
        read_splits(path, list("abcdef"), ["p", "q", "s", "t", "r", "r"], [0, 1, 0, 1, 0, 1])
    assert words in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("seed", range(5))
def test_patient_in_two_parts_is_reported_with_the_parts_in_the_file(tmp_path, seed):
    """The validation part, which is taken from the training part later, does not appear in the message."""
    path = written(tmp_path / "splits.csv", "bag_name,split\na,train\nb,train\nc,train\nd,train\ne,train\nf,test\n")
    with pytest.raises(CarmilError, match="patient 'r' is in train and test of fold 0"):
        read_splits(path, list("abcdef"), ["p", "q", "s", "t", "r", "r"], [0, 1, 0, 1, 0, 0], validation=0.9, seed=seed)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ((), "no splits in this folder"),
        (("splits_0.csv", "splits.json"), "holds several splits (splits_0.csv, splits.json)"),
        (("splits_0_descriptor.csv",), "no splits in this folder"),
    ],
)
def test_folder_without_exactly_one_split_raises_an_error(tmp_path, files, words):
    for name in files:
        written(tmp_path / name, ",train,val,test\n0,a,b,c\n")
    with pytest.raises(CarmilError) as raised:
        read_splits(tmp_path, *cohort())
    assert words in str(raised.value)


def test_missing_split_file_raises_an_error_naming_it(tmp_path):
    for name in ("splits.csv", "splits.json"):
        with pytest.raises(CarmilError, match=rf"{name}: does not exist"):
            read_splits(tmp_path / name, *cohort())


def test_splits_that_cannot_be_written_raise_an_error(tmp_path):
    plain, nested = make_splits(*cohort(), folds=2), make_splits(*cohort(), folds=2, inner=2)
    written(tmp_path / "splits_7.csv", "")
    for splits, options, words in (
        (plain, {"form": "calm"}, "unknown form of splits 'calm'; did you mean 'clam'?"),
        (nested, {"form": "clam"}, "nested splits cannot be written as clam"),
        (plain, {"form": "clam"}, "holds splits_7.csv of other splits"),
        (plain, {"form": "patho-bench"}, "give the labels too"),
        (plain, {"labels": [0]}, "1 label for 40 slides"),
    ):
        with pytest.raises(CarmilError) as raised:
            write_splits(tmp_path, splits, **options)
        assert words in str(raised.value)
        assert "\n" not in str(raised.value)
    assert [file.name for file in tmp_path.iterdir()] == ["splits_7.csv"]


def roles_of(*folds: str) -> np.ndarray:
    return np.array([["-tvT".index(letter) for letter in fold] for fold in folds], dtype=np.int8)


def test_audit_of_a_valid_split_reports_nothing():
    splits = Splits(tuple("abcdef"), tuple("ppqqrr"), roles_of("ttvvTT", "vvTTtt", "TTttvv"))
    assert audit(splits, [0, 1] * 3, ["no", "yes"]) == ([], [])


@pytest.mark.parametrize(
    ("slides", "patients", "roles", "error"),
    [
        ("abcdef", "pqrstp", ("ttvvTT",), "patient 'p' is in train and test of fold 0"),
        ("abcdea", "pqrstu", ("ttvvTT",), "slide 'a' is in train and test of fold 0"),
        ("abcdef", "pqrstu", ("--vvTT",), "fold 0 has no train slides"),
        ("abcdef", "pqrstu", ("ttttTT",), "fold 0 has no val slides"),
        ("abcdef", "pqrstu", ("ttTTvv", "ttvv--"), "fold 1 has no test slides"),
        ("abcdef", "pqrstu", ("t-vvTT",), "class 'yes' has no slide in train of fold 0"),
        (
            "abcdefgh",
            "pqrstuww",
            ("ttvvTTT-", "TTttvv-T"),
            "slides of patient 'w' are tested in different folds ('g' in fold 0, 'h' in fold 1): expected a patient's slides "
            "in the same test parts; move all to one",
        ),
        (
            "abcdefgh",
            "pqrstuww",
            ("ttvvTTTT", "TTttvvT-"),
            "slides of patient 'w' are tested in different folds ('g' in fold 1",
        ),
    ],
)
def test_audit_reports_errors_that_invalidate_a_split(slides, patients, roles, error):
    splits = Splits(tuple(slides), tuple(patients), roles_of(*roles))
    errors, _ = audit(splits, [0, 1] * (len(slides) // 2), ["no", "yes"])
    assert len(errors) == 1
    assert errors[0].startswith(error)


def test_patients_tested_in_several_folds_with_the_same_slides_raise_no_error():
    """Repeated divisions into a training and a test part are an example."""
    splits = Splits(tuple("abcdefgh"), tuple("pqrstuww"), roles_of("ttvvTTTT", "vvttTTTT"))
    assert audit(splits, [0, 1] * 4, ["no", "yes"])[0] == []


def test_file_that_tests_slides_of_a_patient_in_different_folds_is_refused(tmp_path):
    slides, patients = list("abcdefgh"), list("pqrstuww")
    words = {"t": "train", "v": "val", "T": "test", "-": ""}
    rows = [
        f"{slide}\t{patient}\t{words[first]}\t{words[second]}"
        for slide, patient, first, second in zip(slides, patients, "ttvvTTT-", "TTttvv-T", strict=True)
    ]
    path = tmp_path / "splits.tsv"
    path.write_text("\n".join(["slide\tpatient\tfold_0\tfold_1", *rows, ""]))
    with pytest.raises(
        CarmilError, match=r"splits\.tsv: slides of patient 'w' are tested in different folds \('g' in fold 0"
    ):
        read_splits(path, slides, patients, [0, 1] * 4)
    splits = read_splits(path, slides, slides, [0, 1] * 4)  # patients are not known
    assert splits.folds == 2


def test_audit_reports_remarks_about_unusual_splits():
    splits = Splits(tuple("abcdef"), tuple("pqrstu"), roles_of("ttvvTT", "ttvTT-"))
    errors, remarks = audit(splits, [0, 1] * 3, ["no", "yes"])
    assert errors == []
    assert remarks == [
        "class 'yes' has no slide in val of fold 1",
        "1 of 6 slides is tested in more than one fold ('e')",
        "3 of 6 slides are never tested ('a', 'b' and 1 more)",
    ]


def test_audit_requires_inner_folds_to_share_test_slides():
    splits = Splits(tuple("abcdef"), tuple("pqrstu"), roles_of("ttvvTT", "ttTTvv"), inner=2)
    assert audit(splits, [0, 1] * 3, ["no", "yes"])[0] == [
        "the inner folds of fold 0 test different slides: expected the same"
    ]


def test_roles_or_labels_of_the_wrong_shape_raise_an_error():
    with pytest.raises(CarmilError, match=r"roles of shape \(1, 3\) and 2 patients for 2 slides"):
        Splits(("a", "b"), ("p", "q"), roles_of("ttT"))
    with pytest.raises(CarmilError, match="expected one label per slide"):
        audit(Splits(("a", "b"), ("p", "q"), roles_of("tT")), [0, 5], ["no", "yes"])
    assert NAMES == ("", "train", "val", "test", "cal")


@pytest.mark.finding(n=8)
def test_split_errors_name_classes_instead_of_numbers(tmp_path):
    slides, patients, labels = cohort(patients=20)
    classes = ("benign", "carcinoma")
    with pytest.raises(
        CarmilError, match=r"class 'benign' has 10 patients for 11 folds.*'benign': 10, 'carcinoma': 10"
    ):
        make_splits(slides, patients, labels, folds=11, classes=classes)
    with pytest.raises(CarmilError, match="40 slides, all 'carcinoma': a split needs at least two classes"):
        make_splits(slides, patients, [1] * 40, classes=classes)
    with pytest.raises(CarmilError, match="class 'carcinoma' has no slide in train of fold 0"):
        official_splits(slides, patients, labels, ["test" if label else "train" for label in labels], classes=classes)
    lines = [
        "slide,split",
        *(f"{slide},{'test' if label else 'train'}" for slide, label in zip(slides, labels, strict=True)),
    ]
    (tmp_path / "splits.csv").write_text("\n".join(lines))
    with pytest.raises(CarmilError, match="class 'carcinoma' has no slide in train of fold 0"):
        read_splits(tmp_path / "splits.csv", slides, patients, labels, classes=classes)


@pytest.mark.finding(n=14)
def test_leading_zeros_in_fold_columns_are_ignored(tmp_path):
    cohort = [f"s{i}" for i in range(12)], [f"P{i}" for i in range(12)], [i % 2 for i in range(12)]
    path = tmp_path / "splits.tsv"
    splits = make_splits(*cohort, folds=3)
    write_splits(path, splits, form="carmil")
    written = path.read_text()
    path.write_text(written.replace("fold_0", "fold_00"))
    assert np.array_equal(read_splits(path, *cohort).roles, splits.roles)
    path.write_text(written.replace("fold_1", "fold_00"))
    with pytest.raises(CarmilError, match="3 columns of folds are not 2 outer x 1 inner folds"):
        read_splits(path, *cohort)
    path.write_text(f"slide\tfold_{'9' * 5000}\ns0\ttrain\n")
    with pytest.raises(CarmilError, match=r"splits\.tsv"):
        read_splits(path, *cohort)
