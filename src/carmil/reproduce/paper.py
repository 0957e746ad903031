"""The paper's figures on digit bags: its Table 1 and its interpretability table."""

from collections.abc import Sequence

import numpy as np

Figure = tuple[float, float]  # mean and standard deviation, in per cent

# (model, evidence, negative rule) -> task -> measure -> figure
PAPER: dict[tuple[str, str, str], dict[str, dict[str, Figure]]] = {
    ("abmil", "attention", "mirror"): {
        "adjacent_pairs": {"auc": (85.7, 5.9), "auprc_plus": (76.9, 6.1), "auprc_both": (61.5, 0.9)},
        "four_bags": {"auc": (99.1, 0.1), "auprc_plus": (86.8, 0.2), "auprc_both": (53.1, 0.1)},
    },
    ("additive", "attention", "mirror"): {
        "adjacent_pairs": {"auc": (81.0, 2.2), "auprc_plus": (64.3, 4.8), "auprc_both": (63.5, 1.2)},
        "four_bags": {"auc": (97.0, 2.7), "auprc_plus": (82.1, 12.1), "auprc_both": (53.4, 0.8)},
    },
    ("additive", "patch_scores", "mirror"): {
        "adjacent_pairs": {"auprc_plus": (66.7, 7.4), "auprc_both": (67.6, 6.6)},
        "four_bags": {"auprc_plus": (76.4, 15.0), "auprc_both": (76.8, 14.6)},
    },
    ("transmil", "rollout", "mirror"): {
        "adjacent_pairs": {"auc": (94.6, 4.4), "auprc_plus": (81.5, 6.9), "auprc_both": (61.7, 2.1)},
        "four_bags": {"auc": (99.5, 0.1), "auprc_plus": (81.6, 6.3), "auprc_both": (51.9, 0.8)},
    },
    # the interpretability table
    ("abmil", "random", "mirror"): {
        "adjacent_pairs": {"auprc_plus": (54.2, 0.9), "auprc_both": (54.2, 0.9)},
        "four_bags": {"auprc_plus": (30.6, 0.2), "auprc_both": (31.2, 0.2)},
    },
    ("abmil", "single", "mirror"): {
        "adjacent_pairs": {"auprc_plus": (78.5, 1.0), "auprc_both": (78.5, 1.0)},
        "four_bags": {"auprc_plus": (87.9, 1.6), "auprc_both": (87.7, 2.1)},
    },
    ("car/abmil", "attention", "counterfactual"): {
        "adjacent_pairs": {"auc": (94.1, 5.9), "auprc_plus": (85.7, 6.5), "auprc_both": (84.6, 5.2)},
        "four_bags": {"auc": (99.6, 0.1), "auprc_plus": (86.8, 0.6), "auprc_both": (89.7, 0.9)},
    },
}


def figure(values: Sequence[float | None]) -> Figure:
    """Mean and standard deviation over models, in per cent; of one model there is no deviation."""
    known = np.asarray(values, dtype=float)  # None, as JSON has it, becomes NaN
    spread = float(known.std(ddof=1)) if len(known) > 1 else float("nan")
    return 100 * float(known.mean()), 100 * spread


def figure_text(value: Figure | None) -> str:
    if value is None:
        return "–"
    mean, spread = value
    return f"{mean:.1f}" if np.isnan(spread) else f"{mean:.1f} ± {spread:.1f}"
