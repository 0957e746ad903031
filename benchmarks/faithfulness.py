"""Time deletion in 101 steps by 8 maps on a bag of 10,000 x 1024: in one computation, and in a loop of one pass per step and map.

    python benchmarks/faithfulness.py [--device cuda] [--every 10]

The loop is timed at the steps 5, 15, ..., 95 of one map, and scaled to all steps and maps; --every 1 times every step of that map.
Both use the same model in float32, and the features are on the device before timing starts.
"""

import torch
from speed.script import run_script
from speed.timing import DEVICE, time_step

from carmil.bags.bags import Bags
from carmil.counterfactual.branches import create_model
from carmil.evidence.faithfulness import deletion_logits

INSTANCES, WIDTH, MAPS, STEPS = 10_000, 1024, 8, 100


def main(device: str = DEVICE, every: int = 10, seconds: float = 2) -> None:
    torch.manual_seed(0)
    model = create_model("abmil.gated", WIDTH, 2).eval().to(device)
    bags = Bags.from_list([torch.randn(INSTANCES, WIDTH)]).to(device)
    maps = torch.randn(MAPS, INSTANCES, device=device)
    order = maps[0].argsort(descending=True)
    steps = range(every // 2, STEPS, every)  # on average as many instances as over all steps

    @torch.no_grad()
    def loop() -> torch.Tensor:
        remaining = [order[INSTANCES * step // STEPS :].sort().values for step in steps]
        return torch.cat([model(bags.features[rows], torch.tensor([0, len(rows)])).logits for rows in remaining])

    ours = time_step(lambda: lambda: deletion_logits(model, bags, maps), device=device, seconds=seconds).seconds
    sample = time_step(lambda: loop, device=device, seconds=seconds).seconds
    total = sample / len(steps) * STEPS * MAPS
    difference = (loop().cpu() - deletion_logits(model, bags, maps)[0, 0, list(steps)]).abs().max()
    print(f"carmil             {ours:9.3f} s for {MAPS} maps x {STEPS + 1} steps")
    print(f"one pass at a time {total:9.3f} s, scaled from {sample:.3f} s for {len(steps)} steps of one map")
    print(f"{total / ours:.0f} times as fast; logits differ by at most {float(difference):.1e}")


if __name__ == "__main__":
    run_script(main)
