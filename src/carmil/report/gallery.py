"""Slides with small maps: the clearest answers, right and wrong, or the highest, lowest and most discordant predictions.

n instances of one slide, c cases. Only the evidence of the selected slides is read.
"""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from carmil.bags.pictures import Pictures
from carmil.maps.colours import ATTENTION, NOTHING, SIGNED, colour_indices, colour_table, to_colours
from carmil.maps.mosaic import Mosaic, mosaic, picture_size, pixel_boxes, spacing
from carmil.maps.painting import Painter
from carmil.maps.tile_maps import TileMap, colour_limits
from carmil.report.cases import Cases, quantity_text
from carmil.report.heat_map_figure import SlideMaps, bounding_box, tiles_on
from carmil.report.page import embedded
from carmil.runs.slide_evidence import SlideEvidence, evidence_file, read_slide_evidence
from carmil.slides.slide import Picture, Slide
from carmil.targets import Target
from carmil.words import probability_text

MOST = 12  # slides
OF_A_KIND = 3  # slides of each kind
LONGEST = 160  # pixels of a map; one pixel per tile if that is less
LONGEST_STRIP = 400
LONGEST_TISSUE = 280  # of a picture of the tissue
QUALITY = 82  # of its JPEG
MOST_PICTURES = 60  # instances shown per slide: those with the most evidence
PICTURES_IN_A_ROW, FRAME, GAP = 30, 4, 4  # pixels of a frame and of the gap between two
ATTENDED = (128, 80, 170)  # the frame of an instance with the largest attention weight
SHADES = 65  # odd, so that 0 has a shade of its own; finer steps are invisible, and files stay small


@dataclass(frozen=True)
class Thumbnail:
    """A map as a PNG in the page, with its title and the range of its colours."""

    title: str
    span: str
    uri: str


@dataclass(frozen=True)
class GallerySlide:
    """A slide, its answer, and its maps.

    The maps are strips if the positions of the instances are unknown, pictures of the instances if the store has them,
    and drawn over the tissue if the file of the slide is known. words: outcome, answer, and the number behind the
    answer. right is False only if a wrong answer is given, and None if answers are neither right nor wrong; why: the
    reason for the selection, where `right` does not give it.
    """

    slide: str
    answer: str
    words: str
    right: bool | None
    why: str
    otherwise: str
    instances: int
    strip: bool
    pictures: bool
    maps: tuple[Thumbnail, ...]
    tissue: bool = False


@dataclass(frozen=True, eq=False)
class TiledSlide:
    """The file of a slide, and the side of its tiles in the unit of their coordinates, if it is known."""

    open: Callable[[], Slide]
    tile_size: float | None


def gallery(
    cases: Cases,
    folder: Path,
    *,
    on_a_plane: bool,
    pictures: Callable[[str], Pictures | None] = lambda slide: None,
    files: Callable[[str], TiledSlide | None] = lambda slide: None,
) -> list[GallerySlide]:
    """Return the selected slides, kind by kind.

    on_a_plane: whether coordinates, if there are any, are in one plane. pictures: those of the instances of a slide.
    files: those of the slides.
    """
    gallery_slides, answers, target = [], cases.answers, cases.target
    for example in select_examples(cases):
        i = example.case
        name = str(cases.frame["slide"].iloc[i])
        slide = read_slide_evidence(evidence_file(folder, name))
        leading = cases.decisions[i].explained(cases.p[i])
        at = slide.coordinates if on_a_plane else None
        maps, images = slide.maps(of=leading), pictures(name)
        file = None if at is None or images is not None else files(name)
        if images is not None:
            maps = [*maps[1:], maps[0], *_runner_up(slide, target.outputs, cases.p[i], leading)]
            thumbnails = _picture_rows(maps, images)
        elif at is not None and file is not None:
            with file.open() as opened:
                on_slide = SlideMaps(name, at, file.tile_size, slide.unit, tuple(maps), None)
                thumbnails = _over_tissue(opened, on_slide)
        else:
            thumbnails = _thumbnails(maps, strip(maps[0].values) if at is None else plane(at))
        gallery_slides.append(
            GallerySlide(
                slide=name,
                answer=answers[i],
                words=_words(cases, i, answers[i]),
                right=not cases.wrong[i] if target.answer_names else None,
                why=example.why,
                otherwise=str(slide.row.get("counterfactual_prediction") or ""),
                instances=len(slide),
                strip=at is None and images is None,
                pictures=images is not None,
                maps=tuple(thumbnails),
                tissue=file is not None,
            )
        )
    return gallery_slides


@dataclass(frozen=True)
class Example:
    """A case that is an example of a kind, the better the higher its score; kinds are shown in their order."""

    kind: tuple[int, int]
    score: float
    case: int
    why: str = ""


def select_examples(cases: Cases) -> list[Example]:
    """Select at most MOST cases, kind by kind; a slide is selected once.

    The kinds take turns: the best example of every kind, then the second of every kind. If not all fit, the best of
    the last turn are taken.
    """
    kinds: dict[tuple[int, int], list[Example]] = {}
    for example in sorted(_examples(cases), key=lambda one: -one.score):
        kinds.setdefault(example.kind, []).append(example)
    names, seen = cases.names, set[str]()
    turns: list[tuple[int, Example]] = []
    for turn in range(OF_A_KIND):
        for kind in sorted(kinds):
            best = next((one for one in kinds[kind] if names[one.case] not in seen), None)
            if best is not None:
                seen.add(names[best.case])
                turns.append((turn, best))
    kept = sorted(turns, key=lambda one: (one[0], -one[1].score, one[1].kind))[:MOST]
    return [example for _, example in sorted(kept, key=lambda one: (one[1].kind, one[0]))]


def _examples(cases: Cases) -> list[Example]:
    """Return each case as an example of its kind, or of several."""
    target, everything = cases.target, range(len(cases.p))
    if target.answer_names:
        truth, right, margin = cases.truth.tolist(), cases.right.tolist(), cases.margin.tolist()
        return [Example((truth[i], not right[i]), margin[i], i) for i in everything]
    if target.probabilities:
        leading, rows = cases.answer.tolist(), np.arange(len(cases.p))
        p, truth = cases.p[rows, cases.answer], cases.truth[rows, cases.answer]
        right = (p >= 0.5) == (truth > 0)
        known = np.flatnonzero(~np.isnan(truth)).tolist()
        words = [f"{target.outputs[leading[i]]}: {'right' if right[i] else 'wrong'}" for i in everything]
        return [Example((leading[i], not right[i]), float(abs(p[i] - 0.5)), i, words[i]) for i in known]
    number, name = _relative_numbers(cases), f"predicted {target.quantity.name}"
    kinds = {f"highest {name}": number, f"lowest {name}": -number, "most at odds with the outcome": _discordance(cases)}
    scores = enumerate(kinds.items())
    return [Example((kind, 0), float(score[i]), i, why) for kind, (why, score) in scores for i in everything]


def selection_words(target: Target) -> str:
    """Describe the rule by which slides are selected."""
    if target.answer_names:
        clear = "farthest from the threshold of their fold, or of several classes with the largest lead"
        clear = clear if target.words.rivals else "with the largest lead"
        return f"Of each {target.strata_word} the surest right and the surest wrong answers ({clear})"
    if target.probabilities:
        word = target.output_word
        return f"Of each {word} that is the most probable the surest right and the surest wrong answers (farthest from 50 %)"
    near = ", counted from the threshold of their fold" if target.answers_in_words else ""
    name = target.quantity.name
    return f"The highest and the lowest predicted {name}{near}, and the slides that are most at odds with their outcome"


def _words(cases: Cases, i: int, answer: str) -> str:
    """Describe the outcome and the answer of case i, and the number behind the answer."""
    target, p = cases.target, cases.p[i]
    known, quantity = target.describe(cases.truth[i]), target.quantity
    if target.words.rivals:
        leading = cases.decisions[i].explained(p)
        share = probability_text(p[cases.answer[i]])
        answered = f"answered {answer} ({share})" if answer == leading else f"{answer} (p of {leading}: {share})"
        return f"label {known}, {answered}"
    if not target.answers_in_words:
        return f"{quantity.name} {known}, predicted {answer}"
    value = cases.decisions[i].value_words(p)
    if not quantity.share:
        value = f"{quantity.name} {quantity_text(quantity, float(target.quantities(p)[0]))}"
    return f"{f'{target.strata_word} {known}' if target.answer_names else known}, answered {answer} ({value})"


def _relative_numbers(cases: Cases) -> NDArray[np.float64]:
    """Return the predicted numbers (c), relative to the threshold of each case if there is one, since models have
    different thresholds.
    """
    return cases.p[:, 0] - np.array([rule.threshold or 0.0 for rule in cases.decisions])


def _discordance(cases: Cases) -> NDArray[np.float64]:
    """Return (c) the discordance of each case with its prediction, among the cases of its fold."""
    folds, found = cases.frame["fold"].astype(str).to_numpy(), np.zeros(len(cases.p))
    for fold in np.unique(folds):
        own = folds == fold
        found[own] = cases.target.discordance(cases.p[own], cases.truth[own])
    return found


@dataclass(frozen=True, eq=False)
class Layout:
    """Squares (n, 4) in a picture of `pixels` (width, height)."""

    boxes: NDArray[np.int64]
    pixels: tuple[int, int]

    def laid(self, values: NDArray[np.float64]) -> Mosaic:
        return mosaic(self.boxes, values[None], self.pixels)


def plane(coordinates: NDArray[np.float64]) -> Layout:
    """Return tiles at their positions (n, 2), cropped to these; one pixel per tile unless there are too many."""
    at = (coordinates - coordinates.min(0)) / spacing(coordinates)
    wide, high = (at.max(0) + 1).tolist()
    pixels = picture_size(wide, high, min(LONGEST, math.ceil(max(wide, high))))
    return Layout(pixel_boxes(at, 1.0, (0.0, 0.0, wide, high), pixels), pixels)


def strip(evidence: NDArray[np.float64]) -> Layout:
    """Return instances side by side, from the most refuting (or least) to the most supporting."""
    n = len(evidence)
    at = np.zeros((n, 2))
    at[np.argsort(evidence, kind="stable"), 0] = np.arange(n)
    pixels = (min(n, LONGEST_STRIP), 1)
    return Layout(pixel_boxes(at, 1.0, (0.0, 0.0, float(n), 1.0), pixels), pixels)


def gradient(*, signed: bool) -> str:
    """Return the colours as a CSS gradient, from the lowest to the highest."""
    stops = SIGNED if signed else ATTENTION
    first = stops[0][0]
    shades = (f"rgb({r} {g} {b}) {100 * (at - first) / (1 - first):g}%" for at, (r, g, b) in stops)
    return f"linear-gradient(to right, {', '.join(shades)})"


def _thumbnails(maps: Sequence[TileMap], layout: Layout) -> list[Thumbnail]:
    thumbnails = []
    for one in maps:
        low, high = (words.strip("()") for words in colour_limits(one, "minmax"))
        span = f"±{high.lstrip('+')}" if one.signed else f"{low} to {high}"
        laid = layout.laid(one.shades("minmax"))
        cells = colour_indices(laid.spread(laid.cells[0]), signed=one.signed)
        span = "negligible, drawn as 0" if one.negligible else f"{span}, faint" if one.why_faint else span
        thumbnails.append(Thumbnail(one.title, span, _png(cells, signed=one.signed)))
    return thumbnails


def _runner_up(slide: SlideEvidence, classes: Sequence[str], p: NDArray[np.float64], leading: str) -> list[TileMap]:
    """Return the evidence of the most probable other class, if the slide has signed evidence."""
    if len(classes) == 1 or not slide.signed:
        return []
    others = [classes[c] for c in np.argsort(-p) if classes[c] != leading]
    return slide.maps(of=others[0])[:1]


def _picture_rows(maps: Sequence[TileMap], pictures: Pictures) -> list[Thumbnail]:
    """Return, per map, the pictures of the instances in frames of the map's colours; similar pictures are adjacent."""
    most = np.argsort(-np.abs(maps[-1].values), kind="stable")[:MOST_PICTURES]
    order = most[np.argsort(pictures.index[most], kind="stable")]
    thumbnails = []
    for thumbnail, one in zip(_thumbnails(maps, strip(maps[0].values)), maps, strict=True):
        shades = np.nan_to_num(one.shades("minmax")[order])
        frames = to_colours(shades, signed=one.signed) if one.signed else np.tile(ATTENDED, (len(order), 1))
        strength = np.abs(shades)[:, None]
        frames = np.rint(strength * frames + (1 - strength) * 255).astype(np.uint8)
        cells = [_framed(pictures.rgb(row), frame) for row, frame in zip(order, frames, strict=True)]
        thumbnails.append(replace(thumbnail, uri=_rows_of_cells(cells)))
    return thumbnails


def _over_tissue(slide: Slide, on_slide: SlideMaps) -> list[Thumbnail]:
    """Return the tiled part of the slide in its colours, then each map over it in grey."""
    tiles, maps = tiles_on(slide, on_slide), on_slide.maps
    left, top, right, bottom = box = bounding_box(tiles)
    pixels = picture_size(right - left, bottom - top, LONGEST_TISSUE)
    ground = slide.read(left, top, right - left, bottom - top, pixels)
    named = _thumbnails(maps, strip(maps[0].values))
    painted = Painter(slide, tiles, maps).paint(box, pixels)
    drawn = (replace(thumbnail, uri=_jpeg(picture)) for thumbnail, picture in zip(named, painted, strict=True))
    return [Thumbnail("slide", "", _jpeg(ground)), *drawn]


def _jpeg(picture: Picture) -> str:
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, format="JPEG", quality=QUALITY)
    return embedded(stream.getvalue(), "jpeg")


def _framed(picture: NDArray[np.uint8], frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    height, width, _ = picture.shape
    cell = np.full((height + 2 * FRAME + GAP, width + 2 * FRAME + GAP, 4), 0, np.uint8)
    cell[: height + 2 * FRAME, : width + 2 * FRAME] = [*frame, 255]
    cell[FRAME : FRAME + height, FRAME : FRAME + width, :3] = picture
    return cell


def _rows_of_cells(cells: Sequence[NDArray[np.uint8]]) -> str:
    blank = np.zeros_like(cells[0])
    columns = min(len(cells), PICTURES_IN_A_ROW)
    padded = [*cells, *[blank] * (-len(cells) % columns)]
    rows = [np.concatenate(padded[first : first + columns], axis=1) for first in range(0, len(padded), columns)]
    stream = io.BytesIO()
    Image.fromarray(np.concatenate(rows)).save(stream, format="PNG", optimize=True)
    return embedded(stream.getvalue())


def _png(cells: NDArray[np.uint8], *, signed: bool) -> str:
    """Encode positions in the table of colours (h, w) as the data URI of a PNG; empty cells are transparent."""
    shades = np.linspace(0, NOTHING - 1, SHADES).round().astype(int)
    shade = np.rint(cells / (NOTHING - 1) * (SHADES - 1)).astype(np.uint8)
    picture = Image.fromarray(np.where(cells == NOTHING, SHADES, shade).astype(np.uint8))
    picture.putpalette([*colour_table(signed=signed)[shades, :3].ravel().tolist(), 255, 255, 255])
    stream = io.BytesIO()
    picture.save(stream, format="PNG", optimize=True, transparency=SHADES)
    return embedded(stream.getvalue())
