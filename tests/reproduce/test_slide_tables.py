"""The tables of slides on made-up cohorts in the layout of the paper's: their figures and their text."""

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
from carmil.reproduce import encoders, hyperparameters, method_runs, paper, table2, table3, weno
from carmil.reproduce.method_runs import runs_folder, select_by_fold, train_methods, train_model, train_together
from carmil.reproduce.recipes import Request
from carmil.reproduce.slide_cohorts import CohortSet, find_cohorts
from carmil.reproduce.slide_table import (
    ABMIL,
    CAR_COSINE,
    CAR_L1,
    Difference,
    caution_lines,
    difference_table,
    differences,
    figures_table,
)
from carmil.studies import train
from carmil.studies.agreement import run_agreement
from carmil.studies.compare import Comparison
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
    """Write a cohort whose instance 0 encodes the class; bracs and camelyon16 have a split, camelyon16 also truth."""
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
    """Yield the request of a recipe; the tests of this file share runs, as recipes do."""
    folder = tmp_path_factory.mktemp("slides")
    for name in CLASSES:
        make(folder / "data", name)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(method_runs, "FAST_OPTIONS", SMALL)
        yield Request(out=folder / "out", shared=folder, data=folder / "data", fast=True)


@pytest.fixture(scope="module")
def table2_finding(recipe_request):
    """Return Table 2 for some of its methods."""
    return table2.reproduce(
        replace(recipe_request, out=recipe_request.out / "table2"), models=["mean", "transmil", "abmil.gated", *CARS]
    )


CARS = ["CAR-MIL (L1)", "CAR-MIL (cosine)"]


def figures(recipe_request, name):
    return json.loads((recipe_request.out / name / f"{name}.json").read_text())


def column(table, head):
    return {line[0]: line[table.heads.index(head)] for line in table.lines}


def test_table2_has_one_row_per_method_with_the_figures_of_its_runs(recipe_request, table2_finding):
    ours = table2_finding.tables[0]
    assert ours.title == "Ours: mean ± standard deviation, per cent"
    assert [line[0] for line in ours.lines] == ["Mean", "TransMIL", "ABMIL", *CARS]
    brca, camelyon = (
        next(c for c in find_cohorts(recipe_request).cohorts if c.name == n) for n in ("brca", "camelyon16")
    )
    folds = train_model(brca, "abmil.gated", recipe_request).metrics
    auc = folds.summary["auc"]
    assert column(ours, "TCGA-BRCA AUC")["ABMIL"] == f"{100 * auc.mean:.1f} ± {100 * auc.std:.1f}"
    assert len(folds.by_fold) == 3  # of the fast protocol
    runs = [line.figures["auc"] for line in train_model(camelyon, "car/abmil.gated", recipe_request).metrics.by_fold]
    assert len(runs) == 3  # the official split three times, so the deviation is over runs
    shown = f"{100 * np.mean(runs):.1f} ± {100 * np.std(runs, ddof=1):.1f}"
    assert column(ours, "CAMELYON16 AUC")["CAR-MIL (L1)"] == shown


def test_auprc_uses_attention_or_rollout_for_transmil(recipe_request, table2_finding):
    ours = column(table2_finding.tables[0], "CAMELYON16 AUPRC+")
    assert ours["Mean"] == "–"  # the model has no attention
    camelyon = next(c for c in find_cohorts(recipe_request).cohorts if c.name == "camelyon16")
    run = train_model(camelyon, "transmil", recipe_request)
    assert ours["TransMIL"].startswith(f"{100 * run.metrics.summary['auprc_rollout'].mean:.1f} ")
    by_slide = run.predictions().groupby("seed")["auprc_rollout"].mean()
    assert by_slide.tolist() == pytest.approx([line.figures["auprc_rollout"] for line in run.metrics.by_fold])
    assert any("TransMIL's rollout" in line for line in table2_finding.conditions)
    (random_line,) = (line for line in table2_finding.conditions if "a random map" in line)
    (chance,) = run_agreement(train_model(camelyon, "mean", recipe_request), ["random"])
    assert f"is {100 * chance.measures['auprc_plus'].nanmean():.1f}" in random_line


def test_table2_without_annotations_omits_map_figures_only(tmp_path):
    make(tmp_path / "data", "camelyon16", annotated=False)
    recipe_request = Request(out=tmp_path / "out", shared=tmp_path, data=tmp_path / "data", fast=True)
    result = table2.reproduce(recipe_request, models=["abmil.gated"])
    assert column(result.tables[0], "CAMELYON16 AUPRC+") == {"ABMIL": "–"}
    assert column(result.tables[0], "CAMELYON16 AUC")["ABMIL"] != "–"
    assert not any("a random map" in line for line in (*result.lines, *result.conditions))


def test_figures_of_the_paper_are_in_a_separate_table(table2_finding):
    published = table2_finding.tables[-1]
    assert published.title == "The paper's, UNI features of TCGA, BRACS and CAMELYON16"
    assert column(published, "CAMELYON16 AUPRC+")["TransMIL"] == "28.2 ± 3.6"
    assert all("The paper's" not in table.title for table in table2_finding.tables[:-1])


def test_car_is_compared_with_abmil_on_every_cohort_and_metric(recipe_request, table2_finding):
    table = next(table for table in table2_finding.tables if table.title.startswith("Differences"))
    assert len([line for line in table.lines if line[1] == "CAR-MIL (L1) − ABMIL"]) == 4 * 2
    every = figures(recipe_request, "table2")["differences"]
    pair = next(d for d in every if (d["cohort"], d["first"], d["measure"]) == ("brca", "CAR-MIL (L1)", "auc"))
    low, high = 100 * pair["low"], 100 * pair["high"]
    line = next(line for line in table.lines if line[:3] == ("TCGA-BRCA", "CAR-MIL (L1) − ABMIL", "AUC"))
    assert line[3:5] == (f"{100 * pair['difference']:+.1f}", f"{low:+.1f} to {high:+.1f}")
    assert any("the effect of initialisation" in line for line in table2_finding.conditions)


def test_differences_between_uninformed_models_are_marked(recipe_request):
    camelyon, *_ = (c for c in find_cohorts(recipe_request).cohorts if c.name == "camelyon16")
    rows = train_methods([camelyon], [ABMIL, CAR_L1, CAR_COSINE], recipe_request)
    test = rows[0].predictions.groupby("slide")["label"].first()
    shares = test.value_counts(normalize=True)
    chance = -np.log(shares[test]).mean()

    def with_cross_entropy(row, share):
        """Return the row with predictions whose cross-entropy is this fraction of that of the class frequencies."""
        p = np.exp(-share * chance)
        right = np.where(row.predictions["label"] == "tumor", p, 1 - p) + 0.001 * (row.predictions["seed"] - 1)
        return replace(row, predictions=row.predictions.assign(p_tumor=right, p_normal=1 - right))

    def all_with_cross_entropy(*shares):
        return [with_cross_entropy(row, share) for row, share in zip(rows, shares, strict=True)]

    assert {row.run.outputs for row in rows} == {("normal", "tumor")} and set(rows[0].predictions["seed"]) == {0, 1, 2}
    assert caution_lines(all_with_cross_entropy(0.9, 0.5, 0.97)) == []
    idle = all_with_cross_entropy(0.9, 1.1, 0.995)
    first, second = caution_lines(idle)
    assert first.startswith(f"{camelyon.title}, CAR-MIL (L1): the model is no better than class frequencies")
    assert second.startswith(f"{camelyon.title}, CAR-MIL (cosine): ") and f" {chance:.3f};" in second
    pairs = [(CAR_L1, CAR_COSINE), (CAR_L1, ABMIL)]
    assert [one.informed for one in differences(idle, pairs)] == [False, True] * 2
    table = difference_table(differences(idle, pairs))
    assert [line[-1] for line in table.lines] == ["neither", "yes"] * 2


def test_claim_table_lists_methods_that_are_better_than_car_or_abmil():
    cohort = StudyCohort("x", "X", Path(), Path(), ("auc", "f1_macro"), "uni")

    def pair(first, second, difference, low, high, p, *, informed=True):
        result = Comparison(first, second, difference, low, high, p, p, p, holm_t=p)
        return Difference(cohort, "auc", result, informed)

    claims = {
        CAR_L1.title: [
            pair("CAR", "DSMIL", 0.02, -0.1, 0.1, 0.01),
            pair("CAR", "CLAM", -0.1, -0.2, -0.05, 0.01),
            pair("CAR", "CIA", -0.1, -0.2, -0.05, 0.01, informed=False),
        ],
        CAR_COSINE.title: [pair("CAR", "CLAM", -0.1, -0.2, 0.05, 0.6)],
        ABMIL.title: [pair("ABMIL", "CLAM", -0.1, -0.2, -0.05, 0.3)],
    }
    table = table2.claim_table(claims)
    assert table.lines == (
        (CAR_L1.title, "2", "1", "CLAM on X by AUC", "CLAM on X by AUC"),
        (CAR_COSINE.title, "1", "0", "none", "none"),
        (ABMIL.title, "1", "0", "none", "CLAM on X by AUC"),
    )


def test_distance_is_chosen_on_validation_bags_in_every_fold(recipe_request):
    camelyon, *_ = (c for c in find_cohorts(recipe_request).cohorts if c.name == "camelyon16")
    alternatives = train_methods([camelyon], [CAR_L1, CAR_COSINE], recipe_request)
    row, choice = select_by_fold(alternatives, "CAR-MIL")
    losses = [[model.validation_loss for model in one.run.models] for one in alternatives]
    assert list(choice.taken.values()) == np.argmin(losses, 0).tolist()
    for (fold, seed), i in choice.taken.items():
        line = next(one for one in row.by_fold if (one.fold, one.seed) == (fold, seed))
        assert line in alternatives[i].run.metrics.by_fold
        actual, expected = (
            f[f["seed"] == seed].set_index("slide")["p_tumor"] for f in (row.predictions, alternatives[i].predictions)
        )
        pd.testing.assert_series_equal(actual.sort_index(), expected.sort_index())
    assert len(row.predictions) == len(alternatives[0].predictions)


def test_both_distances_are_trained_together_with_the_results_of_separate_training(
    recipe_request, tmp_path, monkeypatch
):
    trained = []
    plain = method_runs.run_together
    monkeypatch.setattr(
        method_runs, "run_together", lambda studies, *a, **k: trained.append(len(studies)) or plain(studies, *a, **k)
    )
    camelyon, *_ = (c for c in find_cohorts(recipe_request).cohorts if c.name == "camelyon16")
    separate = replace(recipe_request, shared=tmp_path / "apart")
    alone = train_model(camelyon, CAR_COSINE.model, separate, **CAR_COSINE.settings)
    together = train_methods(
        [camelyon], [CAR_L1, ABMIL, CAR_COSINE], replace(recipe_request, shared=tmp_path / "together")
    )
    assert trained == [2]
    assert [one.method for one in together] == [CAR_L1, ABMIL, CAR_COSINE]
    assert together[2].run.metrics.by_fold == alone.metrics.by_fold
    assert together[0].run.metrics.by_fold != alone.metrics.by_fold
    train_methods([camelyon], [CAR_COSINE, CAR_L1], replace(recipe_request, shared=tmp_path / "together"))
    assert trained == [2]  # read from disk, not trained
    assert not list((tmp_path / "together").rglob("*checkpoint*"))


def test_recipe_killed_after_training_in_parts_reuses_the_parts(recipe_request, tmp_path, monkeypatch):
    camelyon, *_ = (c for c in find_cohorts(recipe_request).cohorts if c.name == "camelyon16")
    here = replace(recipe_request, shared=tmp_path / "shared")
    monkeypatch.setattr(partition, "models_that_fit", lambda *a, **k: 2)  # of six models
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
    result = table3.reproduce(replace(recipe_request, out=recipe_request.out / "table3"))
    ours, between, choices, published = result.tables
    assert [line[0] for line in ours.lines] == list(paper.TABLE3) == [line[0] for line in published.lines]
    assert [line[1] for line in between.lines][:3] == [f"CAR-{name} − {base}" for name, base in PAIRS]
    counts = [int(word) for word in choices.lines[1][1].replace(",", "").split() if word.isdigit()]
    assert sum(counts) == 3  # one choice per run
    assert table3.SELECTION in result.conditions


def only(*names):
    def cohorts(recipe_request, **others):
        result = find_cohorts(recipe_request, **others)
        return CohortSet(tuple(one for one in result.cohorts if one.name in names), result.missing)

    return cohorts


def test_encoder_table_has_available_encoders_and_lists_missing_features(recipe_request):
    make(recipe_request.data, "brca", "resnet50")
    result = encoders.reproduce(replace(recipe_request, out=recipe_request.out / "encoders"))
    ours, between, _ = result.tables
    assert [line[0] for line in ours.lines] == [
        f"{name}, {encoder}" for encoder in ("uni", "resnet50") for name in ("ABMIL", "CAR-MIL (L1)")
    ]
    assert column(ours, "TCGA-BRCA AUC")["ABMIL, resnet50"] != "–" == column(ours, "CAMELYON16 AUC")["ABMIL, resnet50"]
    assert ("TCGA-BRCA", "CAR-MIL (L1), resnet50 − ABMIL, resnet50") in [line[:2] for line in between.lines]
    assert any("DATA/luad_tp53/resnet50" in line for line in result.conditions)


def test_hyperparameter_grid_and_plain_model_are_trained_together_and_drawn(recipe_request):
    result = hyperparameters.reproduce(replace(recipe_request, out=recipe_request.out / "hyperparameters"))
    brca = next(c for c in find_cohorts(recipe_request).cohorts if c.name == "brca")
    points = runs_folder(brca, recipe_request) / "alpha-lambda-distance" / "points"
    assert len(list(points.iterdir())) == 2 * 2 * 2 + 2
    assert [table.title.partition(":")[0] for table in result.tables] == [
        "Ours", "Differences on the same cases", "TCGA-BRCA", "TCGA-LUAD TP53",
    ]  # fmt: skip
    plain = train_model(brca, "abmil.gated", recipe_request).metrics.summary["auc"].mean
    assert result.tables[2].lines[0][4].startswith(f"{100 * plain:.1f} ± ")  # alpha = lambda = 0 is ABMIL
    assert [picture.path.read_bytes()[:4] for picture in result.pictures] == [b"\x89PNG"] * 2
    assert any("choose on the test set" in line for line in result.conditions)
    assert result.tables[1].lines[0][1] == "CAR-MIL, chosen by fold − ABMIL"


def test_weno_table_has_cohorts_of_two_classes_and_selected_epochs(recipe_request, monkeypatch):
    monkeypatch.setattr(weno, "find_cohorts", only("camelyon16", "bracs"))
    result = weno.reproduce(replace(recipe_request, out=recipe_request.out / "weno"))
    assert [line[0] for line in result.tables[0].lines] == ["ABMIL", "WENO", "CAR-MIL (L1)"]
    assert result.tables[0].heads == ("model", "CAMELYON16 AUC", "CAMELYON16 AUPRC+")
    assert [line[2] for line in result.tables[2].lines] == ["0 of 3"]
    assert len(result.tables[1].lines) == 3 * 2


def test_stand_in_table_is_labelled_as_a_stand_in(recipe_request):
    brca = next(c for c in find_cohorts(recipe_request).cohorts if c.name == "brca")
    rows = [replace(one, cohort=replace(brca, stand_in=True)) for one in train_methods([brca], [ABMIL], recipe_request)]
    assert figures_table(rows).title.startswith("Ours, on a stand-in made of crc's nuclei: ")


def test_table2_command_writes_what_it_prints(recipe_request, run_cli):
    command = ["--data", str(recipe_request.data), "--fast", "--device", "cpu", "--out", str(recipe_request.shared)]
    status, out, _ = run_cli("reproduce", "table2", *command, "--models", "mean,abmil.gated")
    assert status == 0
    text = (recipe_request.shared / "table2.md").read_text()
    assert "the figures are meaningless" in text
    assert "no attention-based" not in text  # CAR was not requested
    assert "TCGA-NSCLC is missing" in out
    assert "TCGA-NSCLC is missing" in text
    status, _, err = run_cli("reproduce", "table2", *command, "--models", "nomil")
    assert (status, "unknown model 'nomil'" in err) == (2, True)


def test_recipe_without_any_cohort_raises_an_error(tmp_path):
    with pytest.raises(CarmilError, match="no slides found"):
        weno.reproduce(Request(out=tmp_path, shared=tmp_path, data=tmp_path, fast=True))


def test_stored_figures_of_the_paper_appear_in_the_paper(shared_data):
    text = (shared_data.parent / "paper" / "car-mil.tex").read_text()
    rows = [" ".join(line.replace("\\our", " ").replace("± ", "±").split()) for line in text.splitlines()]
    for table in (paper.TABLE2, paper.TABLE3, paper.ENCODERS, paper.WENO):
        for name, figures in table.items():
            wanted = [cell for cell in figures.split() if cell != "–"]
            per_line = 2 if table is paper.ENCODERS else len(wanted)
            for start in range(0, len(wanted), per_line):
                part = wanted[start : start + per_line]
                assert any(in_order(part, row) for row in rows), (name, part)


def in_order(cells, row):
    """Return whether the row contains exactly these figures, in this order."""
    stripped = [word.strip("{}\\&") for word in row.replace("\\textbf{", " ").replace("\\underline{", " ").split()]
    return [word.rstrip("}") for word in stripped if "±" in word] == cells
