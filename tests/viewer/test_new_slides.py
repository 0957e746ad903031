"""carmil view SLIDE --model RUN: slides are answered with progress on the page, kept, and shown."""

import json
import threading

import pandas as pd
import pytest

from carmil.explanations import slide_pipeline
from carmil.progress import Progressed, count_progress
from carmil.slides import encoders
from carmil.viewer import serve
from carmil.viewer.app import guarded_app
from carmil.viewer.guard import known_hosts
from carmil.viewer.opening import NewSlides, prepare_slides
from carmil.viewer.preparation import Preparation, PreparationState, StoppedError, without_folders

from .answered import ENCODER, train_tiny_study, write_tissue
from .pages import PHONE, assert_accessible, expect, shows
from .test_security import WHATIF, assert_refused


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return train_tiny_study(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def slide(study):
    return write_tissue(study.folder / "new.tif")


@pytest.fixture
def view(run_cli, monkeypatch, study):
    """Return a function that runs `carmil view` until everything is prepared, and returns status, stderr, slides and out."""
    monkeypatch.setattr(serve, "bound", lambda host, port: pytest.fail("the real server is not needed"))

    opened_runs = []

    def run(*words, weights=study.weights):
        shown = []

        def once(open_runs, *, preparation=None, **access):
            if preparation is not None:
                preparation.start()
                preparation._thread.join()
            runs = open_runs() if preparation is None else preparation.result
            opened_runs.extend(runs)
            shown.append((runs, preparation, access["shown"]))

        monkeypatch.setattr(serve, "serve", once)
        given = [] if weights is None else ["--weights", str(weights)]
        status, _, err = run_cli("view", *map(str, words), "--model", str(study.run), *given)
        return (status, err, *(shown[0] if shown else ((), None, "")))

    yield run
    close(opened_runs)


def test_view_processes_a_slide_only_once(view, study, slide, tmp_path, monkeypatch):
    """The first call cuts, encodes and explains; the second loads no encoder; a changed file is answered again."""
    out = tmp_path / "answers"
    status, err, runs, preparation, shown = view(slide, "--out", out)
    assert status == 0 and preparation.state.failed == "", err
    (answers,) = runs
    case = json.loads(answers.cohort())["cases"][0]
    table = pd.read_csv(out / "predictions.csv")
    assert shown == "#slide=new" and case["slide"] == "new" and case["prediction"] == table["answer"][0]
    assert case["predicted"] == pytest.approx(table[["p_calm", "p_crowded"]].iloc[0], abs=1e-6)
    assert answers.pictures.zoom(0).width == 1800

    with monkeypatch.context() as patched:
        patched.setattr(encoders, "load_encoder", lambda *words, **named: pytest.fail("nothing is left to encode"))
        for more in ((), ("--encoder", ENCODER)):
            status, err, runs, preparation, shown = view(slide, "--out", out, *more, weights=None)
            assert (status, preparation, shown) == (0, None, "#slide=new"), err
            assert json.loads(runs[0].cohort())["cases"] == [case]
        with pytest.raises(pytest.fail.Exception, match="nothing is left to encode"):
            view(slide, "--out", out, "--preset", "biopsy")

    copy = tmp_path / "new.tif"
    copy.write_bytes(slide.read_bytes())
    assert view(copy, "--out", out)[3] is not None  # a file elsewhere


def test_results_are_saved_next_to_the_run_by_default(view, study, slide):
    assert view(slide)[0] == 0
    assert (study.folder / "run-answers" / "answers.json").is_file()


def test_another_encoder_is_refused_before_the_viewer_starts(view, study, slide, tmp_path):
    import timm
    import torch

    torch.manual_seed(1)
    torch.save(timm.create_model("test_resnet", pretrained=False).state_dict(), tmp_path / "other.pt")
    out = ("--out", tmp_path / "answers")
    for words, weights, expected in (
        (("--encoder", "resnet50"), None, "was trained on features of timm_test_resnet-"),
        ((), tmp_path / "other.pt", "was encoded by timm_test_resnet-"),
    ):
        status, err, runs, preparation, _ = view(slide, *out, *words, weights=weights)
        assert status == 2 and expected in err and "use its encoder" in err
        assert not runs and preparation is None and not (tmp_path / "answers").exists()


def test_contradictory_arguments_exit_with_one_line(run_cli, study, slide, study_folder):
    for words, expected in (
        ([slide], "to show a slide, give the run that answers with --model"),
        ([slide, study.run, "--model", study.run], "cannot be shown together: use one command for each"),
        ([slide, "--model", study.run, "--slides", study.folder], "--slides is for runs"),
        (["missing.svs", "--model", study.run], "missing.svs does not exist: expected a run, answers or a slide"),
        ([study.run, "--encoder", ENCODER], "--encoder is for slides"),
        ([study.run, "--out", study.folder], "--out is for slides"),
    ):
        status, _, err = run_cli("view", *map(str, words), "--no-browser")
        assert status == 2 and expected in err and err.count("\n") == 1, err


@pytest.fixture
def gated(study, slide, tmp_path, monkeypatch):
    """Return a preparation of a good and a broken slide that waits for `gate` before it encodes."""
    gate, encode = threading.Event(), slide_pipeline.encode_slides

    def wait_and_encode(*words, **named):
        assert gate.wait(600)
        return encode(*words, **named)

    monkeypatch.setattr(slide_pipeline, "encode_slides", wait_and_encode)
    broken = tmp_path / "secret" / "broken.tif"
    broken.parent.mkdir()
    broken.write_bytes(b"II*\0 not much of a slide")
    new = NewSlides((slide, broken), study.run, tmp_path / "secret" / "answers", study.encoder)
    preparation = prepare_slides(new, log=lambda line: None)
    preparation.gate = gate
    yield preparation
    gate.set()
    preparation.stop()
    close(preparation.result)


def close(runs):
    for answers in runs:
        answers.pictures.slides.close()


def wait_for(preparation, stage):
    for _ in range(1000):
        if preparation.state.stage == stage and preparation.state.done == preparation.state.total:
            return
        threading.Event().wait(0.1)
    raise AssertionError(preparation.state)


def test_requests_during_the_preparation_return_only_its_state(asking, gated):
    ask = asking(guarded_app(preparation=gated, is_known=known_hosts([], any_address=False)))
    assert ask("/api/cohort").json["preparing"]["stage"] == "starting"
    gated.start()
    wait_for(gated, "cutting")
    response = ask("/api/cohort")
    assert response.json["preparing"] | {"seconds_left": 0} == {
        "stage": "cutting", "done": 2, "total": 2, "things": "slides", "seconds_left": 0, "failed": "",
    }  # fmt: skip
    assert b"secret" not in response.body and b"/tmp" not in response.body
    for target in ("/api/cohort?run=1", "/api/case/0", "/api/case/0/places", "/api/case/0/zoom/0/0_0.jpeg"):
        assert_refused(ask(target), 400, 404)
    assert_refused(ask.post(WHATIF, {"remove": []}), 404)
    assert ask("/").status == 200
    gated.gate.set()
    gated._thread.join()
    cohort = ask("/api/cohort").json
    assert [case["slide"] for case in cohort["cases"]] == ["new"]
    (remark,) = [line for line in cohort["remarks"] if "Skipped" in line]
    assert remark.startswith("Skipped: broken.tif") and "/" not in remark.replace("um/px", "")


def test_preparation_of_an_unreadable_slide_states_the_reason(asking, study, tmp_path):
    empty = tmp_path / "empty.svs"
    empty.write_bytes(b"")
    preparation = prepare_slides(
        NewSlides((empty,), study.run, tmp_path / "answers", study.encoder), log=lambda line: None
    )
    preparation.start()
    preparation._thread.join()
    ask = asking(guarded_app(preparation=preparation, is_known=known_hosts([], any_address=False)))
    failed = ask("/api/cohort").json["preparing"]["failed"]
    assert failed.startswith("the slide could not be encoded: empty.svs is empty (0 bytes)") and "/tmp" not in failed


def test_stopped_preparation_resumes(study, slide, tmp_path, monkeypatch):
    """It is stopped while encoding, after writing the tiles; the next call does not cut them again."""
    new = NewSlides((slide,), study.run, tmp_path / "answers", study.encoder)
    preparation, explain = prepare_slides(new, log=lambda line: None), slide_pipeline.explain_run
    monkeypatch.setattr(
        slide_pipeline, "explain_run", lambda *words, **named: preparation._stopped.set() or explain(*words, **named)
    )
    preparation.start()
    preparation._thread.join()
    assert preparation.result == () and preparation.state.failed == ""
    assert not (new.out / "evidence").exists() and not (new.out / "answers.json").exists()
    features = (new.out / "features" / "features.bin").stat().st_mtime_ns
    monkeypatch.setattr(slide_pipeline, "explain_run", explain)
    again = prepare_slides(new, log=lambda line: None)
    again.start()
    again._thread.join()
    assert len(again.result[0].run) == 1
    assert (new.out / "features" / "features.bin").stat().st_mtime_ns == features


def test_time_left_is_estimated_from_the_pace_of_the_current_stage(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("carmil.viewer.preparation.time.monotonic", lambda: now[0])
    preparation = Preparation(tuple, say=lambda line: None)
    for seconds, done, left in ((0, 10, None), (5, 20, 40.0), (15, 30, 52.5)):
        now[0] = 100.0 + seconds
        preparation._on_progress(Progressed("encoding", done, 100, "tiles"))
        assert preparation.state == PreparationState("encoding", done, 100, "tiles", left)
    preparation._on_progress(Progressed("explaining run", 0, 1, "slides"))
    assert preparation.state.seconds_left is None
    preparation.stop()
    with pytest.raises(StoppedError):
        preparation._on_progress(Progressed("explaining run", 1, 1, "slides"))


def test_internal_error_is_logged_and_not_shown(caplog):
    def work():
        with count_progress("cutting", "slides") as on_slide:
            on_slide(0, 1)
        raise RuntimeError("/a/secret/path")

    preparation = Preparation(work, say=lambda line: None)
    preparation.start()
    preparation._thread.join()
    assert preparation.state.failed == "internal error; see the terminal for details" and "secret" in caplog.text


def test_folders_are_removed_from_messages():
    hidden = {"scans/new.tif": "new.tif", "/data/scans/new.tif": "new.tif", "/data": "data"}
    assert without_folders("/data/scans/new.tif and scans/new.tif in /data", hidden) == "new.tif and new.tif in data"


@pytest.fixture
def preparing_page(gated, opened, serve):
    """Return the page while slides are prepared."""
    gated.start()
    wait_for(gated, "cutting")
    address = serve(guarded_app(preparation=gated, is_known=known_hosts([], any_address=False)))
    page = opened(f"{address}/#slide=new", viewport=PHONE, bypass_csp=True)
    expect(page.locator(".preparing")).to_contain_text("2 of 2 slides")
    return page


def test_page_shows_the_progress_then_the_slide(preparing_page, gated):
    """The page shows the stage and its progress, then the slide with its answer, and why another slide was skipped."""
    page = preparing_page
    expect(page.locator("#slide")).to_have_text("new")
    expect(page.locator(".stage-name")).to_have_text("Finding tissue and cutting tiles")
    expect(page.locator("progress")).to_have_attribute("aria-label", "Finding tissue and cutting tiles")
    gated.gate.set()
    page.wait_for_selector("main.open")
    shows(page, "new")
    expect(page.locator(".chances")).to_be_visible()
    expect(page.locator("#remarks")).to_contain_text("Skipped: broken.tif")
    expect(page.locator(".preparing")).to_have_count(0)


def test_axe_finds_no_violation_while_progress_is_shown(preparing_page, axe):
    assert_accessible(preparing_page, axe)
