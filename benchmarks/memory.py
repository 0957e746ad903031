"""Peak memory of one bag of 30,000 x 1024, forward and backward, each model in a process of its own.

python benchmarks/memory.py [MODEL ...]
"""

import subprocess
import sys

from carmil.provenance import machine_line

INSTANCES = 30_000
STEP = f"""
import resource, sys, torch
from carmil import create_model
model = create_model(sys.argv[1], 1024, 2).train()
bag, offsets = torch.randn({INSTANCES}, 1024), torch.tensor([0, {INSTANCES}])
losses = model.losses(model(bag, offsets), torch.tensor([1]), model.coefficients)
sum(model.coefficients[term] * value.sum() for term, value in losses.items()).backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


def main() -> None:
    for name in sys.argv[1:] or ["abmil.gated", "rrt", "transmil", "car/transmil"]:
        answer = subprocess.run([sys.executable, "-c", STEP, name], capture_output=True, text=True, check=True)
        print(f"{name:16} {float(answer.stdout):5.2f} GiB, python and torch included")
    print(machine_line())


if __name__ == "__main__":
    main()
