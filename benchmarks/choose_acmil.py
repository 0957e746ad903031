"""Choose the number of ACMIL's maps in `carmil reproduce crc` by the validation loss of its folds.

    python benchmarks/choose_acmil.py --data DIR [--heads 5,3,2,1] [--masked 0.0,0.6] [--seeds 3] [--device cuda]

One run per choice, kept in --out: five folds and `seeds` initialisations with the settings of `carmil reproduce crc`. Test
figures are printed too, for the record; they have no part in the choice.
"""

from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from speed.script import run_script
from speed.timing import DEVICE

from carmil.reproduce.crc import PROTOCOL, crc_cohort
from carmil.reproduce.method_runs import train_model
from carmil.reproduce.recipes import Request

FIGURES = {"AUC": "auc", "attention": "auprc_attention", "path": "auprc_path"}


def main(
    data: Annotated[Path, typer.Option(help="Folder with crc's features.npy and instances.csv.")],
    heads: str = "5,3,2,1",
    masked: str = "0.0",
    seeds: int = 3,
    model: str = "acmil",
    epochs: int = PROTOCOL.epochs,
    device: str = DEVICE,
    out: Path = Path("choose_acmil"),
) -> None:
    request = Request(out=out, shared=out, device=device)
    cohort = crc_cohort(data, request, epochs=epochs, seeds=seeds)
    for count, share in product(map(int, heads.split(",")), map(float, masked.split(","))):
        run = train_model(cohort, model, request, options={"heads": count, "masked_share": share})
        loss = np.nanmin(np.array(run.history().validation, dtype=float), axis=0).mean()
        means = ", ".join(f"{name} {100 * run.metrics.summary[key].mean:.1f}" for name, key in FIGURES.items())
        print(f"{count} maps, masked {share:g}: validation loss {loss:.4f}; test {means}", flush=True)


if __name__ == "__main__":
    run_script(main)
