"""carmil slides run, interrupted at every stage after a slide file was replaced, and run again."""

import os
import shutil
import signal
import subprocess
import sys

import pandas as pd
import pytest
from tests.conftest import draw_tissue, write_slide
from tests.viewer.answered import train_tiny_study

from carmil.bags.store import open_store
from carmil.explanations import slide_pipeline
from carmil.explanations.slide_pipeline import answer_slides, draw_answers
from carmil.maps import drawing
from carmil.runs.slide_evidence import read_slide_evidence
from carmil.slides import features

STAGES = {
    "cutting": (slide_pipeline, "tile_slides"),
    "encoding": (features, "encode"),
    "packing": (features, "build_store"),
    "removing what was computed from the old features": (slide_pipeline, "forget_answers"),
    "tidying up after the features were replaced": (features, "shutil"),
    "predicting": (slide_pipeline, "predict_bags"),
    "explaining": (slide_pipeline, "explain_run"),
    "recording the run": (slide_pipeline, "write_answers"),
    "drawing": (drawing, "write_geojson"),
}


class StoppedError(Exception):
    pass


class Stop:
    """Raises when it, or an attribute of it, is called."""

    def __getattr__(self, name):
        return self

    def __call__(self, *words, **named):
        raise StoppedError


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return train_tiny_study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """Return a folder with two slides, `changing` and `other`, and a file `new` that replaces the first."""
    folder = tmp_path_factory.mktemp("scans")
    picture = draw_tissue(1400, 1800)[0]
    write_slide(folder / "changing.tif", picture)
    write_slide(folder / "other.tif", picture[:, ::-1].copy())
    write_slide(folder / "new", picture[::-1].copy())
    return folder


@pytest.fixture(scope="module", autouse=True)
def _few_pictures():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(drawing, "draw_comparison", lambda painter, path, **how: path)
        patched.setattr(drawing, "draw_extreme_tiles", lambda slide, tiles, one, path, top: path)
        yield


@pytest.fixture(scope="module")
def answered(study, scans, tmp_path_factory):
    """Return a folder with the scans, and `out` with the answers for both slides before one was replaced."""
    folder = tmp_path_factory.mktemp("answered")
    for name in ("changing.tif", "other.tif"):
        shutil.copy2(scans / name, folder / name)
    run(study, folder, "changing", "other")
    return folder


@pytest.fixture
def replaced(answered, scans, tmp_path):
    """Return a copy of the answered folder in which a file of another picture has the place of the first slide."""
    folder = shutil.copytree(answered, tmp_path / "work")
    shutil.copy2(scans / "new", folder / "changing.tif")
    os.utime(folder / "changing.tif", (1e9, 1e9))
    return folder


@pytest.fixture(scope="module")
def uninterrupted(study, scans, answered, tmp_path_factory):
    """Return the contents of every file after a run that was not interrupted."""
    folder = shutil.copytree(answered, tmp_path_factory.mktemp("uninterrupted") / "work")
    shutil.copy2(scans / "new", folder / "changing.tif")
    os.utime(folder / "changing.tif", (1e9, 1e9))
    run(study, folder, "changing")
    return contents(folder)


def run(study, folder, *names):
    slides = [folder / f"{name}.tif" for name in names]
    results = answer_slides(slides, study.run, folder / "out", study.encoder, device="cpu", log=lambda line: None)
    draw_answers(results, study.run, folder / "out", longest=100)


def contents(folder):
    """Return what every file holds. The folder's own path, and the time of the files that a store was built from, are left out."""
    found = {}
    for path in sorted((folder / "out").rglob("*")):
        if path.is_file() and path.suffix not in (".h5", ".lock") and path.name != "index.json":
            found[str(path.relative_to(folder))] = path.read_bytes().replace(bytes(folder), b"")
    store = open_store(folder / "out" / "features")
    return found | {"entries": store.entries, "fingerprint": store.fingerprint}


def shown(folder):
    """Return what the folder shows of the slide that was replaced: predictions, evidence and map."""
    out = folder / "out"
    table = [out / "predictions.parquet", out / "predictions.csv"]
    frames = [(pd.read_parquet if path.suffix == ".parquet" else pd.read_csv)(path) for path in table if path.is_file()]
    rows = [float(frame.loc[frame["slide"] == "changing", "p_calm"].iloc[0]) for frame in frames if has_row(frame)]
    evidence, map_ = out / "evidence" / "changing.parquet", out / "maps" / "changing" / "changing.geojson"
    values = read_slide_evidence(evidence).columns["evidence_calm"].tolist() if evidence.is_file() else None
    return [round(p, 6) for p in rows], values, map_.read_bytes() if map_.is_file() else None


def has_row(frame):
    return (frame["slide"] == "changing").any()


def features_of(folder, slide):
    return open_store(folder / "out" / "features").checksums[slide]


def check_belongs(folder, answered):
    """Check that nothing that is shown of the replaced slide is of other features than those that are stored."""
    rows, values, map_ = shown(folder)
    before = shown(answered)
    if features_of(folder, "changing") == features_of(answered, "changing"):
        assert set(rows) <= set(before[0]) and values in (None, before[1]) and map_ in (None, before[2])
    else:
        assert not set(rows) & set(before[0]) and (values is None or values != before[1])
        assert map_ is None or map_ != before[2]


def test_replaced_slide_has_different_features_answers_and_maps(replaced, answered, study, uninterrupted):
    """If they were equal, the tests below would prove nothing."""
    before = shown(answered)
    run(study, replaced, "changing")
    after = shown(replaced)
    assert features_of(replaced, "changing") != features_of(answered, "changing")
    assert all(new != old for new, old in zip(after, before, strict=True)) and len(after[0]) == 2
    assert contents(replaced) == uninterrupted


@pytest.mark.parametrize("stage", STAGES)
def test_interrupted_run_mixes_no_features_and_resumes_with_the_results_of_an_uninterrupted_run(
    stage, replaced, answered, study, uninterrupted, monkeypatch
):
    with monkeypatch.context() as patched:
        patched.setattr(*STAGES[stage], Stop())
        with pytest.raises(StoppedError):
            run(study, replaced, "changing")
    check_belongs(replaced, answered)
    other = pd.read_parquet(replaced / "out" / "predictions.parquet").set_index("slide").loc["other", "p_calm"]
    assert other == pytest.approx(
        pd.read_parquet(answered / "out" / "predictions.parquet").set_index("slide").loc["other", "p_calm"]
    )
    assert (replaced / "out" / "maps" / "other" / "other.geojson").is_file()
    run(study, replaced, "changing")
    assert contents(replaced) == uninterrupted


@pytest.mark.slow
def test_killed_run_mixes_no_features_and_resumes_with_the_results_of_an_uninterrupted_run(
    replaced, answered, study, uninterrupted
):
    """A killed process, unlike one that raises, leaves its temporary folders behind."""
    code = f"""
import os, signal
from pathlib import Path
from carmil.explanations import slide_pipeline
from carmil.slides.encoders import load_encoder
slide_pipeline.predict_bags = lambda *words, **named: os.kill(os.getpid(), signal.SIGKILL)
encoder = load_encoder("timm/test_resnet", weights=Path({str(study.weights)!r}))
slide, out = Path({str(replaced / "changing.tif")!r}), Path({str(replaced / "out")!r})
slide_pipeline.answer_slides([slide], Path({str(study.run)!r}), out, encoder, device="cpu", log=print)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert features_of(replaced, "changing") != features_of(answered, "changing")
    check_belongs(replaced, answered)
    run(study, replaced, "changing")
    assert contents(replaced) == uninterrupted


def test_replaced_file_of_the_same_size_is_cut_again(answered, scans, study, tmp_path):
    """An uncompressed slide that was replaced by another one has the same number of bytes."""
    folder = shutil.copytree(answered, tmp_path / "work")
    whole = (folder / "changing.tif").read_bytes()
    (folder / "changing.tif").write_bytes(whole)
    os.utime(folder / "changing.tif", (1e9, 1e9))
    tiles = folder / "out" / "tiles" / "patches" / "changing_patches.h5"
    other = folder / "out" / "tiles" / "patches" / "other_patches.h5"
    before = tiles.stat().st_mtime_ns, other.stat().st_mtime_ns
    run(study, folder, "changing", "other")
    assert tiles.stat().st_mtime_ns != before[0] and other.stat().st_mtime_ns == before[1]
