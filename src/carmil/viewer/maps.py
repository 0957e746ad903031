"""The maps of a case: attention weights, counterfactual attention weights, their difference, and evidence.

n instances of one case, k classes or other outputs. `of` is the number of an output.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carmil.errors import CarmilError, unknown
from carmil.evidence.explainers import EXPLAINERS
from carmil.evidence.faithfulness import deletion_logits, deletion_orders
from carmil.explanations.bag_evidence import BagEvidence, explain_bag
from carmil.maps.tile_maps import Kind, TileMap, logits_apart
from carmil.models.contract import Ability
from carmil.viewer.cases import RunCases
from carmil.viewer.limits import BoundedCache

KEPT = 2**27  # bytes of maps
RANDOM_ORDERS = 5
QUICK, SLOW = 100, 20  # steps of a deletion curve if one pass computes all of them, and if each needs a pass


@dataclass(frozen=True)
class MapKind:
    """diverging: the values have a sign; of_class: every one of several classes has its own map."""

    name: str
    title: str
    diverging: bool
    of_class: bool


@dataclass(frozen=True, eq=False)
class MapResponse:
    """The values (n) of a map, its limits low and high, their meaning as text, and their unit (empty if the meaning names it).

    negligible: why the map is drawn as 0, faint: why its largest value fills only the share `fill` of the colours; both
    are empty otherwise. even: all tiles have similar values, so that there are no ranks. caution: the one that
    attention is nearly uniform; empty if it is not.
    """

    values: NDArray[np.float64]
    low: float
    high: float
    diverging: bool
    of: str
    unit: str
    negligible: str
    faint: str
    fill: float
    even: bool
    caution: str


def kinds_of(run: RunCases) -> list[MapKind]:
    """Return the maps that the run's models have, the most informative last."""
    abilities, explainer = run.model.abilities, EXPLAINERS[run.method]
    own = Ability.MAP_PER_CLASS in abilities and len(run.outputs) > 1
    kinds = []
    if Ability.ATTENDS in abilities:
        kinds.append(MapKind("factual", "attention weight", diverging=False, of_class=own))
    if Ability.COUNTERFACTUAL_MAP in abilities:
        kinds.append(MapKind("counterfactual", "counterfactual attention weight", diverging=False, of_class=own))
        kinds.append(MapKind("difference", "attention weight minus counterfactual", diverging=True, of_class=own))
    title = "evidence" if explainer.signed else f"evidence ({run.method})"
    return [*kinds, MapKind("evidence", title, diverging=explainer.signed, of_class=explainer.class_conditional)]


class CaseMaps:
    """Maps of the cases; those requested most recently are in memory."""

    def __init__(self, run: RunCases, *, share: float = 1.0) -> None:
        self.run = run
        self.kinds = {kind.name: kind for kind in kinds_of(run)}
        self._cache: BoundedCache[BagEvidence] = BoundedCache(int(KEPT * share), _bytes)

    @property
    def says(self) -> str:
        """Describe the values of the evidence."""
        return EXPLAINERS[self.run.method].describe(self.run.target)

    def evidence_of(self, number: int) -> BagEvidence:
        """Return the maps of a case from the run's folder, or compute them."""
        evidence = self._cache.get(number)
        if evidence is None:
            run = self.run
            evidence = self._stored(number) or explain_bag(
                run.members(number), run.bag(number), (run.method,), run.outputs, searched=False
            )
            self._cache.put(number, evidence)
        return evidence

    def _stored(self, number: int) -> BagEvidence | None:
        """Return the maps that `carmil explain` wrote for the case; None if there are none, or they do not fit the case."""
        run = self.run
        if run.evidence is None or run.evidence.summary.evidence != run.method:
            return None
        try:
            columns = run.evidence.slide(run.cases[number].slide).columns
        except CarmilError:
            return None
        if any(len(columns.get(f"evidence_{name}", ())) != run.size(number) for name in run.outputs):
            return None
        return BagEvidence({name: torch.from_numpy(values.copy()) for name, values in columns.items()})

    def shown(self, number: int, name: str, of: int) -> MapResponse:
        """Return the map `name`, for class `of` if every class has its own map."""
        if name not in self.kinds:
            raise CarmilError(unknown("map", name, self.kinds))
        kind, one = self.kinds[name], self._tile_map(number, name, of)
        values = one.values
        largest = float(np.abs(values).max()) / ((one.fill or 1.0) if kind.diverging else 1.0)
        low = -largest if kind.diverging else min(0.0, float(values.min()))
        words, unit = self._words(one, kind, self.run.outputs[of]), self._unit(kind)
        negligible = one.why_negligible if kind.diverging else ""
        faint, fill = (one.why_faint, one.fill) if kind.diverging else ("", 1.0)
        return MapResponse(
            values, low, largest, kind.diverging, words, unit, negligible, faint, fill, one.even, one.why_uniform
        )

    def negligible(self, number: int, of: int) -> str:
        """Return why the evidence of a class is negligible on this slide; empty if it is not."""
        return self.shown(number, "evidence", of).negligible

    def attention_caution(self, number: int, of: int) -> str:
        """Return the caution that the attention on this slide is nearly uniform; empty if it is not, or without attention."""
        return self._tile_map(number, "factual", of).why_uniform if "factual" in self.kinds else ""

    def _tile_map(self, number: int, name: str, of: int) -> TileMap:
        """Return the map in the form that drawings and reports use, so that negligible maps are judged by the same rule
        everywhere.
        """
        values = self.values(number, name, of).double().nan_to_num().numpy()
        if name != "evidence":
            return TileMap(name, values, cast("Kind", name))
        every = [self.evidence(number, c).double().nan_to_num().numpy() for c in range(len(self.run.outputs))]
        case, target = self.run.cases[number], self.run.target
        turning = case.decision.turning(case.predicted, of)
        apart = logits_apart(every) if target.words.rivals else None
        return TileMap(target.outputs[of], values, "evidence", apart=apart, turning=turning, words=target.words)

    def evidence(self, number: int, of: int) -> Tensor:
        """Return the evidence (n) of class `of`."""
        return self.evidence_of(number).columns[f"evidence_{self.run.outputs[of]}"]

    def top(self, number: int, of: int, count: int) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """Return the instances with the largest and the smallest evidence, with its value; none if the evidence is
        negligible.

        Instances that are neither for nor against (see `TileMap.signs`) are left out. Unsigned evidence has no
        refuting instances.
        """
        if self.negligible(number, of):
            return [], []
        one = self._tile_map(number, "evidence", of)
        order = np.argsort(-one.values, kind="stable").tolist()
        highest, lowest = ([(j, float(one.values[j])) for j in some[:count]] for some in (order, order[::-1]))
        if not EXPLAINERS[self.run.method].signed:
            return highest, []
        return [pair for pair in highest if one.signs[pair[0]] > 0], [pair for pair in lowest if one.signs[pair[0]] < 0]

    def deletion(self, number: int, of: int, *, quick: bool) -> dict[str, list[float]]:
        """Return the quantity of an output (see `Target`) by the share of instances removed: those with the highest
        evidence first, those with the lowest first, or at random.

        The order is that of the displayed evidence; the quantity is the mean over the models.

        quick: instances do not depend on their bag; otherwise every step is a pass through the model, and there
        are fewer steps.
        """
        steps, orders = (QUICK, RANDOM_ORDERS) if quick else (SLOW, 1)
        bag, evidence = self.run.bag(number), self.evidence(number, of).nan_to_num().unsqueeze(0)
        order, each = deletion_orders(evidence, random_orders=orders), []
        for model in self.run.members(number):
            outputs = deletion_logits(model, bag, order, steps=steps)[:, 0]  # (2 + orders, steps + 1, k)
            predicted = model.link.predictions(outputs.double()).detach().numpy()
            each.append(self.run.target.quantities(predicted)[..., of])
        most, least, *random = np.mean(each, axis=0)
        return {
            "share": [step / steps for step in range(steps + 1)],
            "most": most.tolist(),
            "least": least.tolist(),
            "random": np.mean(random, axis=0).tolist(),
        }

    def values(self, number: int, name: str, of: int) -> Tensor:
        """Return the map `name` (n), for class `of` if every class has its own map."""
        if name == "evidence":
            return self.evidence(number, of)
        columns = self.evidence_of(number).columns
        own = f"_{self.run.outputs[of]}" if Ability.MAP_PER_CLASS in self.run.model.abilities else ""
        if name == "difference":
            return columns[f"a{own}"] - columns[f"a_cf{own}"]
        return columns[f"{'a' if name == 'factual' else 'a_cf'}{own}"]

    def _words(self, one: TileMap, kind: MapKind, of: str) -> str:
        if kind.name != "evidence":
            return one.meaning
        explainer, target = EXPLAINERS[self.run.method], self.run.target
        described = explainer.describe(target, of if explainer.class_conditional else "")
        return f"{target.words.colours}: {described}" if explainer.signed else described

    def _unit(self, kind: MapKind) -> str:
        return EXPLAINERS[self.run.method].unit(self.run.target) if kind.name == "evidence" else ""


def _bytes(found: BagEvidence) -> int:
    return sum(column.numel() * column.element_size() for column in found.columns.values())
