"""Several runs in one viewer: two models side by side, each with its own slides, target and words."""

import json
import re
from contextlib import ExitStack, contextmanager

import pytest

from carmil.errors import CarmilError
from carmil.viewer import maps, pictures, whatif
from carmil.viewer.app import guarded_app
from carmil.viewer.cases import read_cases
from carmil.viewer.guard import known_hosts
from carmil.viewer.opening import distinct_names, responses_of
from carmil.viewer.slide_files import SlideFiles

from .pages import assert_accessible, drawn, expect, lasso, shows, until


@pytest.fixture(scope="module")
def both(study_folder, run_of_kind):
    """Return the responses about a run of two classes on nine slides, and a run of three grades on eighteen."""
    with opening(study_folder, [study_folder / "run", run_of_kind("ordinal")]) as responses:
        yield responses


@contextmanager
def opening(study_folder, folders, slides=("slides", "slides")):
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


def test_requests_for_a_case_are_answered_by_its_own_run(asking, app_of_both, both):
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


def test_run_names_are_only_as_long_as_needed_to_differ(tmp_path):
    assert distinct_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert distinct_names([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    with pytest.raises(CarmilError, match="is given twice"):
        distinct_names([tmp_path / "a", tmp_path / "b" / ".." / "a"])
    with pytest.raises(CarmilError, match="at most 4"):
        distinct_names([tmp_path / str(i) for i in range(5)])


@pytest.mark.parametrize(
    ("width", "height", "scheme"), [(1440, 900, "light"), (1024, 768, "dark"), (390, 844, "light")]
)
def test_axe_finds_no_violation_with_two_runs(opened, serve, app_of_both, axe, width, height, scheme):
    look = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
    page = opened(f"{serve(app_of_both)}/#slide=s1", bypass_csp=True, **look)
    assert_accessible(page, axe)


@pytest.mark.parametrize("width", [1440, 1024, 390])
def test_two_runs_fit_the_screen(opened, serve, app_of_both, width):
    page = opened(f"{serve(app_of_both)}/#slide=s1", viewport={"width": width, "height": 844})
    first, second = (page.locator(".stage").nth(i).bounding_box() for i in range(2))
    assert (first["y"] == second["y"]) == (width > 390) and first["width"] == second["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("#cohort").evaluate("column => { column.hidden = false; }")
    label, answer, other = (
        page.locator(f".rows .row .{name}").first.bounding_box() for name in ("label", "answer", "counter")
    )
    assert label["width"] > answer["width"] + 20  # a short number leaves its space to the label
    assert answer["width"] == pytest.approx(other["width"], abs=12)


def test_panes_stay_together_when_their_size_changes(opened, serve, app_of_both):
    """The window is resized, and the legend of one pane grows: both panes still show the same place at the same size."""
    page = opened(f"{serve(app_of_both)}/#slide=s1", viewport={"width": 1440, "height": 900})
    bars = page.locator(".scale-bar")
    for width, height in ((1440, 640), (1100, 900)):
        before = bars.first.get_attribute("style")
        page.set_viewport_size({"width": width, "height": height})
        expect(bars.first).not_to_have_attribute("style", before)
        drawn(page)
        assert bars.last.get_attribute("style") == bars.first.get_attribute("style")
    page.get_by_role("button", name="Remove the top 10 % of evidence").click()
    expect(page.locator(".of.gone").first).to_be_visible()
    drawn(page)
    assert bars.last.get_attribute("style") == bars.first.get_attribute("style")


def test_page_shows_two_runs_side_by_side(opened, serve, app_of_both, both):
    """Check answers, maps and texts of both, linked views, a what-if of the first, and slides of only one run."""
    first, second = both
    page = opened(f"{serve(app_of_both)}/#slide=s1")
    expect(page.locator("#count")).to_have_text("18")
    expect(page.locator(".pane")).to_have_count(2)
    captions = page.locator("figcaption").all_inner_texts()
    for caption, answers, words in zip(captions, both, ("supports “", "raises the grade"), strict=True):
        case = next(case for case in answers.run.cases if case.slide == "s1")
        assert caption.startswith(f"{answers.run.name}: {case.answer}, ") and words in caption
    expect(page.get_by_role("heading", name=f"Answer of {second.run.name}")).to_be_visible()
    expect(page.locator("#other-answer")).to_contain_text("mean grade")

    page.locator(".stage").first.hover()
    page.get_by_role("button", name="Zoom in").click()
    until(page, "location.hash.includes('view=')")
    until(page, "new Set([...document.querySelectorAll('.scale-bar')].map(bar => bar.style.width)).size === 1")

    page.get_by_role("button", name="whole").click()
    until(page, "!location.hash.includes('view=')")
    lasso(page, [(4, 4), (200, 4), (200, 128), (4, 128)], size=(1000, 700))
    page.get_by_role("button", name="Remove 6 tiles").click()
    expect(page.locator(".moves tbody th")).to_have_text(["a", "b"])

    page.get_by_role("button", name=f"Explain {second.run.name}").click()
    expect(page.locator("#answer-title")).to_have_text(f"Answer of {second.run.name}")
    expect(page.locator("figcaption").first).to_have_text(re.compile(f"^{re.escape(second.run.name)}: "))
    expect(page.locator("#tiles")).to_contain_text("Raises the grade most")

    page.get_by_role("searchbox").fill("s12")
    row = page.locator(".rows .row")
    expect(row).to_contain_text(f"not in {first.run.name}")
    row.click()
    shows(page, "s12")
    expect(page.locator(".pane")).to_have_count(1)
    expect(page.locator("#remark")).to_have_text(f"This slide is not in {first.run.name}.")


@pytest.fixture
def opened_runs(study_folder):
    """Return a function that yields the responses about runs until the end of the test, like `opening`."""
    with ExitStack() as runs:
        yield lambda *words: runs.enter_context(opening(study_folder, *words))


@pytest.mark.parametrize("slides", [("slides", "slides"), ("slides", None)])
def test_region_is_drawn_on_panes_with_the_same_coordinates(
    opened_runs, opened, serve, study_folder, run_of_kind, slides
):
    responses = opened_runs([study_folder / "run", run_of_kind("ordinal")], slides)
    page = opened(f"{serve(guarded_app(*responses, is_known=known_hosts([], any_address=False)))}/#slide=s1")
    before = maps_painted(page)
    lasso(page, [(4, 4), (200, 4), (200, 128), (4, 128)], size=(1000, 700))
    page.get_by_role("button", name="Discard").wait_for()
    page.mouse.move(2, 2)  # no tile is hovered
    expect(page.locator("figcaption output").first).to_be_empty()
    drawn(page)
    changed = [one != other for one, other in zip(before, maps_painted(page), strict=True)]
    assert changed == [True, slides[0] == slides[1]]


def maps_painted(page):
    return page.evaluate("[...document.querySelectorAll('canvas.map')].map(canvas => canvas.toDataURL())")
