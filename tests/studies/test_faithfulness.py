"""`carmil faithfulness`: figures that can be done by hand, runs side by side, and words that do not fit."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from carmil.evidence import bag_auc, explain
from carmil.evidence.faithfulness import evidence_of_class, faithfulness_of
from carmil.evidence.randomisation import shuffle_weights, similarity_over_chance
from carmil.models.pooling import Offsets
from carmil.runs.faithfulness import ALIKE, NO_GAIN, UNLEARNED
from carmil.runs.run import read_run
from carmil.studies import faithfulness as command
from carmil.studies.faithfulness import measure_faithfulness
from carmil.studies.faithfulness_probe import EXPLAINED, FOLLOWED, TWINS, probe
from carmil.studies.subjects import find_run_store
from carmil.studies.train import run_study

from .conftest import make_files

FEW = {"steps": 20, "random_orders": 3, "device": "cpu"}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A run of CAR with two seeds a fold, and one of mean."""
    folder = tmp_path_factory.mktemp("faithful")
    files = make_files(folder, patients=18)
    run_study(files.settings(folder / "car", seeds=2, epochs=12, lr=1e-2))
    run_study(files.settings(folder / "mean", model="mean", options={"hidden": 8}, epochs=12, lr=1e-2))
    return folder


def judged(*folders, methods=(), log=lambda line: None, out=None, **others):
    out = out or folders[0] / "faithfulness"
    return measure_faithfulness(folders, out, methods=methods, log=log, **{**FEW, **others})


def shuffled_copy(run, folder, *, seed=0):
    """The run with the entries of every tensor in random order."""
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("faithfulness"))
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(folder / "weights.safetensors")
    for name, tensor in weights.items():
        weights[name] = tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view_as(tensor)
    save_file(weights, folder / "weights.safetensors")
    return folder


@pytest.fixture(scope="module")
def car(study):
    (found,) = judged(study / "car", methods=("path", "attention", "random"))
    return found


def by_hand(run):
    """For every model its slides, what its path evidence does to its answers, then that of its twins, and all twins' answers."""
    bags, population, frame = find_run_store(run).bags(), run.population(), run.predictions()
    for row, model in enumerate(run.models):
        slides = frame[(frame["fold"] == model.fold) & (frame["seed"] == model.seed)]
        part = bags[[bags.ids.index(slide) for slide in slides["slide"]]]
        labels = torch.tensor([run.classes.index(label) for label in slides["label"]])
        member = population.member(row)
        twins = [shuffle_weights(member, seed=row * TWINS + i) for i in range(TWINS)]
        with torch.no_grad():
            answers = member(part.features, part.offsets).logits.argmax(-1)
            of_twins = torch.stack([twin(part.features, part.offsets).logits.softmax(-1) for twin in twins])
        maps = [evidence_of_class(explain(one, part), answers, part.offsets) for one in (member, *twins[:EXPLAINED])]
        followed = torch.stack(maps[: 1 + FOLLOWED])
        yield part, faithfulness_of(member, part, followed, labels, steps=20, random_orders=3), maps, of_twins


def test_figures_are_means_over_rightly_answered_slides_of_the_means_over_their_models(study, car):
    areas, alike, copies = {}, {}, {}
    for part, found, (own, *others), of_twins in by_hand(read_run(study / "car")):
        offsets = Offsets(part.offsets)
        each = torch.stack(
            [similarity_over_chance(own[:, None], other[:, None], offsets).squeeze(-1) for other in others]
        )
        gain = found.deletion_area[1:].mean(0) - found.deletion_area[0]
        for i, slide in enumerate(part.ids):
            alike.setdefault(slide, []).append(float(each[:, i].mean()))
            copies.setdefault(slide, []).append(of_twins[:, i].numpy())
            if found.right[i]:
                measures = found.deletion_area[0, i], found.insertion_area[0, i], found.sufficiency(0.1)[0, i], gain[i]
                areas.setdefault(slide, []).append([float(value) for value in measures])
    figures = car.maps[0].figures
    expected = np.mean([np.mean(values, axis=0) for values in areas.values()], axis=0)
    names = ("deletion_area", "insertion_area", "sufficiency", "aopc_gain")
    assert [figures[name].value for name in names] == pytest.approx(expected.tolist(), abs=1e-5)
    of_slides = [np.mean(values) for values in alike.values()]
    assert figures["randomisation"].value == pytest.approx(np.nanmean(of_slides), abs=1e-5)
    assert figures["deletion_area"].slides == len(areas) == car.rightly_answered
    assert figures["randomisation"].slides == np.isfinite(of_slides).sum()
    assert len(alike) == car.slides == 36
    labels = read_run(study / "car").predictions().groupby("slide")["label"].first()
    p = np.stack([np.mean(values, axis=0) for values in copies.values()], axis=1)
    aucs = [bag_auc(one, (labels[list(copies)] == "b").to_numpy().astype(int)) for one in p]
    assert list(car.auc_of_twins) == pytest.approx(aucs, abs=1e-6)


def test_every_model_has_shuffles_of_its_own(study, monkeypatch, tmp_path):
    seeds = []

    def noted(*words):
        seeds.append(tuple(words[-1]))
        return probe(*words)

    monkeypatch.setattr(command, "probe", noted)
    judged(study / "car", methods=("attention",), out=tmp_path)
    assert len(seeds) == 6
    assert len(set().union(*seeds)) == 6 * TWINS
    assert EXPLAINED >= 5


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_run_with_shuffled_weights_fails_the_randomisation_test_by_every_map(study, tmp_path, seed):
    run = shuffled_copy(study / "car", tmp_path / "shuffled", seed=seed)
    (found,) = judged(run, methods=("path", "attention"), random_orders=10)
    assert [one.fails for one in found.maps] == [True, True]
    assert all(UNLEARNED in one.failures for one in found.maps)


def test_the_curves_begin_with_what_was_predicted_and_end_with_the_bag_of_zeros(study, car):
    run = read_run(study / "car")
    frame = run.predictions().groupby("slide").agg({"p_a": "mean", "p_b": "mean", "label": "first"})
    whole = bag_auc(frame[["p_a", "p_b"]].to_numpy(), (frame["label"] == "b").to_numpy().astype(int))
    for one in car.maps:
        assert one.auc[0] == pytest.approx(whole, abs=1e-6)
        assert one.deletion.mean[0] == pytest.approx(one.insertion.mean[-1])
        assert one.deletion.mean[-1] == pytest.approx(one.insertion.mean[0])
        assert len(one.deletion.mean) == len(one.auc) == 21
        assert (np.array(one.deletion.low) <= np.array(one.deletion.mean) + 1e-9).all()
        assert (np.array(one.deletion.mean) <= np.array(one.deletion.high) + 1e-9).all()
    assert car.maps[0].deletion.mean[10] < car.random_order.mean[10]  # path evidence is better than chance


def test_a_map_that_does_not_know_the_model_fails_the_randomisation_test(car):
    path, _, chance = car.maps
    assert chance.method == "random"
    assert chance.figures["randomisation"].value == pytest.approx(1)
    assert chance.figures["aopc_gain"].value == pytest.approx(0, abs=1e-6)
    assert chance.failures == (ALIKE, NO_GAIN)
    assert path.failures == ()
    assert path.fails is False
    assert path.figures["aopc_gain"].low > 0


def test_the_twin_is_a_control_with_curves_of_its_own(car):
    for one in car.maps:
        own, twin = (found.figures["deletion_area"].value for found in (one, one.weights_shuffled))
        assert one.figures["aopc_gain"].value == pytest.approx(twin - own)
        assert one.weights_shuffled.deletion.mean[0] == pytest.approx(one.deletion.mean[0])
        assert np.mean(one.weights_shuffled.deletion.mean) == pytest.approx(twin)
        assert len(one.weights_shuffled.auc) == 21


def test_a_model_of_zeros_has_a_constant_map_and_has_learned_nothing(study, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(study / "car", run)
    weights = {
        name: tensor if name in ("mean", "deviation") else torch.zeros_like(tensor)  # these scale the features
        for name, tensor in load_file(run / "weights.safetensors").items()
    }
    save_file(weights, run / "weights.safetensors")
    (found,) = judged(run, methods=("attention",))
    assert found.maps[0].failures == (UNLEARNED, NO_GAIN)
    assert np.isnan(found.maps[0].figures["randomisation"].value)


def test_stability_is_there_where_several_models_were_tested_on_a_slide(study, car):
    assert -1 <= car.maps[0].figures["stability"].value < 1
    assert car.maps[2].figures["stability"].value == pytest.approx(1)  # random is the same for every model
    (mean,) = judged(study / "mean")
    assert "stability" not in mean.maps[0].figures
    assert mean.maps[0].figures["effective"].value >= 1


def test_by_default_the_models_own_evidence_and_attention(study):
    found = judged(study / "car", study / "mean")
    assert [[one.method for one in run.maps] for run in found] == [["path", "attention"], ["patch_scores"]]


def test_runs_side_by_side_are_written_as_table_picture_page_and_json(study, tmp_path, said):
    out = tmp_path / "out"
    words = ("--methods", "path,single,random", "--steps", "10", "--random-orders", "2", "--device", "cpu")
    status, shown, err = said("faithfulness", str(study / "car"), str(study / "mean"), "--out", str(out), *words)
    assert status == 0
    assert "path does not fit" in err
    assert "car: random FAILS the randomisation test: the map is much the same" in shown
    facts = json.loads((out / "faithfulness.json").read_text())
    assert [[one["method"] for one in run["maps"]] for run in facts["runs"]] == [
        ["path", "single", "random"],
        ["single", "random"],
    ]
    assert facts["runs"][0]["maps"][2]["fails_randomisation"] is True
    assert "| car: random | FAILS" in (out / "faithfulness.md").read_text()
    assert (out / "faithfulness.png").read_bytes()[:4] == b"\x89PNG"
    assert str(study) not in (out / "faithfulness.html").read_text() + (out / "faithfulness.json").read_text()


def test_two_runs_of_one_name_are_told_apart(study, tmp_path):
    shutil.copytree(study / "mean", tmp_path / "mean")
    found = judged(study / "mean", tmp_path / "mean", methods=("random",))
    assert [run.name for run in found] == ["mean", "mean (2)"]


def test_runs_of_other_slides_are_said_to_be_no_match(study, tmp_path):
    other = make_files(tmp_path, patients=12, seed=3)
    run_study(other.settings(tmp_path / "other", model="mean", options={"hidden": 8}, epochs=2))
    said = []
    judged(study / "mean", tmp_path / "other", methods=("random",), log=said.append)
    assert any("not of the same slides" in line for line in said)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["car", "nowhere"], "nowhere does not exist"),
        (["car", "--methods", "pathh"], "did you mean 'path'"),
        (["mean", "--methods", "path"], "none of path fits mean"),
        (["car", "mean", "--methods", "rollout,random"], "'rollout' fits none of these runs' models"),
        (["car", "--steps", "15"], "--steps 15"),
        (["car", "--random-orders", "0"], "--random-orders 0"),
    ],
)
def test_what_does_not_fit_is_one_line_and_status_2(study, tmp_path, said, monkeypatch, words, expected):
    monkeypatch.chdir(study)
    status, _, err = said("faithfulness", *words, "--out", str(tmp_path / "out"), "--device", "cpu")
    assert status == 2
    assert expected in err.strip().splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_cohort_that_moved_away_is_named_and_found_where_it_is_now(study, tmp_path, said):
    shutil.copytree(study / "car", tmp_path / "run", ignore=shutil.ignore_patterns("cohort", "faithfulness"))
    words = ("faithfulness", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--device", "cpu", "--steps", "10")
    status, _, err = said(*words)
    assert status == 2
    last = err.strip().splitlines()[-1]
    assert "the cohort of" in last
    assert "--bags" in last
    for place in (study / "car" / "cohort", study / "features"):
        status, _, err = said(*words, "--bags", str(place))
        assert status == 0, err
    make_files(tmp_path / "others", patients=3, seed=9)
    status, _, err = said(
        *words[:2], "--bags", str(tmp_path / "others" / "features"), "--out", str(tmp_path / "other_out")
    )
    assert status == 2
    assert "is not the cohort that" in err.strip().splitlines()[-1]


@pytest.mark.parametrize("name", ["weights.safetensors", "splits.tsv", "predictions.parquet"])
@pytest.mark.parametrize("command", ["faithfulness", "explain"])
def test_a_run_that_lacks_a_file_is_told_before_anything_is_computed(study, tmp_path, said, command, name):
    shutil.copytree(study / "mean", tmp_path / "run")
    (tmp_path / "run" / name).unlink()
    status, _, err = said(command, str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--device", "cpu")
    assert status == 2
    assert err.strip().splitlines()[-1] == f"carmil: the run {tmp_path / 'run'} lacks {name}: train again"
    assert not (tmp_path / "out").exists()


def test_a_killed_command_goes_on_with_the_models_that_were_not_asked(study, car, tmp_path, monkeypatch):
    asked = []

    def until_killed(*words):
        if len(asked) == 3:  # the first fold's two models, and one of the second's
            raise KeyboardInterrupt
        asked.append(1)
        return probe(*words)

    monkeypatch.setattr(command, "probe", until_killed)
    with pytest.raises(KeyboardInterrupt):
        judged(study / "car", methods=("path", "attention", "random"), out=tmp_path)
    asked.clear()
    monkeypatch.setattr(command, "probe", lambda *words: asked.append(1) or probe(*words))
    (again,) = judged(study / "car", methods=("path", "attention", "random"), out=tmp_path)
    assert len(asked) == 4
    for one, before in zip(again.maps, car.maps, strict=True):
        assert one.figures == before.figures
        assert one.failures == before.failures
        np.testing.assert_array_equal(one.deletion.mean, before.deletion.mean)
    judged(study / "car", methods=("path", "attention", "random"), out=tmp_path)
    assert len(asked) == 4
