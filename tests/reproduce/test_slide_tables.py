"""The tables of slides on made-up cohorts that lie as the paper's would: what stands in them, and what is said in words."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from carmil.bags.sources import Bag
from carmil.bags.writers import write_bag
from carmil.datasets.study_cohort import StudyCohort
from carmil.errors import CarmilError
from carmil.reproduce import encoders, hyperparameters, method_runs, paper_slides, table2, table3, weno
from carmil.reproduce.method_runs import runs_folder, select_by_fold, train_methods, train_model, train_together
from carmil.reproduce.recipes import Request
from carmil.reproduce.slide_cohorts import CohortSet, find_cohorts
from carmil.reproduce.slide_table import (
    ABMIL,
    CAR_COSINE,
    CAR_L1,
    Difference,
    difference_lines,
    differences,
    figures_table,
    uninformed_lines,
)
from carmil.studies import train
from carmil.studies.compare import Comparison
from carmil.studies.subjects import open_run_store
from carmil.training import partition

WIDTH = 8
SMALL = {
    "mean": {"hidden": 8},
    "abmil.gated": {"hidden": 8, "attention": 4},
    "dsmil": {"hidden": 8, "query_size": 4},
    "transmil": {"hidden": 8, "heads": 2, "landmarks": 4},
    "weno": {"hidden": 8, "teacher": 8, "attention": 4, "student": 8},
}
CLASSES = {
    "brca": ("IDC", "ILC"),
    "luad_tp53": ("0 wild type", "1 mutated"),
    "bracs": ("0 N", "1 PB", "2 UDH"),
    "camelyon16": ("normal", "tumor"),
}


def make(data: Path, name: str, encoder: str = "uni", *, slides: int = 24, annotated: bool = True) -> None:
    """Instance 0 tells the class. bracs and camelyon16 have a split of their own, camelyon16's instances a truth."""
    rng = np.random.default_rng(len(name))
    classes, lines = CLASSES[name], []
    for i in range(slides):
        label, n = i % len(classes), int(rng.integers(4, 8))
        features = rng.normal(size=(n, WIDTH)).astype(np.float32)
        features[0, label] = 3.0
        truth = (np.arange(n) < label).astype(np.int64) if annotated and name == "camelyon16" else None
        slide = f"{name}_{i:02d}"
        write_bag(Bag(id=slide, features=features, instance_labels=truth), data / name / encoder, "npz")
        split = ("train", "train", "test", "val")[i // len(classes) % 4]
        lines.append({"slide": slide, "patient": f"P{i}", "label": classes[label], "split": split})
    kept = ["slide", "patient", "label", *(["split"] if name in ("bracs", "camelyon16") else [])]
    pd.DataFrame(lines)[kept].to_csv(data / name / "labels.csv", index=False)


@pytest.fixture(scope="module")
def recipe_request(tmp_path_factory) -> Iterator[Request]:
    """What a recipe works with; runs are shared by the tests of this file, as recipes share them."""
    folder = tmp_path_factory.mktemp("slides")
    for name in CLASSES:
        make(folder / "data", name)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(method_runs, "FAST_OPTIONS", SMALL)
        yield Request(out=folder / "out", shared=folder, data=folder / "data", fast=True)


@pytest.fixture(scope="module")
def found2(recipe_request):
    """Table 2 of some of its methods."""
    return table2.reproduce(
        replace(recipe_request, out=recipe_request.out / "table2"), models=["mean", "transmil", "abmil.gated", *CARS]
    )


CARS = ["CAR-MIL (L1)", "CAR-MIL (cosine)"]


def figures(recipe_request, name):
    return json.loads((recipe_request.out / name / f"{name}.json").read_text())


def column(table, head):
    return {line[0]: line[table.heads.index(head)] for line in table.lines}


def test_a_row_is_a_method_and_a_cell_what_its_run_found(recipe_request, found2):
    ours = found2.tables[0]
    assert ours.title == "Ours: mean ± standard deviation, per cent"
    assert [line[0] for line in ours.lines] == ["Mean", "TransMIL", "ABMIL", *CARS]
    brca, camelyon = (
        next(c for c in find_cohorts(recipe_request).cohorts if c.name == n) for n in ("brca", "camelyon16")
    )
    folds = train_model(brca, "abmil.gated", recipe_request).metrics
    auc = folds.summary["auc"]
    assert column(ours, "TCGA-BRCA AUC")["ABMIL"] == f"{100 * auc.mean:.1f} ± {100 * auc.std:.1f}"
    assert len(folds.by_fold) == 3  # of a look at the machinery
    runs = [line.figures["auc"] for line in train_model(camelyon, "car/abmil.gated", recipe_request).metrics.by_fold]
    assert len(runs) == 3  # the official split thrice: the deviation is over runs
    shown = f"{100 * np.mean(runs):.1f} ± {100 * np.std(runs, ddof=1):.1f}"
    assert column(ours, "CAMELYON16 AUC")["CAR-MIL (L1)"] == shown


def test_auprc_uses_attention_and_for_transmil_rollout(recipe_request, found2):
    ours = column(found2.tables[0], "CAMELYON16 AUPRC+")
    assert ours["Mean"] == "–"  # attends to nothing
    camelyon = next(c for c in find_cohorts(recipe_request).cohorts if c.name == "camelyon16")
    run = train_model(camelyon, "transmil", recipe_request)
    assert ours["TransMIL"].startswith(f"{100 * run.metrics.summary['auprc_rollout'].mean:.1f} ")
    by_slide = run.predictions().groupby("seed")["auprc_rollout"].mean()
    assert by_slide.tolist() == pytest.approx([line.figures["auprc_rollout"] for line in run.metrics.by_fold])
    assert any("TransMIL's rollout" in line for line in found2.conditions)
    (blind,) = (line for line in found2.conditions if "a random map" in line)
    bags = open_run_store(run).bags()
    tested = [i for i, name in enumerate(bags.ids) if name in set(run.predictions()["slide"])]
    truth = [bags[i].instance_labels for i in tested if bags[i].instance_labels.any()]
    assert f"near {100 * np.mean([float(one.double().mean()) for one in truth]):.1f}, " in blind
    assert f"in the {len(truth)} test slides" in blind


def test_without_annotations_nothing_is_said_of_maps_and_the_rest_is(tmp_path):
    make(tmp_path / "data", "camelyon16", annotated=False)
    recipe_request = Request(out=tmp_path / "out", shared=tmp_path, data=tmp_path / "data", fast=True)
    found = table2.reproduce(recipe_request, models=["abmil.gated"])
    assert column(found.tables[0], "CAMELYON16 AUPRC+") == {"ABMIL": "–"}
    assert column(found.tables[0], "CAMELYON16 AUC")["ABMIL"] != "–"
    assert not any("a random map" in line for line in (*found.lines, *found.conditions))


def test_the_papers_figures_stand_in_a_table_of_their_own(found2):
    theirs = found2.tables[-1]
    assert theirs.title == "The paper's, UNI features of TCGA, BRACS and CAMELYON16"
    assert column(theirs, "CAMELYON16 AUPRC+")["TransMIL"] == "28.2 ± 3.6"
    assert all("The paper's" not in table.title for table in found2.tables[:-1])


def test_car_beside_abmil_is_said_of_every_cohort_and_follows_the_interval_over_cases(recipe_request, found2):
    told = [line for line in found2.lines if line.startswith("CAR-MIL (L1) beside ABMIL on ")]
    assert len(told) == 4
    every = figures(recipe_request, "table2")["differences"]
    pair = next(d for d in every if (d["cohort"], d["first"], d["measure"]) == ("brca", "CAR-MIL (L1)", "auc"))
    low, high = 100 * pair["low"], 100 * pair["high"]
    assert f"AUC {100 * pair['difference']:+.1f} [{low:+.1f}, {high:+.1f}]: " in next(t for t in told if "BRCA" in t)
    assert any("the effect of initialisation" in line for line in found2.conditions)


@pytest.mark.parametrize(
    ("low", "high", "says"),
    [
        (-0.01, 0.02, "no difference that these cases can show"),
        (0.01, 0.03, "better, by more than"),
        (-0.3, -0.1, "worse"),
        (float("nan"), float("nan"), "too few to tell"),
    ],
)
def test_words_go_whichever_way_the_interval_does(low, high, says):
    cohort = StudyCohort("x", "X", Path(), Path(), ("auc", "f1_macro"), "uni")
    found = Comparison("CAR", "ABMIL", (low + high) / 2, low, high, 0.001, 0.5, 0.5)
    (line,) = difference_lines([Difference(cohort, "auc", found)])
    assert line.startswith("CAR beside ABMIL on X: AUC ")
    assert says in line


def test_a_difference_between_two_who_know_no_more_than_the_classes_shares_is_called_so(recipe_request):
    camelyon, *_ = (c for c in find_cohorts(recipe_request).cohorts if c.name == "camelyon16")
    rows = train_methods([camelyon], [ABMIL, CAR_L1, CAR_COSINE], recipe_request)
    test = rows[0].predictions.groupby("slide")["label"].first()
    shares = test.value_counts(normalize=True)
    chance = -np.log(shares[test]).mean()

    def giving(row, share):
        """The row with answers whose cross-entropy is this share of that of the classes' shares, by runs that differ."""
        p = np.exp(-share * chance)
        right = np.where(row.predictions["label"] == "tumor", p, 1 - p) + 0.001 * (row.predictions["seed"] - 1)
        return replace(row, predictions=row.predictions.assign(p_tumor=right, p_normal=1 - right))

    def all_giving(*shares):
        return [giving(row, share) for row, share in zip(rows, shares, strict=True)]

    assert {row.run.classes for row in rows} == {("normal", "tumor")} and set(rows[0].predictions["seed"]) == {0, 1, 2}
    assert uninformed_lines(all_giving(0.9, 0.5, 0.97)) == []
    idle = all_giving(0.9, 1.1, 0.995)
    (line,) = uninformed_lines(idle)
    assert line.startswith(f"{camelyon.title}: the probabilities of CAR-MIL (L1), CAR-MIL (cosine) are no better than")
    assert f"({chance:.3f})" in line
    pairs = [(idle[1], idle[2]), (idle[1], idle[0])]
    assert [one.informed for one in differences(pairs)] == [False, True] * 2
    sure = Comparison("CAR", "ABMIL", 0.2, 0.1, 0.3, 0.001, 0.5, 0.5)
    assert Difference(camelyon, "auc", sure, informed=False).summary.endswith(
        "explains, but neither predicts better than the class frequencies"
    )
    unsure = Comparison("CAR", "ABMIL", 0.2, -0.1, 0.3, 0.2, 0.5, 0.5)
    assert Difference(camelyon, "auc", unsure, informed=False).verdict == "no difference that these cases can show"


def test_the_claim_names_who_does_better_and_asks_the_same_of_abmil():
    cohort = StudyCohort("x", "X", Path(), Path(), ("auc", "f1_macro"), "uni")

    def pair(first, second, difference, low, high, p, *, informed=True):
        found = Comparison(first, second, difference, low, high, p, p, p, holm_t=p)
        return Difference(cohort, "auc", found, informed)

    claims = {
        CAR_L1.title: [
            pair("CAR", "DSMIL", 0.02, -0.1, 0.1, 0.01),
            pair("CAR", "CLAM", -0.1, -0.2, -0.05, 0.01),
            pair("CAR", "CIA", -0.1, -0.2, -0.05, 0.01, informed=False),
        ],
        CAR_COSINE.title: [pair("CAR", "CLAM", -0.1, -0.2, 0.05, 0.6)],
        ABMIL.title: [pair("ABMIL", "CLAM", -0.1, -0.2, -0.05, 0.3)],
    }
    (table,) = table2.claim_tables(claims)
    assert table.lines == (("X", "AUC", "CLAM; CLAM", "none; none", "none; CLAM"),)
    first, second, third, control = table2.claim_lines(claims)
    assert first.startswith("of 2 comparisons of CAR-MIL (L1) with attention-based methods (1 more, of two that")
    assert "finds in 1 the other better (CLAM on X by AUC); the interval over test cases, which is" in first
    assert "finds in none the other better" in second
    assert second.endswith("in none")
    assert third.endswith("in 1")
    assert "control" in control


def test_validation_bags_choose_the_distance_fold_by_fold(recipe_request):
    camelyon, *_ = (c for c in find_cohorts(recipe_request).cohorts if c.name == "camelyon16")
    alternatives = train_methods([camelyon], [CAR_L1, CAR_COSINE], recipe_request)
    row, choice = select_by_fold(alternatives, "CAR-MIL")
    losses = [[model.validation_loss for model in one.run.models] for one in alternatives]
    assert list(choice.taken.values()) == np.argmin(losses, 0).tolist()
    for (fold, seed), i in choice.taken.items():
        line = next(one for one in row.by_fold if (one.fold, one.seed) == (fold, seed))
        assert line in alternatives[i].run.metrics.by_fold
        mine, theirs = (
            f[f["seed"] == seed].set_index("slide")["p_tumor"] for f in (row.predictions, alternatives[i].predictions)
        )
        pd.testing.assert_series_equal(mine.sort_index(), theirs.sort_index())
    assert len(row.predictions) == len(alternatives[0].predictions)


def test_both_distances_are_one_population_and_each_is_what_it_would_be_alone(recipe_request, tmp_path, monkeypatch):
    trained = []
    plain = method_runs.run_together
    monkeypatch.setattr(
        method_runs, "run_together", lambda studies, *a, **k: trained.append(len(studies)) or plain(studies, *a, **k)
    )
    camelyon, *_ = (c for c in find_cohorts(recipe_request).cohorts if c.name == "camelyon16")
    apart = replace(recipe_request, shared=tmp_path / "apart")
    alone = train_model(camelyon, CAR_COSINE.model, apart, **CAR_COSINE.settings)
    together = train_methods(
        [camelyon], [CAR_L1, ABMIL, CAR_COSINE], replace(recipe_request, shared=tmp_path / "together")
    )
    assert trained == [2]
    assert [one.method for one in together] == [CAR_L1, ABMIL, CAR_COSINE]
    assert together[2].run.metrics.by_fold == alone.metrics.by_fold
    assert together[0].run.metrics.by_fold != alone.metrics.by_fold
    train_methods([camelyon], [CAR_COSINE, CAR_L1], replace(recipe_request, shared=tmp_path / "together"))
    assert trained == [2]  # read, not trained
    assert not list((tmp_path / "together").rglob("*checkpoint*"))


def test_killed_after_a_training_in_parts_it_goes_on_with_the_parts(recipe_request, tmp_path, monkeypatch):
    camelyon, *_ = (c for c in find_cohorts(recipe_request).cohorts if c.name == "camelyon16")
    here = replace(recipe_request, shared=tmp_path / "shared")
    monkeypatch.setattr(partition, "models_that_fit", lambda *a, **k: 2)  # of six
    fitted, fit, conclude = [], partition.fit, train.evaluate_folds
    monkeypatch.setattr(partition, "fit", lambda *a, **k: fitted.append(1) or fit(*a, **k))

    def killed(settings, *others):
        if "cosine" in settings.out.name:
            raise KeyboardInterrupt
        conclude(settings, *others)

    monkeypatch.setattr(train, "evaluate_folds", killed)
    with pytest.raises(KeyboardInterrupt):
        train_together(camelyon, CAR_L1.model, [CAR_L1.settings, CAR_COSINE.settings], here)
    assert len(fitted) == 3 and list((tmp_path / "shared").rglob("*.parts"))
    monkeypatch.setattr(train, "evaluate_folds", conclude)
    first, second = train_together(camelyon, CAR_L1.model, [CAR_L1.settings, CAR_COSINE.settings], here)
    assert len(fitted) == 3 and first.metrics.by_fold != second.metrics.by_fold
    assert not list((tmp_path / "shared").rglob("*checkpoint*"))


PAIRS = (("MIL", "ABMIL"), ("DSMIL", "DSMIL"), ("TransMIL", "TransMIL"))


def test_table3_has_three_models_with_and_without_car(recipe_request, monkeypatch):
    monkeypatch.setattr(table3, "find_cohorts", only("camelyon16"))
    found = table3.reproduce(replace(recipe_request, out=recipe_request.out / "table3"))
    ours, between, choices, theirs = found.tables
    assert [line[0] for line in ours.lines] == list(paper_slides.TABLE3) == [line[0] for line in theirs.lines]
    assert [line[1] for line in between.lines][:3] == [f"CAR-{name} − {base}" for name, base in PAIRS]
    counts = [int(word) for word in choices.lines[1][1].replace(",", "").split() if word.isdigit()]
    assert sum(counts) == 3  # runs
    assert table3.SELECTION in found.conditions


def only(*names):
    def cohorts(recipe_request, **others):
        found = find_cohorts(recipe_request, **others)
        return CohortSet(tuple(one for one in found.cohorts if one.name in names), found.missing)

    return cohorts


def test_other_encoders_are_those_that_are_there_and_what_is_missing_is_said(recipe_request):
    make(recipe_request.data, "brca", "resnet50")
    found = encoders.reproduce(replace(recipe_request, out=recipe_request.out / "encoders"))
    titles = [table.title for table in found.tables]
    assert [title.partition(":")[0] for title in titles[::2][:2]] == ["Ours, uni features", "Ours, resnet50 features"]
    assert found.tables[2].heads == ("model", "TCGA-BRCA AUC", "TCGA-BRCA F1")
    assert any(line.startswith("resnet50 features: CAR-MIL (L1) beside ABMIL on TCGA-BRCA: ") for line in found.lines)
    assert any("DATA/luad_tp53/resnet50" in line for line in found.conditions)


def test_the_grid_and_the_plain_model_are_one_population_and_the_picture_shows_them(recipe_request):
    found = hyperparameters.reproduce(replace(recipe_request, out=recipe_request.out / "hyperparameters"))
    brca = next(c for c in find_cohorts(recipe_request).cohorts if c.name == "brca")
    points = runs_folder(brca, recipe_request) / "alpha-lambda-distance" / "points"
    assert len(list(points.iterdir())) == 2 * 2 * 2 + 2
    assert [table.title.partition(":")[0] for table in found.tables] == [
        "TCGA-BRCA", "TCGA-LUAD TP53", "Differences on the same cases",
    ]  # fmt: skip
    plain = train_model(brca, "abmil.gated", recipe_request).metrics.summary["auc"].mean
    assert found.tables[0].lines[0][4].startswith(f"{100 * plain:.1f} ± ")  # alpha = lambda = 0 is ABMIL
    assert [picture.path.read_bytes()[:4] for picture in found.pictures] == [b"\x89PNG"] * 2
    assert any(f"{100 * plain:.1f} without" in line for line in found.lines)
    assert any("choose on the test set" in line for line in found.conditions)
    assert found.tables[2].lines[0][1] == "CAR-MIL, chosen by fold, − ABMIL"


def test_weno_is_for_two_classes_and_says_by_which_epoch_it_is_taken(recipe_request, monkeypatch):
    monkeypatch.setattr(weno, "find_cohorts", only("camelyon16", "bracs"))
    found = weno.reproduce(replace(recipe_request, out=recipe_request.out / "weno"))
    assert [line[0] for line in found.tables[0].lines] == ["ABMIL", "WENO", "CAR-MIL (L1)"]
    assert found.tables[0].heads == ("model", "CAMELYON16 AUC", "CAMELYON16 AUPRC+")
    assert any("0 of 3 had mined" in line for line in found.lines)
    assert len(found.tables[1].lines) == 3 * 2


def test_a_stand_in_is_called_one_and_never_meets_the_papers_figures(recipe_request):
    brca = next(c for c in find_cohorts(recipe_request).cohorts if c.name == "brca")
    rows = [replace(one, cohort=replace(brca, stand_in=True)) for one in train_methods([brca], [ABMIL], recipe_request)]
    assert figures_table(rows).title.startswith("Ours, on a stand-in made of crc's nuclei: ")


def test_a_command_writes_what_it_prints(recipe_request, said):
    command = ["--data", str(recipe_request.data), "--fast", "--device", "cpu", "--out", str(recipe_request.shared)]
    status, out, _ = said("reproduce", "table2", *command, "--models", "mean,abmil.gated")
    assert status == 0
    text = (recipe_request.shared / "table2.md").read_text()
    assert "the figures mean nothing" in text
    assert "no attention-based" not in text  # CAR was not asked for
    assert "TCGA-NSCLC is not there" in out
    assert "TCGA-NSCLC is not there" in text
    status, _, err = said("reproduce", "table2", *command, "--models", "nomil")
    assert (status, "unknown model 'nomil'" in err) == (2, True)


def test_no_cohort_at_all_is_one_line(tmp_path):
    with pytest.raises(CarmilError, match="slides are needed"):
        weno.reproduce(Request(out=tmp_path, shared=tmp_path, data=tmp_path, fast=True))


def test_every_figure_of_the_paper_is_in_the_paper(shared_data):
    text = (shared_data.parent / "paper" / "car-mil.tex").read_text()
    rows = [" ".join(line.replace("\\our", " ").replace("± ", "±").split()) for line in text.splitlines()]
    for table in (paper_slides.TABLE2, paper_slides.TABLE3, paper_slides.ENCODERS, paper_slides.WENO):
        for name, figures in table.items():
            wanted = [cell for cell in figures.split() if cell != "–"]
            per_line = 2 if table is paper_slides.ENCODERS else len(wanted)
            for start in range(0, len(wanted), per_line):
                part = wanted[start : start + per_line]
                assert any(in_order(part, row) for row in rows), (name, part)


def in_order(cells, row):
    """Are these figures, and no others, in the row?"""
    stripped = [word.strip("{}\\&") for word in row.replace("\\textbf{", " ").replace("\\underline{", " ").split()]
    return [word.rstrip("}") for word in stripped if "±" in word] == cells
