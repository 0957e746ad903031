"""The report of a study: one HTML file with its figures and their intervals, every answer, and how they were obtained.

Everything is computed from the run's folder.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from carmil.maps.tile_maps import LEAST_LOGITS
from carmil.report.cases import Cases, decide_cases, one_row_per_slide
from carmil.report.gallery import gradient
from carmil.report.page import write_page
from carmil.report.plots import reliability_svg
from carmil.report.run_evidence import evidence_part, measured_faithfulness
from carmil.report.run_plots import learning_curves, precision_recall, roc
from carmil.report.run_tables import answer_rows, folds_table
from carmil.runs.run import Run
from carmil.studies import card
from carmil.studies.figures import mean_over_seeds, percent, run_table
from carmil.studies.predictions import merge_patients
from carmil.studies.tables import figures_lines

if TYPE_CHECKING:
    import pandas as pd

LONG = 200  # rows; of a longer table only the errors are printed on paper


def write_report(run: Run, path: Path) -> None:
    merged = run.merges_slides

    def judged(slides: "pd.DataFrame") -> Cases:
        return decide_cases(run, merge_patients(slides, run.classes, run.metrics.rule) if merged else slides)

    cases = judged(mean_over_seeds(run.predictions(), run.classes))
    slides = one_row_per_slide(run)
    by_slide, patients = decide_cases(run, slides), judged(slides)
    heads, rows = answer_rows(run, by_slide, patients if merged and len(patients.truth) < len(slides) else None)
    write_page(
        path,
        "run.html",
        run=run,
        lead=figures_lines(run),
        protocol=card.protocol(run),
        limits=card.LIMITS,
        figures=run_table(run),
        intervals=card.INTERVALS,
        folds=folds_table(run, cases),
        roc=roc(run, cases),
        pr=precision_recall(run, cases),
        confusion=cases.confusion.tolist(),
        cases=cases,
        withheld=int((~cases.sure).sum()),
        answered_right=percent(float(cases.right[cases.sure].mean()) if cases.sure.any() else None),
        calibration=run.metrics.calibration,
        reliability=reliability_svg(run.metrics.calibration),
        evidence=evidence_part(run, by_slide),
        faith=measured_faithfulness(run),
        gradient=gradient,
        least_logits=LEAST_LOGITS,
        curves=learning_curves(run),
        heads=heads,
        rows=rows,
        rule=card.answer_rule(run),
        long=LONG,
        settings=card.settings_shown(run),
        facts=card.trained(run) | card.data(run) | card.machine(run),
        command=card.command(run),
        yaml=card.yaml_part(run),
        remarks=card.remarks(run),
        choices=card.choices(run),
        percent=percent,
    )
