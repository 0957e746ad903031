"""The sections of the benchmark that time training steps. Each is a generator of records.

r models, b bags, n instances.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from carmil.bags.bags import Bags
from carmil.counterfactual import create_model
from carmil.models.pooling import Offsets
from carmil.training.loop import fit
from carmil.training.recipe import TRAIN, VALIDATION, Recipe

from .arithmetic import CLASSES, WIDTH, one_bag_loss, work
from .ours import MODEL, new_population, noise_bags, our_step
from .plain import WEIGHT_DECAY, Loss, PlainCAR, float32_products, one_bag_loop, plain_twin, torchmil_loss
from .plan import Plan
from .results import Fact, Measurement, Record
from .timing import (
    DoesNotFitError,
    Step,
    Timing,
    available_memory,
    peak_memory,
    refuse_shortage,
    release,
    synchronize,
    time_in_turn,
    time_step,
)

TOO_LARGE = "did not fit in memory"
DISTINCT_BAGS = 8  # alternate, so that no cache holds the next one
BuildLoss = Callable[[str], tuple[nn.Module, Loss]]  # device -> model on it, and its loss on a bag


@dataclass(frozen=True)
class Bench:
    """The plan, the device, the folder for output, and the machine's fastest matrix product in operations per second."""

    plan: Plan
    device: str
    peak: float
    out: Path

    def measurement(self, row: Measurement, timing: Timing) -> Measurement:
        """Fill the figures of a row from the timing of its step."""
        parts = row.models * row.bags
        cost = work(row.model, row.instances)
        return replace(
            row,
            ms=1000 * timing.seconds / parts,
            fastest_ms=1000 * timing.fastest / parts,
            slowest_ms=1000 * timing.slowest / parts,
            rounds=timing.rounds,
            tflops=cost.operations * parts / timing.seconds / 1e12,
            floor_ms=1000 * cost.operations / self.peak,
            memory_mib=timing.memory / 2**20,
            counted_by=cost.counted_by,
        )

    def time(self, row: Measurement, build: Callable[[], Step]) -> Measurement:
        """Time the step that `build` returns, if it fits into memory."""
        needed = 2 * row.models * row.bags * work(row.model, row.instances).kept
        if self.device == "cpu" and needed > 0.9 * available_memory(
            "cpu"
        ):  # no error to catch when a CPU's memory ends
            return replace(row, note=f"would not fit: about {needed / 2**30:.0f} GiB")
        try:
            return self.measurement(row, time_step(build, device=self.device, seconds=self.plan.seconds))
        except DoesNotFitError:
            return replace(row, note=TOO_LARGE)
        finally:
            release(self.device)

    def ours(
        self, section: str, name: str, *, models: int, instances: int, together: int = 1, what: str = "carmil"
    ) -> Measurement:
        """Time a step of a population of `models` on `together` bags."""

        def build() -> Step:
            bags = noise_bags([instances] * max(2 * together, _distinct(instances)), self.device)
            return our_step(new_population(name, models, self.device), bags, together=together)

        return self.time(Measurement(section, what, name, models, together, instances, ours=True), build)

    def one_bag(
        self, section: str, what: str, name: str, instances: int, build_loss: BuildLoss, *, place: str
    ) -> Measurement:
        """Time a step of the field's loop over bags that lie on `place`."""

        def build() -> Step:
            bags = noise_bags([instances] * _distinct(instances), place, dtype=torch.float32)
            return one_bag_loop(*build_loss(self.device), _separate(bags), self.device)

        row = Measurement(section, f"one-bag loop, {what}", name, 1, 1, instances, ours=False)
        return self.time(row, build)


def _distinct(instances: int) -> int:
    return max(2, min(DISTINCT_BAGS, 200_000 // instances))


def _separate(bags: Bags) -> list[tuple[Tensor, Tensor]]:
    """Features and label (1) of each bag, as a data loader of the field returns them."""
    assert bags.labels is not None
    return list(zip(bags.features.split(bags.sizes.tolist()), bags.labels.split(1), strict=True))


def population(bench: Bench) -> Iterator[Record]:
    """CAR-ABMIL on large bags: many models on one bag, one model on one bag, one model on many bags per step."""
    plan = bench.plan
    for models, together in ((plan.population, 1), (1, 1), (1, plan.together)):
        yield bench.ours("population", MODEL, models=models, together=together, instances=plan.bag)
    if plan.through_fit:
        yield _epochs_of_fit(bench)


def _epochs_of_fit(bench: Bench) -> Measurement:
    """One model, several bags per step, by `fit`: epochs of four steps and two validation bags, without the first epoch."""
    together, instances = bench.plan.together, bench.plan.bag
    row = Measurement("population", "carmil, whole epochs of fit", MODEL, 1, 4 * together, instances, ours=True)
    ends: list[float] = []

    def on_epoch(epoch: int, losses: dict[str, float], running: int) -> None:
        synchronize(bench.device)
        ends.append(time.perf_counter())

    try:
        with refuse_shortage(), peak_memory(bench.device) as peak:
            bags = noise_bags([instances] * (4 * together + 2), bench.device)
            roles = torch.full((len(bags),), TRAIN)
            roles[-2:] = VALIDATION
            recipe = Recipe(epochs=6, batch=together, optimizer="adam", weight_decay=WEIGHT_DECAY, shuffle=True)
            fit(new_population(MODEL, 1, bench.device), bags, roles, recipe, on_epoch=on_epoch)
    except DoesNotFitError:
        return replace(row, note=TOO_LARGE)
    epochs = sorted(after - before for before, after in pairwise(ends))
    return bench.measurement(row, Timing(statistics.median(epochs), epochs[0], epochs[-1], len(epochs), peak[0]))


def one_bag(bench: Bench) -> Iterator[Record]:
    """The same architecture in the field's loop: float32 and TF32, bags on the device or copied to it; torchmil's ABMIL."""
    on_cpu, bag = bench.device == "cpu", bench.plan.bag
    places = [("resident", bench.device)] if on_cpu else [("resident", "cuda"), ("copied", "cpu")]
    precisions = [("float32", False)] if on_cpu else [("float32", False), ("TF32", True)]
    for word, place in places:
        for precision, tf32 in precisions:
            with float32_products(tf32=tf32):
                yield bench.one_bag("one-bag", f"{precision}, {word}", MODEL, bag, _plain_car, place=place)
    what = "float32, resident, torchmil's ABMIL"
    if find_spec("torchmil") is None:
        row = Measurement("one-bag", f"one-bag loop, {what}", "abmil.gated", 1, 1, bag, ours=False)
        yield replace(row, note="torchmil is not installed")
    else:
        with float32_products(tf32=False):
            yield bench.one_bag("one-bag", what, "abmil.gated", bag, torchmil_loss, place=bench.device)


def _plain_car(device: str) -> tuple[nn.Module, Loss]:
    model = PlainCAR(WIDTH, CLASSES).to(device).train()
    return model, model.loss


def agreement(bench: Bench) -> Iterator[Record]:
    """Compare our probabilities with those of the plain module in float32, with the same weights, on easy and hard bags."""
    instances = min(bench.plan.bag, 1_000 if bench.device == "cpu" else bench.plan.bag)
    bags = noise_bags([instances] * 16, bench.device)
    for i, (features, label) in enumerate(_separate(bags)):
        features += 0.1 * (i / 16) * (2 * label - 1)
    models = new_population(MODEL, 4, bench.device)
    step = our_step(models, bags)
    for _ in range(32):
        step()
    models.train(False)
    with torch.no_grad(), float32_products(tf32=False):
        ours = models(bags.features, Offsets(bags.offsets, bench.device)).logits.float().softmax(-1)
        state = models.state()
        for row in range(len(models)):
            twin = plain_twin({name: stacked[row] for name, stacked in state.items()}).to(bench.device).eval()
            plain = torch.cat([twin(features.float())[0] for features, _ in _separate(bags)]).softmax(-1)
            worst = (ours[row] - plain).abs().max()
            span = f"probabilities from {plain[:, 1].min():.2f} to {plain[:, 1].max():.2f}"
            yield Fact("agreement", f"model {row}: largest difference of a probability", float(worst), "", span)


def models(bench: Bench) -> Iterator[Record]:
    """Every model at every size: several at once by carmil, and the same module in the field's loop."""
    for name in bench.plan.models:
        for instances in bench.plan.instances:
            yield bench.ours("models", name, models=bench.plan.members, instances=instances)
            build_loss = partial(_single_model, name)
            with float32_products(tf32=False):
                yield bench.one_bag("models", "float32, resident", name, instances, build_loss, place=bench.device)


def _single_model(name: str, device: str) -> tuple[nn.Module, Loss]:
    """A model of carmil as an ordinary module, and its loss; for a method with several phases, the sum of their losses."""
    model = create_model(name, WIDTH, CLASSES).to(device).train()

    def loss(features: Tensor, label: Tensor) -> Tensor:
        offsets = Offsets(torch.tensor([0, len(features)]), device)
        losses = []
        for phase in model.phases:
            model.begin(phase, 0)
            losses.append(one_bag_loss(model, features, offsets, label))
        return torch.stack(losses).sum()

    return model, loss


def linearity(bench: Bench) -> Iterator[Record]:
    """Growth of a step's time with its bags and with the population; an exponent of 1 is proportional growth."""
    plan = bench.plan
    series = {
        "longer bags": [(plan.linear_models, instances) for instances in plan.lengths],
        "more models": [(count, plan.linear_bag) for count in plan.counts],
    }
    for name, sizes in series.items():
        rows = []
        for count, instances in sizes:
            rows.append(bench.ours("linearity", MODEL, models=count, instances=instances, what=f"carmil, {name}"))
            yield rows[-1]
        yield _exponent(name, rows)


def _exponent(name: str, rows: Sequence[Measurement]) -> Fact:
    """The slope of log time over log size, where size is models x instances and one of the two is constant."""
    timed = [(row.models * row.instances, row.ms * row.models) for row in rows if row.ms is not None]
    what = f"{name}: exponent of a step's time"
    if len(timed) < 2:
        return Fact("linearity", what, None, "", "fewer than two figures")
    sizes, times = ([math.log(value) for value in column] for column in zip(*timed, strict=True))
    slope = statistics.linear_regression(sizes, times).slope
    return Fact("linearity", what, slope, "", f"from {timed[0][0]:,} to {timed[-1][0]:,} models x instances")


def crc(bench: Bench) -> Iterator[Record]:
    """Passes over bags of very different sizes, one bag per step, timed in turn: the field's loop, one model, many models."""
    bags, note = _crc_bags(bench)
    plain = _crc_row("one-bag loop, float32, resident", bags, note)
    ours = [replace(plain, what="carmil", models=models, ours=True) for models in (1, bench.plan.crc_models)]
    builds = [partial(_plain_pass, bags, bench.device), *(partial(_our_pass, bags, row.models) for row in ours)]
    with float32_products(tf32=False):
        timings = time_in_turn(builds, device=bench.device, seconds=len(builds) * bench.plan.seconds)
    yield from map(bench.measurement, [plain, *ours], timings)


def _crc_row(what: str, bags: Bags, note: str) -> Measurement:
    instances = round(float(bags.sizes.float().mean()))
    return Measurement("crc", what, MODEL, 1, len(bags), instances, ours=False, note=note)


def _plain_pass(bags: Bags, device: str) -> Step:
    return _repeat(one_bag_loop(*_plain_car(device), _separate(bags), device), len(bags))


def _our_pass(bags: Bags, models: int) -> Step:
    return _repeat(our_step(new_population(MODEL, models, bags.features.device.type), bags), len(bags))


def _repeat(step: Step, count: int) -> Step:
    def steps() -> None:
        for _ in range(count):
            step()

    return steps


def torch_defaults(bench: Bench) -> Iterator[Record]:
    """On a CPU, the field's loop with torch's defaults. carmil's process settings cannot be undone, so this runs first."""
    if "one-bag" in bench.plan.sections:
        what = "float32, resident, torch defaults"
        yield bench.one_bag("one-bag", what, MODEL, bench.plan.bag, _plain_car, place=bench.device)
    if "crc" in bench.plan.sections:
        bags, note = _crc_bags(bench)
        row = _crc_row("one-bag loop, float32, resident, torch defaults", bags, note)
        yield bench.time(row, partial(_plain_pass, bags, bench.device))


def _crc_bags(bench: Bench) -> tuple[Bags, str]:
    """crc's bags, or noise in bags of such sizes (98 of 6 to 699 instances, 207 on average), and a note which of the two."""
    if bench.plan.crc is not None:
        from carmil.datasets.crc_nuclei import patient_bags

        bags, note = patient_bags(bench.plan.crc), "crc"
    else:
        sizes = [6 + round(693 * (i / 97) ** 2.45) for i in range(98)]
        bags, note = noise_bags(sizes, "cpu", dtype=torch.float32), "noise, crc's sizes"
    chosen = torch.randperm(len(bags), generator=torch.Generator().manual_seed(0))[:: bench.plan.crc_every]
    return bags[chosen].to(bench.device), note
