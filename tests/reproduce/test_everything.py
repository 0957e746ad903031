import json
from types import SimpleNamespace

import pytest
import torch

from carmil.errors import CarmilError
from carmil.report.paper import Finding, Picture
from carmil.reproduce.everything import reproduce_all
from carmil.reproduce.recipes import RECIPES, Request, write_finding
from carmil.tables import ResultTable

PAGE = "paper.html"


def recipe(name, reproduce):
    return SimpleNamespace(name=name, of="Table 0", title=f"About {name}", needs="nothing", reproduce=reproduce)


@pytest.fixture
def recipe_request(tmp_path):
    return Request(out=tmp_path / "out", shared=tmp_path / "out")


def recipe_with_picture(recipe_request):
    from PIL import Image

    recipe_request.out.mkdir(parents=True)
    Image.new("RGB", (2, 2), "red").save(recipe_request.out / "red.png")
    table = ResultTable("Ours", ("model", "AUC"), (("abmil", "99.1"), ("<b>", "1")))
    return Finding((table,), (Picture(recipe_request.out / "red.png", "A red square"),), ("on no data",))


def recipe_without_data(recipe_request):
    raise CarmilError("nothing to run on: expected DATA/crc")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_listed_recipe_is_callable(recipe):
    assert callable(recipe.reproduce)


def test_recipe_that_cannot_run_is_reported_and_the_others_continue(recipe_request):
    logged = []
    sections = reproduce_all(
        [recipe("first", recipe_without_data), recipe("second", recipe_with_picture)],
        recipe_request,
        recipe_request.out / PAGE,
        command="carmil",
        say=logged.append,
    )
    assert [section.trouble for section in sections] == ["nothing to run on: expected DATA/crc", ""]
    assert "first could not run: nothing to run on: expected DATA/crc" in logged
    page = (recipe_request.out / PAGE).read_text()
    assert "nothing to run on: expected DATA/crc" in page
    assert ">99.1<" in page and "A red square" in page and "on no data" in page


def test_page_embeds_pictures_loads_no_resources_and_escapes_text(recipe_request):
    reproduce_all(
        [recipe("second", recipe_with_picture)],
        recipe_request,
        recipe_request.out / PAGE,
        command="carmil reproduce all",
    )
    page = (recipe_request.out / PAGE).read_text()
    assert "data:image/png;base64," in page
    assert "http" not in page.replace("http-equiv", "")
    assert "<b>" not in page.split("Ours")[1].split("</table>")[0]
    assert "mean nothing" not in page


def test_fast_page_states_that_its_figures_mean_nothing(tmp_path):
    recipe_request = Request(out=tmp_path, shared=tmp_path, fast=True)
    reproduce_all(
        [recipe("first", lambda recipe_request: Finding())], recipe_request, recipe_request.out / PAGE, command="carmil"
    )
    assert "The figures on this page mean nothing" in (tmp_path / PAGE).read_text()


def test_page_lists_pending_recipes_while_others_run(recipe_request):
    def read_page(recipe_request):
        return Finding(lines=((recipe_request.out.parent / PAGE).read_text(),))

    first, second = reproduce_all(
        [recipe("a", lambda recipe_request: Finding()), recipe("b", read_page)],
        recipe_request,
        recipe_request.out / PAGE,
        command="carmil",
    )
    assert "Not run yet." in second.finding.lines[0] and first.took


def test_findings_are_written_before_their_conditions(recipe_request):
    table = ResultTable("Millimetres", ("month", "rain"), (("May", "80"),))
    result = Finding((table,), lines=("it rains",), conditions=("in spring",))
    reproduce_all(
        [recipe("rain", lambda recipe_request: result)], recipe_request, recipe_request.out / PAGE, command="carmil"
    )
    write_finding("table3", recipe_request, {}, **vars(result))
    for file in (PAGE, "table3.md"):
        text = (recipe_request.out / file).read_text()
        assert text.index("it rains") < text.index("Millimetres") < text.index("How this was measured")
        assert text.index("How this was measured") < text.index("in spring")
    assert json.loads((recipe_request.out / "table3.json").read_text())["conditions"] == ["in spring"]


def test_reproduce_list_shows_every_recipe(run_cli):
    status, out, _ = run_cli("reproduce", "list")
    assert status == 0
    for recipe in RECIPES:
        assert recipe.name in out


def test_recipe_that_runs_out_of_memory_is_reported_and_the_others_continue(recipe_request):
    def too_large(recipe_request):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 80 GiB")

    first, second = reproduce_all(
        [recipe("a", too_large), recipe("b", recipe_with_picture)],
        recipe_request,
        recipe_request.out / PAGE,
        command="carmil",
    )
    assert first.trouble == "memory was not enough: CUDA out of memory. Tried to allocate 80 GiB"
    assert second.took


def test_unknown_recipe_exits_with_one_line(run_cli, tmp_path):
    status, _, err = run_cli("reproduce", "all", "--only", "table9", "--out", str(tmp_path / "out"))
    assert status == 2 and err.count("\n") == 1 and "table9" in err and "table2" in err
    status, _, err = run_cli("reproduce", "all", "--only", ",", "--out", str(tmp_path / "out"))
    assert status == 2 and "no recipe named" in err and not (tmp_path / "out").exists()


def test_missing_data_folder_exits_with_one_line(run_cli, tmp_path):
    status, _, err = run_cli("reproduce", "all", "--data", str(tmp_path / "none"), "--out", str(tmp_path / "out"))
    assert status == 2 and err.count("\n") == 1 and "--data" in err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["table1", "--tasks", ","], "no task named"),
        (["theory", "--tasks", "five_bags"], "unknown task 'five_bags'"),
        (["crc", "--data", ".", "--seed", "4294967296"], "less than or equal to 4294967295"),
        (["faithfulness", "--seed", "4294967296"], "less than or equal to 4294967295"),
    ],
)
def test_invalid_recipe_options_exit_with_one_line(run_cli, tmp_path, words, expected):
    status, _, err = run_cli("reproduce", *words, "--out", str(tmp_path / "out"))
    assert status == 2 and err.count("\n") == 1 and expected in err
    assert not (tmp_path / "out").exists()
