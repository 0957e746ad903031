"""Time the curves of `carmil faithfulness` by 8 maps in both directions on a bag of 10,000 x 1024: in one computation, and in a
loop of one pass per step and order.

    python benchmarks/faithfulness.py [--device cuda] [--every 10]

The loop is timed at every tenth step of one order, and scaled to all steps and orders; --every 1 times every step of that
order. Both use the same model in float32, and the features are on the device before timing starts.
"""

import torch
from speed.script import run_script
from speed.timing import DEVICE, time_step

from carmil.bags.bags import Bags
from carmil.counterfactual.branches import create_model
from carmil.evidence.faithfulness import deletion_logits, removal_counts

INSTANCES, WIDTH, MAPS, STEPS = 10_000, 1024, 8, 100


def main(device: str = DEVICE, every: int = 10, seconds: float = 2) -> None:
    torch.manual_seed(0)
    model = create_model("abmil.gated", WIDTH, 2).eval().to(device)
    bags = Bags.from_list([torch.randn(INSTANCES, WIDTH)]).to(device)
    maps = torch.randn(MAPS, INSTANCES, device=device)
    orders = torch.cat([maps, -maps])  # the most, then the least relevant first
    removed = removal_counts(torch.tensor([INSTANCES]), STEPS, ends=True)
    counts = removed.unique().tolist()[:-1]
    order = orders[0].argsort(descending=True)
    some = counts[every // 2 :: every]  # on average as many instances as over all steps

    @torch.no_grad()
    def loop() -> torch.Tensor:
        remaining = [order[count:].sort().values for count in some]
        return torch.cat([model(bags.features[rows], torch.tensor([0, len(rows)])).logits for rows in remaining])

    def curves() -> torch.Tensor:
        return deletion_logits(model, bags, orders, steps=STEPS, ends=True)

    ours = time_step(lambda: curves, device=device, seconds=seconds).seconds
    sample = time_step(lambda: loop, device=device, seconds=seconds).seconds
    total = sample / len(some) * len(counts) * len(orders)
    columns = torch.searchsorted(removed[0], torch.tensor(some))
    difference = (loop().cpu() - curves()[0, 0, columns]).abs().max()
    print(f"carmil             {ours:9.3f} s for {MAPS} maps in both directions x {len(counts)} steps")
    print(f"one pass at a time {total:9.3f} s, scaled from {sample:.3f} s for {len(some)} steps of one order")
    print(f"{total / ours:.0f} times as fast; logits differ by at most {float(difference):.1e}")


if __name__ == "__main__":
    run_script(main)
