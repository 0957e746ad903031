"""Outputs of both branches of a CAR model: attention scores and logits. n instances of all bags together, b bags, k classes."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.errors import CarmilError
from carmil.models.contract import BagModel
from carmil.models.pooling import Offsets
from carmil.runs.run import Run
from carmil.studies.subjects import open_run_store, own_subjects

AT_ONCE = 2**16  # instances in memory


@dataclass(frozen=True, eq=False)
class BranchOutputs:
    """u (n), F(u) (b, k); with CAR's branch u_cf (n) and F(u_cf) (b, k), else None. On the CPU."""

    scores: Tensor
    logits: Tensor
    counterfactual_scores: Tensor | None
    counterfactual_logits: Tensor | None
    offsets: Offsets

    @property
    def branch(self) -> tuple[Tensor, Tensor]:
        """u_cf and F(u_cf)."""
        if self.counterfactual_scores is None or self.counterfactual_logits is None:
            raise CarmilError("no counterfactual attention: expected a model with CAR's branch, such as 'car/abmil'")
        return self.counterfactual_scores, self.counterfactual_logits


@dataclass(frozen=True, eq=False)
class TestedModel:
    """A model of a run, with the bags it was tested on: their places in the cohort and labels (b)."""

    model: BagModel
    fold: int
    seed: int
    places: Tensor
    labels: Tensor


@torch.no_grad()
def predict_branches(model: BagModel, bags: Bags, chosen: Tensor | None = None) -> BranchOutputs:
    """Return the scores and logits of a model with one attention map for all bags, or the chosen ones (positions)."""
    first = next(model.parameters())
    columns: list[list[Tensor]] = [[], [], [], []]
    sizes = []
    model.eval()
    for part in bags.parts(AT_ONCE, chosen):
        seen = model(part.features.to(first.device).to(first), Offsets(part.offsets, first.device))
        if seen.scores is None or seen.scores.shape[-1] != 1:
            raise CarmilError(
                f"{type(model).__name__} does not have exactly one attention map: expected a model such as 'abmil'"
            )
        columns[0].append(seen.scores[:, 0].cpu())
        columns[1].append(seen.logits.cpu())
        if seen.counterfactual is not None:
            columns[2].append(seen.counterfactual.scores[:, 0, 0].cpu())
            columns[3].append(seen.counterfactual.logits[:, 0].cpu())
        sizes.append(part.sizes)
    u, logits, u_cf, cf_logits = (torch.cat(column) if column else None for column in columns)
    assert u is not None and logits is not None
    ends = torch.cat(sizes).cumsum(0)
    return BranchOutputs(u, logits, u_cf, cf_logits, Offsets(torch.cat([ends.new_zeros(1), ends])))


def models_of_run(run: Run, device: str) -> tuple[Bags, Iterator[TestedModel]]:
    """The cohort of a run, and its models one by one with the slides that each was tested on."""
    store = open_run_store(run)
    subjects, population = own_subjects(run, store), run.population(device)

    def each() -> Iterator[TestedModel]:
        for row, model in enumerate(run.models):
            mine = [one for one in subjects if row in one.models]
            yield TestedModel(
                population.member(row),
                model.fold,
                model.seed,
                torch.tensor([one.place for one in mine], dtype=torch.long),
                torch.tensor([run.classes.index(str(one.label)) for one in mine], dtype=torch.long),
            )

    return store.bags(), each()
