"""The table, picture and page of a sweep, computed from the runs of its points."""

from collections.abc import Mapping
from pathlib import Path

from carmil.files import write_text
from carmil.report.page import write_page
from carmil.report.sensitivity import write_picture
from carmil.runs.facts import Spread
from carmil.runs.writing import SweepPoint, write_sweep_figures
from carmil.studies import card
from carmil.studies.figures import SHOWN, line
from carmil.studies.point_selection import Choice, choose
from carmil.studies.sweep import SweepResult, common_settings, setting_name, value_text
from carmil.studies.tables import figures_lines
from carmil.tables import ResultTable
from carmil.words import plural

FIGURES = (
    *("auc", "c_index", "uno_c", "spearman", "r2", "kappa", "ap", "f1_macro", "balanced_accuracy"),
    *("auprc_attention", "auprc_rollout", "auprc_path"),
)
CHOSEN, IDLE = "*", "†"


def write_sweep(swept: SweepResult) -> tuple[ResultTable, list[str]]:
    """Write sweep.json, sweep.md, sweep.png, report.html, and study.yaml if the command needs it. Return the table and notes."""
    out = swept.sweep.out
    choice = choose(swept.runs)
    table, lines = sweep_table(swept, choice), sweep_lines(swept, choice)
    write_sweep_figures(out, sweep_points(swept, choice), choice.by_fold)
    listed = "\n".join(f"- {text}" for text in lines)
    write_text(out / "sweep.md", f"# {out.resolve().name}\n\n{listed}\n\n{table.markdown()}")
    if settings := card.yaml_part(swept.runs[0], without=swept.sweep.over):
        write_text(out / card.CONFIG, settings)
    caption = write_picture(swept, choice.best, out / "sweep.png")
    write_page(
        out / "report.html",
        "sweep.html",
        name=out.resolve().name,
        lines=lines,
        table=table,
        picture=out / "sweep.png",
        caption=caption,
        limits=card.LIMITS,
        over={
            setting_name(name): ", ".join(value_text(value) for value in values)
            for name, values in swept.sweep.over.items()
        },
        common={
            setting_name(name): value_text(Path(str(value)) if name in card.PATHS else value)
            for name, value in common_settings(swept.sweep).items()
            if value is not None
        },
        about=figures_lines(swept.runs[0])[0].partition("; ")[2],
        machine=card.machine(swept.runs[0]),
        command=sweep_command(swept),
    )
    return table, lines


def sweep_points(swept: SweepResult, choice: Choice) -> list[SweepPoint]:
    """Return the figures of every point, for sweep.json."""
    return [
        SweepPoint(
            point.name,
            {name: value_text(v) if isinstance(v, Path) else v for name, v in point.values.items()},
            validation_loss=choice.losses[i],
            summary=run.metrics.summary,
            idle_branch=point.idle,
            chosen_on_validation_bags=i == choice.best,
        )
        for i, (point, run) in enumerate(zip(swept.sweep.points, swept.runs, strict=True))
    ]


def sweep_table(swept: SweepResult, choice: Choice) -> ResultTable:
    """Tabulate one row per grid point; the last row is the point selected per fold on validation bags."""
    names = [name for name in FIGURES if any(name in run.metrics.summary for run in swept.runs)]
    lines = []
    for i, (point, run) in enumerate(zip(swept.sweep.points, swept.runs, strict=True)):
        values = [value_text(value) for value in point.values.values()]
        values[-1] += f" {IDLE}" * point.idle
        lines.append((*values, _loss(choice.losses[i], i == choice.best), *_cells(run.metrics.summary, names)))
    if choice.by_fold:
        blank = [""] * (len(swept.sweep.over) - 1)
        lines.append(("chosen by fold", *blank, "", *_cells(choice.by_fold, names)))
    heads = [setting_name(name) for name in swept.sweep.over]
    return ResultTable(
        "Test folds: mean ± standard deviation over the folds, per cent",
        (*heads, "validation loss", *(SHOWN[name] for name in names)),
        tuple(lines),
        names=len(heads),
    )


def sweep_lines(swept: SweepResult, choice: Choice) -> list[str]:
    """Return notes on the contents of the table, and on how to read it."""
    runs = swept.runs
    models = plural(sum(len(run.models) for run in runs), "model")
    lines = [f"{plural(len(runs), 'point')}, {models} kept; every point is a run in points/, as carmil train writes it"]
    if choice.best is None:
        lines.append(
            "the points were validated on different bags or by different losses, so that no point can be selected by these "
            "losses"
        )
    else:
        lines += [
            f"{CHOSEN} the lowest validation loss, the mean over the folds: the point that validation bags choose",
            "chosen by fold: each fold and seed takes the point of its own lowest validation loss, as carmil train does "
            "with a list of values; no test bag was used for that choice",
        ]
    lines.append(
        "choosing the best test figure of this table is choosing on the test set: it overestimates performance on other data"
    )
    if any(point.idle for point in swept.sweep.points):
        lines.append(f"{IDLE} the branch has no weight there: the plain model, trained beside an idle branch")
    return lines


def sweep_command(swept: SweepResult) -> str:
    """Return the command to run in the folder that contains the sweep; OUT/study.yaml contains settings without an option."""
    grid = [
        f"{setting_name(name)}={','.join(value_text(v) for v in values)}" for name, values in swept.sweep.over.items()
    ]
    over = [word for one in grid for word in ("--over", one)]
    return card.command_of("sweep", swept.runs[0], swept.sweep.out, without=swept.sweep.over, extra=over)


def _loss(summary: Spread, best: bool) -> str:
    mean, std = summary.mean, summary.std
    spread = "" if std != std else f" ± {std:.3f}"  # NaN with a single fold
    return f"{mean:.3f}{spread}" + f" {CHOSEN}" * best


def _cells(summary: Mapping[str, Spread], names: list[str]) -> list[str]:
    return [line(summary, name) if name in summary else "–" for name in names]
