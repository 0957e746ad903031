"""A bag classifier with the interface of scikit-learn. b bags, k classes."""

from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, ClassVar, NotRequired, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin
from torch import Tensor
from typing_extensions import TypedDict

from carmil.bags.bags import Bags
from carmil.errors import CarmilError
from carmil.estimators.estimator import AGAIN, MILEstimator, SomeBags, check_not_missing, native
from carmil.statistics.conformal import class_quantiles, fewest_cases, prediction_sets
from carmil.statistics.operating import Rule, threshold
from carmil.targets import Classes
from carmil.targets.decision import Decision
from carmil.training.predict import predict
from carmil.training.recipe import VALIDATION, Recipe
from carmil.untrusted import parse_as
from carmil.words import plural


class _Config(TypedDict):
    """The contents of config.json that only a classifier has."""

    classes: list[str | float | bool]
    threshold: NotRequired[float | None]


@dataclass(eq=False, repr=False, kw_only=True)
class MILClassifier(ClassifierMixin, MILEstimator):
    """Attention-based multiple-instance learning: `fit(bags, y).predict_proba(bags)`.

    `bags` are a carmil.Bags, or a sequence of (instances, features) arrays, one per bag. A validation part of the
    bags, stratified and, if `groups` are given, split by group (patient), is held out to choose the epoch and the
    threshold. With several seeds, predictions are averaged over the models. `scale` (halfway, own, common, none)
    centres and scales the features by statistics of the training bags, as `carmil train --scale` does; `init` is
    xavier, or own for the model's own initial weights.

    With two classes `predict` returns `classes_[1]` where its probability is at least `threshold_`. As in `carmil
    train`, the threshold is chosen on the validation bags by the rule `threshold` (balanced, f1, sensitivity=0.95,
    specificity=0.9), and averaged over the seeds. `decision_.rule` states the rule in words. With threshold="0.5" the
    answers are those of scikit-learn's classifiers; to choose a threshold on other data, wrap the classifier in
    scikit-learn's FixedThresholdClassifier, which uses `predict_proba` only. With more classes the answer is the most
    probable class.
    """

    class_weights: str = "none"
    label_smoothing: float = 0.1
    threshold: str | float = "balanced"

    _target_type: ClassVar[type[Classes]] = Classes

    def predict_proba(self, bags: SomeBags) -> np.ndarray:
        """Return the probabilities (b, k), in the order of `classes_`: the mean over the seeds."""
        return self._predictions(bags).mean(0).numpy()

    def predict(self, bags: SomeBags) -> np.ndarray:
        """Return the class that `decision_` gives as the answer for each bag (b)."""
        chosen = self.predict_proba(bags)
        return self.classes_[self.decision_.leading(chosen)]

    def calibrate(self, bags: SomeBags, y: Any, *, level: float = 0.9) -> Self:
        """Calibrate `predict_set` on bags that `fit` has not seen, one bag per patient, for a coverage of `level`.

        Each class needs at least level / (1 - level) bags: 9 for 0.9. Sets are not saved with the model.
        """
        p, given = self.predict_proba(bags), np.asarray(y)
        if given.shape != (len(p),) or not np.isin(given, self.classes_).all():
            raise CarmilError(
                f"y has shape {given.shape}: expected one of the classes of `fit` for each of {len(p)} bags"
            )
        labels = np.searchsorted(self.classes_, given)
        fewest, counts = fewest_cases(level), np.bincount(labels, minlength=len(self.classes_))
        rarest = int(counts.argmin())
        if counts[rarest] < fewest:
            raise CarmilError(
                f"class {self._target.names[rarest]!r} has {plural(int(counts[rarest]), 'calibration bag')}: a coverage of "
                f"{level:g} needs at least {fewest}; add bags or lower the level"
            )
        self.quantiles_ = class_quantiles(self._target.nonconformity(p), labels, level)
        return self

    def predict_set(self, bags: SomeBags) -> NDArray[np.bool_]:
        """Return a mask (b, k) of the classes in the prediction set of each bag, in the order of `classes_`.

        For each class, the sets of at least `level` of the new bags of that class contain it, on average over the bags
        that might have been given to `calibrate`.
        """
        if not hasattr(self, "quantiles_"):
            raise CarmilError(
                "prediction sets are not calibrated: call calibrate(bags, y) with bags that fit has not seen"
            )
        return prediction_sets(self._target.nonconformity(self.predict_proba(bags)), self.quantiles_)

    @property
    def _target(self) -> Classes:
        return Classes(names=tuple(map(str, self.classes_)))

    def _read_training(self, y: Any) -> NDArray[np.int64]:
        check_not_missing(y)
        if np.ndim(y) != 1:
            raise CarmilError(f"y has shape {np.shape(y)}: expected one class per bag")
        try:
            self.classes_, labels = np.unique(np.asarray(y), return_inverse=True)
        except TypeError:
            raise CarmilError("y has labels of different types: expected all of them as text, or as numbers") from None
        if len(self.classes_) < 2:
            raise CarmilError("all bags have the same label: expected two classes or more")
        return labels.astype(np.int64)

    def _check_parameters(self) -> None:
        super()._check_parameters()
        Rule.parse(str(self.threshold))

    def _recipe(self) -> Recipe:
        return replace(super()._recipe(), class_weights=self.class_weights, label_smoothing=self.label_smoothing)

    def _finish(self, bags: Bags, outcomes: NDArray[Any], roles: Tensor) -> None:
        """Choose the threshold of two classes on the validation bags: the mean over the seeds."""
        if hasattr(self, "quantiles_"):
            del self.quantiles_  # of the models before
        if len(self.classes_) != 2:
            self._decide_by(None)
            return
        validation, rule = (roles == VALIDATION).nonzero().squeeze(-1), Rule.parse(str(self.threshold))
        p = predict(self.population_, bags, chosen=validation, maps=False).values[..., 1].double().cpu().numpy()
        self._decide_by(mean(threshold(outcomes[validation.numpy()], each, rule).threshold for each in p))

    def _decide_by(self, at: float | None) -> None:
        rule = Rule.parse(str(self.threshold))
        origin = "threshold given" if rule.name == "fixed" else f"threshold chosen for {rule.words} on validation bags"
        self.threshold_ = at
        self.decision_ = Decision(self._target.names, at, origin="" if at is None else origin)

    def _facts(self) -> dict[str, Any]:
        return {"classes": [native(value) for value in self.classes_], "threshold": self.threshold_}

    def _restore(self, facts: Any, where: str) -> None:
        parse_as(facts, _Config, where, AGAIN)
        self.classes_ = np.array(facts["classes"])
        two = len(self.classes_) == 2
        self._decide_by(facts.get("threshold", 0.5 if two else None))  # 0.1.0 recorded none
