"""The measurements of `carmil faithfulness`, the verdict of the randomisation test, and faithfulness.json.

A twin is a copy of a model with its weights shuffled. S steps in which the tiles of a slide are removed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path

from carmil.errors import CarmilError
from carmil.files import write_text
from carmil.provenance import machine, to_json
from carmil.runs.facts import Count, Number, SlideMean
from carmil.runs.run import Run, weights_key
from carmil.untrusted import describe_value, read_json_as

FILE = "faithfulness.json"
FAILS_FROM = 0.5  # a map with at least this similarity to the twin's map shows the features or the architecture
ALIKE = "the map is much the same without anything that was learned"
NO_GAIN = "it explains the answers no better than the map of the model with shuffled weights does"
UNLEARNED = "the model answers no better than with shuffled weights: it has learned nothing for a map to show"
PASSED, FAILED, UNKNOWN = "passes ✓", "FAILS ✗", "not known"
Curve = tuple[Number, ...]


@dataclass(frozen=True)
class Band:
    """The mean over the slides at each of S+1 steps, and its 95 % interval over patients."""

    mean: Curve
    low: Curve
    high: Curve


@dataclass(frozen=True)
class CurveWords:
    """Descriptions of the curves of a run's target: of the number that is followed, and of the cohort's figure.

    by_fold: whether all slides count and the cohort's figure is the mean over the test folds; for classes only
    correctly answered slides count, and the figure is of all folds together. two_sided: whether curves follow the
    distance of a number from its middle, towards the prediction, rather than a probability.
    """

    value: str = "probability of the label"
    figure: str = "AUC"
    by_fold: bool = False
    two_sided: bool = False

    @property
    def slides(self) -> str:
        """Return the slides that count."""
        return "all slides" if self.by_fold else "correctly answered slides"


OF_CLASSES = CurveWords()


@dataclass(frozen=True)
class RemovalFigures:
    """Figures by name, and curves of removing tiles in the order of one map. auc (S+1): the cohort's AUC, or the key figure
    of another target.
    """

    figures: Mapping[str, SlideMean]
    deletion: Band
    insertion: Band
    auc: Curve


@dataclass(frozen=True)
class MapFaithfulness(RemovalFigures):
    """One explainer of a run. weights_shuffled: the same figures for the order of the twins' maps.

    learned: whether the run answers better than its twins; None if this could not be measured.
    """

    method: str
    learned: bool | None
    weights_shuffled: RemovalFigures

    @property
    def failures(self) -> tuple[str, ...]:
        """Return the reasons for which the map fails the randomisation test; empty if it passes."""
        conditions = {
            UNLEARNED: self.learned is False,
            ALIKE: self.figures["randomisation"].value >= FAILS_FROM,
            NO_GAIN: self.figures["aopc_gain"].low <= 0,
        }
        return tuple(words for words, failed in conditions.items() if failed)

    @property
    def fails(self) -> bool | None:
        """Return whether the map fails; None if it passes but a part of the test is undefined (a constant map, one
        patient or class).
        """
        undefined = isnan(self.figures["randomisation"].value) or isnan(self.figures["aopc_gain"].low)
        if not self.failures and (self.learned is None or undefined):
            return None
        return bool(self.failures)

    @property
    def verdict(self) -> str:
        """Return the verdict of the randomisation test: PASSED, FAILED or UNKNOWN."""
        return UNKNOWN if self.fails is None else FAILED if self.fails else PASSED


@dataclass(frozen=True)
class RunFaithfulness:
    """All maps of a run, and the effect of random orders of removal on its answers.

    run, weights and data are keys of the run, its weights and its cohort; auc_of_twins: the AUC of the cohort (or
    another target's key figure), one per twin. rightly_answered: number of slides that count. words: descriptions of
    the curves. confidence: the level that the smallest number of tiles must reach. region_tiles: tiles in a region, for
    figures by region; 0 if there are none.
    """

    name: str
    run: str
    weights: str
    data: str
    model: str
    slides: Count
    rightly_answered: Count
    random_order: Band
    random_order_auc: Curve
    auc_of_twins: tuple[Number, ...]
    maps: tuple[MapFaithfulness, ...]
    words: CurveWords = OF_CLASSES
    confidence: Number = 0.9
    region_tiles: Count = 0


@dataclass(frozen=True)
class _File:
    runs: tuple[RunFaithfulness, ...]


def write_faithfulness_file(runs: Sequence[RunFaithfulness], folder: Path, *, command: str) -> None:
    """Write faithfulness.json, with the verdict and the figures of each map."""
    listed = []
    for run in runs:
        maps = [
            {"method": one.method, "fails_randomisation": one.fails, "failures": one.failures, **asdict(one)}
            for one in run.maps
        ]
        facts = {**asdict(run), "maps": maps}
        if run.words == OF_CLASSES:
            del facts["words"]
        listed.append(facts)
    content = {"command": command, "machine": machine(), "runs": listed}
    write_text(folder / FILE, json.dumps(to_json(content), indent=2))


def read_faithfulness(run: Run) -> RunFaithfulness:
    """Read RUN/faithfulness. A missing file, or one of another run or other weights, is refused."""
    path = run.folder / "faithfulness" / FILE
    if not path.is_file():
        raise CarmilError(
            f"Not measured yet: run `carmil faithfulness {run.name}`, then `carmil report {run.name}` to show it here."
        )
    again = f"run `carmil faithfulness {run.name}` again"
    content = read_json_as(path, _File, "is not as `carmil faithfulness` writes it", again)
    keys = (run.key, weights_key(run))
    content_of_run = next((one for one in content.runs if (one.run, one.weights) == keys), None)
    if content_of_run is None:
        raise CarmilError(f"{path} is not of the weights of this run: {again}")
    if problem := _inconsistency(content_of_run):
        raise CarmilError(f"{path}: {problem}; {again}")
    return content_of_run


def _inconsistency(found: RunFaithfulness) -> str:
    """Describe the first inconsistency; empty if there is none."""
    if not found.maps or not found.auc_of_twins:
        return "maps or auc_of_twins is empty"
    parts = [part for one in found.maps for part in (one, one.weights_shuffled)]
    bands = [found.random_order, *(part.deletion for part in parts), *(part.insertion for part in parts)]
    steps = {len(curve) for band in bands for curve in (band.mean, band.low, band.high)}
    steps |= {len(curve) for curve in (found.random_order_auc, *(part.auc for part in parts))}
    if len(steps) != 1 or min(steps) < 2:
        return "its curves have different numbers of steps, or fewer than two"
    for one in found.maps:
        for name in ("randomisation", "aopc_gain"):
            if name not in one.figures:
                return f"{name} of the map {describe_value(one.method)} is missing"
    return ""
