"""A classifier of bags with the interface of scikit-learn. b bags, n instances, k classes."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NotRequired

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from torch import Tensor
from typing_extensions import TypedDict

from carmil import __version__
from carmil.bags.bags import Bags
from carmil.bags.splits import TRAIN, make_splits
from carmil.counterfactual import list_models
from carmil.counterfactual.branches import study_coefficients
from carmil.errors import CarmilError, unknown
from carmil.evidence import default_explainer, explain
from carmil.files import write_text
from carmil.models.scaled_model import SCALES
from carmil.runs.decision import Decision
from carmil.runs.run import build, pick_device, read_population
from carmil.runs.settings import checked_options, with_preset
from carmil.statistics.operating import Rule, threshold
from carmil.studies.cohort import replace_labels
from carmil.training.population import Member, Population
from carmil.training.predict import predict
from carmil.training.protocol import GridPoint, train_protocol
from carmil.training.recipe import VALIDATION, Recipe, first_eligible_epoch
from carmil.training.scaling import fit_scales
from carmil.untrusted import parse_as, read_json
from carmil.weights import write_tensors
from carmil.words import plural

SomeBags = Bags | Sequence[Any]


class _Parameters(TypedDict):
    """The parameters of the constructor that a loaded classifier needs."""

    model: str
    lr: float
    seeds: int
    seed: int
    precision: str
    scale: NotRequired[str]
    init: NotRequired[str]
    threshold: NotRequired[str | float]


class _Config(TypedDict):
    """config.json, as `save_pretrained` writes it."""

    parameters: dict[str, Any]
    classes: list[str | float | bool]
    features: int
    threshold: NotRequired[float | None]


class MILClassifier(ClassifierMixin, BaseEstimator):
    """Attention-based multiple-instance learning: `fit(bags, y).predict_proba(bags)`.

    `bags` are a carmil.Bags, or a sequence of (instances, features) arrays, one per bag. A part of the bags, stratified and, if
    `groups` are given, split by group (patient), is held out to choose the epoch and the threshold. Several seeds answer
    together.
    `scale` (halfway, own, common, none) centres and scales the features by statistics of the training bags, as `carmil train
    --scale` does; `init` is xavier, or own for the model's own initial weights.

    With two classes `predict` returns `classes_[1]` where its probability is at least `threshold_`, as `carmil train` does:
    chosen
    on the validation bags by the rule `threshold` (balanced, f1, sensitivity=0.95, specificity=0.9), the mean over the seeds.
    `decision_.rule` states the rule in words. threshold="0.5" answers as scikit-learn's own classifiers do; to choose a
    threshold
    by other data, wrap the classifier in scikit-learn's FixedThresholdClassifier, which uses `predict_proba` alone. With more
    classes the answer is the most probable class.
    """

    def __init__(
        self,
        model: str = "car/abmil.gated",
        *,
        options: dict[str, Any] | None = None,
        epochs: int = 100,
        batch: int = 1,
        lr: float = 5e-4,
        weight_decay: float = 1e-2,
        schedule: str = "cosine",
        warmup: int | None = None,
        patience: int = 20,
        validation: float = 0.15,
        class_weights: str = "none",
        label_smoothing: float = 0.1,
        threshold: str | float = "balanced",
        alpha: float | None = None,
        lambda_: float | None = None,
        distance: str | None = None,
        scale: str = "halfway",
        init: str = "xavier",
        seeds: int = 1,
        seed: int = 0,
        precision: str = "bfloat16",
        device: str = "auto",
    ) -> None:
        self.model = model
        self.options = options
        self.epochs = epochs
        self.batch = batch
        self.lr = lr
        self.weight_decay = weight_decay
        self.schedule = schedule
        self.warmup = warmup
        self.patience = patience
        self.validation = validation
        self.class_weights = class_weights
        self.label_smoothing = label_smoothing
        self.threshold = threshold
        self.alpha = alpha
        self.lambda_ = lambda_
        self.distance = distance
        self.scale = scale
        self.init = init
        self.seeds = seeds
        self.seed = seed
        self.precision = precision
        self.device = device

    @classmethod
    def from_preset(cls, preset: str, **given: Any) -> "MILClassifier":
        """Return a classifier with the settings of a preset of `carmil train --preset`; parameters given beside it win.

        from_preset("0.1", seeds=3) trains as version 0.1.0 did.
        """
        parameters: dict[str, Any] = {**with_preset({"preset": preset, **given}, where="MILClassifier")}
        return cls(**parameters)

    def fit(self, bags: SomeBags, y: Sequence[Any] | np.ndarray | None = None, groups: Any = None) -> "MILClassifier":
        """Train on bags and their labels; without y on the labels of the Bags."""
        found = _as_bags(bags)
        if y is None:
            if found.labels is None:
                raise CarmilError("no labels: give y, or Bags that have them")
            y = found.labels.numpy()
        if len(y) != len(found):
            raise CarmilError(f"{plural(len(y), 'label')} for {plural(len(found), 'bag')}")
        _check_labels(y)
        try:
            self.classes_, labels = np.unique(np.asarray(y), return_inverse=True)
        except TypeError:
            raise CarmilError("y has labels of different types: expected all of them as text, or as numbers") from None
        if len(self.classes_) < 2:
            raise CarmilError("all bags have the same label: expected two classes or more")
        found = replace_labels(found, torch.from_numpy(labels.astype(np.int64)))
        self.n_features_in_ = found.width
        if self.model not in (known := list_models()):
            raise CarmilError(unknown("model", self.model, known))
        if self.scale not in SCALES:
            raise CarmilError(unknown("scale", self.scale, SCALES))
        given = {"alpha": self.alpha, "lambda_": self.lambda_, "distance": self.distance}
        coefficients, _ = study_coefficients(self.model, given)
        recipe = Recipe(
            epochs=self.epochs,
            batch=self.batch,
            optimizer="adam",
            weight_decay=self.weight_decay,
            shuffle=True,
            warmup=first_eligible_epoch(self.warmup, self.epochs),
            patience=self.patience,
            study_seed=self.seed,
            schedule=self.schedule,
            class_weights=self.class_weights,
            label_smoothing=self.label_smoothing,
        )
        rule = Rule.parse(str(self.threshold))
        roles = self._roles(found, labels, [str(name) for name in self.classes_], groups)

        def prepare(population: Population, roles: Tensor) -> None:
            if self.scale != "none":
                fit_scales(population, found, roles, self.scale)

        trained = train_protocol(
            self._build,
            found,
            roles,
            recipe=recipe,
            seeds=range(self.seed, self.seed + self.seeds),
            grid=[GridPoint(self.lr, coefficients)],
            prepare=prepare,
            device=pick_device(self.device),
            precision=self.precision,
        ).select()
        self.population_, self.history_ = trained.population, trained.history
        self._decide_by(self._chosen(found, labels, (roles[0] == VALIDATION).nonzero().squeeze(-1), rule))
        return self

    def predict_proba(self, bags: SomeBags) -> np.ndarray:
        """Return (b, k) in the order of `classes_`: the mean over the seeds."""
        answers = predict(self._fitted(), self._same_width(_as_bags(bags)), maps=False)
        return answers.probabilities.mean(0).numpy()

    def predict(self, bags: SomeBags) -> np.ndarray:
        """Return (b) the class that `decision_` answers."""
        chosen = self.predict_proba(bags)
        return self.classes_[self.decision_.leading(chosen)]

    def explain(self, bags: SomeBags, method: str | None = None) -> list[np.ndarray]:
        """Return the evidence of every instance for every class, one (n, k) array per bag; the mean over the seeds.

        method: an explainer of `carmil.EXPLAINERS` that fits the model; by default the one that `carmil explain` uses for it.
        """
        population, found = self._fitted(), self._same_width(_as_bags(bags))
        members = [population.member(row) for row in range(len(population))]
        method = default_explainer(members[0]) if method is None else method
        maps = torch.stack([explain(member, found, method) for member in members]).mean(0)
        return [part.numpy() for part in maps.split(found.sizes.tolist())]

    def save_pretrained(self, folder: str | Path, *, push_to: str | None = None) -> None:
        """Write config.json and weights.safetensors; with push_to="owner/name" also to the Hugging Face hub (carmil[hub])."""
        population, folder = self._fitted(), Path(folder)
        facts = {
            "carmil": __version__,
            "parameters": {name: _native(value) for name, value in self.get_params().items() if name != "device"},
            "classes": [_native(value) for value in self.classes_],
            "features": self.n_features_in_,
            "threshold": self.threshold_,
        }
        write_text(folder / "config.json", json.dumps(facts, indent=2))
        write_tensors(folder / "weights.safetensors", population.state())
        if push_to is not None:
            _hub().upload_folder(repo_id=push_to, folder_path=str(folder))

    @classmethod
    def from_pretrained(cls, name: str | Path, *, device: str = "auto") -> "MILClassifier":
        """Load a classifier that `save_pretrained` wrote: a local folder, or the name of a repository on the Hugging Face hub."""
        folder = Path(name)
        if not folder.is_dir():
            if str(name).count("/") != 1 or str(name).startswith((".", "/")):
                raise CarmilError(
                    f"{name} is no folder: expected one with config.json, or a hub name such as owner/name"
                )
            folder = Path(_hub().snapshot_download(str(name), allow_patterns=["config.json", "weights.safetensors"]))
        path, again = folder / "config.json", "save the classifier again"
        facts = read_json(path, again)
        parse_as(facts, _Config, str(path), again)
        parameters = facts["parameters"]
        parse_as(parameters, _Parameters, f"{path}: parameters", again)
        if surplus := set(parameters) - set(cls().get_params()):
            raise CarmilError(f"{path}: unknown parameter {min(surplus)!r}: {again}")
        if not 1 <= parameters.get("seeds", 1) <= 1000 or not 0 <= parameters.get("seed", 0) < 2**31:
            raise CarmilError(f"{path}: seeds or seed is outside its range: {again}")
        as_before = {"scale": "none", "init": "own"}  # as 0.1.0 trained, which did not write them
        loaded = cls(
            **{**as_before, **parameters, "options": checked_options(parameters.get("options"), f"{path}: options")}
        )
        loaded.device = device
        loaded.classes_ = np.array(facts["classes"])
        loaded.n_features_in_ = facts["features"]
        members = [Member(seed=loaded.seed + i, lr=loaded.lr) for i in range(loaded.seeds)]
        loaded.population_ = read_population(
            folder / "weights.safetensors",
            loaded._build,
            members,
            device=pick_device(device),
            precision=loaded.precision,
            advice=again,
        )
        two = len(loaded.classes_) == 2
        loaded._decide_by(facts.get("threshold", 0.5 if two else None))  # 0.1.0 wrote none
        return loaded

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.three_d_array = True
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "population_")

    def _build(self) -> Any:
        return build(self, self.n_features_in_, len(self.classes_))

    def _chosen(self, bags: Bags, labels: np.ndarray, validation: Tensor, rule: Rule) -> float | None:
        """Choose the threshold of two classes on the validation bags: the mean over the seeds."""
        if len(self.classes_) != 2:
            return None
        p = predict(self.population_, bags, chosen=validation, maps=False).probabilities[..., 1].double().cpu().numpy()
        return mean(threshold(labels[validation.numpy()], each, rule).threshold for each in p)

    def _decide_by(self, at: float | None) -> None:
        rule = Rule.parse(str(self.threshold))
        origin = "threshold given" if rule.name == "fixed" else f"threshold chosen for {rule.words} on validation bags"
        names = tuple(str(name) for name in self.classes_)
        self.threshold_, self.decision_ = at, Decision(names, at, origin="" if at is None else origin)

    def _roles(self, bags: Bags, labels: np.ndarray, classes: Sequence[str], groups: Any) -> Tensor:
        """(1, b) VALIDATION for the part that chooses the epoch, TRAIN for the others."""
        names = tuple(str(i) for i in range(len(bags)))
        patients = names if groups is None else tuple(str(group) for group in groups)
        if len(patients) != len(bags):
            raise CarmilError(f"{plural(len(patients), 'group')} for {plural(len(bags), 'bag')}")
        if not 0 < self.validation < 1:
            raise CarmilError(f"validation={self.validation}: expected a share between 0 and 1, like 0.15")
        # The test part of one of as many folds as give this share validates.
        folds = max(2, round(1 / self.validation))
        counts = [len({p for p, label in zip(patients, labels, strict=True) if label == c}) for c in np.unique(labels)]
        fewest = min(counts)
        if fewest < 2:
            raise CarmilError(
                f"class {classes[counts.index(fewest)]!r} has one bag (or group) only: expected two, "
                "one of them to choose the epoch by"
            )
        roles = make_splits(
            names,
            patients,
            labels.tolist(),
            folds=min(folds, fewest),
            seed=self.seed,
            classes=classes,
        ).roles[0]
        return torch.where(torch.from_numpy(roles) == 3, VALIDATION, TRAIN).long().unsqueeze(0)

    def _fitted(self) -> Population:
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(self)
        return self.population_

    def _same_width(self, bags: Bags) -> Bags:
        if bags.width != self.n_features_in_:
            raise CarmilError(f"bags of {bags.width} features, the model was trained on {self.n_features_in_}")
        return bags


def _check_labels(y: Any) -> None:
    """Refuse missing labels, before numpy turns them into the text 'nan'."""
    values = y.tolist() if hasattr(y, "tolist") else list(y)
    missing = [i for i, value in enumerate(values) if _is_missing(value)]
    if missing:
        raise CarmilError(
            f"y has no label (NaN or None) for {len(missing)} of {plural(len(values), 'bag')}, the first at position {missing[0]}: "
            "leave these bags out, or give them a label"
        )


def _is_missing(value: Any) -> bool:
    """Whether a label is None, NaN, or a missing value of pandas."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float | np.floating) and bool(np.isnan(value))


def _native(value: Any) -> Any:
    """A scalar of numpy, as a grid of parameters has them, as Python's own."""
    return value.item() if isinstance(value, np.generic) else value


def _as_bags(bags: SomeBags) -> Bags:
    if isinstance(bags, Bags):
        return bags
    if len(bags) > 0 and isinstance(bags[0], Bags):  # scikit-learn makes a list of Bags when it selects some
        return Bags.concatenate(bags)
    return Bags.from_list([torch.as_tensor(_as_array(bag, i)) for i, bag in enumerate(bags)])


def _as_array(bag: Any, place: int) -> np.ndarray:
    try:
        return np.asarray(bag, dtype=np.float32)
    except (TypeError, ValueError):
        raise CarmilError(f"bag {place} does not hold numbers only: expected an array (instances, features)") from None


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise CarmilError("the Hugging Face hub needs an extra: pip install 'carmil[hub]'") from error
    return huggingface_hub
