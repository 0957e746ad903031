"""Compare maps of the default model with the truth about tiles, single and smoothed.

    python benchmarks/defaults.py --data DATA --out OUT ...     # trains, and keeps weights in OUT
    python benchmarks/maps.py --data DATA --models OUT [--part val] [--explainers path,coalition,attention]

foci: AUPRC+ of the tumour slides, the mean over slides, after smoothing over 0, 1, 2 and 3 tiles; AUPRC of one ranking of all tiles
of all slides, those without tumour included; and the share of the tiles of normal slides that are drawn as "for tumour".
crc: AUPRC+ of the nuclei of patients with cancer. Of each model, and of the mean map of all. On validation slides unless `--part
test` is given: groups, smoothing and the default map are chosen there.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import cohorts
import numpy as np
import torch
import typer
from cohorts import Cohort
from sklearn.metrics import average_precision_score
from speed.script import run_script
from speed.timing import DEVICE

from carmil.bags.bags import Bags
from carmil.datasets.planting import PATCH
from carmil.evidence.coalition import coalition_evidence
from carmil.evidence.explainers import explain
from carmil.maps.tile_maps import Kind, TileMap
from carmil.models.contract import BagModel
from carmil.models.pooling import Offsets, bag_softmax
from carmil.runs.run import build, read_population
from carmil.runs.settings import Settings
from carmil.tables import ResultTable
from carmil.training.population import Member
from carmil.training.recipe import VALIDATION

POSITIVE = 1  # the class with tumour, or cancer
RADII = (0, 1, 2, 3)
EXPLAINERS = "attention,path,coalition.2,coalition.3,coalition.4,coalition.8,single"


def positive_map(method: str, model: BagModel, bags: Bags, device: str) -> np.ndarray:
    """The values (n) of all tiles for the positive class; of attention the weights."""
    name, _, size = method.partition(".")
    if name == "coalition" and size:
        parts = [
            coalition_evidence(model, x.to(device).float(), torch.tensor([0, len(x)]), size=int(size))
            for x in bags.features.split(bags.sizes.tolist())
        ]
        return torch.cat(parts)[:, POSITIVE].cpu().numpy()
    values = explain(model, bags, method)
    if method == "attention":
        values = bag_softmax(values, Offsets(bags.offsets))
    return values[:, min(POSITIVE, values.shape[1] - 1)].numpy()


def models_of(name: str, cohort: Cohort, folder: Path, device: str) -> list[BagModel]:
    settings = Settings.of({"bags": "-", "out": "-"}, where="defaults")
    members = [Member(seed=i) for i in range(cohorts.KEPT)]
    make = partial(build, settings, cohort.bags.width, cohort.target)
    population = read_population(folder / f"{name}.safetensors", make, members, device=device)
    return [population.member(row) for row in range(len(members))]


def explained_bags(cohort: Cohort, part: str) -> list[torch.Tensor]:
    """The bags that each of the kept models explains: validation or test bags of its fold."""
    roles, tested = cohort.roles(0)
    chosen = tested if part == "test" else roles == VALIDATION
    return [row.nonzero().squeeze(-1) for row in chosen.expand(cohorts.KEPT, -1)]


def smoothed(method: str, values: np.ndarray, bags: Bags, radius: float) -> list[TileMap]:
    """The map of every bag, smoothed over a radius in tiles."""
    kind: Kind = "factual" if method == "attention" else "evidence"
    maps = [
        TileMap("positive", part.numpy(), kind) for part in torch.from_numpy(values).double().split(bags.sizes.tolist())
    ]
    if bags.coordinates is None:
        return maps
    places = bags.coordinates.split(bags.sizes.tolist())
    return [one.smooth(at.numpy(), radius * PATCH, "") for one, at in zip(maps, places, strict=True)]


def figures(maps: list[TileMap], bags: Bags) -> tuple[float, float, float]:
    """AUPRC+ (mean over positive bags), AUPRC of one ranking of all tiles, share of tiles of negative bags drawn as "for"."""
    assert bags.labels is not None and bags.instance_labels is not None
    truth = [part.numpy() > 0 for part in bags.instance_labels.split(bags.sizes.tolist())]
    positive = bags.labels == POSITIVE
    each = [
        average_precision_score(here, one.values)
        for here, one, counts in zip(truth, maps, positive.tolist(), strict=True)
        if counts and 0 < here.sum() < len(here)
    ]
    together = average_precision_score(np.concatenate(truth), np.concatenate([one.values for one in maps]))
    coloured = [
        float((one.signs > 0).mean()) for one, counts in zip(maps, positive.tolist(), strict=True) if not counts
    ]
    return float(np.mean(each)), float(together), float(np.mean(coloured))


def rows_of(
    name: str, cohort: Cohort, models: list[BagModel], part: str, method: str, device: str
) -> Iterator[tuple[str, ...]]:
    chosen = explained_bags(cohort, part)
    maps = [positive_map(method, model, cohort.bags[rows], device) for model, rows in zip(models, chosen, strict=False)]
    given = [(f"{len(maps)} models, each", list(zip(maps, chosen, strict=False)))]
    if all(torch.equal(rows, chosen[0]) for rows in chosen):
        given.append((f"mean map of {len(maps)}", [(np.mean(maps, axis=0), chosen[0])]))
    for who, pairs in given:
        for radius in RADII if cohort.bags.coordinates is not None else (0,):
            found = [
                figures(smoothed(method, values, cohort.bags[rows], radius), cohort.bags[rows])
                for values, rows in pairs
            ]
            yield name, method, who, str(radius), *(f"{value:.3f}" for value in np.mean(found, axis=0))


def main(
    data: Annotated[Path, typer.Option()],
    models: Annotated[Path, typer.Option(help="Where defaults.py wrote its results.")],
    part: Annotated[str, typer.Option(help="val or test.")] = "val",
    cohorts_: Annotated[str, typer.Option("--cohorts")] = "foci,crc",
    explainers: str = EXPLAINERS,
    count: Annotated[int, typer.Option(help="Models that explain.")] = 3,
    device: str = DEVICE,
) -> None:
    rows: list[tuple[str, ...]] = []
    for name in cohorts_.split(","):
        cohort = cohorts.load(name, data)
        # Models of an official split are seeds, of which some are enough; others are folds, all of which are needed.
        trained = models_of(name, cohort, models, device)[: count if cohort.parts is not None else None]
        for method in explainers.split(","):
            for row in rows_of(name, cohort, trained, part, method, device):
                rows.append(row)
                print(*row, sep="\t", flush=True)
    heads = ("cohort", "map", "of", "radius", "AUPRC+", "AUPRC of one ranking", 'normal tiles "for"')
    print(ResultTable(f"Maps, {part} slides", heads, tuple(rows), names=4).markdown())


if __name__ == "__main__":
    run_script(main)
