"""`carmil faithfulness`: figures checked by hand, several runs, and invalid arguments."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from carmil.bags.sources import Bag
from carmil.bags.writers import write_bag
from carmil.evidence import bag_auc, explain
from carmil.evidence.faithfulness import evidence_of_class, faithfulness_of
from carmil.evidence.randomisation import shuffle_weights, similarity_over_chance
from carmil.explanations import faithfulness as command
from carmil.explanations.faithfulness import has_learned, measure_faithfulness
from carmil.explanations.faithfulness_probe import EXPLAINED, FOLLOWED, PREDICTIONS, TWINS, Accumulator, probe
from carmil.models.pooling import Offsets
from carmil.runs.faithfulness import ALIKE, NO_GAIN, UNLEARNED
from carmil.runs.run import read_run
from carmil.runs.settings import Settings
from carmil.studies.subjects import find_run_store
from carmil.studies.train import run_study
from carmil.targets import Classes

from ..studies.conftest import SMALL, make_files

FEW = {"steps": 20, "random_orders": 3, "device": "cpu"}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Return a folder with runs of car/abmil (two seeds per fold) and mean."""
    folder = tmp_path_factory.mktemp("faithful")
    files = make_files(folder, patients=18)
    run_study(files.settings(folder / "car", seeds=2, epochs=12, lr=1e-2))
    run_study(files.settings(folder / "mean", model="mean", options={"hidden": 8}, epochs=12, lr=1e-2))
    return folder


def measure(*folders, methods=(), log=lambda line: None, out=None, **others):
    out = out or folders[0] / "faithfulness"
    return measure_faithfulness(folders, out, methods=methods, log=log, **{**FEW, **others})


def shuffled_copy(run, folder, *, seed=0):
    """Copy the run with the entries of every tensor shuffled."""
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("faithfulness"))
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(folder / "weights.safetensors")
    for name, tensor in weights.items():
        weights[name] = tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view_as(tensor)
    save_file(weights, folder / "weights.safetensors")
    return folder


@pytest.fixture(scope="module")
def car(study):
    (result,) = measure(study / "car", methods=("path", "attention", "random"))
    return result


def by_hand(run):
    """Yield for every model its slides, the faithfulness of its path evidence, all maps, and the answers of its twins."""
    bags, population, frame = find_run_store(run).bags(), run.population(), run.predictions()
    for row, model in enumerate(run.models):
        slides = frame[(frame["fold"] == model.fold) & (frame["seed"] == model.seed)]
        part = bags[[bags.ids.index(slide) for slide in slides["slide"]]]
        labels = torch.tensor([run.outputs.index(label) for label in slides["label"]])
        member = population.member(row)
        twins = [shuffle_weights(member, seed=row * TWINS + i) for i in range(TWINS)]
        with torch.no_grad():
            answers = member(part.features, part.offsets).logits.argmax(-1)
            of_twins = torch.stack([twin(part.features, part.offsets).logits.softmax(-1) for twin in twins])
        maps = [evidence_of_class(explain(one, part), answers, part.offsets) for one in (member, *twins[:EXPLAINED])]
        followed = torch.stack(maps[: 1 + FOLLOWED])
        yield part, faithfulness_of(member, part, followed, labels, steps=20, random_orders=3), maps, of_twins


def test_figures_are_means_over_correct_slides_of_means_over_models(study, car):
    areas, similarities, copies = {}, {}, {}
    for part, result, (own, *others), of_twins in by_hand(read_run(study / "car")):
        offsets = Offsets(part.offsets)
        each = torch.stack(
            [similarity_over_chance(own[:, None], other[:, None], offsets).squeeze(-1) for other in others]
        )
        gain = result.deletion_area[1:].mean(0) - result.deletion_area[0]
        for i, slide in enumerate(part.ids):
            similarities.setdefault(slide, []).append(float(each[:, i].mean()))
            copies.setdefault(slide, []).append(of_twins[:, i].numpy())
            if result.right[i]:
                measures = (
                    result.deletion_area[0, i],
                    result.insertion_area[0, i],
                    result.sufficiency(0.1)[0, i],
                    gain[i],
                    result.srg[0, i],
                    result.aukc[0, i],
                )
                areas.setdefault(slide, []).append([float(value) for value in measures])
    figures = car.maps[0].figures
    expected = np.mean([np.mean(values, axis=0) for values in areas.values()], axis=0)
    names = ("deletion_area", "insertion_area", "sufficiency", "aopc_gain", "srg", "aukc")
    assert [figures[name].value for name in names] == pytest.approx(expected.tolist(), abs=1e-5)
    assert 0.5 < figures["robustness"].value < 1
    of_slides = [np.mean(values) for values in similarities.values()]
    assert figures["randomisation"].value == pytest.approx(np.nanmean(of_slides), abs=1e-5)
    assert figures["deletion_area"].slides == len(areas) == car.rightly_answered
    assert figures["randomisation"].slides == np.isfinite(of_slides).sum()
    assert len(similarities) == car.slides == 36
    labels = read_run(study / "car").predictions().groupby("slide")["label"].first()
    p = np.stack([np.mean(values, axis=0) for values in copies.values()], axis=1)
    aucs = [bag_auc(one, (labels[list(copies)] == "b").to_numpy().astype(int)) for one in p]
    assert list(car.auc_of_twins) == pytest.approx(aucs, abs=1e-6)


def test_every_model_has_different_weight_shuffles(study, monkeypatch, tmp_path):
    seeds = []

    def recording_probe(*words):
        seeds.append(tuple(words[-1]))
        return probe(*words)

    monkeypatch.setattr(command, "probe", recording_probe)
    measure(study / "car", methods=("attention",), out=tmp_path)
    assert len(seeds) == 6
    assert len(set().union(*seeds)) == 6 * TWINS
    assert EXPLAINED >= 5


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_run_with_shuffled_weights_fails_the_randomisation_test(study, tmp_path, seed):
    run = shuffled_copy(study / "car", tmp_path / "shuffled", seed=seed)
    (result,) = measure(run, methods=("path", "attention"), random_orders=10)
    assert [one.fails for one in result.maps] == [True, True]
    assert all(UNLEARNED in one.failures for one in result.maps)


def test_curves_start_at_the_prediction_and_end_at_the_zero_bag(study, car):
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
    assert car.maps[0].deletion.mean[10] < car.random_order.mean[10]  # path evidence is better than a random order


def test_map_that_ignores_the_model_fails_the_randomisation_test(car):
    path, _, chance = car.maps
    assert chance.method == "random"
    assert chance.figures["randomisation"].value == pytest.approx(1)
    assert chance.figures["aopc_gain"].value == pytest.approx(0, abs=1e-6)
    assert chance.failures == (ALIKE, NO_GAIN)
    assert path.failures == ()
    assert path.fails is False
    assert path.figures["aopc_gain"].low > 0


def test_weight_shuffled_twin_is_a_control_with_its_own_curves(car):
    for one in car.maps:
        own, twin = (result.figures["deletion_area"].value for result in (one, one.weights_shuffled))
        assert one.figures["aopc_gain"].value == pytest.approx(twin - own)
        assert one.weights_shuffled.deletion.mean[0] == pytest.approx(one.deletion.mean[0])
        assert np.mean(one.weights_shuffled.deletion.mean) == pytest.approx(twin)
        assert len(one.weights_shuffled.auc) == 21


def test_model_with_zero_weights_fails_as_untrained(study, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(study / "car", run)
    weights = {
        name: tensor if name in ("mean", "deviation") else torch.zeros_like(tensor)  # these scale the features
        for name, tensor in load_file(run / "weights.safetensors").items()
    }
    save_file(weights, run / "weights.safetensors")
    (result,) = measure(run, methods=("attention",))
    assert result.maps[0].failures == (UNLEARNED, NO_GAIN)
    assert np.isnan(result.maps[0].figures["randomisation"].value)


@pytest.mark.parametrize(
    ("own", "twins", "learned"),
    [
        ((0.1, 0.2, 0.9, 0.8), ((0.4, 0.4, 0.6, 0.6), (0.9, 0.9, 0.1, 0.1)), True),  # an AUC of 1, as one of the twins
        ((0.4, 0.4, 0.6, 0.6), ((0.1, 0.2, 0.9, 0.8), (0.9, 0.9, 0.1, 0.1)), False),
        (
            (0.1, 0.7, 0.9, 0.6),
            ((0.4, 0.4, 0.6, 0.6), (0.9, 0.9, 0.1, 0.1)),
            False,
        ),  # an AUC of 0.75 below that of a twin
        ((0.4, 0.6, 0.9, 0.5), ((0.1, 0.9, 0.9, 0.1), (0.5, 0.5, 0.5, 0.5)), True),  # an AUC above those of all twins
        ((0.5, 0.5, 0.5, 0.5), ((0.5, 0.5, 0.5, 0.5), (0.5, 0.5, 0.5, 0.5)), False),
    ],
)
def test_twins_with_equal_auc_are_compared_by_the_likelihood_of_the_labels(own, twins, learned):
    accumulator = Accumulator(4, 1, steps=10, random_orders=1, twins=2, predictions=2)

    def both(p):
        return torch.stack([1 - torch.tensor(p), torch.tensor(p)], dim=-1).double()

    every = both(own)[None, :, None].expand(-1, -1, 11, -1)
    accumulator.add_answers(np.arange(4), every, at_random=every, twins=both(twins))
    target, labels = Classes(names=("a", "b")), np.array([0, 0, 1, 1])
    cohort = accumulator.cohort(target.key_measure, labels, np.zeros((1, 4), dtype=np.int64))
    assert has_learned(target, accumulator, cohort, labels) is learned


def test_stability_is_reported_if_several_models_were_tested_on_a_slide(study, car):
    assert -1 <= car.maps[0].figures["stability"].value < 1
    assert car.maps[2].figures["stability"].value == pytest.approx(1)  # the random map is the same for every model
    (mean,) = measure(study / "mean")
    assert "stability" not in mean.maps[0].figures
    assert mean.maps[0].figures["effective"].value >= 1


def test_default_methods_are_evidence_and_attention_of_the_model(study):
    result = measure(study / "car", study / "mean")
    assert [[one.method for one in run.maps] for run in result] == [["path", "attention"], ["patch_scores"]]


def test_several_runs_are_written_as_table_picture_page_and_json(study, tmp_path, run_cli):
    out = tmp_path / "out"
    words = ("--methods", "path,single,random", "--steps", "10", "--random-orders", "2", "--device", "cpu")
    status, shown, err = run_cli("faithfulness", str(study / "car"), str(study / "mean"), "--out", str(out), *words)
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


def test_mean_smallest_number_of_tiles_includes_only_sufficiently_confident_slides(study, car):
    (unsure,) = measure(study / "car", methods=("path",), confidence=0.999, out=study / "unsure")
    assert unsure.maps[0].figures["msk"].slides < car.maps[0].figures["msk"].slides <= car.rightly_answered
    sure = car.maps[0].figures["msk"]
    assert 1 <= sure.value < car.maps[2].figures["msk"].value  # a random order needs more tiles
    assert sure.slides == car.maps[2].figures["msk"].slides


@pytest.fixture(scope="module")
def placed(tmp_path_factory):
    """Return a run on slides whose tiles have coordinates."""
    folder, rng = tmp_path_factory.mktemp("placed"), np.random.default_rng(0)
    lines = ["slide,patient,label"]
    for i in range(12):
        features = rng.normal(size=(24, 6)).astype(np.float32)
        features[:3, i % 2] = 5.0
        at = np.stack([np.arange(24) % 6, np.arange(24) // 6], axis=1).astype(np.float32) * 512
        write_bag(Bag(f"s{i:02}", features, at, "level0_px", 512.0), folder / "features", "npz")
        lines.append(f"s{i:02},p{i:02},{'ab'[i % 2]}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    given = dict(model="abmil", options=SMALL, folds=3, epochs=8, lr=1e-2, patience=4, device="cpu")
    run_study(Settings(bags=folder / "features", labels=folder / "labels.csv", out=folder / "run", **given))
    return folder


def test_regions_of_one_tile_have_the_same_figures_as_tiles(placed):
    (result,) = measure(placed / "run", methods=("path",), region_tiles=1)
    for part in (result.maps[0], result.maps[0].weights_shuffled):
        for name in ("deletion_area", "srg", "msk", "aukc", "necessity"):
            found, expected = (part.figures[prefix + name].value for prefix in ("region_", ""))
            assert found == pytest.approx(expected, abs=1e-3, nan_ok=True)  # equal tiles may be in another order


def test_regions_are_reported_in_a_separate_table(placed, tmp_path, run_cli):
    words = ("--regions", "--region-tiles", "4", "--confidence", "0.5", "--methods", "path", "--steps", "10")
    status, shown, err = run_cli("faithfulness", str(placed / "run"), "--out", str(tmp_path), *words, "--device", "cpu")
    assert status == 0, err
    assert "up to 4 neighbouring tiles are removed together" in shown
    facts = json.loads((tmp_path / "faithfulness.json").read_text())
    assert facts["command"].endswith("--confidence 0.5 --regions --region-tiles 4")
    figures = facts["runs"][0]["maps"][0]["figures"]
    assert figures["region_srg"]["value"] != figures["srg"]["value"]
    assert 1 <= figures["region_msk"]["value"] <= 6


def test_intermediate_results_are_stored_in_binary(study, car):
    (path,) = (study / "car" / "faithfulness" / "asked").glob("car-0*")
    with np.load(path, allow_pickle=False) as values:
        assert path.stat().st_size < 2 * sum(values[name].size for name in PREDICTIONS) + 100_000
        assert {values[name].dtype for name in PREDICTIONS} == {np.dtype(np.float32)}


def test_runs_with_equal_names_are_numbered(study, tmp_path):
    shutil.copytree(study / "mean", tmp_path / "mean")
    result = measure(study / "mean", tmp_path / "mean", methods=("random",))
    assert [run.name for run in result] == ["mean", "mean (2)"]


def test_runs_on_different_slides_are_logged_as_not_comparable(study, tmp_path):
    other = make_files(tmp_path, patients=12, seed=3)
    run_study(other.settings(tmp_path / "other", model="mean", options={"hidden": 8}, epochs=2))
    logged = []
    measure(study / "mean", tmp_path / "other", methods=("random",), log=logged.append)
    assert any("not of the same slides" in line for line in logged)


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
        (["car", "--confidence", "1.5"], "--confidence 1.5: expected a number between 0 and 1"),
        (["car", "--regions"], "36 bags of 36 without coordinates, such as"),
        (["car", "--region-tiles", "4"], "--region-tiles 4 needs --regions"),
    ],
)
def test_invalid_arguments_exit_with_one_line_and_status_2(study, tmp_path, run_cli, monkeypatch, words, expected):
    monkeypatch.chdir(study)
    status, _, err = run_cli("faithfulness", *words, "--out", str(tmp_path / "out"), "--device", "cpu")
    assert status == 2
    assert expected in err.strip().splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_moved_cohort_is_found_with_bags_option(study, tmp_path, run_cli):
    shutil.copytree(study / "car", tmp_path / "run", ignore=shutil.ignore_patterns("cohort", "faithfulness"))
    words = ("faithfulness", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--device", "cpu", "--steps", "10")
    status, _, err = run_cli(*words)
    assert status == 2
    last = err.strip().splitlines()[-1]
    assert "the cohort of" in last
    assert "--bags" in last
    for place in (study / "car" / "cohort", study / "features"):
        status, _, err = run_cli(*words, "--bags", str(place))
        assert status == 0, err
    make_files(tmp_path / "others", patients=3, seed=9)
    status, _, err = run_cli(
        *words[:2], "--bags", str(tmp_path / "others" / "features"), "--out", str(tmp_path / "other_out")
    )
    assert status == 2
    assert "has another fingerprint than the cohort that" in err.strip().splitlines()[-1]


@pytest.mark.parametrize("name", ["weights.safetensors", "splits.tsv", "predictions.parquet"])
@pytest.mark.parametrize("command", ["faithfulness", "explain"])
def test_run_with_a_missing_file_is_rejected_before_computing(study, tmp_path, run_cli, command, name):
    shutil.copytree(study / "mean", tmp_path / "run")
    (tmp_path / "run" / name).unlink()
    status, _, err = run_cli(command, str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--device", "cpu")
    assert status == 2
    assert err.strip().splitlines()[-1] == f"carmil: the run {tmp_path / 'run'} lacks {name}: train again"
    assert not (tmp_path / "out").exists()


def test_interrupted_faithfulness_resumes_with_the_remaining_models(study, car, tmp_path, monkeypatch):
    probed = []

    def killed_after_three(*words):
        if len(probed) == 3:  # both models of the first fold and one of the second
            raise KeyboardInterrupt
        probed.append(1)
        return probe(*words)

    monkeypatch.setattr(command, "probe", killed_after_three)
    with pytest.raises(KeyboardInterrupt):
        measure(study / "car", methods=("path", "attention", "random"), out=tmp_path)
    probed.clear()
    monkeypatch.setattr(command, "probe", lambda *words: probed.append(1) or probe(*words))
    (again,) = measure(study / "car", methods=("path", "attention", "random"), out=tmp_path)
    assert len(probed) == 4
    for one, before in zip(again.maps, car.maps, strict=True):
        assert one.figures == before.figures
        assert one.failures == before.failures
        np.testing.assert_array_equal(one.deletion.mean, before.deletion.mean)
    measure(study / "car", methods=("path", "attention", "random"), out=tmp_path)
    assert len(probed) == 4
