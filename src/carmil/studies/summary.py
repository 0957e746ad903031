"""The summary of explained slides: how attention moved, which class grew, how concentrated the maps are, and whether they agree
with the truth. Everything is computed from the rows of the slides and the maps that were written."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from carmil.bags.bags import Bags
from carmil.evidence.agreement import NEGATIVE_RULES
from carmil.evidence.explainers import EXPLAINERS
from carmil.maps.tile_maps import LEAST_LOGITS, LEAST_MOVED
from carmil.runs.evidence import ClassShift, CounterfactualSummary, EvidenceSummary, Residual, TruthAgreement
from carmil.runs.facts import SlideMean
from carmil.runs.run import Run
from carmil.studies.cautions import unmoved
from carmil.studies.decisions import distinct_rules, rule_lines
from carmil.studies.figures import interval_words, mean_interval, percent
from carmil.studies.localisation import localisation_figures
from carmil.studies.subjects import Subject
from carmil.tables import ResultTable
from carmil.words import plural

if TYPE_CHECKING:
    import pandas as pd

SEVERAL = "where several models explain a slide, its maps are the mean of theirs, each in its own units"
MEASURES = {
    "auprc_plus": "AUPRC+",
    "auprc_both_mirror": "AUPRC± (mirror)",
    "auroc": "AUROC",
    "ndcg": "NDCG",
    "froc": "FROC",
    "dice": "Dice",
}


def summarise_evidence(
    run: Run,
    frame: "pd.DataFrame",
    bags: Bags,
    subjects: Sequence[Subject],
    out: Path,
    methods: Sequence[str],
    thresholds: Mapping[str, Sequence[float]],
) -> EvidenceSummary:
    """Summarise the rows of all slides. thresholds: of Dice, by method and model; empty where there are none."""
    patients = frame["patient"].where(frame["patient"].notna(), frame["slide"]).to_numpy()

    def mean(column: str) -> SlideMean:
        return mean_interval(frame[column].to_numpy(dtype=np.float64), patients)

    def counterfactual(which: str) -> CounterfactualSummary | None:
        if f"{which}_prediction" not in frame:
            return None
        return CounterfactualSummary(
            turned=int((frame[f"{which}_prediction"] != frame["prediction"]).sum()),
            distance=mean(f"{which}_distance"),
            attention_moved=mean(f"{which}_attention_moved"),
            carriers=mean(f"{which}_carriers"),
            median_moved=float(frame[f"{which}_attention_moved"].astype(float).median()),
            class_shift=_class_shift(frame, which, run.classes),
            reached=mean(f"{which}_reached") if f"{which}_reached" in frame else None,
        )

    truth = None
    if bags.instance_labels is not None and len(run.classes) == 2:
        positive = run.classes[1]
        columns = {method: f"{method if i else 'evidence'}_{positive}" for i, method in enumerate(methods)}
        truth = TruthAgreement(
            positive,
            negative_rule=f"mirror: {NEGATIVE_RULES['mirror']}",
            dice_threshold="chosen on the validation bags of each model"
            if thresholds
            else "none: no validation bags here",
            agreement=localisation_figures(bags, subjects, [out / name for name in frame["file"]], columns, thresholds),
        )
    return EvidenceSummary(
        run=run.key,
        model=run.settings.model,
        classes=run.classes,
        slides=len(frame),
        answer_rules=tuple(distinct_rules(frame)),
        evidence=methods[0],
        methods={method: EXPLAINERS[method].description for method in methods},
        several_models=SEVERAL,
        concentration={name: mean(name) for name in map(str, frame) if name.startswith(("attention_", "evidence_"))},
        negligible=int((frame["logits_apart"].astype(float) < LEAST_LOGITS).sum()),
        residual=Residual(float(frame["residual"].max()), float(frame["residual"].mean()))
        if "residual" in frame
        else None,
        counterfactual=counterfactual("counterfactual"),
        searched=counterfactual("searched"),
        correlations={"u and u_cf": {name: mean(name) for name in ("spearman", "pearson")}}
        if "spearman" in frame
        else None,
        truth=truth,
    )


def agreement_table(summary: EvidenceSummary) -> ResultTable | None:
    """One row per method, in per cent with 95 % intervals; None where the instances have no truth."""
    if summary.truth is None:
        return None
    found = summary.truth.agreement
    names = [name for name in MEASURES if any(name in figures for figures in found.values())]
    rows = tuple((method, *(_cell(figures.get(name)) for name in names)) for method, figures in found.items())
    title = f"Agreement with the truth, class {summary.truth.class_}: per cent, 95 % interval"
    return ResultTable(title, ("map", *(MEASURES[name] for name in names)), rows)


def summary_lines(summary: EvidenceSummary) -> list[str]:
    """For the terminal: what was explained by what, and how the counterfactual reads."""
    slides = plural(summary.slides, "slide")
    lines = [f"{slides}; evidence_CLASS is {summary.evidence}: {summary.methods[summary.evidence]}"]
    lines += rule_lines(summary.answer_rules)
    if summary.residual is not None:
        error = f"{summary.residual.largest:.1e}"
        lines.append(f"on every slide it adds up to the change of the logit, with a relative error of at most {error}")
    if summary.negligible:
        lines.append(
            f"negligible evidence: on {summary.negligible} of {slides} all tiles together change the difference between any two "
            f"class logits by less than {LEAST_LOGITS:g} (column logits_apart); maps of it are drawn as 0"
        )
    for which, part in summary.counterfactuals.items():
        lines.append(
            f"{which} attention: {part.turned} of {slides} would get another answer; "
            f"{part.attention_moved.value:.2f} of the attention moved (2 is the most), "
            f"90 % of it on {part.carriers.value:.0%} of the instances"
        )
        if which == "counterfactual" and part.median_moved < LEAST_MOVED:
            lines.append(unmoved(part.median_moved))
    return lines


def _class_shift(frame: "pd.DataFrame", which: str, classes: Sequence[str]) -> ClassShift | None:
    """Of rightly answered slides (one row per class), which class's logit grew most (one column per class)."""
    if frame["label"].isna().all():
        return None
    right = frame[frame["label"] == frame["prediction"]]
    matrix = tuple(
        tuple(int(((right["label"] == label) & (right[f"{which}_grown"] == grown)).sum()) for grown in classes)
        for label in classes
    )
    return ClassShift("label of rightly answered slides", matrix)


def _cell(figure: SlideMean | None) -> str:
    if figure is None:
        return "–"
    interval = interval_words(figure)
    return percent(figure.value) + (f" ({interval})" if interval != "–" else "")
