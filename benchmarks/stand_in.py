"""Can a slide of the stand-in study be told without looking at what was planted? Plain statistics; no model of carmil is trained.

    python benchmarks/stand_in.py CRC [--seeds 5]

A logistic regression on the mean of a slide's features: over the whole slide, and over the part that must not know the label (what
is not planted; in `weak` the nuclei of each kind for themselves). The second must be at chance. Beside them what can be had at
all: with every nucleus's kind known (`weak`), and with kinds told by a classifier of nuclei that was trained on the training
patients' kinds, which no method of the paper sees.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from carmil.datasets.crc_nuclei import INFLAMMATORY, NORMAL, STROMA, TUMOUR, Nuclei, read_nuclei
from carmil.datasets.planting import MadeSlide
from carmil.datasets.stand_in_slides import FULL, slides_of

TOP = 0.002  # of a slide's nuclei, those that look most like tumour


class Study:
    """One cohort drawn with one seed: features of nuclei, slides, labels and who is tested on whom."""

    def __init__(self, name: str, nuclei: Nuclei, features: np.ndarray, seed: int) -> None:
        self.nuclei, self.features = nuclei, features
        self.slides = slides_of(name, nuclei, FULL, seed)
        self.labels = np.array([slide.label for slide in self.slides])
        parts = np.array([slide.split for slide in self.slides])
        groups = np.array([slide.patient for slide in self.slides])
        if parts[0]:
            self.folds = [(np.flatnonzero(parts == "train"), np.flatnonzero(parts == "test"))]
        else:
            self.folds = list(GroupKFold(5).split(groups, groups=groups))

    def auc(self, of_slide: Callable[[MadeSlide], np.ndarray]) -> float:
        """Of a logistic regression on a vector a slide; more than two classes: one against the rest, their mean."""
        vectors = np.stack([of_slide(slide) for slide in self.slides])
        found = []
        for train, test in self.folds:
            model = make_pipeline(StandardScaler(), LogisticRegression(C=0.001, max_iter=2000))
            p = model.fit(vectors[train], self.labels[train]).predict_proba(vectors[test])
            two = p.shape[1] == 2
            found.append(roc_auc_score(self.labels[test], p[:, 1] if two else p, multi_class="ovr"))
        return float(np.mean(found))

    def mean(self, where: Callable[[MadeSlide], np.ndarray]) -> float:
        return self.auc(lambda slide: self.features[slide.nuclei[where(slide)]].mean(axis=0))

    def of_kind(self, kinds: tuple[str, ...]) -> float:
        return self.mean(lambda slide: np.isin(self.nuclei.kinds[slide.nuclei], kinds))

    def told_by_nuclei(self, kind: str, of_scores: Callable[[np.ndarray], float]) -> float:
        """AUC of a figure of the slide's nuclei, each scored by a classifier of the training patients' nuclei."""
        found = []
        for train, test in self.folds:
            patients = sorted({p for i in train for p in self.nuclei.patients[self.slides[i].nuclei]})
            rows = self.nuclei.of(patients, (TUMOUR, *NORMAL))
            model = make_pipeline(StandardScaler(), PCA(64, random_state=0), LogisticRegression(max_iter=500))
            scores = model.fit(self.features[rows], self.nuclei.kinds[rows] == kind).decision_function(self.features)
            figures = [of_scores(scores[self.slides[i].nuclei]) for i in test]
            found.append(roc_auc_score(self.labels[test], figures))
        return float(np.mean(found))


def everything(slide: MadeSlide) -> np.ndarray:
    return np.ones(len(slide.nuclei), dtype=bool)


def not_planted(slide: MadeSlide) -> np.ndarray:
    assert slide.truth is not None
    return slide.truth == 0


def top(scores: np.ndarray) -> float:
    return float(np.sort(scores)[-max(1, int(TOP * len(scores))) :].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("crc", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    asked = parser.parse_args()
    nuclei = read_nuclei(asked.crc)
    features = np.asarray(nuclei.features("resnet50"), dtype=np.float32)
    found: dict[str, list[float]] = {}

    def note(what: str, figure: float) -> None:
        found.setdefault(what, []).append(figure)

    for seed in range(asked.seeds):
        foci, kinds, weak = (Study(name, nuclei, features, seed) for name in ("foci", "kinds", "weak"))
        for name, study in (("foci", foci), ("kinds", kinds)):
            note(f"{name}: mean of the whole slide", study.mean(everything))
            note(f"{name}: mean of what is not planted", study.mean(not_planted))
        note("foci: supervised nuclei, mean of the top 0.2 %", foci.told_by_nuclei(TUMOUR, top))
        note("weak: mean of the whole slide", weak.mean(everything))
        for one in ((INFLAMMATORY,), (TUMOUR,), STROMA):
            note(f"weak: mean of {' and '.join(one)} nuclei alone", weak.of_kind(one))
        note(
            "weak: supervised nuclei, share of inflammatory",
            weak.told_by_nuclei(INFLAMMATORY, lambda s: float((s > 0).mean())),
        )
        shares = [(nuclei.kinds[slide.nuclei] == INFLAMMATORY).mean() for slide in weak.slides]
        note("weak: true share of inflammatory", float(roc_auc_score(weak.labels, shares)))
    print("| AUC of | mean | lowest | highest |\n|---|---:|---:|---:|")
    for what, figures in found.items():
        print(f"| {what} | {np.mean(figures):.2f} | {min(figures):.2f} | {max(figures):.2f} |")


if __name__ == "__main__":
    main()
