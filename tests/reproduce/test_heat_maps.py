from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from carmil.errors import CarmilError
from carmil.evidence.explainers import explain
from carmil.maps.tile_maps import TileMap
from carmil.reproduce import heat_maps, slide_cohorts
from carmil.reproduce.chosen_cohorts import with_places
from carmil.reproduce.heat_map_picture import Drawn, draw_heat_maps, zooms
from carmil.reproduce.recipes import Asked
from carmil.reproduce.slide_cohorts import Found
from carmil.reproduce.slide_runs import run_on
from carmil.slides.slide import Tiles
from carmil.studies.tested import reopened

from .small_cohorts import SIDE, TILE, make_cohort


def grid(side):
    y, x = np.mgrid[:side, :side].reshape(2, -1)
    return np.stack([x, y], axis=1) * TILE, x, y


def test_one_zoom_is_around_what_is_annotated_and_the_other_where_nothing_is():
    corners, x, y = grid(30)
    truth = (abs(x - 6) <= 1) & (abs(y - 20) <= 1)
    first, second = zooms(Tiles("s", corners, TILE, TILE, 0.5, 30 * TILE, 30 * TILE, 0.5), truth)
    assert first[0] <= 5 * TILE and first[1] <= 19 * TILE and first[2] >= 8 * TILE and first[3] >= 22 * TILE
    inside = [(corners[:, i] + TILE > second[i]) & (corners[:, i] < second[i + 2]) for i in range(2)]
    assert not (inside[0] & inside[1] & truth).any()
    assert second[2] - second[0] == pytest.approx(first[2] - first[0])
    assert second[0] > 20 * TILE or second[1] < 8 * TILE  # the far corner, not the next best place
    assert len(zooms(Tiles("s", corners, TILE, TILE, 0.5, 30 * TILE, 30 * TILE, 0.5), None)) == 1


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The recipe on slides of two classes; what it found, and what it was asked."""
    home = tmp_path_factory.mktemp("two")
    cohort = make_cohort(home, slides=18)
    many = make_cohort(tmp_path_factory.mktemp("three"), classes=3, slides=9)
    asked = Asked(out=home / "out", shared=home / "shared", fast=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slide_cohorts, "cohorts_in", lambda asked: Found((many, cohort), ()))
        assert with_places(asked) == cohort
        return heat_maps.reproduce(asked), cohort, asked


def test_the_slide_is_the_one_with_most_annotated_tiles_that_all_answer_rightly(drawn):
    found, cohort, asked = drawn
    runs = [run_on(cohort, model, asked) for model in dict.fromkeys(one[1] for one in heat_maps.MAPS)]
    bags = reopened(runs[0]).bags()
    areas = {}
    for name in runs[0].predictions()["slide"].unique():
        place = bags.ids.index(name)
        areas[name] = int(bags.instance_labels[bags.offsets[place] : bags.offsets[place + 1]].sum())
    right = [
        {
            slide
            for slide, line in run.predictions().groupby("slide")
            if (line["p_b"].mean() > 0.5) == (areas[slide] > 0)
        }
        for run in runs
    ]
    positive = [name for name, area in areas.items() if area]
    agreed = set.intersection(*right) & set(positive)
    best = max(sorted(agreed or positive), key=areas.get)
    assert f"slide {best} (b; {areas[best]} of {SIDE**2} tiles annotated)" in found.lines[0]
    assert ("answer none of them rightly" in found.lines[0]) == (not agreed)


def test_its_maps_are_those_of_the_models_that_were_tested_on_it(drawn):
    found, cohort, asked = drawn
    run = run_on(cohort, "car/abmil.gated", asked)
    store = reopened(run)
    chosen = heat_maps.choose([run], store)
    bag = store.bags()[torch.tensor([chosen.place])]
    population = run.population()
    mean = torch.stack([explain(population.member(i), bag, "path")[:, 1] for i in range(2)]).double().mean(0)
    assert heat_maps._asked(run, "path", chosen, bag, "cpu").tolist() == pytest.approx(mean.tolist(), abs=1e-7)
    assert [line[0] for line in found.tables[0].lines] == [title for title, *_ in heat_maps.MAPS]
    assert found.pictures[0].path.is_file() and "a plane" in found.pictures[0].caption


def test_where_no_slide_is_answered_rightly_by_all_the_rule_says_so(drawn, monkeypatch):
    _, cohort, asked = drawn
    run = run_on(cohort, "abmil.gated", asked)
    wrong = run.predictions().assign(p_a=1.0, p_b=0.0)
    other = SimpleNamespace(**{**vars(run), "classes": run.classes, "predictions": lambda: wrong})
    other.settings = run.settings
    chosen = heat_maps.choose([other], reopened(run))
    assert "together answer none of them rightly" in chosen.rule and chosen.label == "b"
    assert isinstance(wrong, pd.DataFrame)


def test_a_slide_that_is_found_by_name_is_drawn_over_and_another_is_refused(tmp_path):
    import tifffile

    corners, x, y = grid(4)
    maps = (
        TileMap("b", (x + y).astype(float), "factual", "ABMIL"),
        TileMap("b", (x - y).astype(float), "evidence", "CAR-MIL, path evidence"),
    )
    one = Drawn("s01", corners.astype(float), float(TILE), "level0_px", maps, x == 1)
    picture = np.full((4 * TILE, 4 * TILE, 3), 200, np.uint8)
    how = {"tile": (256, 256), "photometric": "rgb", "resolution": (2e4, 2e4), "resolutionunit": "CENTIMETER"}
    slides = tmp_path / "slides"
    slides.mkdir()
    tifffile.imwrite(slides / "s01.tif", picture, **how)
    found = draw_heat_maps(one, tmp_path / "maps.png", slides)
    assert [path.name for path, _ in found] == ["maps.png", "maps_large.png"]
    assert all(path.is_file() for path, _ in found) and "the slide, in grey" in found[0][1]
    with pytest.raises(CarmilError, match="has no file of 's02'"):
        draw_heat_maps(Drawn("s02", one.corners, one.size, one.unit, maps, None), tmp_path / "x.png", slides)
    with pytest.raises(CarmilError, match="expected the slide that they were cut from"):
        draw_heat_maps(Drawn("s01", one.corners * 3, one.size, one.unit, maps, None), tmp_path / "x.png", slides)
