"""A model of the time to an event with the interface of scikit-survival. b bags, t times."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from typing_extensions import TypedDict

from carmil.bags.bags import Bags
from carmil.errors import CarmilError
from carmil.estimators.estimator import AGAIN, CLOSE, LARGEST, MILEstimator, SomeBags, check_name
from carmil.runs.facts import Baseline
from carmil.statistics.hazards import StepFunction, mean_of_steps, survival_probabilities
from carmil.statistics.survival import concordance
from carmil.studies.baseline_hazards import baseline_hazards
from carmil.targets import Survival
from carmil.targets.survival import LOSSES
from carmil.targets.target import lost_in_rounding
from carmil.training.recipe import TRAIN
from carmil.untrusted import parse_as
from carmil.words import plural

EXPECTED = (
    "expected a structured array or a DataFrame of two columns, one boolean (the event) and one of numbers (the time), "
    "as scikit-survival's Surv.from_arrays(event, time) makes"
)


class _Config(TypedDict):
    """The contents of config.json that only a model of the time to an event has."""

    baselines: Annotated[list[Baseline], Field(min_length=1)]


@dataclass(eq=False, repr=False, kw_only=True)
class MILSurvival(MILEstimator):
    """Attention-based multiple-instance learning of the time to an event: `fit(bags, y).predict(bags)`.

    y is a structured array with two fields, as scikit-survival's Surv.from_arrays(event, time) makes, or a DataFrame with two
    columns: a boolean one, whether the event occurred, and the time of the event or of the end of follow-up. They may have any
    order and names. `predict` returns risks: larger means an earlier event. `score` is Harrell's C-index. loss: cox
    (Cox's partial likelihood, which compares the bags of a batch) or discrete (the likelihood of time in intervals).
    `explain` returns one column: positive evidence raises the risk. Bags, the validation part (stratified by event),
    seeds and the other parameters are those of `MILClassifier`.

    `cum_baseline_hazard_` is the cumulative hazard of a bag with a risk of 0: Breslow's estimate on the training bags, the
    mean over the seeds.
    """

    loss: str = "cox"
    batch: int = Survival.batch

    _target_type: ClassVar[type[Survival]] = Survival

    def predict(self, bags: SomeBags) -> np.ndarray:
        """Return the risk of each bag (b), its log hazard relative to the mean of the training bags: the mean over the seeds."""
        return self._predictions(bags).double().mean(0)[:, 0].numpy()

    def predict_survival_function(self, bags: SomeBags, return_array: bool = False) -> NDArray[Any]:
        """Return the probability of no event until each time: one function of time per bag (b), with its steps in x and y.

        return_array: an array (b, t) of the values at `unique_times_`.
        """
        risk = self.predict(bags)
        values = survival_probabilities(self.cum_baseline_hazard_, risk, self.unique_times_)
        return values if return_array else self._functions(values, 1.0)

    def predict_cumulative_hazard_function(self, bags: SomeBags, return_array: bool = False) -> NDArray[Any]:
        """Return the cumulative hazard until each time, in the form of `predict_survival_function`."""
        values = np.exp(self.predict(bags))[:, None] * self.cum_baseline_hazard_.values
        return values if return_array else self._functions(values, 0.0)

    def score(self, bags: SomeBags, y: Any) -> float:
        """Return Harrell's C-index of the risks."""
        time, event = _read(y).T
        return concordance(time, event > 0, self.predict(bags))

    @property
    def unique_times_(self) -> NDArray[np.float64]:
        """Return the times (t) of the training bags' events."""
        return self.cum_baseline_hazard_.times

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        return tags

    @property
    def _target(self) -> Survival:
        return Survival(loss=self.loss)

    def _own_labels(self, bags: Bags) -> NDArray[Any]:
        labels = super()._own_labels(bags)
        if labels.ndim != 2 or labels.shape[1] != 2:
            raise CarmilError(
                f"the bags have labels of shape {labels.shape}: expected the time and, as 1 or 0, the event of each bag"
            )
        return np.array(
            [(event > 0, time) for time, event in labels.tolist()], dtype=[("event", bool), ("time", float)]
        )

    def _read_training(self, y: Any) -> NDArray[np.float64]:
        outcomes = _read(y)
        if not outcomes[:, 1].any():
            raise CarmilError(
                f"no event in y, all {plural(len(outcomes), 'bag')} are censored: expected some; is the event inverted?"
            )
        if lost_in_rounding(outcomes[:, 0]):
            raise CarmilError(f"y has times {CLOSE}")
        return outcomes

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_name("loss", self.loss, LOSSES)

    def _finish(self, bags: Bags, outcomes: NDArray[Any], roles: Tensor) -> None:
        trained = (roles == TRAIN).expand(len(self.population_), -1)
        self._use(baseline_hazards(self.population_, bags, outcomes, trained))

    def _use(self, baselines: tuple[Baseline, ...]) -> None:
        self.baselines_ = baselines
        self.cum_baseline_hazard_ = mean_of_steps([baseline.function for baseline in baselines])

    def _facts(self) -> dict[str, Any]:
        return {"baselines": [asdict(baseline) for baseline in self.baselines_]}

    def _restore(self, facts: Any, where: str) -> None:
        self._use(tuple(parse_as(facts, _Config, where, AGAIN)["baselines"]))

    def _functions(self, values: NDArray[np.float64], before: float) -> NDArray[Any]:
        functions = np.empty(len(values), dtype=object)
        functions[:] = [StepFunction(self.unique_times_, row, before) for row in values]
        return functions


def _read(y: Any) -> NDArray[np.float64]:
    """Return the time and the event, 1 or 0, of each bag (b, 2)."""
    fields = _fields(y)
    events = [values for values in fields.values() if values.dtype.kind == "b"]
    times = [values for values in fields.values() if values.dtype.kind in "iuf"]
    if len(fields) != 2 or len(events) != 1 or len(times) != 1:
        found = ", ".join(f"{name} ({values.dtype})" for name, values in fields.items())
        raise CarmilError(f"y has {f'the fields {found}' if found else f'no fields ({type(y).__name__})'}: {EXPECTED}")
    time = times[0].astype(np.float64)
    if (odd := ~((time >= 0) & (time < LARGEST))).any():
        place = int(odd.argmax())
        raise CarmilError(
            f"y has the time {time[place]:g} at position {place}: expected 0 or more, below {LARGEST:g}; "
            "correct it or leave the bag out"
        )
    return np.column_stack([time, events[0]])


def _fields(y: Any) -> dict[str, NDArray[Any]]:
    """Return the fields of a structured array, or the columns of a DataFrame, by name; none of anything else."""
    if hasattr(y, "columns"):
        return {str(name): y[name].to_numpy() for name in y.columns}
    names = y.dtype.names if isinstance(y, np.ndarray) else None
    return {name: y[name] for name in names or ()}
