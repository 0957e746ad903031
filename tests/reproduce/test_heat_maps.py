import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from carmil.bags.building import build_store
from carmil.bags.finding import find_bags
from carmil.bags.readers import read_bag
from carmil.bags.writers import write_bag
from carmil.errors import CarmilError
from carmil.evidence.explainers import explain
from carmil.maps.tile_maps import TileMap
from carmil.report.heat_map_figure import SlideMaps, draw_heat_maps, zoom_boxes
from carmil.reproduce import heat_maps, slide_cohorts
from carmil.reproduce.method_runs import train_model
from carmil.reproduce.recipes import Request
from carmil.reproduce.slide_cohorts import CohortSet, with_coordinates
from carmil.slides.slide import Tiles
from carmil.studies import cautions
from carmil.studies.subjects import open_run_store, own_subjects

from .small_cohorts import SIDE, TILE, make_cohort


def grid(side):
    y, x = np.mgrid[:side, :side].reshape(2, -1)
    return np.stack([x, y], axis=1) * TILE, x, y


def test_one_zoom_shows_annotated_tiles_and_the_other_unannotated_tiles():
    corners, x, y = grid(30)
    truth = (abs(x - 6) <= 1) & (abs(y - 20) <= 1)
    first, second = zoom_boxes(Tiles("s", corners, TILE, TILE, 0.5, 30 * TILE, 30 * TILE, 0.5), truth)
    assert first[0] <= 5 * TILE and first[1] <= 19 * TILE and first[2] >= 8 * TILE and first[3] >= 22 * TILE
    inside = [(corners[:, i] + TILE > second[i]) & (corners[:, i] < second[i + 2]) for i in range(2)]
    assert not (inside[0] & inside[1] & truth).any()
    assert second[2] - second[0] == pytest.approx(first[2] - first[0])
    assert second[0] > 20 * TILE or second[1] < 8 * TILE  # the far corner, not the nearest free place
    assert len(zoom_boxes(Tiles("s", corners, TILE, TILE, 0.5, 30 * TILE, 30 * TILE, 0.5), None)) == 1


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Return the finding of the recipe on slides of two classes, the cohort, and the request."""
    home = tmp_path_factory.mktemp("two")
    cohort = make_cohort(home, slides=18)
    many = make_cohort(tmp_path_factory.mktemp("three"), classes=3, slides=9)
    request = Request(out=home / "out", shared=home / "shared", fast=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slide_cohorts, "find_cohorts", lambda request: CohortSet((many, cohort), ()))
        assert with_coordinates(request) == cohort
        return heat_maps.reproduce(request), cohort, request


def test_chosen_slide_has_most_annotated_tiles_among_slides_all_models_predict_correctly(drawn):
    result, cohort, request = drawn
    runs = [train_model(cohort, model, request) for model in dict.fromkeys(one[1].model for one in heat_maps.MAPS)]
    bags = open_run_store(runs[0]).bags()
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
    assert f"slide {best} (b; {areas[best]} of {SIDE**2} tiles annotated)" in result.lines[0]
    assert ("predict none of them correctly" in result.lines[0]) == (not agreed)


def test_maps_are_means_over_models_tested_on_the_slide(drawn):
    result, cohort, request = drawn
    run = train_model(cohort, "car/abmil.gated", request)
    store = open_run_store(run)
    chosen = heat_maps.choose([run], store)
    bag = store.bags()[torch.tensor([chosen.place])]
    population = run.population()
    mean = torch.stack([explain(population.member(i), bag, "path")[:, 1] for i in range(2)]).double().mean(0)
    subject = next(one for one in own_subjects(run, store) if one.slide == chosen.slide)
    found_map = heat_maps.explain_slide(run, subject, bag, "path", "cpu")[:, 1]
    assert found_map.tolist() == pytest.approx(mean.tolist(), abs=1e-7)
    assert [line[0] for line in result.tables[0].lines] == [title for title, *_ in heat_maps.MAPS]
    assert result.pictures[0].path.is_file() and "a plane" in result.pictures[0].caption


def test_selection_rule_states_if_no_slide_is_predicted_correctly_by_all(drawn):
    _, cohort, request = drawn
    run = train_model(cohort, "abmil.gated", request)
    store, frame = open_run_store(run), run.predictions()
    areas = {name: int((store.bag(i).instance_labels > 0).sum()) for i, name in enumerate(store.ids)}
    ill = sorted(frame.loc[frame["label"] == "b", "slide"].unique(), key=areas.get)

    def run_predicting(positive_slides):
        """Return the run as if its models predicted b for these slides and a for all others."""
        p = frame["slide"].isin(positive_slides).astype(float)
        answers = frame.assign(p_a=1 - p, p_b=p)
        own = {"target": run.target, "outputs": run.outputs, "tested_folds": run.tested_folds, "decision": run.decision}
        return SimpleNamespace(**(vars(run) | own | {"predictions": lambda: answers.copy()}))

    none = heat_maps.choose([run_predicting(ill[:1]), run_predicting(ill[1:])], store)
    assert (none.slide, none.label, none.annotated) == (ill[-1], "b", areas[ill[-1]])
    assert none.rule.endswith(
        f"the {len(ill)} test slides that are not 'a', as all 2 models together predict none of them correctly"
    )
    one = heat_maps.choose([run_predicting(ill[:1]), run_predicting(ill)], store)
    assert one.slide == ill[0]
    assert one.rule.endswith(
        f"among the 1 of {len(ill)} test slides that are not 'a' which all 2 models predict correctly"
    )


@pytest.fixture
def titles(monkeypatch):
    """Return the list of panel titles of every saved picture."""
    save, recorded = Figure.savefig, []

    def saved(figure, *args, **options):
        recorded.append([panel.get_title() for panel in figure.axes if panel.get_title()])
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", saved)
    return recorded


def test_finding_without_truth_mentions_no_annotated_tiles(tmp_path, monkeypatch, titles):
    cohort = make_cohort(tmp_path, slides=12)
    for source in find_bags(tmp_path / "work").sources:
        write_bag(replace(read_bag(source), instance_labels=None), tmp_path / "bare", "safetensors")
    build_store(tmp_path / "bare", tmp_path / "unknown", workers=1)
    cohort = replace(cohort, name="unknown", bags=tmp_path / "unknown")
    monkeypatch.setattr(slide_cohorts, "find_cohorts", lambda request: CohortSet((cohort,), ()))
    monkeypatch.setattr(cautions, "LITTLE", 1.0)  # so that no run is below it
    result = heat_maps.reproduce(Request(out=tmp_path / "out", shared=tmp_path / "shared", fast=True))
    cautioned = [line.split(": ")[0] for line in result.lines if "no better than class frequencies" in line]
    assert cautioned == [f"{cohort.title}, {name}" for name in ("ABMIL", "CLAM", "AddMIL", "DSMIL", "CAR-MIL")]
    assert f"(b; {SIDE**2} tiles, none known to be annotated): the slide that comes first by name" in result.lines[0]
    assert "No tile is known to be annotated: zoom 1 is the middle of the tissue." in result.pictures[0].caption
    assert titles == [["tiles", *(title.replace(", ", ",\n") for title, *_ in heat_maps.MAPS)]]
    assert result.tables[0].heads == ("map", "p of b, %", "Spearman with ABMIL", "Spearman with CAR-MIL (F)")
    assert result.tables[0].lines[0][2] == result.tables[0].lines[4][3] == "1.00"  # correlation with itself
    assert json.loads((tmp_path / "out" / "heat-maps.json").read_text())["slide"]["annotated"] is None
    text = (tmp_path / "out" / "heat-maps.md").read_text().replace("known to be annotated", "")
    assert "annotated" not in text and "zoom 2" not in text.lower()


@pytest.mark.parametrize(
    ("of", "first", "words"),
    [
        (lambda x: x < 0, "tiles", "No tile is known to be annotated: zoom 1 is the middle of the tissue."),
        (
            lambda x: x >= 0,
            "annotated",
            "annotated region; there is no place of the same size without an annotated tile.",
        ),
        (
            lambda x: x == 0,
            "annotated",
            "Lines: annotated tiles. Zoom 1 is around the largest annotated region, zoom 2",
        ),
    ],
    ids=["none", "all", "some"],
)
def test_caption_and_titles_describe_the_picture(tmp_path, titles, of, first, words):
    corners, x, y = grid(20)
    maps = tuple(TileMap("b", (x - y).astype(float), kind, kind) for kind in ("factual", "evidence"))
    ((_, caption),) = draw_heat_maps(
        SlideMaps("s01", corners.astype(float), float(TILE), "level0_px", maps, of(x)), tmp_path / "maps.png"
    )
    assert words in caption
    assert titles == [[first, "factual", "evidence"]]


def test_maps_are_drawn_over_the_matching_slide_only(tmp_path, titles):
    import tifffile

    corners, x, y = grid(4)
    maps = (
        TileMap("b", (x + y).astype(float), "factual", "ABMIL"),
        TileMap("b", (x - y).astype(float), "evidence", "CAR-MIL, path evidence"),
    )
    one = SlideMaps("s01", corners.astype(float), float(TILE), "level0_px", maps, x == 1)
    picture = np.full((4 * TILE, 4 * TILE, 3), 200, np.uint8)
    how = {"tile": (256, 256), "photometric": "rgb", "resolution": (2e4, 2e4), "resolutionunit": "CENTIMETER"}
    slides = tmp_path / "slides"
    slides.mkdir()
    tifffile.imwrite(slides / "s01.tif", picture, **how)
    result = draw_heat_maps(one, tmp_path / "maps.png", slides)
    assert [path.name for path, _ in result] == ["maps.png", "maps_large.png"]
    assert all(path.is_file() for path, _ in result) and "the slide, in grey" in result[0][1]
    bare = draw_heat_maps(replace(one, truth=None), tmp_path / "bare.png", slides)
    assert [line[0] for line in titles] == ["annotated", "slide"] and "Lines" not in bare[0][1]
    with pytest.raises(CarmilError, match="has no file of the slide 's02'"):
        draw_heat_maps(SlideMaps("s02", one.corners, one.size, one.unit, maps, None), tmp_path / "x.png", slides)
    with pytest.raises(CarmilError, match="expected the slide that they were cut from"):
        draw_heat_maps(SlideMaps("s01", one.corners * 3, one.size, one.unit, maps, None), tmp_path / "x.png", slides)
