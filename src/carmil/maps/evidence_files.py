"""A slide's file of `carmil explain`, read back as maps. n instances."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from carmil.errors import CarmilError, unknown
from carmil.evidence.explainers import EXPLAINERS
from carmil.files import safe_name
from carmil.maps.tile_maps import COUNTERFACTUAL, DIFFERENCE, FACTUAL, Kind, TileMap, logits_apart
from carmil.untrusted import one_line_errors, parsed, read_parquet

TAKEN = ("summary",)  # names of files that no slide's may have
RULE = "answer_rule"  # where a slide's line has the decision rule in words
ABOUT = b"carmil"  # where a slide's line stands in the metadata of its file


def evidence_file(folder: Path, slide: str) -> Path:
    """Where `carmil explain` has put the evidence of a slide, or would."""
    distinct = folder / f"{safe_name(slide, taken=(*TAKEN, slide))}.parquet"  # another slide has nearly the same name
    return distinct if distinct.is_file() else folder / f"{safe_name(slide, taken=TAKEN)}.parquet"


class _About(TypedDict):
    """What a slide's file says besides its columns."""

    line: NotRequired[dict[str, float | str | bool | None] | None]
    coordinate_unit: NotRequired[str | None]


@dataclass(frozen=True, eq=False)
class SlideEvidence:
    """columns (n each) by name; `line`, what is said of the slide; `unit`, of the coordinates, where there are any."""

    path: Path
    columns: dict[str, NDArray[Any]]
    line: dict[str, Any]
    unit: str

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def explained_class(self) -> str:
        """The class whose evidence is shown: the answer, or where there is none the class that leads."""
        return str(self.line.get("explained_class", self.line.get("prediction", "")))

    @property
    def answer_lines(self) -> list[str]:
        """For the head of a picture: the answer, its probability, the label where it is known, and the decision rule."""
        answer, leading = self.line.get("prediction"), self.explained_class
        if not answer:
            return []
        p, label, rule = (self.line.get(name) for name in (f"p_{leading}", "label", RULE))
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
        """Those that are asked for: factual, counterfactual, difference, or classes.

        By default the evidence of the answer, then attention weights and counterfactual attention weights where there are any.
        of: the class whose evidence is shown, by default `explained_class`. Where every class has attention of its own, it is
        that of this class.
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
        """Whether `evidence_CLASS` speaks for and against. That of a model which has attention alone does not, and is no map of
        evidence; files of 0.1.0 do not say."""
        explainer = EXPLAINERS.get(str(self.line.get("explainer", "")))
        return explainer is None or explainer.signed

    @cached_property
    def apart(self) -> float | None:
        """How far the slide's tiles move the logits of two classes apart, see `logits_apart`."""
        return logits_apart([self.columns[f"evidence_{name}"] for name in self._classes])

    @property
    def _classes(self) -> list[str]:
        """The classes that the file has evidence of."""
        named = (name.removeprefix("p_") for name in self.line if name.startswith("p_"))
        return [name for name in named if f"evidence_{name}" in self.columns]

    def _there(self, answer: str) -> dict[str, tuple[NDArray[Any], Kind, str]]:
        """What the file has, by the words one asks with. Maps of attention are of its weights a."""
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


def read_evidence(path: Path) -> SlideEvidence:
    if not path.is_file():
        raise CarmilError(f"{path}: there is no such evidence; `carmil explain` writes it, a file a slide")
    again = "run `carmil explain` again"
    with one_line_errors(path, again):
        table = read_parquet(path, again)
        columns = {name: table[name].to_numpy() for name in table.column_names}
        told = json.loads((table.schema.metadata or {})[ABOUT])
    parsed(told, _About, str(path), again)
    line: dict[str, Any] = told.get("line") or {}
    for name, values in columns.items():
        if values.dtype.kind not in "biuf" and (name in ("x", "y") or name.startswith(("u", "a", "evidence"))):
            raise CarmilError(f"{path}: {name} holds {values.dtype}: expected numbers; {again}")
    if not columns or len(table.column_names) != len(columns):
        raise CarmilError(f"{path} has no columns, or two of one name: {again}")
    return SlideEvidence(path, columns, line, str(told.get("coordinate_unit") or ""))
