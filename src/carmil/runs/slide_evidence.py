"""The evidence file of a slide: one row per instance, with the slide's row of the summary in the metadata. n instances."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.errors import CarmilError, unknown
from carmil.evidence.explainers import EXPLAINERS
from carmil.files import atomic_file, safe_name
from carmil.maps.tile_maps import COUNTERFACTUAL, DIFFERENCE, FACTUAL, Kind, Smoothing, TileMap, logits_apart
from carmil.slides.slide import Tiles
from carmil.targets.target import FOR_AND_AGAINST, EvidenceWords
from carmil.untrusted import one_line_errors, parse_as, read_parquet
from carmil.words import probability_text

Row = dict[str, float | str | bool | None]  # one row of summary.csv, by column
NEAR = 0.75  # tolerance in level-0 pixels: stores use float32, and other tools round coordinates
TAKEN = ("summary",)  # file names that are not available for slides
RULE = "answer_rule"  # the key of the decision rule in a slide's row
ABOUT = b"carmil"  # the metadata key of the slide's row


def evidence_file(folder: Path, slide: str) -> Path:
    """Return the path of the evidence of a slide in a folder of `carmil explain`."""
    distinct = folder / f"{safe_name(slide, taken=(*TAKEN, slide))}.parquet"  # in case another slide has a similar name
    return distinct if distinct.is_file() else folder / f"{safe_name(slide, taken=TAKEN)}.parquet"


@dataclass(frozen=True)
class _About:
    """The metadata of a slide's file. turning: by output, see `TileMap`."""

    line: Row | None = None
    coordinate_unit: str | None = None
    words: EvidenceWords = FOR_AND_AGAINST
    turning: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class SlideEvidence:
    """columns (n each) by name; `row` of the summary; `unit` of the coordinates, if there are any; words: the terms for
    evidence.

    turning: how far the outputs must move for another answer, by output; files of earlier versions do not have it.
    """

    path: Path
    columns: dict[str, NDArray[Any]]
    row: Row
    unit: str
    words: EvidenceWords = FOR_AND_AGAINST
    turning: Mapping[str, float | None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def explained_class(self) -> str:
        """Return the class whose evidence is shown: the answer or, if there is none, the leading class."""
        return str(self.row.get("explained_class", self.row.get("prediction", "")))

    @property
    def answer_lines(self) -> list[str]:
        """Return lines for the head of a picture: the answer, its probability, the label if known, and the decision rule."""
        answer, leading = self.row.get("prediction"), self.explained_class
        if not answer:
            return []
        p, label, rule = (self.row.get(name) for name in (f"p_{leading}", "label", RULE))
        words = f"Answer: {answer}"
        value = self.row.get("prediction_value")
        words += (
            f"; probability of {leading}: {probability_text(p)}"
            if isinstance(p, float)
            else f"; {value}"
            if value
            else ""
        )
        words += f"; label: {label}" if label else ""
        return [words, f"Decision rule: {rule}"] if rule else [words]

    @property
    def coordinates(self) -> NDArray[np.float64] | None:
        """Return the coordinates (n, 2) in `unit`; None if the cohort has none."""
        if "x" not in self.columns or "y" not in self.columns:
            return None
        return np.stack([self.columns["x"], self.columns["y"]], axis=1).astype(np.float64)

    def maps(self, asked: Sequence[str] = (), *, of: str | None = None, model: str = "") -> list[TileMap]:
        """Return the requested maps: factual, counterfactual, difference, or classes.

        By default these are the evidence of the answer, then attention weights and counterfactual attention weights
        if there are any. of: the class whose evidence is shown, by default `explained_class`. If each class has an
        attention map of its own, the map of this class is taken.
        """
        shown_class = self.explained_class if of is None else of
        available = self._available_maps(shown_class)
        evidence = [name for name, (_, kind, whose) in available.items() if kind == "evidence" and whose == shown_class]
        names = list(asked) or [*evidence, *(name for name in (FACTUAL, COUNTERFACTUAL) if name in available)]
        tile_maps = []
        for name in names:
            if name not in available:
                raise CarmilError(f"{self.path}: {unknown('map', name, available)}")
            values, kind, of = available[name]
            one = TileMap(of, values.astype(np.float64), kind, model, words=self.words)
            if kind == "evidence":
                one = replace(one, apart=self.apart, turning=self.turning.get(of))
            tile_maps.append(one)
        return tile_maps

    @property
    def signed(self) -> bool:
        """Return whether `evidence_CLASS` is signed, for and against.

        A model that has attention only has unsigned values, which are not a map of evidence; files of 0.1.0 do not
        record this.
        """
        explainer = EXPLAINERS.get(str(self.row.get("explainer", "")))
        return explainer is None or explainer.signed

    @cached_property
    def apart(self) -> float | None:
        """Return how far the slide's tiles move the logits of two classes apart, see `logits_apart`; None for other targets."""
        if not self.words.rivals:
            return None
        return logits_apart([self.columns[f"evidence_{name}"] for name in self._classes])

    @property
    def _classes(self) -> list[str]:
        """Return the classes, or other outputs, for which the file has evidence."""
        return [name.removeprefix("evidence_") for name in self.columns if name.startswith("evidence_")]

    def _available_maps(self, answer: str) -> dict[str, tuple[NDArray[Any], Kind, str]]:
        """Return the maps of the file, by the names they are requested with. Attention maps show the attention weights a."""
        available: dict[str, tuple[NDArray[Any], Kind, str]] = {}
        a, a_cf = (self.columns.get(name, self.columns.get(f"{name}_{answer}")) for name in ("a", "a_cf"))
        whose = answer if "a" not in self.columns else ""
        if a is not None:
            available[FACTUAL] = (a, "factual", whose or FACTUAL)
        if a_cf is not None:
            available[COUNTERFACTUAL] = (a_cf, "counterfactual", whose or COUNTERFACTUAL)
        if a is not None and a_cf is not None:
            available[DIFFERENCE] = (a.astype(np.float64) - a_cf, "difference", whose or DIFFERENCE)
        for name in self._classes if self.signed else ():
            word = f"evidence_{name}" if name in available else name
            available[word] = (self.columns[f"evidence_{name}"], "evidence", name)
        return available


def write_slide_evidence(
    path: Path,
    bag: Bags,
    columns: Mapping[str, Tensor],
    row: Row,
    words: EvidenceWords = FOR_AND_AGAINST,
    turning: Mapping[str, float | None] | None = None,
) -> None:
    """Write the maps of one bag, (n) each by name, and its coordinates if they are known. turning: see `SlideEvidence`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays = {"instance": pa.array(range(int(bag.sizes[0])))}
    if bag.coordinates is not None:
        arrays |= {name: pa.array(bag.coordinates[:, i].numpy()) for i, name in enumerate(("x", "y"))}
    arrays |= {name: pa.array(values.float().numpy()) for name, values in columns.items()}
    facts = {"line": row, "coordinate_unit": bag.units[0], "turning": dict(turning or {})} | (
        {} if words == FOR_AND_AGAINST else {"words": asdict(words)}
    )
    about = json.dumps(facts).encode()
    with atomic_file(path) as aside:
        pq.write_table(pa.table(arrays).replace_schema_metadata({ABOUT: about}), aside)


def read_row(path: Path, slide: str) -> Row | None:
    """Read the slide's row from its file; None if there is no complete file of this slide under this name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        row: Row = json.loads(pq.read_schema(path).metadata[ABOUT])["line"]
        return row if (row["slide"], row["file"]) == (slide, path.name) and "logits_apart" in row else None
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return None


def read_column(path: Path, name: str) -> NDArray[Any]:
    """Read one map (n) of a slide's file."""
    table = read_parquet(path, again := "remove it and run `carmil explain` again")
    with one_line_errors(path, again):
        return table[name].to_numpy().copy()


def read_slide_evidence(path: Path) -> SlideEvidence:
    if not path.is_file():
        raise CarmilError(
            f"{path} does not exist: expected the evidence of the slide; `carmil explain` writes one file per slide"
        )
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
        raise CarmilError(f"{path} has no columns, or two with the same name: {again}")
    return SlideEvidence(path, columns, about.line or {}, about.coordinate_unit or "", about.words, about.turning)


def maps_of(
    folder: Path, tiles: Tiles, asked: Sequence[str] = (), *, model: str = "", smoothing: Smoothing | None = None
) -> list[TileMap]:
    """Return the requested maps of a slide, one value per tile; see `SlideEvidence.maps`."""
    evidence = read_slide_evidence(evidence_file(folder, tiles.slide))
    rows = _rows_of_tiles(evidence, tiles)
    maps = [replace(one, values=np.append(one.values, np.nan)[rows]) for one in evidence.maps(asked, model=model)]
    return [one if smoothing is None else smoothing(one, tiles) for one in maps]


def check_maps(folder: Path, slides: Sequence[str], asked: Sequence[str]) -> None:
    """Refuse requested maps that a folder does not have, by its first readable slide: all slides have the maps of the run."""
    for slide in slides:
        try:
            evidence = read_slide_evidence(evidence_file(folder, slide))
        except CarmilError:
            continue  # reported when the slide is drawn
        evidence.maps(asked)
        return


def answer_lines(folder: Path, slide: str, *, model: str = "") -> list[str]:
    """Return lines about the answer that the evidence in a folder explains: probability, label if known, and rule."""
    lines = read_slide_evidence(evidence_file(folder, slide)).answer_lines
    return [f"{model}: {line}" if model else line for line in lines]


def _rows_of_tiles(found: SlideEvidence, tiles: Tiles) -> NDArray[np.int64]:
    """Return the row of each tile (n), -1 if it has none: by coordinates if the file has them, else by order."""
    count, coordinates = len(found), found.coordinates
    if coordinates is None:
        if count != len(tiles):
            raise CarmilError(
                f"{found.path} has {count:,} rows without coordinates for {len(tiles):,} tiles: expected one row per tile"
            )
        return np.arange(count)
    if found.unit == "um":
        coordinates /= tiles.slide_mpp
    if len(coordinates) == len(tiles) and (np.abs(coordinates - tiles.corners) <= NEAR).all():
        return np.arange(count)
    far, tile = cKDTree(tiles.corners).query(coordinates, p=np.inf)
    lost = int((far > NEAR).sum())
    if lost:
        raise CarmilError(
            f"{found.path}: {lost:,} of {len(coordinates):,} rows match no tile of {tiles.slide}: expected the tiles "
            "that the features were made from"
        )
    rows = np.full(len(tiles), -1)
    rows[tile] = np.arange(len(coordinates))
    return rows
