"""`carmil explain`: the evidence of every slide as a table, and a summary; `carmil.runs.evidence` lists the files.

The summary is computed from the rows of the slides and the maps in their files: how attention moved, which class's
logit grew, how concentrated the maps are, and whether they agree with the truth. Evidence is in the unit of the target's
outputs: logits for classes and labels, the log hazard for a risk.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from carmil.bags.bags import Bags
from carmil.bags.store import Store, open_store
from carmil.errors import CarmilError
from carmil.evidence.agreement import NEGATIVE_RULES
from carmil.evidence.explainers import EXPLAINERS
from carmil.explanations.bag_evidence import BagEvidence, concentration_numbers, explain_bag
from carmil.explanations.localisation import dice_thresholds, localisation_figures
from carmil.files import safe_names
from carmil.maps.tile_maps import LEAST_LOGITS, LEAST_MOVED, logits_apart
from carmil.models.contract import Ability, BagModel
from carmil.progress import Log, count_progress
from carmil.provenance import to_json
from carmil.runs.compute_once import compute_once
from carmil.runs.evidence import (
    ClassShift,
    CounterfactualSummary,
    EvidenceSummary,
    Residual,
    TruthAgreement,
    begin_explanation,
    write_summary,
)
from carmil.runs.facts import Number, SlideMean
from carmil.runs.run import Run, read_run, weights_key
from carmil.runs.slide_evidence import TAKEN, Row, read_row, write_slide_evidence
from carmil.studies.cautions import unmoved
from carmil.studies.evaluate import check_fits
from carmil.studies.figures import interval_words, mean_interval, percent
from carmil.studies.subjects import (
    RULE,
    Subject,
    check_complete,
    distinct_rules,
    explainers_for,
    match_run_store,
    open_run_store,
    own_subjects,
    pack_bags,
    rule_lines,
    store_subjects,
    validation_places,
)
from carmil.tables import ResultTable
from carmil.targets import Classes
from carmil.words import plural

SEVERAL = "where several models explain a slide, its maps are the mean of theirs, each in its own units"
MEASURES = {
    "auprc_plus": "AUPRC+",
    "auprc_both_mirror": "AUPRC± (mirror)",
    "auroc": "AUROC",
    "ndcg": "NDCG",
    "froc": "FROC",
    "dice": "Dice",
}


@dataclass(frozen=True, eq=False)
class Explanation:
    """The result of `explain_run`. frame: one row per slide; written: the number of slides that were explained for
    the first time.
    """

    folder: Path
    methods: tuple[str, ...]
    frame: pd.DataFrame
    summary: EvidenceSummary
    written: int


def explain_run(
    run_folder: Path,
    out: Path | None,
    *,
    bags: Path | None,
    methods: tuple[str, ...],
    searched: bool,
    device: str,
    log: Log,
    asked: Collection[str] | None = None,
) -> Explanation:
    """Explain the run's own slides with the models that were tested on them, or new slides (`bags`) with all models.

    asked: the slides that messages concern, by default all.
    """
    run = read_run(run_folder)
    check_complete(run)
    methods = explainers_for(run, methods, log=log)
    if searched and not isinstance(run.target, Classes):
        raise CarmilError(f"--searched needs classes; {run.folder} predicts {run.target.title}: leave it out")
    if searched and Ability.POOLS_BY_ATTENTION not in run.model().abilities:
        raise CarmilError(f"--searched needs attention pooling, which {run.settings.model!r} does not have")
    out = out or (run.folder / "evidence" if bags is None else Path("evidence"))
    store, own = _store(run, bags, out, log, asked)
    subjects = own_subjects(run, store) if own else store_subjects(run, store)
    begin_explanation(out, run, methods=methods, searched=searched, data=store.fingerprint)
    if store.bags().instance_labels is not None and not _measurable(run, store.bags()):
        log(
            "agreement with the truth of instances is measured for two classes, or for the single output of another target "
            f"if the truth is about it; here are {', '.join(run.outputs)}"
        )
    population = run.population(device)
    members = [population.member(row) for row in range(len(run.models))]
    rows, written = _explain_slides(run, members, store.bags(), subjects, methods, out, searched)
    frame = pd.DataFrame(rows)
    validated = own and run.data.imported is None
    thresholds = _thresholds(run, members, store, methods, out, device) if validated else {}
    summary = summarise_evidence(run, frame, store.bags(), subjects, out, methods, thresholds)
    write_summary(out, frame, summary)
    return Explanation(out, methods, frame, summary, written)


def _store(run: Run, bags: Path | None, out: Path, log: Log, asked: Collection[str] | None) -> tuple[Store, bool]:
    """Return the store of the slides to explain, and whether they are the run's own."""
    if bags is None:
        return open_run_store(run), True
    store = open_store(pack_bags(run, bags, out, log=log))
    own = match_run_store(run, store)
    if own is not None:
        log(f"{bags} is the cohort of the run: every slide is explained by the models that were tested on it")
        return own, True
    check_fits(run, store, bags, log, asked)
    return store, False


def _thresholds(
    run: Run, members: list[BagModel], store: Store, methods: tuple[str, ...], out: Path, device: str
) -> dict[str, list[float]]:
    """Return the thresholds of Dice by method and model; they are chosen once and stored in a file."""
    request = {"run": run.key, "weights": weights_key(run), "methods": list(methods), "searched": False}
    request |= {"thresholds": run.thresholds, "data": store.fingerprint}

    def choose() -> dict[str, list[float]]:
        with count_progress("thresholds of Dice", "models") as on_model:
            return dice_thresholds(members, store.bags(), validation_places(run, store), methods, on_model)

    return compute_once(out / "thresholds.json", request, choose, device=device, kind=dict[str, list[Number]])[0]


def _explain_slides(
    run: Run,
    members: list[BagModel],
    bags: Bags,
    subjects: list[Subject],
    methods: tuple[str, ...],
    out: Path,
    searched: bool,
) -> tuple[list[Row], int]:
    """Return the rows of all slides, and how many were computed. Slides with a complete file are read; the others are explained."""
    rows, computed = [], 0
    names = safe_names((subject.slide for subject in subjects), taken=TAKEN)
    with count_progress(f"explaining {run.name}", "slides") as on_slide:
        for done, subject in enumerate(subjects, 1):
            path = out / f"{names[subject.slide]}.parquet"
            row = read_row(path, subject.slide)
            if row is None:
                bag = bags[subject.place]
                models = [members[row] for row in subject.models]
                evidence = explain_bag(models, bag, methods, run.outputs, searched=searched)
                row = _row(run, subject, evidence, bag, path.name) | {"explainer": methods[0]}
                turning = _turning(run, subject, row)
                write_slide_evidence(path, bag, evidence.columns, row, run.target.words, turning)
                computed += 1
            rows.append(row)
            on_slide(done, len(subjects))
    return rows, computed


def _turning(run: Run, subject: Subject, row: Row) -> dict[str, float | None]:
    """Return, by output, the change that would give the slide another answer."""
    p = np.array([row[name] for name in run.target.prediction_columns()], dtype=np.float64)
    decision = run.decision(subject.models)
    return {name: decision.turning(p, i) for i, name in enumerate(run.outputs)}


def _row(run: Run, subject: Subject, found: BagEvidence, bag: Bags, file: str) -> Row:
    """Return a slide's row: its names, the answer and its rule, and every number that was computed.

    A slide that the run was tested on has the predictions stored in the run, so that rounding cannot change the answer.
    explained_class is the output whose evidence is shown: the answer or, if there is none, the leading class; for other
    targets, the predicted output.
    """
    numbers, decision, target = dict(found.numbers), run.decision(subject.models), run.target
    computed = numbers.pop("p").tolist()
    p = computed if subject.predicted is None else list(subject.predicted)
    leading = decision.explained(p)
    row: Row = {"slide": subject.slide, "file": file, "patient": subject.patient, "label": subject.label}
    row |= {"instances": int(bag.sizes[0]), "models": len(subject.models), "prediction": decision.answer(p)}
    row |= {RULE: decision.rule, "explained_class": leading}
    if not isinstance(target, Classes):
        row["prediction_value"] = decision.value_words(p)
    row |= {name: float(value) for name, value in zip(target.prediction_columns(), p, strict=True)}
    for which, stored in (("counterfactual", subject.counterfactual), ("searched", None)):
        if f"{which}_p" in numbers:
            elsewhere = numbers.pop(f"{which}_p").tolist()
            row[f"{which}_prediction"] = decision.answer(elsewhere if stored is None else stored)
            grown = numbers.pop(f"{which}_change")
            if len(run.outputs) > 1:
                row[f"{which}_grown"] = run.outputs[int(grown.argmax())]
    numbers |= concentration_numbers(found, bag, leading)
    row["logits_apart"] = None
    if target.words.rivals:
        row["logits_apart"] = logits_apart([found.columns[f"evidence_{name}"].numpy() for name in run.outputs])
    else:
        row["total_evidence"] = float(found.columns[f"evidence_{leading}"].abs().sum())
    return to_json(row | {name: float(value) for name, value in numbers.items()})


def summarise_evidence(
    run: Run,
    frame: pd.DataFrame,
    bags: Bags,
    subjects: Sequence[Subject],
    out: Path,
    methods: Sequence[str],
    thresholds: Mapping[str, Sequence[float]],
) -> EvidenceSummary:
    """Summarise the rows of all slides. thresholds: those of Dice, by method and model; empty if there are none."""
    patients = frame["patient"].where(frame["patient"].notna(), frame["slide"]).to_numpy()
    answers = run.target.answers_in_words  # otherwise nearly every number is another answer

    def mean(column: str) -> SlideMean:
        return mean_interval(frame[column].to_numpy(dtype=np.float64), patients)

    def counterfactual(which: str) -> CounterfactualSummary | None:
        if f"{which}_prediction" not in frame:
            return None
        return CounterfactualSummary(
            turned=int((frame[f"{which}_prediction"] != frame["prediction"]).sum()) if answers else None,
            distance=mean(f"{which}_distance"),
            attention_moved=mean(f"{which}_attention_moved"),
            carriers=mean(f"{which}_carriers"),
            median_moved=float(frame[f"{which}_attention_moved"].astype(float).median()),
            class_shift=_class_shift(frame, which, run.target.answer_names),
            reached=mean(f"{which}_reached") if f"{which}_reached" in frame else None,
        )

    truth = None
    if _measurable(run, bags):
        positive = run.outputs[-1]
        columns = {method: f"{method if i else 'evidence'}_{positive}" for i, method in enumerate(methods)}
        truth = TruthAgreement(
            positive,
            negative_rule=f"mirror: {NEGATIVE_RULES['mirror']}",
            dice_threshold="chosen on the validation bags of each model"
            if thresholds
            else "none: no validation bags here",
            agreement=localisation_figures(bags, subjects, [out / name for name in frame["file"]], columns, thresholds),
        )
    size = "logits_apart" if run.target.words.rivals else "total_evidence"
    return EvidenceSummary(
        run=run.key,
        model=run.settings.model,
        classes=run.outputs,
        slides=len(frame),
        answer_rules=tuple(distinct_rules(frame)),
        evidence=methods[0],
        methods={method: EXPLAINERS[method].describe(run.target) for method in methods},
        several_models=SEVERAL,
        concentration={name: mean(name) for name in map(str, frame) if name.startswith(("attention_", "evidence_"))},
        negligible=int((frame[size].astype(float) < LEAST_LOGITS).sum()),
        residual=Residual(float(frame["residual"].max()), float(frame["residual"].mean()))
        if "residual" in frame
        else None,
        counterfactual=counterfactual("counterfactual"),
        searched=counterfactual("searched"),
        correlations={"u and u_cf": {name: mean(name) for name in ("spearman", "pearson")}}
        if "spearman" in frame
        else None,
        truth=truth,
        words=run.target.words,
        output=run.target.output_word,
    )


def _measurable(run: Run, bags: Bags) -> bool:
    """Return whether agreement with the truth of instances is measured.

    A truth without columns describes the second of two classes, never a risk or a value.
    """
    truth = bags.instance_labels
    if truth is None:
        return False
    return len(run.outputs) == 2 if isinstance(run.target, Classes) else truth.ndim == 2 and len(run.outputs) == 1


def agreement_table(summary: EvidenceSummary) -> ResultTable | None:
    """Return one row per method, in per cent with 95 % intervals; None if the instances have no truth."""
    if summary.truth is None:
        return None
    agreement = summary.truth.agreement
    names = [name for name in MEASURES if any(name in figures for figures in agreement.values())]
    rows = tuple((method, *(_cell(figures.get(name)) for name in names)) for method, figures in agreement.items())
    of = f"class {summary.truth.class_}" if summary.words.rivals else summary.truth.class_
    title = f"Agreement with the truth, {of}: per cent, 95 % interval"
    return ResultTable(title, ("map", *(MEASURES[name] for name in names)), rows)


def summary_lines(summary: EvidenceSummary) -> list[str]:
    """Return lines for the terminal: which slides were explained by which methods, and how the counterfactual
    changed the answers.
    """
    slides, words = plural(summary.slides, "slide"), summary.words
    one = len(summary.classes) == 1
    column = f"evidence_{summary.classes[0] if one else summary.output.upper()}"
    lines = [f"{slides}; {column} is {summary.evidence}: {summary.methods[summary.evidence]}"]
    lines += rule_lines(summary.answer_rules)
    whole = words.total(summary.classes[0]) if one else "the logit"
    if not words.of_answers:
        lines.append(
            "positive evidence {1} {0}, negative evidence {2} {0}".format(
                summary.classes[0], words.positive, words.negative
            )
        )
    if summary.residual is not None:
        error = f"{summary.residual.largest:.1e}"
        lines.append(f"on every slide it adds up to the change of {whole}, with a relative error of at most {error}")
    if summary.negligible:
        changed, noted = whole, ""
        if words.rivals:
            changed, noted = "the difference between any two class logits", " (column logits_apart)"
        lines.append(
            f"negligible evidence: on {summary.negligible} of {slides} all tiles together change {changed} by less than "
            f"{LEAST_LOGITS:g}{noted}; maps of it are drawn as 0"
        )
    for which, part in summary.counterfactuals.items():
        effect = f"{part.turned} of {slides} would get another answer"
        if part.turned is None:
            effect = f"it changes {whole} by {part.distance.value:.2g} on average"
        lines.append(
            f"{which} attention: {effect}; "
            f"{part.attention_moved.value:.2f} of the attention moved (2 is the most), "
            f"90 % of it on {part.carriers.value:.0%} of the instances"
        )
        if which == "counterfactual" and part.median_moved < LEAST_MOVED:
            lines.append(unmoved(part.median_moved))
    return lines


def _class_shift(frame: pd.DataFrame, which: str, classes: Sequence[str]) -> ClassShift | None:
    """Count, among correctly answered slides by class (rows), the class whose logit grew most (columns)."""
    if not classes or frame["label"].isna().all() or f"{which}_grown" not in frame:
        return None
    right = frame[frame["label"] == frame["prediction"]]
    matrix = tuple(
        tuple(int(((right["label"] == label) & (right[f"{which}_grown"] == grown)).sum()) for grown in classes)
        for label in classes
    )
    return ClassShift("label of correctly answered slides", matrix)


def _cell(figure: SlideMean | None) -> str:
    if figure is None:
        return "–"
    interval = interval_words(figure)
    return percent(figure.value) + (f" ({interval})" if interval != "–" else "")
