"""Time coalition evidence of one slide of 10,000 x 1024, all classes, by one model, beside path evidence.

python benchmarks/coalition.py [--device cuda] [--classes 2] [--models abmil.gated,car/abmil.gated]

The features are on the device before the clock starts; each figure is the median of the repeats, after one that is not counted.
"""

import argparse
import statistics
import time

import torch

from carmil.bags.bags import Bags
from carmil.counterfactual.branches import create_model
from carmil.evidence.explainers import explain
from carmil.models.scaled import Scaled
from carmil.provenance import machine_line

INSTANCES, WIDTH = 10_000, 1024


def seconds(model: torch.nn.Module, bags: Bags, method: str, device: str, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        explain(model, bags, method)
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--classes", type=int, default=2)
    parser.add_argument("--models", default="abmil.gated,car/abmil.gated,clam.sb,dsmil")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.manual_seed(0)
    bags = Bags.from_list([torch.randn(INSTANCES, WIDTH)]).to(given.device)
    print(f"measured on {given.device}: {machine_line()}")
    for name in given.models.split(","):
        model = Scaled(create_model(name, WIDTH, given.classes), WIDTH).eval().to(given.device)
        found = {method: seconds(model, bags, method, given.device, given.repeats) for method in ("path", "coalition")}
        print(f"{name}: " + ", ".join(f"{method} {value:.3f} s" for method, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
