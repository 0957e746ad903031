"""Where the time of a training step on a GPU goes, kernel by kernel.

    python benchmarks/step.py [--model car/abmil.gated] [--models 50] [--bags 1] [--instances 10000]

A step of a population on bags of noise, as benchmarks/speed takes it: run as it is (asked for operation by operation), and
recorded and replayed. Then what the device spends in each kernel, the mean over five steps.
"""

import argparse
import time

import torch
from speed.arithmetic import work
from speed.ours import new_population, noise_bags, our_step

from carmil.provenance import machine_line
from carmil.training.step import Stepper


def milliseconds(step, repeats: int = 20) -> float:
    for _ in range(6):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start) / repeats


def kernels(step, steps: int = 5) -> list[tuple[float, int, str]]:
    """Milliseconds a step, calls a step, name; the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found = [(e.self_device_time_total / steps / 1000, e.count // steps, e.key) for e in profile.key_averages()]
    return sorted((entry for entry in found if entry[0] > 0.005), reverse=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="car/abmil.gated")
    parser.add_argument("--models", type=int, default=50)
    parser.add_argument("--bags", type=int, default=1)
    parser.add_argument("--instances", type=int, default=10_000)
    given = parser.parse_args()
    print(machine_line())
    bags = noise_bags([given.instances] * 3 * given.bags, "cuda")
    operations = work(given.model, given.instances).operations * given.models * given.bags

    def step():
        return our_step(new_population(given.model, given.models, "cuda"), bags, together=given.bags)

    times = {"replayed": milliseconds(step())}
    Stepper.__call__ = Stepper._step  # from here on nothing is recorded
    times["operation by operation"] = milliseconds(step())
    for name, ms in times.items():
        print(f"{name}: {ms:.3f} ms a step, {operations / ms / 1e9:.0f} TFLOP/s")
    for ms, calls, name in kernels(step()):
        print(f"{ms:8.3f} ms  x{calls:<3d} {name[:110]}")
