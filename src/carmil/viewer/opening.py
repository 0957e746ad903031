"""Open the input of `carmil view`: runs, answers of `carmil slides run`, and slides that a run answers first."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from carmil.errors import CarmilError
from carmil.progress import Log
from carmil.runs.answers import RecordedSlide, is_answers, read_answers
from carmil.viewer.app import PAGE
from carmil.viewer.cases import RunCases, read_answer_cases, read_cases, runs_in
from carmil.viewer.preparation import Preparation, without_folders
from carmil.viewer.responses import Responses
from carmil.viewer.slide_files import OpenSlides, SlideFiles

if TYPE_CHECKING:
    from carmil.slides.encoders import Encoder

MOST_RUNS = 4
NO_ZOOM = (
    "OpenSeadragon is missing, so slides cannot be zoomed: run `python tools/fetch_openseadragon.py` (it needs npm)"
)


@dataclass(frozen=True)
class NewSlides:
    """Slides that a run answers before they are shown."""

    slides: Sequence[Path]
    run: Path
    out: Path
    encoder: "Encoder"
    preset: str | None = None
    mpp: float | None = None
    mpps: Mapping[Path, float] | None = None
    device: str = "cpu"
    annotations: Path | None = None

    @property
    def hidden(self) -> dict[str, str]:
        """Return the folders that must not appear on the page, and the names shown instead."""
        paths = (*self.slides, self.run, self.out)
        return {str(name): path.name for path in paths for name in (path, path.resolve())}


def is_viewable(folder: Path) -> bool:
    """Return whether a folder holds a run, runs or answers."""
    return (folder / "run.json").exists() or is_answers(folder) or bool(runs_in(folder))


def open_folders(
    folders: Sequence[Path],
    *,
    slides: Path | None = None,
    annotations: Path | None = None,
    model: Path | None = None,
    mpp: float | None = None,
    slides_table: Path | None = None,
    remarks: Iterable[str] = (),
    log: Log,
) -> list[Responses]:
    """Open runs and answers of `carmil slides run`. model: the run that answered, if it has been moved. mpp, slides_table: see
    `SlideFiles`.

    annotations: the folder of drawn regions, by default RUN-annotations next to the first run.
    """
    distinct_names(folders)
    drawn = annotations_folder(annotations, folders[0])
    runs, files, opened = [], [], OpenSlides()
    for folder in folders:
        recorded: Mapping[str, RecordedSlide] = {}
        if is_answers(folder):
            answered = read_answers(folder)
            runs.append(read_answer_cases(answered, model=model, log=log))
            recorded = answered.slides
        else:
            runs.append(read_cases(folder, log=log))
        names = [case.slide for case in runs[-1].cases]
        files.append(
            SlideFiles(slides, names, recorded=recorded, mpp=mpp, slides_table=slides_table, opened=opened, log=log)
        )
    if not (PAGE / "openseadragon.min.js").is_file():
        log(NO_ZOOM)
        remarks = [*remarks, NO_ZOOM]
    return responses_of(folders, runs, files, annotations=drawn, remarks=remarks, log=log)


def prepare_slides(new: NewSlides, *, log: Log) -> Preparation:
    """Return the preparation that answers slides and opens the folder of their answers."""

    def answer_and_open() -> list[Responses]:
        from carmil.explanations.slide_pipeline import answer_slides  # imports what runs alone do not need

        results = answer_slides(
            new.slides,
            new.run,
            new.out,
            new.encoder,
            preset=new.preset,
            mpp=new.mpp,
            mpps=new.mpps,
            device=new.device,
            log=log,
        )
        for why in results.broken.values():
            log(f"skipped: {why}")
        remarks = [f"Skipped: {without_folders(why, new.hidden)}." for why in results.broken.values()]
        return open_folders(
            [new.out], annotations=new.annotations, model=new.run, mpp=new.mpp, remarks=remarks, log=log
        )

    return Preparation(answer_and_open, hidden=new.hidden, say=log)


def responses_of(
    folders: Sequence[Path],
    runs: Sequence[RunCases],
    files: Sequence[SlideFiles],
    *,
    annotations: Path | None = None,
    remarks: Iterable[str] = (),
    log: Log = lambda line: None,
) -> list[Responses]:
    """Return the responses about runs that are served together, named after their folders. files: the slides of each run."""
    responses, first = list[Responses](), 0
    for run, name, slides in zip(runs, distinct_names(folders), files, strict=True):
        one = replace(run, name=name) if len(runs) > 1 else run
        share = 1 / len(runs)
        responses.append(
            Responses(
                one,
                slides,
                annotations=annotations,
                remarks=remarks,
                first=first,
                earlier=responses,
                share=share,
                log=log,
            )
        )
        first += len(run)
    return responses


def annotations_folder(given: Path | None, run: Path) -> Path:
    """Return the folder of drawn regions, which is created when the first one is saved."""
    if given is not None and given.exists() and not given.is_dir():
        raise CarmilError(f"--annotations {given} is a file: expected a folder, or a new name")
    beside = run.resolve()
    return given or beside.parent / f"{beside.name}-annotations"


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return the last part of each path, or as many of the last parts as are needed to distinguish all paths."""
    if len(folders) > MOST_RUNS:
        raise CarmilError(f"{len(folders)} runs cannot be shown together: give at most {MOST_RUNS}")
    parts = [folder.resolve().parts for folder in folders]
    if len(set(parts)) < len(parts):
        twice = next(folder for folder, one in zip(folders, parts, strict=True) if parts.count(one) > 1)
        raise CarmilError(f"{twice} is given twice: give different runs")
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-count:]) for one in parts]
        if len(set(names)) == len(names):
            break
    return names
