"""A slide's file of evidence: one row per instance, and the slide's row of the summary in the file's metadata. n instances."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.errors import CarmilError, unknown
from carmil.evidence.explainers import EXPLAINERS
from carmil.files import atomic_file, safe_name
from carmil.maps.smoothing import Smoothing
from carmil.maps.tile_maps import COUNTERFACTUAL, DIFFERENCE, FACTUAL, Kind, TileMap, logits_apart
from carmil.slides.slide import Tiles
from carmil.untrusted import one_line_errors, parse_as, read_parquet

Row = dict[str, float | str | bool | None]  # one row of summary.csv, by column
NEAR = 0.75  # level-0 pixels by which a coordinate may differ: stores keep float32, and other tools round
TAKEN = ("summary",)  # names of files that no slide's may have
RULE = "answer_rule"  # where a slide's line has the decision rule in words
ABOUT = b"carmil"  # where a slide's line stands in the metadata of its file


def evidence_file(folder: Path, slide: str) -> Path:
    """The path of the evidence of a slide in a folder of `carmil explain`."""
    distinct = folder / f"{safe_name(slide, taken=(*TAKEN, slide))}.parquet"  # another slide has nearly the same name
    return distinct if distinct.is_file() else folder / f"{safe_name(slide, taken=TAKEN)}.parquet"


@dataclass(frozen=True)
class _About:
    """The metadata of a slide's file."""

    line: Row | None = None
    coordinate_unit: str | None = None


@dataclass(frozen=True, eq=False)
class SlideEvidence:
    """columns (n each) by name; `row`, of the summary; `unit`, of the coordinates, where there are any."""

    path: Path
    columns: dict[str, NDArray[Any]]
    row: Row
    unit: str

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def explained_class(self) -> str:
        """The class whose evidence is shown: the answer, or without one the leading class."""
        return str(self.row.get("explained_class", self.row.get("prediction", "")))

    @property
    def answer_lines(self) -> list[str]:
        """For the head of a picture: the answer, its probability, the label where it is known, and the decision rule."""
        answer, leading = self.row.get("prediction"), self.explained_class
        if not answer:
            return []
        p, label, rule = (self.row.get(name) for name in (f"p_{leading}", "label", RULE))
        words = f"Answer: {answer}"
        words += f"; probability of {leading}: {p:.1%}" if isinstance(p, float) else ""
        words += f"; label: {label}" if label else ""
        return [words, f"Decision rule: {rule}"] if rule else [words]

    @property
    def coordinates(self) -> NDArray[np.float64] | None:
        """(n, 2) in `unit`; None where the cohort has none."""
        if "x" not in self.columns or "y" not in self.columns:
            return None
        return np.stack([self.columns["x"], self.columns["y"]], axis=1).astype(np.float64)

    def maps(self, asked: Sequence[str] = (), *, of: str | None = None, model: str = "") -> list[TileMap]:
        """The requested maps: factual, counterfactual, difference, or classes.

        By default the evidence of the answer, then attention weights and counterfactual attention weights where there are any.
        of: the class whose evidence is shown, by default `explained_class`. Where every class has attention of its own, it
        is that of
        this class.
        """
        shown = self.explained_class if of is None else of
        there = self._there(shown)
        evidence = [name for name, (_, kind, whose) in there.items() if kind == "evidence" and whose == shown]
        names = list(asked) or [*evidence, *(name for name in (FACTUAL, COUNTERFACTUAL) if name in there)]
        found = []
        for name in names:
            if name not in there:
                raise CarmilError(f"{self.path}: {unknown('map', name, there)}")
            values, kind, of = there[name]
            apart = self.apart if kind == "evidence" else None
            found.append(TileMap(of, values.astype(np.float64), kind, model, apart=apart))
        return found

    @property
    def signed(self) -> bool:
        """Whether `evidence_CLASS` is for and against. Of a model that has attention alone it is not, and is no map of
        evidence;
        files of 0.1.0 do not record it.
        """
        explainer = EXPLAINERS.get(str(self.row.get("explainer", "")))
        return explainer is None or explainer.signed

    @cached_property
    def apart(self) -> float | None:
        """How far the slide's tiles move the logits of two classes apart, see `logits_apart`."""
        return logits_apart([self.columns[f"evidence_{name}"] for name in self._classes])

    @property
    def _classes(self) -> list[str]:
        """The classes that the file has evidence of."""
        named = (name.removeprefix("p_") for name in self.row if name.startswith("p_"))
        return [name for name in named if f"evidence_{name}" in self.columns]

    def _there(self, answer: str) -> dict[str, tuple[NDArray[Any], Kind, str]]:
        """The maps of the file, by the names they are requested with. Maps of attention are of its weights a."""
        found: dict[str, tuple[NDArray[Any], Kind, str]] = {}
        a, a_cf = (self.columns.get(name, self.columns.get(f"{name}_{answer}")) for name in ("a", "a_cf"))
        whose = answer if "a" not in self.columns else ""
        if a is not None:
            found[FACTUAL] = (a, "factual", whose or FACTUAL)
        if a_cf is not None:
            found[COUNTERFACTUAL] = (a_cf, "counterfactual", whose or COUNTERFACTUAL)
        if a is not None and a_cf is not None:
            found[DIFFERENCE] = (a.astype(np.float64) - a_cf, "difference", whose or DIFFERENCE)
        for name in self._classes if self.signed else ():
            word = f"evidence_{name}" if name in found else name
            found[word] = (self.columns[f"evidence_{name}"], "evidence", name)
        return found


def write_slide_evidence(path: Path, bag: Bags, columns: Mapping[str, Tensor], row: Row) -> None:
    """Write the maps of one bag, (n) each by name, beside its coordinates where they are known."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays = {"instance": pa.array(range(int(bag.sizes[0])))}
    if bag.coordinates is not None:
        arrays |= {name: pa.array(bag.coordinates[:, i].numpy()) for i, name in enumerate(("x", "y"))}
    arrays |= {name: pa.array(values.float().numpy()) for name, values in columns.items()}
    about = json.dumps({"line": row, "coordinate_unit": bag.units[0]}).encode()
    with atomic_file(path) as aside:
        pq.write_table(pa.table(arrays).replace_schema_metadata({ABOUT: about}), aside)


def read_row(path: Path, slide: str) -> Row | None:
    """The slide's row in a file that is complete, for this slide and under this name; None if there is no such file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        row: Row = json.loads(pq.read_schema(path).metadata[ABOUT])["line"]
        return row if (row["slide"], row["file"]) == (slide, path.name) and "logits_apart" in row else None
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return None


def read_column(path: Path, name: str) -> NDArray[Any]:
    """One map (n) of a slide's file."""
    table = read_parquet(path, again := "remove it and run `carmil explain` again")
    with one_line_errors(path, again):
        return table[name].to_numpy().copy()


def read_slide_evidence(path: Path) -> SlideEvidence:
    if not path.is_file():
        raise CarmilError(f"{path}: there is no such evidence; `carmil explain` writes one file per slide")
    again = "run `carmil explain` again"
    with one_line_errors(path, again):
        table = read_parquet(path, again)
        columns = {name: table[name].to_numpy() for name in table.column_names}
        metadata = json.loads((table.schema.metadata or {})[ABOUT])
    about = parse_as(metadata, _About, str(path), again)
    for name, values in columns.items():
        if values.dtype.kind not in "biuf" and (name in ("x", "y") or name.startswith(("u", "a", "evidence"))):
            raise CarmilError(f"{path}: {name} holds {values.dtype}: expected numbers; {again}")
    if not columns or len(table.column_names) != len(columns):
        raise CarmilError(f"{path} has no columns, or two of one name: {again}")
    return SlideEvidence(path, columns, about.line or {}, about.coordinate_unit or "")


def maps_of(
    folder: Path, tiles: Tiles, asked: Sequence[str] = (), *, model: str = "", smoothing: Smoothing | None = None
) -> list[TileMap]:
    """The requested maps of a slide, one value per tile; see `SlideEvidence.maps`."""
    found = read_slide_evidence(evidence_file(folder, tiles.slide))
    rows = _rows_of_tiles(found, tiles)
    maps = [replace(one, values=np.append(one.values, np.nan)[rows]) for one in found.maps(asked, model=model)]
    return [one if smoothing is None else smoothing(one, tiles) for one in maps]


def answer_lines(folder: Path, slide: str, *, model: str = "") -> list[str]:
    """What the evidence in a folder explains: the answer with its probability, the label where it is known, and the rule."""
    lines = read_slide_evidence(evidence_file(folder, slide)).answer_lines
    return [f"{model}: {line}" if model else line for line in lines]


def _rows_of_tiles(found: SlideEvidence, tiles: Tiles) -> NDArray[np.int64]:
    """(n) the row of each tile, -1 where there is none: by coordinates where the file has them, else by order."""
    count, there = len(found), found.coordinates
    if there is None:
        if count != len(tiles):
            raise CarmilError(
                f"{found.path} has {count:,} rows without coordinates for {len(tiles):,} tiles: expected one row per tile"
            )
        return np.arange(count)
    if found.unit == "um":
        there /= tiles.slide_mpp
    if len(there) == len(tiles) and (np.abs(there - tiles.corners) <= NEAR).all():
        return np.arange(count)
    return _nearest(there, tiles, found.path)


def _nearest(there: NDArray[np.float64], tiles: Tiles, path: Path) -> NDArray[np.int64]:
    from scipy.spatial import cKDTree

    far, tile = cKDTree(tiles.corners).query(there, p=np.inf)
    lost = int((far > NEAR).sum())
    if lost:
        raise CarmilError(
            f"{path}: {lost:,} of {len(there):,} rows match no tile of {tiles.slide}: were the features made from these tiles?"
        )
    rows = np.full(len(tiles), -1)
    rows[tile] = np.arange(len(there))
    return rows
