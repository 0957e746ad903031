"""Selection of the slides in the gallery, and colours and positions of their thumbnails."""

import base64
import io
import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from carmil.maps.colours import to_colours
from carmil.report.cases import Cases
from carmil.report.gallery import LONGEST, MOST, gallery, gradient, plane, select_examples, strip
from carmil.runs.slide_evidence import ABOUT
from carmil.targets import Classes
from carmil.targets.decision import Decision

CLASSES = ("a", "b")
TARGET = Classes(names=CLASSES)


def cases_of(p, truth, slides=None):
    p, truth = np.asarray(p, dtype=np.float64), np.asarray(truth)
    names = [f"s{i}" for i in range(len(p))] if slides is None else slides
    frame = pd.DataFrame({"slide": names})
    classes = tuple("abcde"[: p.shape[1]])
    sure, rules = np.ones(len(p), dtype=bool), (Decision(classes),) * len(p)
    return Cases(Classes(names=classes), frame, p, truth, p.argmax(1), sure, rules)


def selected(cases):
    return [example.case for example in select_examples(cases)]


def two(p, truth, slides=None):
    return cases_of(np.stack([1 - np.asarray(p), p], axis=1), truth, slides)


def write_evidence(folder, slide, columns, p=(0.2, 0.8)):
    line = {"slide": slide, "prediction": "b", "p_a": p[0], "p_b": p[1], "counterfactual_prediction": "a"}
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    about = {ABOUT: json.dumps({"line": line, "coordinate_unit": "level0_px"}).encode()}
    pq.write_table(table.replace_schema_metadata(about), folder / f"{slide}.parquet")


def pixels(thumbnail):
    """Return the RGBA pixels (h, w, 4) of a thumbnail."""
    png = base64.b64decode(thumbnail.uri.removeprefix("data:image/png;base64,"))
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGBA"))


def test_most_confident_correct_and_wrong_slides_of_each_class_are_selected():
    truth = [0, 0, 0, 1, 1, 1, 1, 1, 1]
    p = [0.1, 0.2, 0.9, 0.4, 0.3, 0.95, 0.9, 0.8, 0.7]
    assert selected(two(p, truth)) == [0, 1, 2, 5, 6, 7, 4, 3]  # at most three correct slides of class 1


@pytest.mark.finding(n=2)
def test_confidence_is_the_distance_to_the_threshold_of_the_fold():
    cases = two([0.92, 0.6, 0.5, 0.45], [1, 1, 1, 1])
    rules = tuple(Decision(CLASSES, at) for at in (0.9, 0.1, 0.2, 0.3))  # margins 0.02, 0.5, 0.3 and 0.15
    answers = np.array([1, 1, 1, 1])
    assert selected(Cases(TARGET, cases.frame, cases.p, cases.truth, answers, cases.sure, rules)) == [1, 2, 3]


def test_at_most_twelve_slides_are_selected_and_every_kind_is_included():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(5, 0.3), size=400)
    cases = cases_of(p, rng.integers(0, 5, 400))
    result = selected(cases)
    kinds = {(cases.truth[i], cases.right[i]) for i in range(400)}
    assert len(result) == MOST
    assert {(cases.truth[i], cases.right[i]) for i in result} == kinds and len(kinds) == 10


def test_slide_in_several_folds_is_selected_once():
    assert selected(two([0.9, 0.8, 0.7], [1, 1, 1], slides=["x", "x", "y"])) == [0, 2]


def test_thumbnail_colours_tiles_at_their_position_and_is_transparent_elsewhere(tmp_path):
    x, y = np.array([1024, 2048, 1024, 3072]), np.array([512, 512, 1536, 1536])
    evidence = np.array([-2.0, 4.0, 0.0, 1.0])
    columns = {"x": x, "y": y, "u": evidence, "a": evidence**2, "evidence_a": -evidence, "evidence_b": evidence}
    write_evidence(tmp_path, "s0", columns)
    (shown,) = gallery(two([0.8], [1]), tmp_path, on_a_plane=True)
    assert [one.title for one in shown.maps] == ["evidence for b", "attention weight"]
    assert [one.span for one in shown.maps] == ["±4", "0 to 16"]
    signed, attention = (pixels(one) for one in shown.maps)
    assert signed.shape == (2, 3, 4)
    assert signed[..., 3].tolist() == [[255, 255, 0], [255, 0, 255]]
    np.testing.assert_allclose(signed[[0, 0, 1, 1], [0, 1, 0, 2], :3], to_colours(evidence / 4, signed=True), atol=6)
    assert (signed[1, 0, :3] == to_colours(np.array([0.0]), signed=True)).all()  # neither for nor against
    np.testing.assert_allclose(attention[0, 1, :3], to_colours(np.array([1.0]), signed=False)[0])


def test_gallery_draws_evidence_for_the_answer_by_the_threshold(tmp_path):
    columns = {"x": [0, 1], "y": [0, 0], "evidence_a": [1.0, -1.0], "evidence_b": [-1.0, 1.0]}
    write_evidence(tmp_path, "s0", columns)
    cases = two([0.8], [1])
    below = Cases(TARGET, cases.frame, cases.p, cases.truth, np.array([0]), cases.sure, (Decision(CLASSES, 0.9),))
    (shown,) = gallery(below, tmp_path, on_a_plane=True)
    assert (shown.answer, shown.right, shown.maps[0].title) == ("a", False, "evidence for a")


def test_instances_without_coordinates_are_drawn_as_a_strip_sorted_by_evidence(tmp_path):
    evidence = np.random.default_rng(0).normal(size=50)
    write_evidence(tmp_path, "s0", {"a": np.exp(-evidence), "evidence_a": -evidence, "evidence_b": evidence})
    (shown,) = gallery(two([0.8], [1]), tmp_path, on_a_plane=True)
    assert shown.strip
    signed, attention = (pixels(one) for one in shown.maps)
    assert signed.shape == (1, 50, 4)
    expected = to_colours(np.sort(evidence) / np.abs(evidence).max(), signed=True)
    np.testing.assert_allclose(signed[0, :, :3], expected, atol=6)
    assert attention[0, 0, :3].sum() < attention[0, -1, :3].sum()  # dark where attention is high


def test_tissue_pieces_on_different_grids_are_drawn_at_tile_size():
    one = np.array([(x * 256, y * 256) for y in range(5) for x in range(5)])
    pieces = [one + np.array(away) for away in ((0, 0), (1400, 37), (111, 1500))]
    layout = plane(np.concatenate(pieces).astype(float))
    sizes = layout.boxes[:, 2:] - layout.boxes[:, :2]
    assert (sizes >= 1).all() and (sizes <= 2).all()
    assert layout.pixels == (11, 11)


def test_thumbnail_averages_tiles_that_share_a_pixel():
    layout = strip(np.arange(4000.0))
    values = layout.laid(np.arange(4000.0)).cells[0, 0]
    assert layout.pixels == (400, 1)
    assert values == pytest.approx(np.arange(400) * 10 + 4.5, abs=5)  # within half a pixel
    assert max(plane(np.random.default_rng(0).uniform(0, 1e5, (20_000, 2))).pixels) == LONGEST


def test_gallery_of_large_slides_stays_small(tmp_path):
    rng = np.random.default_rng(0)
    y, x = np.divmod(np.arange(10_000), 100)
    for i in range(12):
        maps = {name: rng.normal(size=10_000) for name in ("a", "a_cf", "evidence_a", "evidence_b")}
        write_evidence(tmp_path, f"s{i}", {"x": x * 256, "y": y * 256, **maps})
    result = gallery(two(np.tile([0.1, 0.8], 6), np.arange(12) // 2 % 2), tmp_path, on_a_plane=True)
    assert [len(one.maps) for one in result] == [3] * 12
    assert sum(len(one.uri) for slide in result for one in slide.maps) < 500_000


def test_colour_scale_uses_the_colours_of_the_maps():
    assert (
        gradient(signed=False)
        == "linear-gradient(to right, rgb(238 234 244) 0%, rgb(128 80 170) 60%, rgb(52 16 88) 100%)"
    )
    assert "rgb(236 236 238) 50%" in gradient(signed=True)


@pytest.mark.finding(n=9)
def test_report_overlays_and_viewer_show_the_same_values_with_the_same_title(tmp_path):
    from carmil.bags.bags import Bags
    from carmil.counterfactual import create_model
    from carmil.explanations.bag_evidence import explain_bag
    from carmil.runs.slide_evidence import read_slide_evidence
    from carmil.targets.decision import Decision
    from carmil.training.population import Member, Population
    from carmil.viewer.cases import Case, RunCases
    from carmil.viewer.maps import CaseMaps

    population = Population(lambda: create_model("car/abmil", 3, 2, hidden=4, attention=2), [Member()])
    bag = Bags.from_list([torch.randn(20, 3, generator=torch.Generator().manual_seed(0))])
    result = explain_bag([population.member(0)], bag, ("path",), CLASSES, searched=False)
    write_evidence(tmp_path, "s0", {name: values.numpy() for name, values in result.columns.items()})
    drawn = {one.title: one.values for one in read_slide_evidence(tmp_path / "s0.parquet").maps(of="b")}
    case = Case("s0", 0, (0,), Decision(tuple(CLASSES)), np.array([0.5, 0.5]))
    viewer = CaseMaps(RunCases("run", TARGET, bag, (case,), population))
    shown = {kind.title: viewer.shown(0, kind.name, 1).values for kind in viewer.kinds.values()}
    for title in ("attention weight", "counterfactual attention weight"):
        assert drawn[title].sum() == pytest.approx(1, abs=1e-6)
        np.testing.assert_allclose(drawn[title], shown[title], atol=1e-7)
    np.testing.assert_allclose(drawn["evidence for b"], shown["evidence"], atol=1e-7)
