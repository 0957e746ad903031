"""The parts of a benchmark, each a function that yields what it finds, one record after the other.

r models, b bags, n instances.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import Tensor, nn

from carmil.bags.bags import Bags
from carmil.counterfactual import create_model
from carmil.models.pooling import Offsets
from carmil.training.loop import fit
from carmil.training.recipe import TRAIN, VALIDATION, Recipe

from .arithmetic import CLASSES, WIDTH, one_bag_loss
from .bench import TOO_LARGE, Bench
from .measure import (
    DoesNotFitError,
    Step,
    Timing,
    measured_in_turn,
    peak_memory,
    shortage_told,
    synchronize,
)
from .ours import MODEL, new_population, noise_bags, our_step
from .plain import (
    WEIGHT_DECAY,
    Loss,
    PlainCAR,
    float32_products,
    one_bag_loop,
    plain_twin,
    torchmil_loss,
)
from .reading import store
from .records import Fact, Measurement, Record
from .study import study
from .trained import trained

DISTINCT = 8  # bags that take turns, so that no cache holds the next one


def population(bench: Bench) -> Iterator[Record]:
    """CAR-ABMIL on large bags: many models a bag at a time, one model a bag at a time, one model many bags at a time."""
    plan = bench.plan
    for models, together in ((plan.population, 1), (1, 1), (1, plan.together)):
        yield _ours(bench, "population", MODEL, models=models, together=together, instances=plan.bag)
    if plan.through_fit:
        yield _whole_training(bench)


def _ours(
    bench: Bench, section: str, name: str, *, models: int, instances: int, together: int = 1, what: str = "carmil"
) -> Measurement:
    empty = Measurement(section, what, name, models, together, instances, ours=True)

    def build() -> Step:
        bags = noise_bags([instances] * max(2 * together, _distinct(instances)), bench.device)
        return our_step(new_population(name, models, bench.device), bags, together=together)

    return bench.step(empty, build)


def _whole_training(bench: Bench) -> Measurement:
    """One model, several bags a step, by `fit`: epochs of four steps with validation on two bags, the first left out."""
    together, instances = bench.plan.together, bench.plan.bag
    empty = Measurement("population", "carmil, whole epochs of fit", MODEL, 1, 4 * together, instances, ours=True)
    ended: list[float] = []

    def on_epoch(epoch: int, losses: dict[str, float], running: int) -> None:
        synchronize(bench.device)
        ended.append(time.perf_counter())

    try:
        with shortage_told(), peak_memory(bench.device) as peak:
            bags = noise_bags([instances] * (4 * together + 2), bench.device)
            roles = torch.full((len(bags),), TRAIN)
            roles[-2:] = VALIDATION
            recipe = Recipe(epochs=6, batch=together, optimizer="adam", weight_decay=WEIGHT_DECAY, shuffle=True)
            fit(new_population(MODEL, 1, bench.device), bags, roles, recipe, on_epoch=on_epoch)
    except DoesNotFitError:
        return replace(empty, note=TOO_LARGE)
    epochs = sorted(after - before for before, after in pairwise(ended))
    timing = Timing(statistics.median(epochs), epochs[0], epochs[-1], len(epochs), peak[0])
    return bench.measurement(empty, timing)


def _distinct(instances: int) -> int:
    return max(2, min(DISTINCT, 200_000 // instances))


def one_bag(bench: Bench) -> Iterator[Record]:
    """The same architecture in the field's loop; in float32 and TF32, bags on the device or copied to it; torchmil's ABMIL."""
    places = [("resident", bench.device)] if bench.device == "cpu" else [("resident", "cuda"), ("copied", "cpu")]
    precisions = [("float32", False)] if bench.device == "cpu" else [("float32", False), ("TF32", True)]
    for words, place in places:
        for precision, tf32 in precisions:
            empty = _one_bag_row("one-bag", f"{precision}, {words}", MODEL, bench.plan.bag)
            with float32_products(tf32=tf32):
                yield bench.step(empty, _plain_loop(bench, empty, _plain_car, place=place))
    empty = _one_bag_row("one-bag", "float32, resident, torchmil's ABMIL", "abmil.gated", bench.plan.bag)
    if find_spec("torchmil") is None:
        yield replace(empty, note="torchmil is not installed")
    else:
        with float32_products(tf32=False):
            yield bench.step(empty, _plain_loop(bench, empty, torchmil_loss, place=bench.device))


def _one_bag_row(section: str, what: str, name: str, instances: int) -> Measurement:
    return Measurement(section, f"one-bag loop, {what}", name, 1, 1, instances, ours=False)


def _plain_car(device: str) -> tuple[nn.Module, Loss]:
    model = PlainCAR(WIDTH, CLASSES).to(device).train()
    return model, model.loss


def _plain_loop(
    bench: Bench, row: Measurement, make: Callable[[str], tuple[nn.Module, Loss]], *, place: str
) -> Callable[[], Step]:
    """Builds the field's loop over bags that lie on `place`."""

    def build() -> Step:
        bags = noise_bags([row.instances] * _distinct(row.instances), place, dtype=torch.float32)
        return one_bag_loop(*make(bench.device), _apart(bags), bench.device)

    return build


def _apart(bags: Bags) -> list[tuple[Tensor, Tensor]]:
    """Features and label (1) of each bag, as a data loader of the field gives them."""
    assert bags.labels is not None
    return list(zip(bags.features.split(bags.sizes.tolist()), bags.labels.split(1), strict=True))


def agreement(bench: Bench) -> Iterator[Record]:
    """Do our answers differ from the plain module's in float32 with the same weights? On bags from clear to undecided."""
    instances = min(bench.plan.bag, 1_000 if bench.device == "cpu" else bench.plan.bag)
    bags = noise_bags([instances] * 16, bench.device)
    assert bags.labels is not None
    for i, (features, label) in enumerate(_apart(bags)):
        features += 0.1 * (i / 16) * (2 * label - 1)
    everyone = new_population(MODEL, 4, bench.device)
    step = our_step(everyone, bags)
    for _ in range(32):
        step()
    everyone.train(False)
    with torch.no_grad(), float32_products(tf32=False):
        ours = everyone(bags.features, Offsets(bags.offsets, bench.device)).logits.float().softmax(-1)
        state = everyone.state()
        for row in range(len(everyone)):
            twin = plain_twin({name: stacked[row] for name, stacked in state.items()}).to(bench.device).eval()
            theirs = torch.cat([twin(features.float())[0] for features, _ in _apart(bags)]).softmax(-1)
            worst = (ours[row] - theirs).abs().max()
            span = f"probabilities from {theirs[:, 1].min():.2f} to {theirs[:, 1].max():.2f}"
            yield Fact("agreement", f"model {row}: largest difference of a probability", float(worst), "", span)


def models(bench: Bench) -> Iterator[Record]:
    """Every model at every size: ours, some at once; and the same module in the field's loop."""
    plan = bench.plan
    for name in plan.models:
        for instances in plan.instances:
            yield _ours(bench, "models", name, models=plan.members, instances=instances)
            row = _one_bag_row("models", "float32, resident", name, instances)
            with float32_products(tf32=False):
                yield bench.step(row, _plain_loop(bench, row, partial(_alone, name), place=bench.device))


def _alone(name: str, device: str) -> tuple[nn.Module, Loss]:
    """A model of ours as a module like any other, and its loss; for a method of several phases the sum of theirs."""
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
    """Does a step's time grow as its bags do, and as the population does? The exponent is 1 where it grows in proportion."""
    plan = bench.plan
    series = {
        "longer bags": [(plan.linear_models, instances) for instances in plan.lengths],
        "more models": [(count, plan.linear_bag) for count in plan.counts],
    }
    for name, sizes in series.items():
        found = []
        for count, instances in sizes:
            what = f"carmil, {name}"
            found.append(_ours(bench, "linearity", MODEL, models=count, instances=instances, what=what))
            yield found[-1]
        yield _exponent(name, found)


def _exponent(name: str, found: Sequence[Measurement]) -> Fact:
    """The slope of a step's log time over its log size: models x instances, of which one stays."""
    timed = [(one.models * one.instances, one.ms * one.models) for one in found if one.ms is not None]
    what = f"{name}: exponent of a step's time"
    if len(timed) < 2:
        return Fact("linearity", what, None, "", "fewer than two figures")
    sizes, times = ([math.log(value) for value in column] for column in zip(*timed, strict=True))
    slope = statistics.linear_regression(sizes, times).slope
    return Fact("linearity", what, slope, "", f"from {timed[0][0]:,} to {timed[-1][0]:,} models x instances")


def crc(bench: Bench) -> Iterator[Record]:
    """Passes over bags of very different sizes, a bag a step, in turn: the field's loop, one model of ours, many of ours."""
    bags, about = _crc_bags(bench)
    theirs = _crc_row("one-bag loop, float32, resident", 1, bags, about)
    mine = [replace(theirs, what="carmil", models=models, ours=True) for models in (1, bench.plan.crc_models)]
    builds = [partial(_plain_pass, bags, bench.device), *(partial(_our_pass, bags, row.models) for row in mine)]
    with float32_products(tf32=False):
        timings = measured_in_turn(builds, device=bench.device, seconds=len(builds) * bench.plan.seconds)
    yield from map(bench.measurement, [theirs, *mine], timings)


def _crc_row(what: str, models: int, bags: Bags, about: str) -> Measurement:
    instances = round(float(bags.sizes.float().mean()))
    return Measurement("crc", what, MODEL, models, len(bags), instances, ours=False, note=about)


def _plain_pass(bags: Bags, device: str) -> Step:
    return _pass(one_bag_loop(*_plain_car(device), _apart(bags), device), len(bags))


def _our_pass(bags: Bags, models: int) -> Step:
    return _pass(our_step(new_population(MODEL, models, bags.features.device.type), bags), len(bags))


def _pass(step: Step, count: int) -> Step:
    def whole() -> None:
        for _ in range(count):
            step()

    return whole


def untouched(bench: Bench) -> Iterator[Record]:
    """On a CPU the field's loop as torch comes, before any setting of ours is made. Those cannot be unmade: this goes first."""
    if "one-bag" in bench.plan.sections:
        row = _one_bag_row("one-bag", "float32, resident, as torch comes", MODEL, bench.plan.bag)
        yield bench.step(row, _plain_loop(bench, row, _plain_car, place=bench.device))
    if "crc" in bench.plan.sections:
        bags, about = _crc_bags(bench)
        row = _crc_row("one-bag loop, float32, resident, as torch comes", 1, bags, about)
        yield bench.step(row, partial(_plain_pass, bags, bench.device))


def _crc_bags(bench: Bench) -> tuple[Bags, str]:
    """crc's own bags, or noise in bags like them: 98 of 6 to 699 instances, 207 in the mean; and which it is."""
    if bench.plan.crc is not None:
        from carmil.reproduce.crc import load_crc

        bags, about = load_crc(bench.plan.crc), "crc"
    else:
        sizes = [6 + round(693 * (i / 97) ** 2.45) for i in range(98)]
        bags, about = noise_bags(sizes, "cpu", dtype=torch.float32), "noise, crc's sizes"
    chosen = torch.randperm(len(bags), generator=torch.Generator().manual_seed(0))[:: bench.plan.crc_every]
    return bags[chosen].to(bench.device), about


SECTIONS: dict[str, Callable[[Bench], Iterator[Record]]] = {
    "population": population,
    "one-bag": one_bag,
    "agreement": agreement,
    "trained": trained,
    "models": models,
    "linearity": linearity,
    "crc": crc,
    "store": store,
    "study": study,
}
