"""The evidence that `carmil explain` wrote, as maps of a slide's tiles. n tiles, k rows of evidence."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carmil.errors import CarmilError, unknown
from carmil.files import safe_name
from carmil.slides.maps import COUNTERFACTUAL, DIFFERENCE, FACTUAL, Kind, TileMap
from carmil.slides.slide import Tiles

ABOUT = b"carmil"  # where `carmil explain` keeps what it says of a slide
NEAR = 0.75  # level-0 pixels by which a coordinate may differ: stores keep float32, and other tools round


def maps_of(folder: Path, tiles: Tiles, asked: Sequence[str] = (), *, model: str = "") -> list[TileMap]:
    """The maps that are asked for: factual, counterfactual, difference, or classes. None: what there is, for the answer."""
    path = folder / f"{safe_name(tiles.slide, taken=('summary',))}.parquet"
    columns, told = _read(path)
    line = told.get("line") or {}
    answer = str(line.get("prediction", ""))
    classes = [name.removeprefix("p_") for name in line if name.startswith("p_")]
    rows = _rows_of_tiles(columns, str(told.get("coordinate_unit") or ""), tiles, path)
    there = _there(columns, classes, answer)
    names = list(asked) or [name for name in there if name in (FACTUAL, COUNTERFACTUAL, DIFFERENCE, answer)]
    found = []
    for name in names:
        if name not in there:
            raise CarmilError(f"{path}: {unknown('map', name, there)}")
        values, kind, of = there[name]
        placed = np.append(values.astype(np.float64), np.nan)[rows]
        found.append(TileMap(of, placed, kind, model))
    return found


def _there(
    columns: dict[str, NDArray[Any]], classes: Sequence[str], answer: str
) -> dict[str, tuple[NDArray[Any], Kind, str]]:
    """What the file has, by the words one asks with. Where every class has attention of its own, it is that of the answer.

    Attention is shown by its raw scores u, as the paper does; the difference is one of weights a, since scores may be shifted.
    """
    found: dict[str, tuple[NDArray[Any], Kind, str]] = {}

    def held(name: str) -> NDArray[Any] | None:
        return columns.get(name, columns.get(f"{name}_{answer}"))

    u, u_cf, a, a_cf = (held(name) for name in ("u", "u_cf", "a", "a_cf"))
    whose = answer if "u" not in columns else ""
    if u is not None:
        found[FACTUAL] = (u, "factual", whose or FACTUAL)
    if u_cf is not None:
        found[COUNTERFACTUAL] = (u_cf, "counterfactual", whose or COUNTERFACTUAL)
    if a is not None and a_cf is not None:
        found[DIFFERENCE] = (a.astype(np.float64) - a_cf, "difference", whose or DIFFERENCE)
    for name in classes:
        if f"evidence_{name}" in columns:
            word = f"evidence_{name}" if name in found else name
            found[word] = (columns[f"evidence_{name}"], "evidence", name)
    return found


def _read(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise CarmilError(f"{path}: there is no such evidence; `carmil explain` writes it, a file a slide")
    try:
        table = pq.read_table(path)
        told = json.loads((table.schema.metadata or {})[ABOUT])
        return {name: table[name].to_numpy() for name in table.column_names}, told if isinstance(told, dict) else {}
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise CarmilError(
            f"{path} is no evidence of `carmil explain` ({str(error).splitlines()[0]}): run it again"
        ) from error


def _rows_of_tiles(columns: dict[str, NDArray[Any]], unit: str, tiles: Tiles, path: Path) -> NDArray[np.int64]:
    """(n): the row of each tile, -1 where there is none. By coordinates where the file has them, else by order."""
    count = len(next(iter(columns.values())))
    if "x" not in columns or "y" not in columns:
        if count != len(tiles):
            raise CarmilError(
                f"{path} has {count:,} rows without coordinates, and there are {len(tiles):,} tiles: expected as many"
            )
        return np.arange(count)
    there = np.stack([columns["x"], columns["y"]], axis=1).astype(np.float64)
    if unit == "um":
        there /= tiles.slide_mpp
    if len(there) == len(tiles) and (np.abs(there - tiles.corners) <= NEAR).all():
        return np.arange(count)
    return _nearest(there, tiles, path)


def _nearest(there: NDArray[np.float64], tiles: Tiles, path: Path) -> NDArray[np.int64]:
    from scipy.spatial import cKDTree

    far, tile = cKDTree(tiles.corners).query(there, p=np.inf)
    lost = int((far > NEAR).sum())
    if lost:
        raise CarmilError(
            f"{path}: {lost:,} of {len(there):,} rows lie at no tile of {tiles.slide}: were the features made of these tiles?"
        )
    rows = np.full(len(tiles), -1)
    rows[tile] = np.arange(len(there))
    return rows
