"""Whether models trained in bfloat16 are as good as those trained in float32: AUC on crc, the same folds and seeds."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from carmil.counterfactual import create_model
from carmil.progress import training_progress
from carmil.training.loop import fit
from carmil.training.population import PRECISIONS, Member, Population
from carmil.training.predict import predict

from .bench import Bench
from .ours import MODEL
from .records import Fact

SEEDS, EPOCHS = 5, 50


def trained(bench: Bench) -> Iterator[Fact]:
    """The mean AUC over folds x seeds of test bags, for both precisions."""
    if bench.device == "cpu" or bench.plan.crc is None:
        why = "a CPU computes in float32 alone" if bench.device == "cpu" else "needs --crc"
        yield Fact("trained", "mean AUC in bfloat16 and float32", None, "", why)
        return
    from carmil.evidence import bag_auc
    from carmil.reproduce.crc import FOLDS, LEARNING_RATE, RECIPE, fold_roles, load_crc

    bags = load_crc(bench.plan.crc)
    assert bags.labels is not None
    roles, tested = fold_roles(bags.labels, seed=0)
    recipe = replace(RECIPE, epochs=EPOCHS)
    means = []
    for precision in PRECISIONS:
        members = [Member(seed=seed, lr=LEARNING_RATE) for seed in range(SEEDS * FOLDS)]
        everyone = Population(
            lambda: create_model(MODEL, bags.width, 2), members, device=bench.device, precision=precision
        )
        with training_progress(precision, EPOCHS, len(members)) as on_epoch:
            fit(everyone, bags, roles.repeat(SEEDS, 1), recipe, on_epoch=on_epoch)
        answers = predict(everyone, bags, maps=False).probabilities
        mine = tested.repeat(SEEDS, 1)
        aucs = torch.tensor([bag_auc(p[test], bags.labels[test]) for p, test in zip(answers, mine, strict=True)])
        means.append(100 * float(aucs.mean()))
        spread = f"{FOLDS} folds x {SEEDS} seeds, {EPOCHS} epochs; standard deviation {100 * float(aucs.std()):.1f}"
        yield Fact("trained", f"mean AUC on crc, {precision}", means[-1], "%", spread)
    yield Fact("trained", "difference of the mean AUC", abs(means[0] - means[1]), "points", "")
