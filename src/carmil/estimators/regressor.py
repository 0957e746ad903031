"""A bag regressor with the interface of scikit-learn. b bags."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from sklearn.base import RegressorMixin

from carmil.errors import CarmilError
from carmil.estimators.estimator import CLOSE, LARGEST, MILEstimator, SomeBags, check_name, check_not_missing
from carmil.targets import Value
from carmil.targets.target import lost_in_rounding
from carmil.targets.value import LOSSES


@dataclass(eq=False, repr=False, kw_only=True)
class MILRegressor(RegressorMixin, MILEstimator):
    """Attention-based multiple-instance learning of a number: `fit(bags, y).predict(bags)`.

    y has one number per bag. It is standardised by the mean and the deviation of the training bags, and predictions are
    in its own unit; `score` is R2. loss: squared, or huber, which is linear beyond one standard deviation. `explain`
    returns one column, in standard deviations of the training bags as in `carmil explain`. Bags, the validation part
    (stratified by ranges of y), seeds and the other parameters are those of `MILClassifier`.
    """

    loss: str = "squared"

    _target_type: ClassVar[type[Value]] = Value

    def predict(self, bags: SomeBags) -> np.ndarray:
        """Return the predicted number of each bag (b): the mean over the seeds."""
        return self._predictions(bags).double().mean(0)[:, 0].numpy()

    @property
    def _target(self) -> Value:
        return Value(columns=("y",), loss=self.loss)

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_name("loss", self.loss, LOSSES)

    def _read_training(self, y: Any) -> NDArray[np.float64]:
        """Return y as a column (b, 1)."""
        check_not_missing(y)
        try:
            values = np.asarray(y, dtype=np.float64)
        except (TypeError, ValueError):
            raise CarmilError("y has values that are not numbers: expected one number per bag") from None
        if values.shape not in ((len(values),), (len(values), 1)):
            raise CarmilError(f"y has shape {values.shape}: expected one number per bag")
        values = values.reshape(-1, 1)
        if (odd := ~(np.abs(values[:, 0]) < LARGEST)).any():
            place = int(odd.argmax())
            raise CarmilError(
                f"y is {values[place, 0]:g} at position {place}: expected a finite number below {LARGEST:g}"
            )
        if np.ptp(values) == 0:
            raise CarmilError(f"y is {values[0, 0]:g} for all bags: expected different numbers")
        if lost_in_rounding(values):
            raise CarmilError(f"y has numbers {CLOSE}")
        return values
