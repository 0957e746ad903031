"""Labels of tiles from annotated regions, by a chosen overlap rule.

A point belongs to the smallest region that covers it: a normal area drawn inside a tumour is normal, and a frame around
everything does not change the regions inside it. `write_truth` writes the files that `carmil cohort build` reads.
n tiles.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import shapely
from numpy.typing import NDArray
from shapely import Geometry

from carmil.csv_files import csv_text
from carmil.errors import CarmilError
from carmil.files import atomic_file, safe_names, write_text
from carmil.maps.regions import Region
from carmil.slides.slide import Tiles
from carmil.truth import UNKNOWN
from carmil.words import number_in

POSITIVE, NEGATIVE = 1, 0
EXCLUSIONS = ("_2", "exclusion")  # CAMELYON16's names of normal tissue inside its tumours
RULES = {
    "any": 0.0,
    "centre": 0.5,
    "half": 0.5,
}  # minimum share of a tile, or of its centre, which is either inside or outside
MOST_PAIRS = 2**21  # pairs of a tile and a piece of a region that overlaps it
PIECE_CORNERS = 256  # the time to clip a tile grows with the corners of the shape
_CUT = 2  # in addition to POSITIVE and NEGATIVE: a region that is subtracted
_TINY = 1e-9  # smaller differences of shares are rounding errors


@dataclass(frozen=True, eq=False)
class TileLabels:
    """labels (n): POSITIVE, NEGATIVE or UNKNOWN. positive, negative (n): share of the tile covered by such regions, 0 to 1."""

    labels: NDArray[np.int64]
    positive: NDArray[np.float64]
    negative: NDArray[np.float64]


def positive_names(regions: Sequence[Region], names: Collection[str] = ()) -> list[str]:
    """Return the classes that make a tile positive: `names`, or by default all but CAMELYON16's exclusions."""
    classes = dict.fromkeys(region.name for region in regions if not region.cut)
    return list(names) or [name for name in classes if name.lower() not in EXCLUSIONS]


def label_tiles(
    tiles: Tiles,
    regions: Sequence[Region],
    *,
    positive: Collection[str] = (),
    rule: str = "half",
    complete: bool = False,
) -> TileLabels:
    """Label a tile positive if regions of the `positive` classes cover enough of it, negative if others do.

    Any other tile is unknown, or negative if the annotation is `complete`. `rule`: any, centre, half, or a share such as 0.25.
    """
    least = _least_share(rule)
    names = positive_names(regions, positive)
    ordered = sorted(regions, key=lambda region: region.extent, reverse=True)[
        ::-1
    ]  # among regions of equal size the last one comes first
    kinds = [_CUT if region.cut else POSITIVE if region.name in names else NEGATIVE for region in ordered]
    shapes = [region.shape for region in ordered]
    shares = _at_centres(tiles, shapes, kinds) if rule == "centre" else _visible_shares(tiles, shapes, kinds)
    enough = shares >= least if least else shares > 0
    labels = np.where(enough[POSITIVE], POSITIVE, np.where(enough[NEGATIVE] | complete, NEGATIVE, UNKNOWN))
    return TileLabels(labels.astype(np.int64), shares[POSITIVE], shares[NEGATIVE])


def _least_share(rule: str) -> float:
    share = RULES.get(rule, number_in(rule))
    if share is None or not 0 <= share <= 1:
        raise CarmilError(f"unknown overlap rule {rule!r}: expected any, centre, half, or a share from 0 to 1")
    return share


def _at_centres(tiles: Tiles, shapes: Sequence[Geometry], kinds: Sequence[int]) -> NDArray[np.float64]:
    """Return, for each kind (3, n), 1 where the first shape over a tile's centre is of this kind, otherwise 0."""
    shares = np.zeros((3, len(tiles)))
    tree = shapely.STRtree(shapely.points(tiles.corners + tiles.size / 2))
    for shape, kind in zip(reversed(shapes), reversed(kinds), strict=True):
        inside = tree.query(shape, predicate="intersects")
        shares[:, inside] = 0
        shares[kind, inside] = 1
    return shares


def _visible_shares(tiles: Tiles, shapes: Sequence[Geometry], kinds: Sequence[int]) -> NDArray[np.float64]:
    """Return the share of each tile (3, n) that is covered by shapes of each kind, without the area covered by preceding shapes."""
    squares = shapely.box(*tiles.corners.T, *(tiles.corners + tiles.size).T)
    pieces, piece_kinds, hits = _pieces_over(shapely.STRtree(squares), shapes, kinds)
    tile, piece = np.concatenate(hits), np.repeat(np.arange(len(pieces)), [len(some) for some in hits])
    by_tile = np.argsort(tile, kind="stable")
    tile, piece = tile[by_tile], piece[by_tile]
    layer = np.arange(len(tile)) - np.searchsorted(tile, tile)  # 0 for the first piece over a tile
    areas, covered = np.zeros((3, len(tiles))), np.full(len(tiles), shapely.Polygon())
    for pairs in np.split(np.argsort(layer, kind="stable"), np.bincount(layer).cumsum()[:-1]):
        pairs = pairs[shapely.area(covered[tile[pairs]]) < tiles.size**2 * (1 - _TINY)]
        at = tile[pairs]
        clipped = shapely.intersection(squares[at], pieces[piece[pairs]])
        areas[piece_kinds[piece[pairs]], at] += shapely.area(shapely.difference(clipped, covered[at]))
        covered[at] = shapely.union(covered[at], clipped)
    shares = areas / tiles.size**2
    return np.where(shares < _TINY, 0.0, np.where(shares > 1 - _TINY, 1.0, shares))


def _pieces_over(
    tree: shapely.STRtree, shapes: Sequence[Geometry], kinds: Sequence[int]
) -> tuple[NDArray[np.object_], NDArray[np.int64], list[NDArray[np.int64]]]:
    """Return the shapes in small pieces, the kind of each, and the tiles in the tree that it touches."""
    pieces, piece_kinds, hits, total = [shapely.Polygon()], [_CUT], [np.empty(0, np.int64)], 0
    for shape, kind in zip(shapes, kinds, strict=True):
        for piece in _pieces(shape):
            pieces.append(piece)
            piece_kinds.append(kind)
            hits.append(tree.query(piece, predicate="intersects"))
            total += len(hits[-1])
            if total > MOST_PAIRS:
                raise CarmilError(
                    f"the {len(shapes):,} annotated regions overlap one another too many times: remove duplicates"
                )
    return np.array(pieces), np.array(piece_kinds), hits


def _pieces(shape: Geometry) -> list[Geometry]:
    """Cut a shape into pieces of at most PIECE_CORNERS corners."""
    left, top, right, bottom = shape.bounds
    if shapely.get_num_coordinates(shape) <= PIECE_CORNERS or max(right - left, bottom - top) < 1:
        return [shape]
    if right - left > bottom - top:
        halves = [(left, top, (left + right) / 2, bottom), ((left + right) / 2, top, right, bottom)]
    else:
        halves = [(left, top, right, (top + bottom) / 2), (left, (top + bottom) / 2, right, bottom)]
    pieces = []
    for half in halves:
        piece = shapely.clip_by_rect(shape, *half)  # ten times as fast as `intersection`, but occasionally invalid
        piece = piece if piece.is_valid else shape.intersection(shapely.box(*half))
        pieces += [] if piece.is_empty else _pieces(piece)
    return pieces


def write_truth(labelled: Sequence[tuple[Tiles, TileLabels]], out: Path) -> list[str]:
    """Write out/instances.csv and out/patch_labels/SLIDE.npy; return lines for the log. An unknown label is an empty cell."""
    rows: list[tuple[object, ...]] = [("slide", "x", "y", "label", "positive", "negative")]
    names = safe_names(tiles.slide for tiles, _ in labelled)
    for tiles, labels in labelled:
        words = np.where(labels.labels == UNKNOWN, "", labels.labels.astype(str))
        for (x, y), label, yes, no in zip(tiles.corners.tolist(), words, labels.positive, labels.negative, strict=True):
            rows.append((tiles.slide, x, y, label, f"{yes:.4g}", f"{no:.4g}"))
        with atomic_file(out / "patch_labels" / f"{names[tiles.slide]}.npy") as aside, aside.open("wb") as file:
            np.save(file, labels.labels)
    write_text(out / "instances.csv", csv_text(rows, for_people=False))
    return [
        f"written: {out / 'instances.csv'}",
        f"         {out / 'patch_labels'}, {len(labelled)} slides: put it beside the folder features, then `carmil cohort build`",
    ]
