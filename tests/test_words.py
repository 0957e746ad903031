"""Counts in printed text: "1 bag", never "1 bags"."""

import re

import numpy as np
import pytest
import torch

from carmil.bags.bags import Bags
from carmil.bags.labels import match, read_labels
from carmil.bags.sources import Bag
from carmil.bags.splits import audit, make_splits, official_splits
from carmil.bags.writers import write_bag
from carmil.errors import CarmilError
from carmil.words import plural, probability_text

FOUR = ["a", "b", "c", "d"]
NOUNS = "bags|slides|patients|rows|labels|ids|folds|sites|files|models|seeds|tiles|instances|problems|lines|pairs|groups|cells"
WRONG = re.compile(rf"(?<![\d.,-])1 ((\w+ )?({NOUNS})\b|(bag|slide|patient|row|label|id) (have|are)\b)")


@pytest.mark.finding(n=17)
def test_plural_uses_the_singular_for_one_only():
    assert [plural(n, "bag") for n in (0, 1, 2, 1234)] == ["0 bags", "1 bag", "2 bags", "1,234 bags"]
    assert [plural(n, "patient has", "patients have") for n in (1, 2)] == ["1 patient has", "2 patients have"]
    assert all(WRONG.search(text) for text in ("1 bags", "1 patients have", "1 labelled ids", "left out: 1 slide are"))
    assert not any(
        WRONG.search(text) for text in ("1 bag", "11 bags", "1 of 3 bags has", "0.1 slides", "1 patient has")
    )


def test_no_probability_is_rounded_to_0_or_1():
    texts = {0.0: "< 0.1 %", 0.0004: "< 0.1 %", 0.0006: "0.1 %", 0.0625: "6.3 %", 0.5: "50.0 %", 0.9994: "99.9 %"}
    texts |= {0.9995: "> 99.9 %", 1.0: "> 99.9 %"}
    assert {p: probability_text(p) for p in texts} == texts
    assert probability_text(1.0, "") == "> 99.9"


@pytest.mark.finding(n=17)
def test_commands_print_counts_of_one_in_the_singular(tmp_path, run_cli):
    """The cohort has exactly one of everything that is reported, such as an empty slide and an unlabelled bag."""
    rng = np.random.default_rng(0)
    for name in ("a", "b", "c", "d", "extra"):
        write_bag(Bag(id=name, features=rng.normal(size=(1, 1)).astype(np.float32)), tmp_path / "src", "npy")
    write_bag(Bag(id="empty", features=np.zeros((0, 1), np.float32)), tmp_path / "src", "npy")
    (tmp_path / "src" / "notes.txt").write_text("one file without features")
    rows = ["slide,patient,label", "a,p,x", "b,p,y", "c,q,x", "d,r,y", "d,r,y", "blank,s,", "lost,t,x", "f/e.h5,u,x"]
    (tmp_path / "labels.csv").write_text("\n".join(["# one", "# comment", *rows]))
    (tmp_path / "one.csv").write_text("slide,patient,label,split\na,p,x,train\nb,q,y,test\n")
    out = str(tmp_path / "store")
    printed = []
    for words in (
        ("cohort", "check", str(tmp_path / "src"), "--labels", str(tmp_path / "labels.csv")),
        ("cohort", "build", str(tmp_path / "src"), "--out", out),
        ("cohort", "info", out),
        ("cohort", "check", out),
        ("cohort", "build", str(tmp_path / "src" / "a.npy"), "--out", str(tmp_path / "single")),
        ("cohort", "check", str(tmp_path / "single")),
        ("cohort", "export", str(tmp_path / "single"), "--out", str(tmp_path / "files"), "--layout", "clam"),
        ("split", "--labels", str(tmp_path / "one.csv"), "--out", str(tmp_path / "splits.tsv")),
        ("split", "--labels", str(tmp_path / "labels.csv"), "--folds", "2", "--out", str(tmp_path / "splits.tsv")),
    ):
        printed += run_cli(*words)[1:]
    text = "\n".join(printed)
    for expected in (
        "1 empty slide has no tiles and is left out",
        "1 row repeats a slide and is counted once",
        "1 slide id is a path",
        "1 patient has slides of different labels",
        "1 slide has an empty label",
        "1 bag, no problems",
        "1 bag of 1 instance x 1 feature",
        "1 other file left out",
        "class 'x' has 1 patient for 5 folds",
    ):
        assert expected in text
    assert [match[0] for match in WRONG.finditer(text)] == []


@pytest.mark.finding(n=17)
def test_error_messages_state_counts_of_one_in_the_singular(tmp_path):
    (tmp_path / "labels.csv").write_text("slide,label\n1.0,x\n2,y\n")
    table = read_labels(tmp_path / "labels.csv")
    messages = [*table.notes, *match(table, ["1", "3"]).notes]
    splits = official_splits([*FOUR, "e"], [*FOUR, "e"], [0, 1, 0, 1, 0], ["train", "train", "val", "test", ""])
    messages += [*splits.notes, *audit(splits, [0, 1, 0, 1, 0], ("x", "y"))[1]]
    for act in (
        lambda: match(table, ["z"]),
        lambda: make_splits(["a"], ["p"], [0]),
        lambda: make_splits(["a"], ["p", "q"], [0]),
        lambda: make_splits(FOUR, FOUR, [0, 1, 0, 1], folds=1),
        lambda: make_splits(FOUR, FOUR, [0, 1, 0, 1], folds=2, sites=["s"]),
        lambda: make_splits(FOUR, FOUR, [0, 1, 0, 1], folds=2, sites=["s"] * 4),
        lambda: Bags(torch.ones(1, 1), torch.tensor([0, 1]), ids=("a", "b")),
        lambda: Bags(torch.ones(1, 1), torch.tensor([0, 1]), labels=torch.ones(2)),
        lambda: Bags(torch.full((1, 1), torch.nan), torch.tensor([0, 1])),
    ):
        with pytest.raises(CarmilError) as error:
            act()
        messages.append(str(error.value))
    assert [message for message in messages if WRONG.search(message)] == []
