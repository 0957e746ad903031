"""What explained slides say together: how attention moved, which class grew, how concentrated the maps are, whether they
agree with the truth. Everything is computed from the lines of the slides and the maps that were written."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from carmil.bags.bags import Bags
from carmil.evidence.agreement import NEGATIVE_RULES
from carmil.evidence.explainers import EXPLAINERS
from carmil.maps.tile_maps import LEAST_LOGITS, LEAST_MOVED
from carmil.runs.run import Run
from carmil.studies.cautions import unmoved
from carmil.studies.decisions import distinct_rules, rule_lines
from carmil.studies.figures import mean_interval
from carmil.studies.localisation import localisation_figures
from carmil.studies.subjects import Subject
from carmil.tables import ResultTable
from carmil.words import plural

if TYPE_CHECKING:
    import pandas as pd

SEVERAL = "where several models explain a slide, its maps are the mean of theirs, each in its own units"
MOVED = ("distance", "attention_moved", "carriers")
MEASURES = {
    "auprc_plus": "AUPRC+",
    "auprc_both_mirror": "AUPRC± (mirror)",
    "auroc": "AUROC",
    "ndcg": "NDCG",
    "froc": "FROC",
    "dice": "Dice",
}


def summary_of(
    run: Run,
    frame: "pd.DataFrame",
    bags: Bags,
    subjects: Sequence[Subject],
    out: Path,
    methods: Sequence[str],
    thresholds: dict[str, list[float]],
) -> dict[str, Any]:
    """The contents of summary.json."""
    patients = frame["patient"].where(frame["patient"].notna(), frame["slide"]).to_numpy()

    def mean(column: str) -> dict[str, float]:
        return mean_interval(frame[column].to_numpy(dtype=np.float64), patients)

    concentration = [name for name in map(str, frame) if name.startswith(("attention_", "evidence_"))]
    found: dict[str, Any] = {
        "run": run.key,
        "model": run.settings.model,
        "classes": list(run.classes),
        "slides": len(frame),
        "answer_rules": distinct_rules(frame),
        "evidence": methods[0],
        "methods": {method: EXPLAINERS[method].description for method in methods},
        "several_models": SEVERAL,
        "concentration": {name: mean(name) for name in concentration},
        "negligible": int((frame["logits_apart"].astype(float) < LEAST_LOGITS).sum()),
    }
    if "residual" in frame:
        found["residual"] = {"largest": float(frame["residual"].max()), "mean": float(frame["residual"].mean())}
    for which in ("counterfactual", "searched"):
        if f"{which}_prediction" in frame:
            found[which] = _turned(frame, which, run.classes) | {name: mean(f"{which}_{name}") for name in MOVED}
            found[which]["median_moved"] = float(frame[f"{which}_attention_moved"].astype(float).median())
    if "searched_reached" in frame:
        found["searched"]["reached"] = mean("searched_reached")
    if "spearman" in frame:
        found["correlations"] = {"u and u_cf": {name: mean(name) for name in ("spearman", "pearson")}}
    if bags.instance_labels is not None and len(run.classes) == 2:
        positive = run.classes[1]
        columns = {method: f"{method if i else 'evidence'}_{positive}" for i, method in enumerate(methods)}
        found["truth"] = {
            "class": positive,
            "negative_rule": f"mirror: {NEGATIVE_RULES['mirror']}",
            "dice_threshold": "chosen on the validation bags of each model"
            if thresholds
            else "none: no validation bags here",
            "agreement": localisation_figures(
                bags, subjects, [out / name for name in frame["file"]], columns, thresholds
            ),
        }
    return found


def agreement_table(summary: dict[str, Any]) -> ResultTable | None:
    """A line a method, in per cent with 95 % intervals; None where the instances have no truth."""
    if "truth" not in summary:
        return None
    found = summary["truth"]["agreement"]
    names = [name for name in MEASURES if any(name in line for line in found.values())]
    lines = tuple((method, *(_cell(line.get(name)) for name in names)) for method, line in found.items())
    title = f"Agreement with the truth, class {summary['truth']['class']}: per cent, 95 % interval"
    return ResultTable(title, ("map", *(MEASURES[name] for name in names)), lines)


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """For the terminal: what was explained by what, and how the counterfactual reads."""
    found = [f"{plural(summary['slides'], 'slide')}; evidence_CLASS is {summary['evidence']}: {_described(summary)}"]
    found += rule_lines(summary["answer_rules"])
    if "residual" in summary:
        error = f"{summary['residual']['largest']:.1e}"
        found.append(f"on every slide it adds up to the change of the logit, with a relative error of at most {error}")
    if summary["negligible"]:
        found.append(
            f"negligible evidence: on {summary['negligible']} of {plural(summary['slides'], 'slide')} all tiles together change "
            f"the difference between any two class logits by less than {LEAST_LOGITS:g} (column logits_apart); maps of it are "
            "drawn as 0"
        )
    for which in ("counterfactual", "searched"):
        if which in summary:
            part = summary[which]
            found.append(
                f"{which} attention: {part['turned']} of {plural(summary['slides'], 'slide')} would get another answer; "
                f"{part['attention_moved']['value']:.2f} of the attention moved (2 is the most), "
                f"90 % of it on {part['carriers']['value']:.0%} of the instances"
            )
            if which == "counterfactual" and (moved := part["median_moved"]) < LEAST_MOVED:
                found.append(unmoved(moved))
    return found


def _described(summary: dict[str, Any]) -> str:
    return summary["methods"][summary["evidence"]]


def _turned(frame: "pd.DataFrame", which: str, classes: Sequence[str]) -> dict[str, Any]:
    """How many answers turn; where labels are known, of rightly answered slides (a row a class) which class's logit grew most
    (a column)."""
    found: dict[str, Any] = {"turned": int((frame[f"{which}_prediction"] != frame["prediction"]).sum())}
    if frame["label"].isna().all():
        return found
    right = frame[frame["label"] == frame["prediction"]]
    matrix = [
        [int(((right["label"] == label) & (right[f"{which}_grown"] == grown)).sum()) for grown in classes]
        for label in classes
    ]
    return found | {"class_shift": {"rows": "label of rightly answered slides", "matrix": matrix}}


def _cell(figure: dict[str, float] | None) -> str:
    if figure is None or figure["value"] != figure["value"]:
        return "–"
    value, low, high = (100 * figure[name] for name in ("value", "low", "high"))
    return f"{value:.1f}" if low != low else f"{value:.1f} ({low:.1f} to {high:.1f})"
