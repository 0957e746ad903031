"""Runs that are shown together open a slide file once, and two panes load its tiles once."""

import json
import re

import pytest

from carmil.viewer import slide_files
from carmil.viewer.app import guarded_app
from carmil.viewer.guard import known_hosts
from carmil.viewer.opening import open_folders


@pytest.fixture
def opened_files(monkeypatch):
    """Return the list of the slide files that are opened."""
    names, open_slide = [], slide_files.open_slide

    def record(path, **how):
        names.append(path.name)
        return open_slide(path, **how)

    monkeypatch.setattr(slide_files, "open_slide", record)
    return names


@pytest.fixture
def both(study_folder, run_of_kind):
    """Return the responses about two runs of the same slides, opened as `carmil view` opens them."""
    responses = open_folders(
        [study_folder / "run", run_of_kind("ordinal")], slides=study_folder / "slides", log=lambda line: None
    )
    yield responses
    responses[0].pictures.slides.close()


def cases_of(responses, slide):
    """Return the number of a slide in each run."""
    return [[case.slide for case in one.run.cases].index(slide) for one in responses]


def picture_of(responses, number):
    return json.loads(responses.case(number))["picture"]


def test_slide_shared_by_two_runs_is_opened_once_and_its_tiles_have_one_address(both, opened_files):
    numbers = cases_of(both, "s1")
    pictures = [picture_of(one, number) for one, number in zip(both, numbers, strict=True)]
    assert pictures[0]["case"] == pictures[1]["case"] == numbers[0]
    assert pictures[0] == pictures[1]
    for one, number in zip(both, numbers, strict=True):
        assert one.pictures.tile(number, 10, 0, 0)[:2] == b"\xff\xd8"
    assert opened_files == ["s1.tif"]


def test_tiles_of_a_shared_slide_come_from_the_run_that_can_show_it(both):
    first, second = cases_of(both, "s1")
    both[0].pictures.problems[first] = "the slide has another size than the slide that was tiled"
    assert picture_of(both[0], first) is None
    assert picture_of(both[1], second)["case"] == both[1].first + second
    other = cases_of(both, "s0")
    assert picture_of(both[1], other[1])["case"] == other[0]


def test_two_panes_of_a_slide_load_the_same_tiles(opened, serve, both, opened_files):
    first, second = cases_of(both, "s1")
    page = opened(f"{serve(guarded_app(*both, is_known=known_hosts([], any_address=False)))}/#slide=s1&opacity=1")
    assert page.locator(".stage").count() == 2
    asked = page.evaluate("performance.getEntriesByType('resource').map(({ name }) => name)")
    tiles = {re.search(r"/case/(\d+)/zoom/", name)[1] for name in asked if "/zoom/" in name}
    assert tiles == {str(first)} and any(f"/case/{both[1].first + second}/map/" in name for name in asked)
    assert opened_files.count("s1.tif") == 1
