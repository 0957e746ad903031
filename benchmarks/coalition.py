"""Time path evidence and coalition evidence of one slide of 10,000 x 1024 tiles, all classes, one model.

    python benchmarks/coalition.py [--device cuda] [--classes 2] [--models abmil.gated,car/abmil.gated]

The features are on the device before timing starts; each figure is the median of several rounds.
"""

import torch
from speed.script import run_script
from speed.timing import DEVICE, time_step

from carmil.bags.bags import Bags
from carmil.counterfactual.branches import create_model
from carmil.evidence.explainers import explain
from carmil.models.scaled_model import ScaledModel

INSTANCES, WIDTH = 10_000, 1024


def main(
    device: str = DEVICE,
    classes: int = 2,
    models: str = "abmil.gated,car/abmil.gated,clam.sb,dsmil",
    seconds: float = 2,
) -> None:
    torch.manual_seed(0)
    bags = Bags.from_list([torch.randn(INSTANCES, WIDTH)]).to(device)
    for name in models.split(","):
        model = ScaledModel(create_model(name, WIDTH, classes), WIDTH).eval().to(device)
        for method in ("path", "coalition"):
            timing = time_step(
                lambda model=model, method=method: lambda: explain(model, bags, method), device=device, seconds=seconds
            )
            print(f"{name}, {method}: {timing.seconds:.3f} s", flush=True)


if __name__ == "__main__":
    run_script(main)
