"""Deletion at 101 steps of a bag of 10,000 x 1024 by 8 maps: ours in one computation, and a loop of one pass a step and map.

python benchmarks/faithfulness.py [--device cuda] [--every 10]

The loop is timed at the steps 5, 15, ..., 95 of one map, and this scaled to all steps and maps; --every 1 times all of that map.
Both are asked for the same model in the same precision, float32; the features are on the device before the clock starts.
"""

import argparse
import time

import torch

from carmil.bags.bags import Bags
from carmil.counterfactual.branches import create_model
from carmil.evidence.faithfulness import deletion_logits
from carmil.provenance import machine_line

INSTANCES, WIDTH, MAPS, STEPS = 10_000, 1024, 8, 100


def now(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--every", type=int, default=10)
    given = parser.parse_args()
    torch.manual_seed(0)
    model = create_model("abmil.gated", WIDTH, 2).eval().to(given.device)
    bags = Bags.from_list([torch.randn(INSTANCES, WIDTH)]).to(given.device)
    maps = torch.randn(MAPS, INSTANCES, device=given.device)

    with torch.no_grad():  # once before the clock starts
        deletion_logits(model, bags, maps)
        model(bags.features, bags.offsets)
    started = now(given.device)
    curves = deletion_logits(model, bags, maps)
    ours = now(given.device) - started

    steps = range(given.every // 2, STEPS, given.every)  # as large, on average, as all of them
    order = maps[0].argsort(descending=True)
    answers = []
    started = now(given.device)
    with torch.no_grad():
        for step in steps:
            kept = order[INSTANCES * step // STEPS :].sort().values
            answers.append(model(bags.features[kept], torch.tensor([0, len(kept)])).logits)
    measured = now(given.device) - started
    loop = measured / len(steps) * STEPS * MAPS
    apart = (torch.cat(answers).cpu() - curves[0, 0, list(steps)]).abs().max()

    print(f"carmil             {ours:9.3f} s for {MAPS} maps x {STEPS + 1} steps")
    print(f"one pass at a time {loop:9.3f} s, scaled from {measured:.3f} s for {len(steps)} steps of one map")
    print(f"{loop / ours:.0f} times faster; logits at most {float(apart):.1e} apart")
    print(machine_line())


if __name__ == "__main__":
    main()
