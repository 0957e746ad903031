"""The report of a study: one HTML file with its figures and their intervals, every answer, and the protocol.

Everything is read or computed from the run's folder, including results of `carmil explain` and `carmil faithfulness`.
k classes or other outputs.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from carmil.bags.pictures import Pictures
from carmil.errors import CarmilError
from carmil.explanations.explain import agreement_table
from carmil.maps.tile_maps import LEAST_LOGITS
from carmil.report.cases import Cases, TestedCases, answer_rows, decide_cases, folds_table, one_row_per_slide
from carmil.report.faithfulness import faithfulness_part
from carmil.report.gallery import TiledSlide, gallery, gradient, selection_words
from carmil.report.page import write_page
from carmil.report.run_plots import learning_curves, plots
from carmil.runs.evidence import EvidenceSummary, NoEvidenceError, read_run_evidence
from carmil.runs.faithfulness import read_faithfulness
from carmil.runs.run import Run
from carmil.studies import card
from carmil.studies.figures import mean_over_seeds, mean_text, percent, run_table
from carmil.studies.predictions import merge_patients
from carmil.studies.subjects import open_run_store
from carmil.studies.tables import adjustment_tables, figures_lines, sets_tables
from carmil.tables import ResultTable

LONG = 200  # rows; of a longer table only the errors are printed on paper
CONCENTRATION = {"normalised_entropy": "entropy of log n", "gini": "Gini", "effective": "effective instances"}
DIGITS = {"effective": 0}  # decimals of a count
MOVED = {
    "attention_moved": "attention weight that moved (2 is the most)",
    "carriers": "share of the instances on which 90 % of it moved",
}
CORRELATED = {
    name: f"{name.capitalize()} of attention scores and counterfactual ones" for name in ("spearman", "pearson")
}
WHICH = {"counterfactual": "learned", "searched": "searched"}


def write_report(run: Run, path: Path, *, slides_folder: Path | None = None, mpp: float | None = None) -> None:
    """Write the page. slides_folder: where the files of the slides are, so that maps are drawn over the tissue; mpp: micrometres
    per pixel of files that record none.
    """
    if not run.data.splits:
        raise CarmilError(
            f"{run.folder} was imported without slides, so there is nothing to report: import it again with --bags and "
            "--labels, or use carmil evaluate"
        )
    merged = run.merges_slides

    def judged(slides: pd.DataFrame) -> Cases:
        return decide_cases(run, merge_patients(slides, run.target, run.metrics.rule) if merged else slides)

    cases = judged(mean_over_seeds(run.predictions(), run.target))
    slides = one_row_per_slide(run)
    by_slide, patients = decide_cases(run, slides), judged(slides)
    answers = answer_rows(run, by_slide, patients if merged and len(patients.truth) < len(slides) else None)
    write_page(
        path,
        "run.html",
        run=run,
        lead=figures_lines(run),
        protocol=card.protocol(run),
        limits=card.LIMITS,
        figures=run_table(run),
        intervals=card.intervals_note(run),
        folds=folds_table(run, cases),
        further=[*adjustment_tables(run), *sets_tables(run)],
        plots=plots(TestedCases(run, cases, patients)),
        confusion=cases.confusion.tolist() if run.target.answer_names else None,
        cases=cases,
        withheld=int((~cases.sure).sum()),
        answered_right=percent(float(cases.right[cases.sure].mean()) if cases.sure.any() else None),
        evidence=evidence_part(run, by_slide, _slide_files(run, slides_folder, mpp)),
        faith=measured_faithfulness(run),
        gradient=gradient,
        least_logits=LEAST_LOGITS,
        curves=learning_curves(run) if run.data.imported is None else [],
        answers=answers,
        rule=card.answer_rule(run),
        long=LONG,
        settings=card.settings_shown(run),
        facts=card.trained(run) | card.data(run) | card.machine(run),
        command=card.command(run),
        yaml="" if run.data.imported else card.yaml_part(run),
        remarks=card.remarks(run),
        choices=card.choices(run),
        percent=percent,
    )


def evidence_part(
    run: Run, cases: Cases, files: Callable[[str], TiledSlide | None] = lambda slide: None
) -> dict[str, Any] | str:
    """Return the contents of the evidence section; if there is no evidence, the reason. cases: the run's slides.

    shifts: by counterfactual, counts of correctly answered slides by label (k rows) and by the class whose logit grew
    most (k columns).
    """
    try:
        evidence = read_run_evidence(run)
    except NoEvidenceError as error:
        return str(error)
    summary = evidence.summary
    on_a_plane = run.metrics.rule != "one-bag"  # a patient's slides would overlap
    changes = {WHICH[which]: part.class_shift for which, part in summary.counterfactuals.items()}
    return {
        "summary": summary,
        "agreement": agreement_table(summary),
        "concentration": concentration_table(summary),
        "moved": moved_table(summary),
        "shifts": {which: shift.matrix for which, shift in changes.items() if shift is not None},
        "selected": selection_words(run.target),
        "slides": gallery(cases, evidence.folder, on_a_plane=on_a_plane, pictures=_pictures(run), files=files),
    }


def _slide_files(run: Run, folder: Path | None, mpp: float | None) -> Callable[[str], TiledSlide | None]:
    """Return the files of the run's slides, found by name in a folder; None for a slide that is not there."""
    if folder is None:
        return lambda slide: None
    from carmil.slides.dicom_series import slide_name
    from carmil.slides.opening import find_slides, open_slide

    paths = {name: path for path in find_slides([folder]) for name in (slide_name(path), path.name)}
    if not paths.keys() & set(run.predictions()["slide"]):
        raise CarmilError(f"--slides {folder} has none of the slides of {run.name}: expected files with their names")
    try:
        sizes = {entry.id: entry.tile_size for entry in open_run_store(run).entries}
    except CarmilError:  # the store was moved: the spacing of the tiles tells their size
        sizes = {}

    def of(slide: str) -> TiledSlide | None:
        path = paths.get(slide)
        return None if path is None else TiledSlide(partial(open_slide, path, missing_mpp=mpp), sizes.get(slide))

    return of


def _pictures(run: Run) -> Callable[[str], Pictures | None]:
    """Return pictures of the instances of a slide; None if the run's store has none, or was moved."""
    try:
        store = open_run_store(run)
    except CarmilError:
        return lambda slide: None
    pictures, offsets = store.pictures(), np.cumsum([0, *(entry.rows for entry in store.entries)])
    places = {name: i for i, name in enumerate(store.ids)}

    def of(slide: str) -> Pictures | None:
        i = places.get(slide)
        return None if pictures is None or i is None else pictures.rows(offsets[i], offsets[i + 1])

    return of


def measured_faithfulness(run: Run) -> dict[str, Any] | str:
    """Return the results of `carmil faithfulness`; if there are none, the reason."""
    try:
        return faithfulness_part([read_faithfulness(run)])
    except CarmilError as error:
        return str(error).replace(str(run.folder), run.name)


def concentration_table(summary: EvidenceSummary) -> ResultTable:
    concentration = summary.concentration
    evidence = summary.words.title("the answer" if summary.words.rivals else f"the {summary.output}")
    names = {"attention": "attention weight", "evidence": f"{evidence}, by its size"}
    rows = tuple(
        (
            words,
            *(mean_text(concentration.get(f"{name}_{measure}"), DIGITS.get(measure, 2)) for measure in CONCENTRATION),
        )
        for name, words in names.items()
        if any(key.startswith(f"{name}_") for key in concentration)
    )
    return ResultTable("Concentration of the maps", ("map", *CONCENTRATION.values()), rows)


def moved_table(summary: EvidenceSummary) -> ResultTable | None:
    """Tabulate the changes under each counterfactual, one column per counterfactual. None if there is none."""
    counterfactuals = summary.counterfactuals
    if not counterfactuals:
        return None
    rows = []
    if any(one.turned is not None for one in counterfactuals.values()):
        turned = (f"{one.turned} of {summary.slides}" for one in counterfactuals.values())
        rows.append(("slides that get another answer", *turned))
    if any(one.reached is not None for one in counterfactuals.values()):
        rows.append(
            (
                "share of the slides on which one was found",
                *(mean_text(one.reached) for one in counterfactuals.values()),
            )
        )
    output = "the logits" if summary.words.of_answers else summary.words.total(summary.classes[0])
    moved = MOVED | {"distance": f"how far {output} moved"}
    rows += [
        (words, *(mean_text(getattr(one, name)) for one in counterfactuals.values())) for name, words in moved.items()
    ]
    for between in (summary.correlations or {}).values():  # for the learned counterfactual only
        rows += [
            (words, mean_text(between.get(name)), *["–"] * (len(counterfactuals) - 1))
            for name, words in CORRELATED.items()
        ]
    return ResultTable(
        "Counterfactual", ("mean over slides, 95 % interval", *(WHICH[w] for w in counterfactuals)), tuple(rows)
    )
