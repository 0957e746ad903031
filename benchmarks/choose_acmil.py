"""Choose the number of ACMIL's maps in `carmil reproduce crc` by the validation loss of its folds.

    python benchmarks/choose_acmil.py --data DIR [--heads 5,3,2,1] [--masked 0.0,0.6] [--seeds 3] [--device cuda]

One population per choice: five folds and `seeds` initialisations, with the recipe of `carmil reproduce crc`. Test figures are
printed too, for the record; they have no part in the choice.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from speed.script import run_script
from speed.timing import DEVICE

from carmil.counterfactual import create_model
from carmil.evidence import bag_auc
from carmil.reproduce.crc import FOLDS, LEARNING_RATE, RECIPE, fold_roles, load_crc
from carmil.studies.agreement import map_auprc
from carmil.training.predict import predict
from carmil.training.protocol import GridPoint, train_protocol


def main(
    data: Annotated[Path, typer.Option(help="Folder with crc's features.npy and instances.csv.")],
    heads: str = "5,3,2,1",
    masked: str = "0.0",
    seeds: int = 3,
    model: str = "acmil",
    epochs: int = RECIPE.epochs,
    device: str = DEVICE,
) -> None:
    bags = load_crc(data)
    roles, tested = fold_roles(bags.labels, 0)
    for count, share in product(map(int, heads.split(",")), map(float, masked.split(","))):

        def build(count: int = count, share: float = share):
            return create_model(model, bags.width, 2, heads=count, masked_share=share)

        candidates = train_protocol(
            build,
            bags,
            roles,
            recipe=replace(RECIPE, epochs=epochs),
            seeds=range(seeds),
            grid=[GridPoint(LEARNING_RATE)],
            device=device,
        )
        loss = candidates.history.validation.nan_to_num(torch.inf).amin(0).mean()
        trained = candidates.select().population
        probabilities = predict(trained, bags).probabilities
        figures: dict[str, list[float]] = {"AUC": [], "attention": [], "path": []}
        for row in range(len(trained)):
            test = tested[row % FOLDS]
            figures["AUC"].append(bag_auc(probabilities[row][test], bags.labels[test]))
            for method in ("attention", "path"):
                figures[method].append(map_auprc(trained.member(row), bags, test, method))
        means = ", ".join(f"{name} {100 * torch.tensor(values).mean():.1f}" for name, values in figures.items())
        print(f"{count} maps, masked {share:g}: validation loss {loss:.4f}; test {means}", flush=True)


if __name__ == "__main__":
    run_script(main)
