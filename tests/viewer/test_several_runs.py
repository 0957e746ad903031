"""Several runs in one viewer: two models side by side, each with its own slides, target and words."""

import json
from contextlib import contextmanager

import pytest

from carmil.errors import CarmilError
from carmil.viewer import maps, pictures, whatif
from carmil.viewer.app import guarded_app
from carmil.viewer.cases import read_cases
from carmil.viewer.guard import known_hosts
from carmil.viewer.opening import distinct_names, responses_of
from carmil.viewer.slide_files import SlideFiles

from . import test_page
from .test_page import assert_accessible, lasso, settled, until, viewing

axe, browser, opened = test_page.axe, test_page.browser, test_page.opened  # fixtures


@pytest.fixture(scope="module")
def both(study_folder, run_of_kind):
    """Return the responses about a run of two classes on nine slides, and a run of three grades on eighteen."""
    with opened_runs(study_folder, [study_folder / "run", run_of_kind("ordinal")]) as responses:
        yield responses


@contextmanager
def opened_runs(study_folder, folders, slides=("slides", "slides")):
    """Yield the responses about runs. slides: the folder of each run's slides, None for a run without them."""
    runs = [read_cases(folder) for folder in folders]
    files = [
        SlideFiles(None if name is None else study_folder / name, [case.slide for case in run.cases])
        for name, run in zip(slides, runs, strict=True)
    ]
    yield responses_of(folders, runs, files)
    for one in files:
        one.close()


@pytest.fixture(scope="module")
def app_of_both(both):
    return guarded_app(*both, is_known=known_hosts([], any_address=False))


def test_cases_of_several_runs_have_consecutive_numbers(asking, app_of_both, both):
    ask = asking(app_of_both)
    first, second = ask("/api/cohort").json, ask("/api/cohort?run=1").json
    assert first["runs"] == second["runs"] == [first["run"], second["run"]] and first["run"] != second["run"]
    assert [case["number"] for case in first["cases"] + second["cases"]] == list(range(9 + 18))
    assert [one["name"] for one in first["target"]["outputs"]] == ["a", "b"]
    assert [row["name"] for row in second["target"]["rows"]] == ["1", "2", "3", "mean grade"]
    assert ask("/api/case/26").json["slide"] == second["cases"][-1]["slide"]
    assert ask("/api/case/27").status == 404
    for wrong in ("2", "-1", "x", "1&run=0"):
        assert ask(f"/api/cohort?run={wrong}").status == 400


def test_every_run_answers_for_its_own_cases(asking, app_of_both, both):
    ask = asking(app_of_both)
    for answers in both:
        number = next(number for number, case in enumerate(answers.run.cases) if case.slide == "s1")
        address = f"/api/case/{answers.first + number}"
        assert ask(f"{address}/map/evidence?class=0").body == answers.map(number, "evidence", 0)
        assert len(ask(f"{address}/places").json["x"]) == answers.run.size(number)
        response = ask.post(f"{address}/whatif", {"remove": [0, 1]}).json
        assert response == json.loads(answers.without(number, {"remove": [0, 1]}))
        assert ask(f"{address}/zoom/10/0_0.jpeg").body[:2] == b"\xff\xd8"


def test_runs_share_the_memory_for_caches(both):
    for rooms, limit in (
        ([one.pictures._kept.room for one in both], pictures.KEPT),
        ([one.maps._cache.room for one in both], maps.KEPT),
        ([one.whatif._cache.room for one in both], whatif.KEPT),
    ):
        assert sum(rooms) <= limit


def test_names_of_runs_are_as_long_as_needed(tmp_path):
    assert distinct_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert distinct_names([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    with pytest.raises(CarmilError, match="is given twice"):
        distinct_names([tmp_path / "a", tmp_path / "b" / ".." / "a"])
    with pytest.raises(CarmilError, match="at most 4"):
        distinct_names([tmp_path / str(i) for i in range(5)])


needs_browser = pytest.mark.skipif(
    any(mark.args[0] for mark in test_page.pytestmark), reason="needs chromium and OpenSeadragon"
)


@needs_browser
@pytest.mark.parametrize(
    ("width", "height", "scheme"), [(1440, 900, "light"), (1024, 768, "dark"), (390, 844, "light")]
)
def test_axe_finds_no_violation_in_two_runs(opened, app_of_both, both, axe, width, height, scheme):
    with viewing(app_of_both) as address:
        look = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
        page = opened(f"{address}/#slide=s1", bypass_csp=True, **look)
        assert_accessible(page, axe)
        page.context.close()  # before the server closes


@needs_browser
@pytest.mark.parametrize("width", [1440, 1024, 390])
def test_two_runs_fit_the_screen(opened, app_of_both, width):
    with viewing(app_of_both) as address:
        page = opened(f"{address}/#slide=s1", viewport={"width": width, "height": 844})
        first, second = (page.locator(".stage").nth(i).bounding_box() for i in range(2))
        assert (first["y"] == second["y"]) == (width > 390) and first["width"] == second["width"]
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.context.close()  # before the server closes


@needs_browser
def test_page_shows_two_runs_side_by_side(opened, app_of_both, both):
    """Answers, maps and words of both, linked views, a what-if by the first, and slides that only one has."""
    first, second = both
    with viewing(app_of_both) as address:
        page = opened(f"{address}/#slide=s1")
        assert page.locator("#count").inner_text() == "18"
        assert page.locator(".pane").count() == 2
        captions = page.locator("figcaption").all_inner_texts()
        for caption, answers, words in zip(captions, both, ("supports “", "raises the grade"), strict=True):
            case = next(case for case in answers.run.cases if case.slide == "s1")
            assert caption.startswith(f"{answers.run.name}: {case.answer}, ") and words in caption
        assert page.get_by_role("heading", name=f"Answer of {second.run.name}").is_visible()
        assert "mean grade" in page.locator("#other-answer").inner_text()

        until(page, "document.querySelectorAll('.scale-bar')[1]?.textContent !== ''")
        page.locator(".stage").first.hover()
        page.get_by_role("button", name="Zoom in").click()
        until(page, "location.hash.includes('view=')")
        rulers = page.evaluate("[...document.querySelectorAll('.scale-bar')].map(one => one.style.width)")
        assert rulers[0] == rulers[1]

        page.get_by_role("button", name="whole").click()
        page.wait_for_timeout(300)
        lasso(page, [(4, 4), (200, 4), (200, 128), (4, 128)], size=(1000, 700))
        page.get_by_role("button", name="Remove 6 tiles").click()
        page.wait_for_selector(".moves")
        assert page.locator(".moves tbody th").all_inner_texts() == ["a", "b"]

        page.get_by_role("button", name=f"Explain {second.run.name}").click()
        settled(page)
        until(page, f"document.getElementById('answer-title').textContent === 'Answer of {second.run.name}'")
        assert page.locator("figcaption").first.inner_text().startswith(f"{second.run.name}: ")
        until(page, "document.getElementById('tiles').textContent.includes('Raises the grade most')")

        page.get_by_role("searchbox").fill("s12")
        row = page.locator(".rows .row")
        assert f"not in {first.run.name}" in row.inner_text()
        row.click()
        settled(page)
        assert page.locator(".pane").count() == 1
        assert page.locator("#remark").inner_text() == f"This slide is not in {first.run.name}."
        page.context.close()  # before the server closes


@needs_browser
@pytest.mark.parametrize("slides", [("slides", "slides"), ("slides", None)])
def test_region_is_drawn_on_panes_with_the_same_coordinates(opened, study_folder, run_of_kind, slides):
    folders, known = [study_folder / "run", run_of_kind("ordinal")], known_hosts([], any_address=False)
    with (
        opened_runs(study_folder, folders, slides) as responses,
        viewing(guarded_app(*responses, is_known=known)) as address,
    ):
        page = opened(f"{address}/#slide=s1")
        until(page, "document.querySelectorAll('.openseadragon-canvas').length >= 2")
        page.wait_for_timeout(500)
        before = maps_painted(page)
        lasso(page, [(4, 4), (200, 4), (200, 128), (4, 128)], size=(1000, 700))
        page.get_by_role("button", name="Discard").wait_for()
        page.mouse.move(2, 2)
        page.wait_for_timeout(300)
        changed = [one != other for one, other in zip(before, maps_painted(page), strict=True)]
        assert changed == [True, slides[0] == slides[1]]
        page.context.close()  # before the server closes


def maps_painted(page):
    return page.evaluate("[...document.querySelectorAll('canvas.map')].map(canvas => canvas.toDataURL())")
