"""Check that the label of a stand-in slide cannot be predicted from anything but what was planted. No model of carmil is trained.

    python benchmarks/stand_in.py CRC [--seeds 5]

A logistic regression on the mean of a slide's features: over the whole slide, and over the part that must not depend on the
label (everything that was not planted; in `weak`, the nuclei of each kind). The second must be at chance. For comparison, what
is possible at best: with the kind of every nucleus known (`weak`), and with kinds predicted by a classifier of nuclei, trained
on the kinds of the training patients, which no method of the paper sees.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from speed.script import run_script

from carmil.datasets.crc_nuclei import INFLAMMATORY, NORMAL, STROMA, TUMOUR, Nuclei, read_nuclei
from carmil.datasets.planting import SyntheticSlide
from carmil.datasets.stand_in_slides import FULL, make_slides

TOP = 0.002  # share of a slide's nuclei: those most like tumour


class Study:
    """One cohort drawn with one seed: features of nuclei, slides, labels and folds."""

    def __init__(self, name: str, nuclei: Nuclei, features: np.ndarray, seed: int) -> None:
        self.nuclei, self.features = nuclei, features
        self.slides = make_slides(name, nuclei, FULL, seed)
        self.labels = np.array([slide.label for slide in self.slides])
        parts = np.array([slide.split for slide in self.slides])
        groups = np.array([slide.patient for slide in self.slides])
        official = [(np.flatnonzero(parts == "train"), np.flatnonzero(parts == "test"))]
        self.folds = official if parts[0] else list(GroupKFold(5).split(groups, groups=groups))

    def mean_auc(self, part: Callable[[SyntheticSlide], np.ndarray]) -> float:
        """AUC of a logistic regression on the mean features of a part of each slide; one class against the rest."""
        vectors = np.stack([self.features[slide.nuclei[part(slide)]].mean(axis=0) for slide in self.slides])
        aucs = []
        for train, test in self.folds:
            model = make_pipeline(StandardScaler(), LogisticRegression(C=0.001, max_iter=2000))
            p = model.fit(vectors[train], self.labels[train]).predict_proba(vectors[test])
            p = p[:, 1] if p.shape[1] == 2 else p
            aucs.append(roc_auc_score(self.labels[test], p, multi_class="ovr"))
        return float(np.mean(aucs))

    def kind_auc(self, kinds: tuple[str, ...]) -> float:
        return self.mean_auc(lambda slide: np.isin(self.nuclei.kinds[slide.nuclei], kinds))

    def supervised_auc(self, kind: str, figure: Callable[[np.ndarray], float]) -> float:
        """AUC of a figure of the slide's nuclei, each scored by a classifier of the training patients' nuclei."""
        aucs = []
        for train, test in self.folds:
            patients = sorted({p for i in train for p in self.nuclei.patients[self.slides[i].nuclei]})
            rows = self.nuclei.rows(patients, (TUMOUR, *NORMAL))
            model = make_pipeline(StandardScaler(), PCA(64, random_state=0), LogisticRegression(max_iter=500))
            scores = model.fit(self.features[rows], self.nuclei.kinds[rows] == kind).decision_function(self.features)
            aucs.append(roc_auc_score(self.labels[test], [figure(scores[self.slides[i].nuclei]) for i in test]))
        return float(np.mean(aucs))

    def share_auc(self, kind: str) -> float:
        """AUC of the true share of a kind."""
        shares = [(self.nuclei.kinds[slide.nuclei] == kind).mean() for slide in self.slides]
        return float(roc_auc_score(self.labels, shares))


def everything(slide: SyntheticSlide) -> np.ndarray:
    return np.ones(len(slide.nuclei), dtype=bool)


def not_planted(slide: SyntheticSlide) -> np.ndarray:
    assert slide.truth is not None
    return slide.truth == 0


def top_mean(scores: np.ndarray) -> float:
    return float(np.sort(scores)[-max(1, int(TOP * len(scores))) :].mean())


def positive_share(scores: np.ndarray) -> float:
    return float((scores > 0).mean())


def aucs_of(nuclei: Nuclei, features: np.ndarray, seed: int) -> dict[str, float]:
    """All figures of one draw of the study."""
    foci, kinds, weak = (Study(name, nuclei, features, seed) for name in ("foci", "kinds", "weak"))
    alone = ((INFLAMMATORY,), (TUMOUR,), STROMA)
    return {
        "foci: mean of the whole slide": foci.mean_auc(everything),
        "foci: mean of what is not planted": foci.mean_auc(not_planted),
        "kinds: mean of the whole slide": kinds.mean_auc(everything),
        "kinds: mean of what is not planted": kinds.mean_auc(not_planted),
        "foci: supervised nuclei, mean of the top 0.2 %": foci.supervised_auc(TUMOUR, top_mean),
        "weak: mean of the whole slide": weak.mean_auc(everything),
        **{f"weak: mean of {' and '.join(names)} nuclei alone": weak.kind_auc(names) for names in alone},
        "weak: supervised nuclei, share of inflammatory": weak.supervised_auc(INFLAMMATORY, positive_share),
        "weak: true share of inflammatory": weak.share_auc(INFLAMMATORY),
    }


def main(crc: Path, seeds: int = 5) -> None:
    nuclei = read_nuclei(crc)
    features = np.asarray(nuclei.features("resnet50"), dtype=np.float32)
    draws = [aucs_of(nuclei, features, seed) for seed in range(seeds)]
    print("| AUC of | mean | lowest | highest |\n|---|---:|---:|---:|")
    for what in draws[0]:
        aucs = [draw[what] for draw in draws]
        print(f"| {what} | {np.mean(aucs):.2f} | {min(aucs):.2f} | {max(aucs):.2f} |")


if __name__ == "__main__":
    run_script(main)
