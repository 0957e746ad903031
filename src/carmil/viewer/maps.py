"""The maps of a case: attention weights, counterfactual ones, their difference, and evidence of a class.

n instances of one case, k classes.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carmil.errors import CarmilError, unknown
from carmil.evidence.explainers import EXPLAINERS
from carmil.evidence.faithfulness import faithfulness_of
from carmil.maps.tile_maps import Kind, TileMap, logits_apart
from carmil.models.contract import Ability
from carmil.studies.bag_evidence import BagEvidence, explain_bag
from carmil.viewer.cases import RunCases
from carmil.viewer.limits import BoundedCache

KEPT = 2**27  # bytes of maps
RANDOM_ORDERS = 5
QUICK, SLOW = 100, 20  # steps of a deletion curve: where one pass is enough for all of them, and where each is a pass


@dataclass(frozen=True)
class MapKind:
    """diverging: the values have a sign; of_class: every class has its own map."""

    name: str
    title: str
    diverging: bool
    of_class: bool


@dataclass(frozen=True, eq=False)
class MapResponse:
    """values (n) between low and high, and their meaning in words.

    negligible: why the map is drawn as 0, empty where it is not; even: no tile stands out, so that there are no ranks.
    """

    values: NDArray[np.float64]
    low: float
    high: float
    diverging: bool
    of: str
    negligible: str
    even: bool


@dataclass(frozen=True, eq=False)
class DeletionCurve:
    """p of a class when a share of the instances is removed: the most supporting first, the least, or at random."""

    share: list[float]
    most: list[float]
    least: list[float]
    random: list[float]


def kinds_of(run: RunCases) -> list[MapKind]:
    """The maps that the run's models have, the most informative last."""
    abilities, explainer = run.model.abilities, EXPLAINERS[run.method]
    own = Ability.MAP_PER_CLASS in abilities
    found = []
    if Ability.ATTENDS in abilities:
        found.append(MapKind("factual", "attention weight", diverging=False, of_class=own))
    if Ability.COUNTERFACTUAL_MAP in abilities:
        found.append(MapKind("counterfactual", "counterfactual attention weight", diverging=False, of_class=own))
        found.append(MapKind("difference", "attention weight minus counterfactual", diverging=True, of_class=own))
    title = "evidence" if explainer.signed else f"evidence ({run.method})"
    return [*found, MapKind("evidence", title, diverging=explainer.signed, of_class=explainer.class_conditional)]


class CaseMaps:
    """Maps of the cases, those requested last kept in memory."""

    def __init__(self, run: RunCases) -> None:
        self.run = run
        self.kinds = {kind.name: kind for kind in kinds_of(run)}
        self._cache: BoundedCache[BagEvidence] = BoundedCache(KEPT, _bytes)

    def evidence_of(self, number: int) -> BagEvidence:
        """The maps of a case: as the run holds them, else computed."""
        found = self._cache.get(number)
        if found is None:
            run = self.run
            found = self._stored(number) or explain_bag(
                run.members(number), run.bag(number), (run.method,), run.classes, searched=False
            )
            self._cache.put(number, found)
        return found

    def _stored(self, number: int) -> BagEvidence | None:
        """What `carmil explain` wrote of the case; None if there is nothing, or it does not fit the case."""
        run = self.run
        if run.evidence is None or run.evidence.summary.evidence != run.method:
            return None
        try:
            columns = run.evidence.slide(run.cases[number].slide).columns
        except CarmilError:
            return None
        if any(len(columns.get(f"evidence_{name}", ())) != run.size(number) for name in run.classes):
            return None
        return BagEvidence({name: torch.from_numpy(values.copy()) for name, values in columns.items()})

    def shown(self, number: int, name: str, of: int) -> MapResponse:
        """The map `name` of class `of`, which some maps do not depend on."""
        if name not in self.kinds:
            raise CarmilError(unknown("map", name, self.kinds))
        kind, one = self.kinds[name], self._tile_map(number, name, of)
        values = one.values
        largest = float(np.abs(values).max())
        low = -largest if kind.diverging else min(0.0, float(values.min()))
        words = self._words(kind, self.run.classes[of])
        return MapResponse(values, low, largest, kind.diverging, words, self._why_negligible(kind, one), one.even)

    def negligible(self, number: int, of: int) -> str:
        """Why the evidence of a class is negligible on this slide; empty where it is not."""
        return self._why_negligible(self.kinds["evidence"], self._tile_map(number, "evidence", of))

    def _why_negligible(self, kind: MapKind, one: TileMap) -> str:
        return one.why_negligible if kind.diverging else ""

    def _tile_map(self, number: int, name: str, of: int) -> TileMap:
        """The map as drawings and reports have it, so that one rule judges it everywhere."""
        values = self.values(number, name, of).double().nan_to_num().numpy()
        if name != "evidence":
            return TileMap(name, values, cast("Kind", name))
        every = [self.evidence(number, c).double().nan_to_num().numpy() for c in range(len(self.run.classes))]
        return TileMap(self.run.classes[of], values, "evidence", apart=logits_apart(every))

    def evidence(self, number: int, of: int) -> Tensor:
        """(n)"""
        return self.evidence_of(number).columns[f"evidence_{self.run.classes[of]}"]

    def top(self, number: int, of: int, count: int) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """Instances with the largest and the smallest evidence, and its value; none of negligible evidence.

        Instances that are neither for nor against (see `TileMap.signs`) are left out. Of evidence without a sign nothing refutes.
        """
        if self.negligible(number, of):
            return [], []
        one = self._tile_map(number, "evidence", of)
        order = np.argsort(-one.values, kind="stable").tolist()
        highest, lowest = ([(j, float(one.values[j])) for j in some[:count]] for some in (order, order[::-1]))
        if not EXPLAINERS[self.run.method].signed:
            return highest, []
        return [pair for pair in highest if one.signs[pair[0]] > 0], [pair for pair in lowest if one.signs[pair[0]] < 0]

    def deletion(self, number: int, of: int, *, quick: bool) -> DeletionCurve:
        """Remove instances in the order of the evidence that is shown; p is the mean over the models.

        quick: instances do not depend on their bag; otherwise every step is a pass through the model, and there are fewer
        steps.
        """
        steps, orders = (QUICK, RANDOM_ORDERS) if quick else (SLOW, 1)
        bag, shown = self.run.bag(number), self.evidence(number, of).nan_to_num().unsqueeze(0)
        each = [
            faithfulness_of(model, bag, shown, torch.tensor([of]), steps=steps, random_orders=orders)
            for model in self.run.members(number)
        ]

        def mean(curves: list[Tensor]) -> list[float]:
            return torch.stack(curves).double().flatten(0, -2).mean(0).tolist()

        return DeletionCurve(
            [step / steps for step in range(steps + 1)],
            mean([one.most_first for one in each]),
            mean([one.least_first for one in each]),
            mean([one.at_random for one in each]),
        )

    def values(self, number: int, name: str, of: int) -> Tensor:
        """(n) of the map `name`, for class `of` where every class has its own."""
        if name == "evidence":
            return self.evidence(number, of)
        columns = self.evidence_of(number).columns
        own = f"_{self.run.classes[of]}" if self.kinds[name].of_class else ""
        if name == "difference":
            return columns[f"a{own}"] - columns[f"a_cf{own}"]
        return columns[f"{'a' if name == 'factual' else 'a_cf'}{own}"]

    def _words(self, kind: MapKind, of: str) -> str:
        match kind.name:
            case "factual":
                return f"attention weight{f' for {of}' if kind.of_class else ''}: after the softmax, sums to one on the slide"
            case "counterfactual":
                whose = f" for {of}" if kind.of_class else ""
                return (
                    f"counterfactual attention weight{whose}: where the answer would change; sums to one on the slide"
                )
            case "difference":
                return "positive: more attention for this answer; negative: more attention for another answer"
        says = EXPLAINERS[self.run.method].description
        return f"for (positive) and against (negative) {of}: {says}" if kind.diverging else f"{of}: {says}"


def _bytes(found: BagEvidence) -> int:
    return sum(column.numel() * column.element_size() for column in found.columns.values())
