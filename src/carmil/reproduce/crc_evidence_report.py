"""What `crc-evidence` writes: tables, JSON, a picture."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from carmil.evidence import EXPLAINERS
from carmil.files import write_text
from carmil.provenance import plain
from carmil.report.dots import write_dots
from carmil.reproduce.crc import FOLDS, LEARNING_RATE, VALIDATION_SHARE
from carmil.reproduce.map_comparison import BASELINE, REPEATS, Contrast, Map, Result, Row
from carmil.reproduce.table1 import Figure, shown
from carmil.statistics.bootstrap import Interval
from carmil.tables import ResultTable
from carmil.training.recipe import Recipe


def write_result(result: Result, study: Mapping[str, Any], out: Path) -> None:
    write_text(out / "crc_evidence.json", json.dumps(_as_json(result, study), indent=2))
    write_text(out / "crc_evidence.md", markdown(result))
    _draw(result.rows, out / "crc_evidence.png")


def conditions(machines: Sequence[str], seeds: int, seed: int, recipe: Recipe) -> list[str]:
    """What the figures depend on, a line each."""
    return [
        f"mean ± standard deviation over {seeds} seeds (initialisations; the same {FOLDS} folds by patient, fold seed {seed}), "
        "in per cent",
        "AUPRC+, AUROC, NDCG (gain 1 for a cancerous nucleus): of the map for the positive class in each patient with cancerous "
        "nuclei and others; the mean over a fold's test patients, then over the folds; the same of its validation patients",
        f"intervals: 95 %, percentiles of {REPEATS:,} resamples of the patients of each class, in which the mean over the folds is "
        "computed again; differences on the same resamples, the average over the seeds taken first",
        "bag AUC: of each fold's test patients, mean over folds and seeds, resampled in the same way",
        "baseline: ABMIL's attention. Validation: the best AUPRC+ on validation bags among CAR's maps that are signed and of a "
        "class; a validation bag of one fold is a test bag of another, so that "
        "only the choice fold by fold is blind to all it is tested on",
        f"Adam, learning rate {LEARNING_RATE:g} falling by a cosine over {recipe.epochs} epochs, weight decay 1e-5, one bag a "
        f"step; the epoch with the lowest cross-entropy on validation bags, {VALIDATION_SHARE:.0%} of the training folds",
        f"measured on {'; and on '.join(dict.fromkeys(machines))}",
    ]


def tables(result: Result) -> list[ResultTable]:
    fixed = tuple(
        (
            one.fixed,
            _said_maps(one.maps),
            _span(one.auprc),
            *_less(one, one.auprc_difference),
            _span(one.auc),
            *_less(one, one.auc_difference),
        )
        for one in result.contrasts
    )
    lines = tuple(
        (
            row.model,
            row.evidence,
            _kind(row.evidence),
            shown(row.test["auprc"]),
            _span(row.difference, sign="+z"),
            *(shown(row.test[name]) for name in ("auroc", "ndcg")),
            shown(row.validation["auprc"]),
            shown(result.aucs[row.model]),
        )
        for row in result.rows
    )
    return [
        ResultTable(
            f"The default map against the attention of {BASELINE[0]}",
            ("fixed by", "map", "AUPRC+", "less the baseline's", "p", "bag AUC", "less the baseline's AUC", "p of AUC"),
            fixed,
        ),
        ResultTable(
            "Every explainer",
            ("model", "map", "kind", "AUPRC+", "less the baseline's", "AUROC", "NDCG", "AUPRC+ validation", "bag AUC"),
            lines,
            names=3,
        ),
    ]


def _less(one: Contrast, difference: Interval) -> tuple[str, str]:
    """What it has more than the baseline, and p; of the baseline itself nothing."""
    return ("–", "–") if set(one.maps) == {BASELINE} else (_span(difference, sign="+z"), f"{difference.p:.2g}")


def _said_maps(maps: Sequence[Map]) -> str:
    """Model by model, with how many folds have the map where they differ."""
    folds = Counter(maps)
    return "; ".join(
        ", ".join(
            f"{count} × {method}" if len(folds) > 1 else method
            for (own, method), count in folds.items()
            if own == model
        )
        + f" of {model}"
        for model in dict.fromkeys(model for model, _ in maps)
    )


def _kind(method: str) -> str:
    explainer = EXPLAINERS[method]
    return (
        f"{'signed' if explainer.signed else 'unsigned'}, {'a class' if explainer.class_conditional else 'all classes'}"
    )


def _span(one: Interval, sign: str = "") -> str:
    return f"{one.value:{sign}.1f} [{one.low:{sign}.1f}, {one.high:{sign}.1f}]"


def markdown(result: Result) -> str:
    head = ["# CRC nuclei: what the maps find", "", *(f"- {line}" for line in result.lines), ""]
    return "\n".join([*head, *(table.markdown() for table in tables(result)), "![](crc_evidence.png)", ""])


def _as_json(result: Result, study: Mapping[str, Any]) -> dict[str, Any]:
    def named(figures: Mapping[str, Figure]) -> dict[str, Any]:
        return {name: {"mean": mean, "std": std} for name, (mean, std) in figures.items()}

    rows = [{**asdict(row), "test": named(row.test), "validation": named(row.validation)} for row in result.rows]
    contrasts = [{**asdict(one), "maps": [list(name) for name in one.maps]} for one in result.contrasts]
    facts = {"conditions": result.lines, "study": dict(study), "auc": named(result.aucs)}
    return plain({**facts, "contrasts": contrasts, "rows": rows})


def _draw(rows: Sequence[Row], path: Path) -> None:
    groups: dict[str, dict[str, Interval]] = {}
    for row in rows:
        groups.setdefault(row.model, {})[row.evidence] = row.auprc
    axis = "AUPRC+ on test bags, per cent, with 95 % intervals over patients"
    write_dots(groups, path, axis=axis, guide=groups[BASELINE[0]][BASELINE[1]].value, note="ABMIL's attention")
