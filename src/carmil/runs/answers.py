"""The folder that `carmil slides run` writes: answers of a run for slides, with the data they were computed from.

answers.json         the run, and the file of each slide; written last
predictions.parquet  the answer for every slide of the store, predictions.csv the same as text
features             the store; tiles, as `carmil slides tile` writes them
evidence             as `carmil explain` writes it
maps/SLIDE           pictures, and GeoJSON for QuPath

Folders of earlier versions have no answers.json: their run has to be given.
"""

import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from carmil import __version__
from carmil.errors import CarmilError
from carmil.files import safe_name, write_text
from carmil.provenance import to_json
from carmil.runs.run import DISTANCE, SET_LEVEL, Run, read_run, read_table
from carmil.runs.slide_evidence import evidence_file
from carmil.runs.writing import write_predictions
from carmil.untrusted import read_json_as

RUN_AGAIN = "run `carmil slides run` again"


@dataclass(frozen=True)
class RecordedSlide:
    """The file of a slide, and the micrometres per level-0 pixel that were used to cut its tiles."""

    path: str
    mpp: float


@dataclass(frozen=True)
class _AnswersFile:
    """The contents of answers.json. folder: of the run, relative to the answers where possible."""

    carmil: str
    run: str
    folder: str
    slides: Mapping[str, RecordedSlide]


@dataclass(frozen=True)
class SlideAnswers:
    """key, run: of the run that answered; None if the folder does not record them."""

    folder: Path
    key: str | None = None
    run: Path | None = None
    slides: Mapping[str, RecordedSlide] = field(default_factory=dict)

    @property
    def store(self) -> Path:
        return self.folder / "features"

    @property
    def evidence(self) -> Path:
        return self.folder / "evidence"

    def read_run(self, given: Path | None = None) -> Run:
        """Read the run that answered, at `given` or where it was then."""
        if given is not None:
            return read_run(given)
        if self.run is None:
            raise CarmilError(f"{self.folder} does not record the run that answered: give it with --model")
        if not self.run.is_dir():
            raise CarmilError(
                f"the run that answered in {self.folder} is no longer at {self.run}: give it with --model"
            )
        run = read_run(self.run)
        if run.key != self.key:
            raise CarmilError(
                f"{self.run} is another run than the one that answered in {self.folder}: give that one with --model"
            )
        return run

    def predictions(self, run: Run) -> pd.DataFrame:
        """Read the predictions, one row per slide, with the columns of the run's target."""
        path, target = self.folder / "predictions.parquet", run.target
        frame = read_table(path)
        optional = [name for name in (*target.prediction_columns("cf"), SET_LEVEL, DISTANCE) if name in frame]
        names = [*target.prediction_columns(), *optional]
        sound = all(
            name in frame and frame[name].dtype.kind == "f" and np.isfinite(frame[name]).all() for name in names
        )
        if not sound or "slide" not in frame or frame["slide"].duplicated().any():
            raise CarmilError(f"{path} differs from what `carmil slides run` writes: {RUN_AGAIN}")
        return frame


def is_answers(folder: Path) -> bool:
    """Return whether a folder holds answers of `carmil slides run`, and not a run."""
    files = (folder / "predictions.parquet", folder / "evidence" / "explanation.json")
    return all(file.is_file() for file in files) and not (folder / "run.json").exists()


def write_answers(folder: Path, run: Run, slides: Mapping[str, RecordedSlide]) -> None:
    """Record the run that answered, and the files of these slides beside those of earlier calls."""
    known = read_answers(folder).slides if (folder / "answers.json").is_file() else {}
    facts = _AnswersFile(__version__, run.key, _relative(run.folder.resolve(), folder.resolve()), {**known, **slides})
    write_text(folder / "answers.json", json.dumps(to_json(facts), indent=2))


def forget_answers(folder: Path, kept: Collection[str]) -> None:
    """Remove predictions, evidence and maps of all slides but `kept`, before other features are stored."""
    pictures = {safe_name(slide) for slide in kept}
    for place in sorted((folder / "maps").glob("*")):
        if place.is_dir() and place.name not in pictures:
            shutil.rmtree(place)
    evidence = folder / "evidence"
    others = set(evidence.glob("*.parquet")) - {evidence_file(evidence, slide) for slide in kept}
    if others - {evidence / "summary.parquet"}:
        for file in (*others, *evidence.glob("summary.*")):
            file.unlink(missing_ok=True)
    path = folder / "predictions.parquet"
    try:
        frame = read_table(path) if path.is_file() else pd.DataFrame()
    except CarmilError:  # damaged
        frame = pd.DataFrame()
    remaining = frame[frame["slide"].isin(kept)] if "slide" in frame else frame
    if not len(remaining):
        for file in (folder / "predictions.csv", path):
            file.unlink(missing_ok=True)
    elif len(remaining) < len(frame):
        write_predictions(folder, remaining)


def read_answers(folder: Path) -> SlideAnswers:
    path = folder / "answers.json"
    if not path.exists():
        return SlideAnswers(folder)
    facts = read_json_as(path, _AnswersFile, "is not as `carmil slides run` writes it", RUN_AGAIN)
    return SlideAnswers(folder, facts.run, Path(os.path.normpath(folder.resolve() / facts.folder)), facts.slides)


def _relative(path: Path, start: Path) -> str:
    """Return the path from `start`, so that folders can be moved together; on another drive, the whole path."""
    try:
        return os.path.relpath(path, start)
    except ValueError:
        return str(path)
