"""Use the public names like a user's script. The type checker reads this file against the installed wheel; it is never run.

A line that must be rejected has a `type: ignore`; an unused ignore is an error too.
"""

from pathlib import Path
from typing import assert_type

import numpy as np
import torch

import carmil
from carmil.bags.store import Store
from carmil.evidence.agreement import Agreement
from carmil.training.history import History


def trained(bags: carmil.Bags, roles: torch.Tensor) -> carmil.Population:
    population = carmil.Population(lambda: carmil.create_model("car/abmil", 64), [carmil.Member(seed=0, lr=1e-3)])
    assert_type(carmil.fit(population, bags, roles, carmil.Recipe(epochs=5)), History)
    return population


def asked(model: carmil.BagModel, bags: carmil.Bags, truth: torch.Tensor) -> Agreement:
    assert_type(carmil.create_model("abmil"), carmil.BagModel)
    evidence = assert_type(carmil.explain(model, bags, "path"), torch.Tensor)
    return carmil.evidence_agreement(evidence, -evidence, truth, bags.offsets)


def classified(bags: list[np.ndarray], labels: list[int]) -> dict[str, float]:
    classifier = carmil.MILClassifier("car/abmil.gated", epochs=5).fit(bags, labels)
    assert_type(classifier, carmil.MILClassifier)
    assert_type(classifier.explain(bags), list[np.ndarray])
    return carmil.bag_performance(classifier.predict_proba(bags), labels)


def opened() -> Store:
    return carmil.open_store(Path("cohort"))


carmil.create_modle("abmil")  # type: ignore[attr-defined]
carmil.Member(seed="first")  # type: ignore[arg-type]
carmil.open_store(7)  # type: ignore[arg-type]
