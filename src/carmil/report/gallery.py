"""Slides with small maps: of each class the right and the wrong answers farthest from the threshold.

n instances of one slide, c cases, k classes. Only the evidence of the slides that are shown is read.
"""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from carmil.bags.pictures import Pictures
from carmil.maps.colours import ATTENTION, NOTHING, SIGNED, colour_indices, colour_table, to_colours
from carmil.maps.mosaic import Mosaic, mosaic, picture_size, pixel_boxes, spacing
from carmil.maps.tile_maps import TileMap, colour_limits
from carmil.report.cases import Cases
from carmil.report.page import embedded
from carmil.runs.slide_evidence import SlideEvidence, evidence_file, read_slide_evidence
from carmil.studies.figures import percent

MOST = 12  # slides
OF_A_KIND = 3  # of a class, right or wrong
LONGEST = 160  # pixels of a map; with one pixel a tile where that is less
LONGEST_STRIP = 400
MOST_PICTURES = 60  # of a slide: those with the most evidence
PICTURES_IN_A_ROW, FRAME, GAP = 30, 4, 4  # pixels of a frame and between two
ATTENDED = (128, 80, 170)  # the frame of an instance with the largest attention weight
SHADES = 65  # odd, so that 0 has its own; an eye tells no more apart, and files stay small


@dataclass(frozen=True)
class Thumbnail:
    """A map as a PNG in the page, its title, and the range of its colours."""

    title: str
    span: str
    uri: str


@dataclass(frozen=True)
class GallerySlide:
    """A slide, what was answered, and its maps; as a strip where nobody knows where its instances lie, and as pictures of the
    instances where the store has them.

    p is the probability of the class that leads, in per cent; right is False only where a wrong answer is given.
    """

    slide: str
    label: str
    answer: str
    right: bool
    leading: str
    p: str
    otherwise: str
    instances: int
    strip: bool
    pictures: bool
    maps: tuple[Thumbnail, ...]


def gallery(
    cases: Cases,
    classes: Sequence[str],
    folder: Path,
    *,
    on_a_plane: bool,
    pictures: Callable[[str], Pictures | None] = lambda slide: None,
) -> list[GallerySlide]:
    """The chosen slides, class by class.

    on_a_plane: whether coordinates, where there are any, are of one plane. pictures: of the instances of a slide.
    """
    found, answers = [], cases.answers(classes)
    for i in select_cases(cases):
        name = str(cases.frame["slide"].iloc[i])
        slide = read_slide_evidence(evidence_file(folder, name))
        leading, at = classes[cases.answer[i]], slide.coordinates if on_a_plane else None
        maps, shown = slide.maps(of=leading), pictures(name)
        if shown is not None:
            maps = [*maps[1:], maps[0], *_runner_up(slide, classes, cases.p[i], leading)]
            thumbnails = _picture_rows(maps, shown)
        else:
            thumbnails = _thumbnails(maps, strip(maps[0].values) if at is None else plane(at))
        found.append(
            GallerySlide(
                slide=name,
                label=classes[cases.truth[i]],
                answer=answers[i],
                right=not cases.wrong[i],
                leading=leading,
                p=percent(cases.p[i, cases.answer[i]]),
                otherwise=str(slide.row.get("counterfactual_prediction") or ""),
                instances=len(slide),
                strip=at is None and shown is None,
                pictures=shown is not None,
                maps=tuple(thumbnails),
            )
        )
    return found


def select_cases(cases: Cases) -> list[int]:
    """At most MOST cases in the order of the classes, right ones first; a slide of several divisions once.

    In turns: the surest of every kind, then the second of every kind. Where not all kinds fit, the surest do. The surest
    case is the
    farthest from another answer by its own rule.
    """
    sure = cases.margin
    kinds: dict[tuple[int, bool], list[int]] = {}
    seen: set[str] = set()
    for i in np.argsort(-sure, kind="stable").tolist():
        slide = str(cases.frame["slide"].iloc[i])
        kind = kinds.setdefault((int(cases.truth[i]), not cases.right[i]), [])
        if slide not in seen and len(kind) < OF_A_KIND:
            kind.append(i)
            seen.add(slide)
    turns = [(turn, -sure[i], kind, i) for kind, mine in kinds.items() for turn, i in enumerate(mine)]
    kept = sorted(turns)[:MOST]
    return [i for _, _, _, i in sorted(kept, key=lambda one: (one[2], one[0]))]


@dataclass(frozen=True, eq=False)
class Layout:
    """Squares (n, 4) in a picture of `pixels` (width, height)."""

    boxes: NDArray[np.int64]
    pixels: tuple[int, int]

    def laid(self, values: NDArray[np.float64]) -> Mosaic:
        return mosaic(self.boxes, values[None], self.pixels)


def plane(coordinates: NDArray[np.float64]) -> Layout:
    """Tiles at their positions (n, 2), cropped to them; one pixel per tile unless there are too many."""
    at = (coordinates - coordinates.min(0)) / spacing(coordinates)
    wide, high = (at.max(0) + 1).tolist()
    pixels = picture_size(wide, high, min(LONGEST, math.ceil(max(wide, high))))
    return Layout(pixel_boxes(at, 1.0, (0.0, 0.0, wide, high), pixels), pixels)


def strip(evidence: NDArray[np.float64]) -> Layout:
    """Instances beside each other, from the most refuting (or least) to the most supporting."""
    n = len(evidence)
    at = np.zeros((n, 2))
    at[np.argsort(evidence, kind="stable"), 0] = np.arange(n)
    pixels = (min(n, LONGEST_STRIP), 1)
    return Layout(pixel_boxes(at, 1.0, (0.0, 0.0, float(n), 1.0), pixels), pixels)


def gradient(*, signed: bool) -> str:
    """The colours in CSS, from the lowest to the highest."""
    stops = SIGNED if signed else ATTENTION
    first = stops[0][0]
    shades = (f"rgb({r} {g} {b}) {100 * (at - first) / (1 - first):g}%" for at, (r, g, b) in stops)
    return f"linear-gradient(to right, {', '.join(shades)})"


def _thumbnails(maps: Sequence[TileMap], layout: Layout) -> list[Thumbnail]:
    found = []
    for one in maps:
        low, high = (words.strip("()") for words in colour_limits(one, "minmax"))
        span = f"±{high.lstrip('+')}" if one.signed else f"{low} to {high}"
        laid = layout.laid(one.shades("minmax"))
        cells = colour_indices(laid.spread(laid.cells[0]), signed=one.signed)
        span = "negligible, drawn as 0" if one.negligible else span
        found.append(Thumbnail(one.title, span, _png(cells, signed=one.signed)))
    return found


def _runner_up(slide: SlideEvidence, classes: Sequence[str], p: NDArray[np.float64], leading: str) -> list[TileMap]:
    """The evidence of the likeliest class that was not answered, where the slide has signed evidence."""
    others = [classes[c] for c in np.argsort(-p) if classes[c] != leading]
    return slide.maps(of=others[0])[:1] if slide.signed else []


def _picture_rows(maps: Sequence[TileMap], pictures: Pictures) -> list[Thumbnail]:
    """Per map the pictures of the instances in frames of its colours; those that look alike stand together."""
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


def _framed(picture: NDArray[np.uint8], frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    height, width, _ = picture.shape
    cell = np.full((height + 2 * FRAME + GAP, width + 2 * FRAME + GAP, 4), 0, np.uint8)
    cell[: height + 2 * FRAME, : width + 2 * FRAME] = [*frame, 255]
    cell[FRAME : FRAME + height, FRAME : FRAME + width, :3] = picture
    return cell


def _rows_of_cells(cells: Sequence[NDArray[np.uint8]]) -> str:
    from PIL import Image

    blank = np.zeros_like(cells[0])
    columns = min(len(cells), PICTURES_IN_A_ROW)
    padded = [*cells, *[blank] * (-len(cells) % columns)]
    rows = [np.concatenate(padded[first : first + columns], axis=1) for first in range(0, len(padded), columns)]
    stream = io.BytesIO()
    Image.fromarray(np.concatenate(rows)).save(stream, format="PNG", optimize=True)
    return embedded(stream.getvalue())


def _png(cells: NDArray[np.uint8], *, signed: bool) -> str:
    """Positions in the table of colours (h, w) as a data URI; transparent where there is nothing."""
    from PIL import Image

    shades = np.linspace(0, NOTHING - 1, SHADES).round().astype(int)
    shade = np.rint(cells / (NOTHING - 1) * (SHADES - 1)).astype(np.uint8)
    picture = Image.fromarray(np.where(cells == NOTHING, SHADES, shade).astype(np.uint8))
    picture.putpalette([*colour_table(signed=signed)[shades, :3].ravel().tolist(), 255, 255, 255])
    stream = io.BytesIO()
    picture.save(stream, format="PNG", optimize=True, transparency=SHADES)
    return embedded(stream.getvalue())
