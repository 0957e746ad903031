"""carmil slides run: from a slide to an answer and its heat maps."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from tests.dicom_files import write_series
from tools.small_study import train_small_run

from carmil.bags.geometry import TileGeometry
from carmil.bags.store import open_store
from carmil.errors import CarmilError
from carmil.explanations.slide_pipeline import check_dicom_output
from carmil.runs.run import read_run
from carmil.runs.settings import Settings
from carmil.slides.encoders import load_encoder
from carmil.slides.features import encode_slides
from carmil.slides.opening import find_slides
from carmil.slides.tile_cohort import tile_slides
from carmil.slides.tiling import read_tiles, tiles_file
from carmil.studies.train import run_study

ENCODER = "timm/resnet10t"


@pytest.fixture(scope="module")
def cohort(tmp_path_factory, make_cohort_slide, small_weights):
    """Return a folder with eight slides of two colours and a run trained on them."""
    folder = tmp_path_factory.mktemp("cohort")
    labels = {f"s{i}": "red" if i % 2 else "blue" for i in range(8)}
    paths = [make_cohort_slide(folder / "scans" / f"{name}.tif", colour) for name, colour in labels.items()]
    outcomes = tile_slides(paths, folder / "tiles")
    tiles = {one.path: one.tiles for one in outcomes}
    encoder = load_encoder(ENCODER, weights=small_weights)
    encode_slides(tiles, folder / "features", encoder, device="cpu", say=lambda line: None)
    lines = [f"{name},{name},{colour}" for name, colour in labels.items()]
    train_small_run(folder, ["slide_id,case_id,label", *lines], folds=2, epochs=3)
    return folder


@pytest.fixture(scope="module")
def make_cohort_slide():
    """Return a function that writes a 20x slide whose tissue is a noisy square of one colour."""
    import tifffile

    def write(path, colour):
        path.parent.mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(
            path,
            cohort_picture(path.stem, colour),
            tile=(256, 256),
            photometric="rgb",
            compression="deflate",
            metadata=None,
            resolution=(20_000, 20_000),
            resolutionunit="CENTIMETER",
        )
        return path

    return write


def cohort_picture(name, colour):
    rng = np.random.default_rng(list(name.encode()))
    picture = np.full((1536, 1536, 3), 245, np.uint8)
    inner = rng.integers(-30, 30, (1180, 1180, 3)) + ((210, 60, 80) if colour == "red" else (80, 60, 210))
    picture[180:1360, 180:1360] = np.clip(inner, 0, 255)
    return picture


@pytest.fixture
def run(run_cli, tmp_path, cohort, small_weights):
    def words(slides, *more, weights=small_weights):
        given = ["--encoder", ENCODER, "--weights", str(weights), "--device", "cpu", "--out", str(tmp_path / "out")]
        given += ["--model", str(cohort / "run"), "--longest", "300"]
        return run_cli("slides", "run", *map(str, slides), *given, *more)

    return words


def test_slides_run_writes_answers_maps_and_geojson(tmp_path, run, make_cohort_slide):
    new = [make_cohort_slide(tmp_path / f"new_{colour}.tif", colour) for colour in ("red", "blue")]
    broken = tmp_path / "broken.tif"
    broken.write_bytes(b"II*\0 not much of a slide")
    status, stdout, err = run([*new, broken])
    out = tmp_path / "out"
    assert status == 1 and "broken.tif" in err
    answers = pd.read_csv(out / "predictions.csv")
    assert sorted(answers["slide"]) == ["new_blue", "new_red"] and all(name in stdout for name in answers["slide"])

    evidence = pd.read_parquet(out / "evidence" / "new_red.parquet")
    rows = open_store(out / "features").entries[1].rows
    assert len(evidence) == rows > 4
    maps = out / "maps" / "new_red"
    for name in ("factual", "counterfactual", "evidence_red", "evidence_blue", "comparison"):
        assert (maps / f"{name}.png").stat().st_size > 1000
    features = json.loads((maps / "new_red.geojson").read_text())["features"]
    tiles = [one for one in features if one["properties"]["objectType"] == "tile"]
    corners = [one["geometry"]["coordinates"][0][0] for one in tiles]
    assert corners == evidence[["x", "y"]].to_numpy().tolist()
    for colour in ("red", "blue"):
        drawn = [one["properties"]["measurements"][f"evidence for {colour}"] for one in tiles]
        assert np.allclose(drawn, evidence[f"evidence_{colour}"], rtol=1e-5, atol=1e-9)


def test_slides_run_writes_the_evidence_as_dicom(tmp_path, run):
    """Every tile covers two by two pixels of the segmentation; their fractions are the evidence for and against."""
    import highdicom

    write_series(tmp_path / "series", cohort_picture("new", "red"), container="S1")
    status, _, err = run([tmp_path / "series"], "--dicom")
    assert status == 0, err
    evidence = pd.read_parquet(tmp_path / "out" / "evidence" / "S1.parquet")
    read = highdicom.seg.segread(tmp_path / "out" / "maps" / "S1" / "S1.evidence.dcm")
    labels = [segment.SegmentLabel for segment in read.SegmentSequence]
    assert {f"{sign} {colour}" for sign in ("for", "against") for colour in ("red", "blue")} == set(labels)
    matrix = read.get_total_pixel_matrix(rescale_fractional=True)
    assert matrix.shape == (12, 12, 4)
    for colour in ("red", "blue"):
        signed = matrix[..., labels.index(f"for {colour}")] - matrix[..., labels.index(f"against {colour}")]
        values = evidence[f"evidence_{colour}"] / evidence[f"evidence_{colour}"].abs().max()
        at = np.zeros((12, 12))
        for x, y, value in zip(evidence["x"], evidence["y"], values, strict=True):
            row, column = int(y // 128), int(x // 128)
            at[row : row + 2, column : column + 2] = value
        shown = np.abs(signed).max()
        np.testing.assert_allclose(signed, at * shown, atol=1.5 / 255)
        assert shown > 0.1


def test_slides_run_refuses_dicom_output_of_other_slides_before_computing(tmp_path, run, make_cohort_slide):
    write_series(tmp_path / "scans", cohort_picture("new", "red"), container="S1")
    other = make_cohort_slide(tmp_path / "scans" / "other.tif", "red")
    status, out, err = run([tmp_path / "scans"], "--dicom")
    assert (status, out) == (2, "") and not (tmp_path / "out").exists()
    assert err.strip().splitlines()[-1] == (
        f"carmil: {other} is not DICOM, and a DICOM segmentation names the series it belongs to: leave out --dicom, or "
        "convert the slide to DICOM first"
    )


def test_slides_run_refuses_dicom_output_of_a_run_without_signed_evidence(tmp_path, cohort):
    write_series(tmp_path / "series", cohort_picture("new", "red"), container="S1")
    settings = Settings(
        bags=cohort / "features",
        labels=cohort / "labels.csv",
        out=tmp_path / "attention",
        model="transmil",
        options={"hidden": 8},
        folds=2,
        epochs=1,
        device="cpu",
    )
    run_study(settings, log=lambda line: None)
    with pytest.raises(
        CarmilError, match=r"--dicom writes signed evidence, which 'transmil' of .* does not have: leave"
    ):
        check_dicom_output(find_slides([tmp_path / "series"]), tmp_path / "attention")


@pytest.mark.finding(n=2)
@pytest.mark.finding(n=3)
def test_slides_run_applies_the_decision_rule_and_explains_the_answer(
    tmp_path, run_cli, cohort, small_weights, make_cohort_slide
):
    """Changing the threshold changes answer and maps; slides of the run are answered as in its report."""
    shutil.copytree(cohort / "run", tmp_path / "run")
    models = json.loads((tmp_path / "run" / "models.json").read_text())
    new = make_cohort_slide(tmp_path / "new.tif", "red")
    slides = [str(new), str(cohort / "scans" / "s3.tif")]
    words = ["--encoder", ENCODER, "--weights", str(small_weights), "--device", "cpu", "--longest", "300"]
    for at, answer, other in ((0.01, "red", "blue"), (0.99, "blue", "red")):
        for model in models:
            model["threshold"] = at
        (tmp_path / "run" / "models.json").write_text(json.dumps(models))
        out = tmp_path / answer
        status, stdout, err = run_cli(
            "slides", "run", *slides, *words, "--model", str(tmp_path / "run"), "--out", str(out)
        )
        assert status == 0, err
        assert f"answer: red if p(red) >= {at}, else blue" in stdout
        table = pd.read_csv(out / "predictions.csv").set_index("slide")
        assert (
            table["answer"].tolist() == [answer, answer] and 0.01 < table["p_red"].min() < table["p_red"].max() < 0.99
        )
        assert table["models"].to_dict() == {"new": 2, "s3": 1}
        assert table.loc["s3", "p_red"] == pytest.approx(
            read_run(tmp_path / "run").predictions().set_index("slide").loc["s3", "p_red"], rel=1e-12
        )
        summary = pd.read_csv(out / "evidence" / "summary.csv").set_index("slide")
        assert (summary["prediction"] == answer).all()
        result = json.loads((out / "maps" / "new" / "new.geojson").read_text())
        assert result["carmil"]["coloured_by"] == f"evidence for {answer}"
        classes = {one["properties"].get("classification", {}).get("name") for one in result["features"]}
        assert classes <= {f"for {answer}", f"against {answer}", None} and not any(
            other in str(name) for name in classes
        )


def test_repeated_slides_run_encodes_only_new_slides(tmp_path, run, make_cohort_slide):
    first = make_cohort_slide(tmp_path / "first.tif", "red")
    assert run([first])[0] == 0
    before = pd.read_parquet(tmp_path / "out" / "evidence" / "first.parquet")
    second = make_cohort_slide(tmp_path / "second.tif", "blue")
    status, out, _ = run([first, second])
    rows = {entry.id: entry.rows for entry in open_store(tmp_path / "out" / "features").entries}
    assert status == 0 and set(rows) == {"first", "second"}
    assert f"{rows['second']} tiles in" in out
    assert before.equals(pd.read_parquet(tmp_path / "out" / "evidence" / "first.parquet"))
    assert (tmp_path / "out" / "maps" / "second" / "second.geojson").is_file()


@pytest.mark.finding(n=1)
def test_out_folder_with_answers_of_another_run_is_left_unchanged(tmp_path, run, cohort, make_cohort_slide):
    """Otherwise maps of the other run would be mixed with the answers of this run."""
    shutil.copytree(cohort / "run", tmp_path / "other")
    models = json.loads((tmp_path / "other" / "models.json").read_text())
    (tmp_path / "other" / "models.json").write_text(json.dumps([model | {"threshold": 0.9} for model in models]))
    slides = [make_cohort_slide(tmp_path / f"{name}.tif", "red") for name in ("first", "second")]
    assert run(slides[:1])[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    status, out, err = run(slides[1:], "--model", str(tmp_path / "other"))
    assert (status, out) == (2, "")
    assert (
        err.strip()
        .splitlines()[-1]
        .endswith(
            f"{tmp_path / 'out'} holds answers of another run than {tmp_path / 'other'}: choose another --out, or remove "
            f"{tmp_path / 'out'}"
        )
    )
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


@pytest.mark.finding(n=1)
def test_messages_mention_only_slides_of_this_call(tmp_path, run, cohort, make_cohort_slide):
    assert "features of 1 of these 1 slide ('s3')" in run([cohort / "scans" / "s3.tif"])[2]
    status, out, err = run([make_cohort_slide(tmp_path / "new.tif", "red")])
    assert status == 0 and "new" in out
    assert "s3" not in out and "s3" not in err and "these" not in err


@pytest.mark.finding(n=17)
def test_failed_slides_run_changes_no_earlier_results(tmp_path, run, make_cohort_slide):
    assert run([make_cohort_slide(tmp_path / "good.tif", "red")])[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    (tmp_path / "empty.tif").write_bytes(b"")
    status, out, err = run([tmp_path / "empty.tif"])
    assert (status, out) == (2, "") and "the slide could not be encoded" in err and "0 bytes" in err
    after = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    changed = {
        path.relative_to(tmp_path / "out").parts[0] for path in {*before, *after} if before.get(path) != after.get(path)
    }
    assert changed <= {"tiles"}  # the slide is listed there as skipped


def test_slides_run_uses_existing_tiles(tmp_path, run, cohort):
    slide = cohort / "scans" / "s3.tif"
    status, out, err = run([slide], "--tiles", str(cohort / "tiles"))
    assert status == 0 and not (tmp_path / "out" / "tiles").exists()
    assert "s3" in out and "each is answered by the models that were tested on it" in err


@pytest.fixture
def coarse_run(tmp_path, cohort):
    """Return a function that copies the run with another tile geometry, or without geometry as in 0.1.0."""

    def make(**geometry):
        folder = tmp_path / "coarse"
        shutil.copytree(cohort / "run", folder)
        facts = json.loads((folder / "run.json").read_text())
        assert (facts["tile_pixels"], facts["tile_mpp"]) == (256, 0.5)
        facts = {name: value for name, value in facts.items() if not name.startswith("tile_")}
        (folder / "run.json").write_text(json.dumps(facts | geometry))
        return folder

    return make


@pytest.mark.finding(n=1)
def test_slides_run_cuts_tiles_with_the_geometry_of_the_run(tmp_path, run, cohort, coarse_run):
    model = coarse_run(tile_pixels=128, tile_mpp=1.0)
    status, _, err = run([cohort / "scans" / "s3.tif"], "--model", str(model))
    assert status == 0, err
    assert open_store(tmp_path / "out" / "features").geometry == TileGeometry(128, 1.0)
    assert read_tiles(tiles_file(tmp_path / "out" / "tiles", "s3")).geometry == TileGeometry(128, 1.0)
    assert "tile geometry" not in err


@pytest.mark.finding(n=1)
def test_slides_run_rejects_tiles_of_another_geometry(tmp_path, run, cohort, coarse_run):
    model = coarse_run(tile_pixels=256, tile_mpp=1.0)
    words = ["--tiles", str(cohort / "tiles"), "--model", str(model)]
    status, _, err = run([cohort / "scans" / "s3.tif"], *words)
    last = err.strip().splitlines()[-1]
    assert status == 2 and last.startswith("carmil: ") and "s3_patches.h5 has tiles of 256 pixels at 0.5 um/px" in last
    assert last.endswith(
        "has 256 pixels at 1 um/px: cut them with `carmil slides tile --pixels 256 --tile-mpp 1` and encode them again"
    )
    assert not (tmp_path / "out" / "features").exists()


@pytest.mark.finding(n=1)
def test_slides_run_warns_that_a_run_of_0_1_0_records_no_tile_geometry(tmp_path, run, cohort, coarse_run):
    status, _, err = run([cohort / "scans" / "s3.tif"], "--model", str(coarse_run()))
    assert status == 0, err
    assert "does not record the size of its tiles: they are cut as 256 pixels at 0.5 um/px" in err
    assert err.count("could not be checked") == 1


def test_slides_run_rejects_another_encoder_before_writing_files(tmp_path, run, cohort, small_weights):
    state = torch.load(small_weights, weights_only=True)
    torch.save({name: value + 0.01 for name, value in state.items()}, tmp_path / "other.pt")
    status, _, err = run([cohort / "scans" / "s0.tif"], weights=tmp_path / "other.pt")
    assert status == 2 and "the run was trained on timm_resnet10t-" in err and "use its encoder" in err
    assert not (tmp_path / "out").exists()


def test_slides_run_rejects_another_encoder_name_before_downloading(tmp_path, run_cli, cohort):
    words = ["--model", str(cohort / "run"), "--encoder", "hf-hub:some/one", "--out", str(tmp_path / "out")]
    status, _, err = run_cli("slides", "run", str(cohort / "scans" / "s0.tif"), *words)
    assert status == 2 and "was trained on features of timm_resnet10t-" in err and "not of hf-hub:some/one" in err
    assert not (tmp_path / "out").exists()


def test_slides_run_without_readable_slides_exits_with_an_error(tmp_path, run):
    (tmp_path / "empty.svs").write_bytes(b"")
    status, _, err = run([tmp_path / "empty.svs"])
    assert status == 2 and "the slide could not be encoded" in err and "0 bytes" in err


@pytest.mark.finding(n=17)
def test_slides_run_supports_tissue_presets(tmp_path, run, cohort):
    """The tissue of the slide, 0.35 mm2, is too small for the resection preset."""
    slide = cohort / "scans" / "s3.tif"
    status, _, err = run([slide], "--preset", "resection")
    assert status == 2 and "the smallest area that counts is 1.6 mm2: for small pieces use --preset biopsy" in err
    status, _, err = run([slide], "--preset", "biopsy", "--tiles", str(cohort / "tiles"))
    assert status == 2 and "leave one out" in err


@pytest.fixture
def biopsy_run(tmp_path, cohort):
    """Return a copy of the run whose tiles were cut by the biopsy preset."""
    folder = shutil.copytree(cohort / "run", tmp_path / "biopsies")
    facts = json.loads((folder / "run.json").read_text())
    assert facts["tilings"] == ["--preset default --rule centre --overlap 0"]
    biopsy = "--preset biopsy --rule four-point --overlap 0.25 --keep blurred,pen"
    (folder / "run.json").write_text(json.dumps(facts | {"tilings": [biopsy]}))
    return folder


def test_slides_run_cuts_tiles_by_the_preset_and_rules_of_the_run(tmp_path, run, cohort, biopsy_run):
    status, _, err = run([cohort / "scans" / "s3.tif"], "--model", str(biopsy_run))
    assert status == 0, err
    tiles = read_tiles(tiles_file(tmp_path / "out" / "tiles", "s3"))
    assert tiles.tiling == "--preset biopsy --rule four-point --overlap 0.25 --keep blurred,pen"
    assert np.diff(np.unique(tiles.corners[:, 0])).tolist()[0] == 192
    assert open_store(tmp_path / "out" / "features").tilings == (tiles.tiling,)
    assert "preset" not in err and "chosen" not in err


def test_slides_run_warns_in_one_line_about_tiles_chosen_in_another_way(tmp_path, run, cohort, biopsy_run):
    own = "--preset biopsy --rule four-point --overlap 0.25 --keep blurred,pen"
    slide = cohort / "scans" / "s3.tif"
    for words, other in (
        (["--preset", "default"], own.replace("biopsy", "default")),
        (["--tiles", str(cohort / "tiles")], "--preset default --rule centre --overlap 0"),
    ):
        out = tmp_path / words[0][2:]
        status, _, err = run([slide], "--model", str(biopsy_run), "--out", str(out), *words)
        assert status == 0, err
        (warning,) = (line for line in err.splitlines() if "chosen by" in line)
        assert warning.endswith(
            f"WARNING: {out / 'features'} has tiles chosen by {other}, the run {biopsy_run} was trained on tiles chosen by "
            f"{own}: other tiles can change the answers; cut them as the run's were, unless these slides need it"
        )


def test_predict_warns_about_features_of_tiles_chosen_in_another_way(tmp_path, run_cli, cohort, biopsy_run):
    words = ["--bags", str(cohort / "features"), "--out", str(tmp_path / "answers"), "--device", "cpu"]
    status, _, err = run_cli("predict", str(biopsy_run), *words)
    assert status == 0, err
    assert (
        f"WARNING: {cohort / 'features'} has tiles chosen by --preset default --rule centre --overlap 0, the run" in err
    )
    status, _, err = run_cli("predict", str(cohort / "run"), *words[:3], str(tmp_path / "own"), *words[4:])
    assert status == 0 and "chosen" not in err


def test_slides_run_reports_its_tiling_options_if_the_run_does_not_record_them(run, cohort, biopsy_run):
    facts = json.loads((biopsy_run / "run.json").read_text())
    del facts["tilings"]
    (biopsy_run / "run.json").write_text(json.dumps(facts))
    status, _, err = run([cohort / "scans" / "s3.tif"], "--model", str(biopsy_run))
    assert status == 0, err
    (line,) = (line for line in err.splitlines() if "chosen" in line)
    assert line.endswith(
        f"the run {biopsy_run} does not record how its tiles were chosen: they are cut with --preset default --rule centre "
        "--overlap 0; if another preset was used, give it with --preset"
    )


def test_recorded_tilings_that_are_not_valid_options_are_refused_in_one_line(run, cohort, biopsy_run):
    facts = json.loads((biopsy_run / "run.json").read_text())
    for wrong, reason in (
        ("--preset huge --rule centre --overlap 0", "'huge'"),
        ("--preset default --rule", "expected options of `carmil slides tile`"),
        ("--preset default --rule centre --overlap 7", "an overlap of 7"),
        ("--preset default --rule centre --overlap much", "expected options of `carmil slides tile`"),
    ):
        (biopsy_run / "run.json").write_text(json.dumps(facts | {"tilings": [wrong]}))
        status, _, err = run([cohort / "scans" / "s3.tif"], "--model", str(biopsy_run))
        assert status == 2 and reason in err.strip().splitlines()[-1]


def test_slides_run_on_a_real_slide_writes_a_map(shared_data, tmp_path, run_cli):
    """Use the real weights and a run trained on features that were computed with them."""
    settings = Settings(
        bags=shared_data / "crc", out=tmp_path / "run", truth="is_cancerous", folds=2, epochs=1, device="cpu"
    )
    run_study(settings, log=lambda line: None)
    slide = shared_data / "slides" / "CMU-1-Small-Region.svs"
    weights = shared_data / "weights" / "resnet50_caffe_layer3.safetensors"
    words = ["--model", str(tmp_path / "run"), "--encoder", "resnet50.caffe", "--weights", str(weights)]
    words += ["--longest", "500"]
    status, said_, err = run_cli("slides", "run", str(slide), *words, "--out", str(tmp_path / "out"), "--device", "cpu")
    assert status == 0, err
    assert slide.stem in said_ and "the encoder of the run is not known" in err
    result = json.loads((tmp_path / "out" / "maps" / slide.stem / f"{slide.stem}.geojson").read_text())["features"]
    tiles = [one for one in result if one["properties"]["objectType"] == "tile"]
    assert len(tiles) == open_store(tmp_path / "out" / "features").rows > 10
