"""Time of a training step on a GPU, kernel by kernel.

    python benchmarks/step.py [--model car/abmil.gated] [--models 50] [--bags 1] [--instances 10000]

A step of a population on bags of noise, as in benchmarks/speed: replayed as a CUDA graph, and launched operation by operation. Then
the time of each kernel, averaged over five steps.
"""

import torch
from speed.arithmetic import work
from speed.ours import MODEL, new_population, noise_bags, our_step
from speed.script import run_script
from speed.timing import Step, time_step


def kernels(step: Step, steps: int = 5) -> list[tuple[float, int, str]]:
    """Milliseconds per step, calls per step and name of each kernel, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    rows = [(e.self_device_time_total / steps / 1000, e.count // steps, e.key) for e in profile.key_averages()]
    return sorted((row for row in rows if row[0] > 0.005), reverse=True)


def main(model: str = MODEL, models: int = 50, bags: int = 1, instances: int = 10_000) -> None:
    noise = noise_bags([instances] * 3 * bags, "cuda")
    operations = work(model, instances).operations * models * bags
    for name, recorded in (("replayed", True), ("operation by operation", False)):

        def build(recorded: bool = recorded) -> Step:
            return our_step(new_population(model, models, "cuda"), noise, together=bags, recorded=recorded)

        seconds = time_step(build, device="cuda", seconds=1).seconds
        print(f"{name}: {1000 * seconds:.3f} ms per step, {operations / seconds / 1e12:.0f} TFLOP/s")
    for ms, calls, name in kernels(build()):
        print(f"{ms:8.3f} ms  x{calls:<3d} {name[:110]}")


if __name__ == "__main__":
    run_script(main)
