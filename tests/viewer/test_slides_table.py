"""carmil view --slides-table: micrometres per pixel slide by slide, in place of those of the files."""

import json

import pytest

from carmil.explanations.slide_pipeline import are_answered
from carmil.runs.run import read_run
from carmil.viewer import serve
from carmil.viewer.opening import open_folders

from .answered import train_tiny_study, write_tissue


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "slides.csv"
    path.write_text("wsi,mpp\ns1.tif,0.25\ns0.tif,\nnew.tif,0.4\n")
    return path


def mpp_of(responses, slide):
    number = [case.slide for case in responses.run.cases].index(slide)
    return json.loads(responses.case(number))["picture"]["mpp"]


def test_slides_table_overrides_the_pixel_size_of_slide_files_of_a_run(study_folder, table):
    (responses,) = open_folders(
        [study_folder / "run"], slides=study_folder / "slides", slides_table=table, log=lambda line: None
    )
    assert [mpp_of(responses, slide) for slide in ("s0", "s1")] == pytest.approx([0.5, 0.25])  # an empty cell leaves it
    responses.pictures.slides.close()


def test_new_slide_is_processed_with_the_pixel_size_of_the_table(run_cli, table, tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "bound", lambda host, port: pytest.fail("the real server is not needed"))
    study, slide, shown = train_tiny_study(tmp_path), write_tissue(tmp_path / "new.tif", 2000, 2400), []

    def prepare(open_runs, *, preparation=None, **access):
        if preparation is not None:
            preparation.start()
            preparation._thread.join()
            assert not preparation.state.failed, preparation.state.failed
        shown.append(open_runs() if preparation is None else preparation.result)

    monkeypatch.setattr(serve, "serve", prepare)
    words = [str(slide), "--model", str(study.run), "--weights", str(study.weights), "--slides-table", str(table)]
    for _ in range(2):  # the second command shows the answers of the first
        status, _, error = run_cli("view", *words)
        assert status == 0, error
        assert mpp_of(shown[-1][0], "new") == 0.4
        shown[-1][0].pictures.slides.close()
    run, out = read_run(study.run), tmp_path / "run-answers"
    assert are_answered([slide], run, out, mpps={slide: 0.4})
    assert not are_answered([slide], run, out) and not are_answered([slide], run, out, mpps={slide: 0.25})


def test_slides_table_without_matching_slide_files_is_refused(run_cli, study_folder, tmp_path, table):
    run, slides = str(study_folder / "run"), str(study_folder / "slides")
    status, _, error = run_cli("view", run, "--slides-table", str(table), "--no-browser", "--port", "0")
    assert status == 2 and "--slides-table is for slide files: give their folder with --slides" in error
    table.write_text("wsi,mpp\nother.svs,0.25\n")
    status, _, error = run_cli(
        "view", run, "--slides", slides, "--slides-table", str(table), "--no-browser", "--port", "0"
    )
    assert status == 2 and "has the micrometres per pixel of none of the slides" in error
