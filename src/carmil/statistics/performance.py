"""Metrics of the predictions of bags. b bags, k classes."""

import numpy as np
from numpy.typing import ArrayLike


def bag_performance(probabilities: ArrayLike, labels: ArrayLike) -> dict[str, float]:
    """Return auc (two classes: of class 1; more: one-vs-rest, macro), f1_macro and balanced_accuracy of the most probable class."""
    probabilities, labels = np.asarray(probabilities, dtype=np.float64), np.asarray(labels)
    return {
        "auc": bag_auc(probabilities, labels),
        "f1_macro": f1_macro(probabilities, labels),
        "balanced_accuracy": balanced_accuracy(probabilities, labels),
    }


def f1_macro(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Return the mean F1 over the classes that occur among labels or answers; the answer is the most probable class."""
    from sklearn.metrics import f1_score

    answers = np.asarray(probabilities).argmax(1)
    return float(f1_score(np.asarray(labels), answers, average="macro", zero_division=0.0))


def balanced_accuracy(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Return the mean, over the classes with bags, of the share of their bags whose most probable class is correct."""
    right = np.asarray(probabilities).argmax(1) == np.asarray(labels)
    return float(np.mean([right[np.asarray(labels) == c].mean() for c in np.unique(labels)]))


def bag_auc(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Return the area under the ROC curve; NaN if a class has no bag."""
    from sklearn.metrics import roc_auc_score

    probabilities, labels = np.asarray(probabilities, dtype=np.float64), np.asarray(labels)
    classes = probabilities.shape[1]
    if len(np.unique(labels)) < classes:
        return float("nan")
    if classes == 2:
        return float(roc_auc_score(labels, probabilities[:, 1]))
    probabilities = probabilities / probabilities.sum(1, keepdims=True)
    return float(roc_auc_score(labels, probabilities, multi_class="ovr", average="macro"))
