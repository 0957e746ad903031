"""Small cohorts of digits, trained for a few epochs, for the tests of recipes."""

from dataclasses import replace
from pathlib import Path

from carmil.datasets.digit_cohorts import DIGITS, load_digits
from carmil.datasets.study_cohort import StudyCohort
from carmil.report.paper import Finding
from carmil.reproduce.digits import TASKS
from carmil.reproduce.recipes import Request

SMALL = replace(DIGITS, seeds=2, epochs=3)


def small_cohorts(out: Path, tasks=TASKS, **protocol) -> list[StudyCohort]:
    data = load_digits(sizes=(60, 30, 40))
    return [data.cohort(task, out / "cohorts", replace(SMALL, **protocol)) for task in tasks]


def request_for(out: Path) -> Request:
    return Request(out=out, shared=out)


def rows_of(result: Finding) -> list[dict[str, str]]:
    """Return one dict per table row, keyed by column head; `task` is the title of the table."""
    return [
        {"task": table.title, **dict(zip(table.heads, line, strict=True))}
        for table in result.tables
        for line in table.lines
    ]
