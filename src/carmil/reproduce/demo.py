"""The demo: digit bags, ABMIL and CAR-MIL, and a report that shows what speaks for an answer and what speaks against it."""

import time
from pathlib import Path

from carmil import __version__
from carmil.datasets.digit_data import load_digits
from carmil.datasets.digits import TASKS
from carmil.report.digits import gallery, learning_curves, write_report
from carmil.reproduce.digit_runs import Experiment, run_experiment
from carmil.reproduce.table1 import Row, Settings, evidence_of, rows_of_run, run_folder, tables
from carmil.training.recipe import Recipe
from carmil.training.runs import Run

MODELS = ("abmil", "car/abmil")
TASK_ORDER = ("four_bags", "adjacent_pairs")
INTRODUCTIONS = {
    "four_bags": "Which of 8 and 9 are in the bag? One attention map cannot say that an 8 supports “an 8” and refutes “a 9”; "
    "signed evidence of a class can.",
    "adjacent_pairs": "Are two neighbours among 0 to 4 in the bag? What a digit says depends on the others in its bag.",
}
CHOICE = (
    " The first two test bags of every class, and the first wrong answer if there is one, as the first of the CAR-MIL models "
    "sees them: nothing was picked. Digits are sorted for the eye; the model sees a set. Evidence is path evidence, on one "
    "scale for both classes. Point at a digit for its figure."
)


def run_demo(out: Path, *, fast: bool = False, device: str = "cpu") -> tuple[Path, list[Row]]:
    """Trains, writes the runs and the report under `out`; gives the report's path and the table's rows.

    fast: fewer bags and epochs, for a look at the machinery; the answers are worse.
    """
    started = time.perf_counter()
    sizes = (200, 60, 100) if fast else (2000, 500, 1000)
    recipe = Recipe(epochs=12 if fast else 100, patience=10 if fast else 20, warmup=2 if fast else 10)
    settings = Settings(models=MODELS, repetitions=2 if fast else 3, lr=4e-3)
    data = load_digits(TASK_ORDER, sizes=sizes)
    rows: list[Row] = []
    runs: dict[tuple[str, str], Run] = {}
    for task, study in data.studies.items():
        for model in MODELS:
            about = {**data.about, "task": task}
            experiment = Experiment(TASKS[task], model, settings.members(model), recipe, about, evidence_of(model))
            run = run_experiment(experiment, study, run_folder(out, task, model), device=device)
            runs[task, model] = run
            # The demo's bags are not the paper's, so the paper's figures stay out of its table.
            rows += [Row(**{**vars(row), "paper": {}}) for row in rows_of_run(task, model, run)]
    report = out / "report.html"
    write_report(
        report,
        title="What speaks for the answer, and what against it",
        tables=tables(rows),
        galleries=[
            (
                TASKS[task].title,
                INTRODUCTIONS[task] + CHOICE,
                gallery(runs[task, "car/abmil"], TASKS[task], study.test, data.images),
            )
            for task, study in data.studies.items()
        ],
        curves=[(f"{model} on {TASKS[task].title}", learning_curves(run)) for (task, model), run in runs.items()],
        facts={
            "carmil": __version__,
            "images": data.about["images"],
            "features": data.about["features"],
            "bags": f"{' / '.join(map(str, sizes))} train / validation / test; no image in two of them",
            "models": f"{settings.repetitions} initialisations of each, trained together; CAR: L1, alpha 0.2, lambda 1",
            "machine": "; ".join(dict.fromkeys(run.measured_on for run in runs.values())),
            "time": f"{time.perf_counter() - started:.0f} s, reading and drawing included (less when runs were there already)",
        },
    )
    return report, rows
