"""Agreement with the truth over 1,000 bags x 4 classes: ours in one batched computation, and scikit-learn's in a loop.

python benchmarks/auprc.py
"""

import time

import numpy as np
import torch
from sklearn.metrics import average_precision_score

from carmil.datasets.digits import BAG_SIZE, TASKS, sample_digits
from carmil.evidence import evidence_agreement
from carmil.provenance import machine_line

BAGS = 1000


def loop(scores: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """AUPRC+ and AUPRC± as the benchmark's own code computes them, pair by pair."""
    plus, both = [], []
    for start in range(0, len(truth), BAG_SIZE):
        rows = slice(start, start + BAG_SIZE)
        for c in range(truth.shape[1]):
            found = []
            for sign in (1, -1):
                target = truth[rows, c] == sign
                if 0 < target.sum() < BAG_SIZE:
                    found.append(average_precision_score(target, sign * scores[rows, c]))
                    if sign == 1:
                        plus.append(found[-1])
            if found:
                both.append(np.mean(found))
    return float(np.mean(plus)), float(np.mean(both))


def main() -> None:
    rng = np.random.default_rng(0)
    truth = TASKS["four_bags"].evidence(sample_digits(BAGS, rng)).reshape(-1, 4)
    scores = rng.normal(size=truth.shape)
    started = time.perf_counter()
    ours = evidence_agreement(
        torch.from_numpy(scores), torch.from_numpy(-scores), torch.from_numpy(truth), torch.arange(BAGS + 1) * BAG_SIZE
    )
    between = time.perf_counter()
    theirs = loop(scores, truth)
    ended = time.perf_counter()
    assert np.allclose((float(ours.positive), float(ours.both)), theirs)
    print(f"carmil        {between - started:8.3f} s")
    print(f"scikit-learn  {ended - between:8.3f} s, the same figures")
    print(machine_line())


if __name__ == "__main__":
    main()
