"""The sections of the benchmark beyond a training step: the floors, whole trainings, and reading a store."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from carmil.counterfactual import create_model
from carmil.counterfactual.branches import branch_coefficients
from carmil.files import temporary_folder
from carmil.progress import training_progress
from carmil.statistics.performance import bag_auc
from carmil.training.population import PRECISIONS
from carmil.training.predict import predict
from carmil.training.protocol import GridPoint, train_protocol
from carmil.training.recipe import TRAIN, UNUSED, VALIDATION, Recipe

from .arithmetic import CLASSES, WIDTH, work
from .ours import MODEL, noise_bags, noise_store
from .plain import LEARNING_RATE, WEIGHT_DECAY, float32_products
from .plan import Study
from .results import Fact
from .sections import TOO_LARGE, Bench
from .timing import DoesNotFitError, Step, peak_memory, refuse_shortage, release, synchronize, time_step

FULL_STUDY, FULL_BAG = Study(), 10_000  # what a sample of the study is scaled to
FOLDS, SEEDS, EPOCHS = 5, 5, 50


def floors(device: str, *, seconds: float) -> list[Fact]:
    """Speed of large matrix products in the types of training, and of copies. The first is the floor of all steps."""

    def product(name: str, size: int, dtype: torch.dtype) -> Fact:
        return Fact("floors", f"matrix product, {name}", _product_speed(size, dtype, device, seconds), "TFLOP/s")

    def copy(name: str, size: int, source: str) -> Fact:
        speed = _copy_speed(size, source, device, seconds)
        return Fact("floors", f"copy {name}", speed, "GB/s", "each byte counted once")

    if device == "cpu":
        return [product("float32", 2048, torch.float32), copy("in memory", 2**28, device)]
    facts = [product("bfloat16", 8192, torch.bfloat16)]
    for name, tf32 in (("TF32", True), ("float32", False)):
        with float32_products(tf32=tf32):
            facts.append(product(name, 8192, torch.float32))
    return [*facts, copy("on the device", 2**30, device), copy("to the device, from pageable memory", 2**28, "cpu")]


def _product_speed(size: int, dtype: torch.dtype, device: str, seconds: float) -> float:
    """TFLOP/s of the fastest product of square matrices."""

    def build() -> Step:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)

    return 2 * size**3 / time_step(build, device=device, seconds=seconds).fastest / 1e12


def _copy_speed(size: int, source: str, device: str, seconds: float) -> float:
    """GB/s of the fastest copy of `size` bytes, each byte counted once."""

    def build() -> Step:
        origin, target = torch.ones(size // 4, device=source), torch.empty(size // 4, device=device)
        return lambda: target.copy_(origin)

    return size / time_step(build, device=device, seconds=seconds).fastest / 1e9


def trained(bench: Bench) -> Iterator[Fact]:
    """Mean AUC on crc's test bags after training in bfloat16 and in float32, with the same folds and seeds."""
    if bench.device == "cpu" or bench.plan.crc is None:
        why = "a CPU computes in float32 only" if bench.device == "cpu" else "needs --crc"
        yield Fact("trained", "mean AUC in bfloat16 and float32", None, "", why)
        return
    from carmil.bags.splits import TEST, make_splits
    from carmil.datasets.crc_nuclei import patient_bags
    from carmil.reproduce.crc import PROTOCOL

    bags = patient_bags(bench.plan.crc)
    assert bags.labels is not None
    labels = bags.labels
    split = make_splits(bags.ids, bags.ids, labels.tolist(), folds=FOLDS, validation=0.15)
    roles = torch.from_numpy(split.roles).long()
    tested = roles == TEST
    roles = roles.masked_fill(tested, UNUSED)
    recipe = Recipe(
        epochs=EPOCHS,
        batch=1,
        optimizer="adam",
        weight_decay=PROTOCOL.weight_decay,
        shuffle=True,
        schedule="cosine",
        warmup=PROTOCOL.warmup,
        patience=PROTOCOL.patience,
    )
    means = []
    for precision in PRECISIONS:
        with training_progress(precision, EPOCHS, SEEDS * FOLDS) as on_epoch:
            models = (
                train_protocol(
                    lambda: create_model(MODEL, bags.width, CLASSES),
                    bags,
                    roles,
                    recipe=recipe,
                    seeds=range(SEEDS),
                    grid=[GridPoint(lr=PROTOCOL.lr)],
                    device=bench.device,
                    precision=precision,
                    on_epoch=on_epoch,
                )
                .select()
                .population
            )
        probabilities = predict(models, bags, maps=False).values
        folds = zip(probabilities, tested.repeat(SEEDS, 1), strict=True)
        aucs = torch.tensor([bag_auc(row[test], labels[test]) for row, test in folds])
        means.append(100 * float(aucs.mean()))
        spread = f"{FOLDS} folds x {SEEDS} seeds, {EPOCHS} epochs; standard deviation {100 * float(aucs.std()):.1f}"
        yield Fact("trained", f"mean AUC on crc, {precision}", means[-1], "%", spread)
    yield Fact("trained", "difference of the mean AUC", abs(means[0] - means[1]), "points", "")


def store(bench: Bench) -> Iterator[Fact]:
    """Speed of reading bags from a store: from disk, if the system can drop the file from its cache, and from the cache."""
    with temporary_folder(bench.out) as folder:
        noise = noise_store(folder, bench.plan.store_bags, bench.plan.bag)
        features = noise.path / "features.bin"
        about = f"{bench.plan.store_bags} bags of {bench.plan.bag:,} x {WIDTH}, float16, to {bench.device}"
        for what, cold in (("read from disk", True), ("read again, from the system's cache", False)):
            if cold and not _drop_from_cache(features):
                yield Fact("store", what, None, "GB/s", "this system cannot drop a file from its cache")
                continue
            bags = noise.bags()
            begin = time.perf_counter()
            for bag in bags.features.split(bags.sizes.tolist()):
                bag.to(bench.device, copy=True)
            synchronize(bench.device)
            yield Fact("store", what, features.stat().st_size / (time.perf_counter() - begin) / 1e9, "GB/s", about)


def _drop_from_cache(path: Path) -> bool:
    """Ask the system to drop a file from its cache. False where it cannot be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def study(bench: Bench) -> Iterator[Fact]:
    """Folds x seeds x a grid of alpha and lambda as one population, from the first step to the last epoch."""
    plan, instances = bench.plan.study, bench.plan.bag
    try:
        with refuse_shortage(), peak_memory(bench.device) as peak:
            seconds, trained = _train_study(plan, instances, bench.device)
    except DoesNotFitError:
        yield Fact("study", _study_words(plan, instances), None, "s", TOO_LARGE)
        return
    finally:
        release(bench.device)
    speed = trained * work(MODEL, instances).operations / seconds / 1e12
    yield Fact("study", _study_words(plan, instances), seconds, "s", "training and validation, loading not included")
    yield Fact("study", "arithmetic of the training", speed, "TFLOP/s", "bags that a model trains on")
    yield Fact("study", "memory", peak[0] / 2**30, "GiB", "features included")
    share = _study_size(plan, instances) / _study_size(FULL_STUDY, FULL_BAG)
    if share != 1:
        what = f"at this pace: {_study_words(FULL_STUDY, FULL_BAG)}"
        yield Fact("study", what, seconds / share, "s", "scaled, not measured")


def _study_words(study: Study, instances: int) -> str:
    return f"{study.models} models, {study.slides} slides of {instances:,}, {study.epochs} epochs"


def _study_size(study: Study, instances: int) -> int:
    return study.models * study.slides * study.epochs * instances


def _train_study(plan: Study, instances: int, device: str) -> tuple[float, int]:
    """Return seconds, and how many times a model was trained on a bag.

    Each fold leaves out its test bags, and validates on every eighth of the others.
    """
    bags = noise_bags([instances] * plan.slides, device)
    fold = torch.arange(plan.slides) % plan.folds
    roles = torch.full((plan.folds, plan.slides), TRAIN)
    for i in range(plan.folds):
        roles[i, (fold != i).nonzero().squeeze(-1)[::8]] = VALIDATION
        roles[i, fold == i] = UNUSED
    grid = [
        GridPoint(LEARNING_RATE, branch_coefficients(MODEL, alpha=0.1 * (1 + i // 3), lambda_=0.5 * (1 + i % 3)))
        for i in range(plan.grid)
    ]
    recipe = Recipe(
        epochs=plan.epochs, batch=1, optimizer="adam", weight_decay=WEIGHT_DECAY, shuffle=True, patience=plan.epochs
    )
    synchronize(device)
    begin = time.perf_counter()
    with training_progress("study", plan.epochs, plan.models) as on_epoch:
        train_protocol(
            lambda: create_model(MODEL, WIDTH, CLASSES),
            bags,
            roles,
            recipe=recipe,
            seeds=range(plan.seeds),
            grid=grid,
            device=device,
            precision="bfloat16",
            on_epoch=on_epoch,
        )
    synchronize(device)
    return time.perf_counter() - begin, int((roles == TRAIN).sum()) * plan.seeds * plan.grid * plan.epochs
