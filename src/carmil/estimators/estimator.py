"""The common parts of the estimators: bag models with the interface of scikit-learn. b bags, n instances, k outputs."""

import json
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, NotRequired, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from torch import Tensor
from typing_extensions import TypedDict

from carmil import __version__
from carmil.bags.bags import Bags
from carmil.bags.splits import make_splits
from carmil.counterfactual import list_models
from carmil.counterfactual.branches import study_coefficients
from carmil.errors import CarmilError, unknown
from carmil.evidence import default_explainer, explain
from carmil.files import write_text
from carmil.models.scaled_model import SCALES
from carmil.runs.run import build, pick_device, read_population
from carmil.runs.settings import checked_options, with_preset
from carmil.studies.cohort import replace_labels
from carmil.targets import Target
from carmil.training.population import Member, Population
from carmil.training.predict import predict
from carmil.training.protocol import GridPoint, train_protocol
from carmil.training.recipe import TRAIN, VALIDATION, Recipe, first_eligible_epoch
from carmil.training.scaling import fit_scales
from carmil.untrusted import parse_as, read_json
from carmil.weights import write_tensors
from carmil.words import plural

SomeBags = Bags | Sequence[Any]
AGAIN = "save the model again"
LARGEST = 1e15  # of numbers and times, as in label tables
CLOSE = "too close to each other for their size: subtract a constant, such as the smallest"


class _Parameters(TypedDict):
    """The constructor parameters that a loaded estimator needs."""

    model: str
    lr: float
    seeds: int
    seed: int
    precision: str
    scale: NotRequired[str]
    init: NotRequired[str]
    threshold: NotRequired[str | float]
    loss: NotRequired[str]


class _Config(TypedDict):
    """The contents of config.json that all estimators have, as written by `save_pretrained`."""

    parameters: dict[str, Any]
    features: int
    target: NotRequired[str]


@dataclass(eq=False, repr=False)
class MILEstimator(BaseEstimator):
    """The base class of `MILClassifier`, `MILRegressor` and `MILSurvival`.

    `bags` are a carmil.Bags, or a sequence of (instances, features) arrays, one per bag. A validation part of the
    bags, stratified by class, range of values or event and, if `groups` are given, split by group (patient), is held
    out to choose the epoch. With several seeds, predictions are averaged over the models. `scale` (halfway, own,
    common, none) centres and scales the features by statistics of the training bags, as `carmil train --scale` does;
    `init` is xavier, or own for the model's own initial weights.
    """

    model: str = "car/abmil.gated"
    _: KW_ONLY
    options: dict[str, Any] | None = None
    epochs: int = 100
    batch: int = 1
    lr: float = 5e-4
    weight_decay: float = 1e-2
    schedule: str = "cosine"
    warmup: int | None = None
    patience: int = 20
    validation: float = 0.15
    alpha: float | None = None
    lambda_: float | None = None
    distance: str | None = None
    scale: str = "halfway"
    init: str = "xavier"
    seeds: int = 1
    seed: int = 0
    precision: str = "bfloat16"
    device: str = "auto"

    _target_type: ClassVar[type[Target]]

    @classmethod
    def from_preset(cls, preset: str, **given: Any) -> Self:
        """Return an estimator with the settings of a preset of `carmil train --preset`; explicit parameters take
        precedence.

        from_preset("0.1", seeds=3) trains as version 0.1.0 did.
        """
        settings, own = with_preset({"preset": preset, **given}, where=cls.__name__), cls().get_params()
        parameters: dict[str, Any] = {name: settings[name] for name in settings if name in own or name in given}
        return cls(**parameters)

    def fit(self, bags: SomeBags, y: Any = None, groups: Any = None) -> Self:
        """Train on bags and their labels; if y is None, on the labels of the Bags."""
        all_bags = _as_bags(bags)
        if y is None:
            y = self._own_labels(all_bags)
        outcomes = self._read_training(y)
        if len(outcomes) != len(all_bags):
            raise CarmilError(
                f"{plural(len(outcomes), 'label')} for {plural(len(all_bags), 'bag')}: expected one per bag"
            )
        labels = torch.tensor(outcomes)
        all_bags = replace_labels(all_bags, labels.float() if labels.is_floating_point() else labels)
        self.n_features_in_ = all_bags.width
        self._check_parameters()
        coefficients, _ = study_coefficients(
            self.model, {"alpha": self.alpha, "lambda_": self.lambda_, "distance": self.distance}
        )
        recipe = self._recipe()
        strata, names = self._target.strata(outcomes)
        roles = self._roles(all_bags, np.array(strata), names, groups)

        def prepare(population: Population, roles: Tensor) -> None:
            if self.scale != "none":
                fit_scales(population, all_bags, roles, self.scale, device=pick_device(self.device))

        trained = train_protocol(
            self._build,
            all_bags,
            roles,
            recipe=recipe,
            seeds=range(self.seed, self.seed + self.seeds),
            grid=[GridPoint(self.lr, coefficients)],
            prepare=prepare,
            device=pick_device(self.device),
            precision=self.precision,
        ).select()
        self.population_, self.history_ = trained.population, trained.history
        self._finish(all_bags, outcomes, roles[0])
        return self

    def explain(self, bags: SomeBags, method: str | None = None) -> list[np.ndarray]:
        """Return the evidence of every instance for every output, one (n, k) array per bag; the mean over the seeds.

        The outputs are the logits of the classes, or one column: the log risk, or the number in standard deviations of
        the training bags, as in `carmil explain`. Positive evidence raises an output, negative evidence lowers it.
        method: an explainer of `carmil.EXPLAINERS` that fits the model; by default the one that `carmil explain` uses for it.
        """
        population, checked_bags = self._fitted(), self._same_width(_as_bags(bags))
        members = [population.member(row) for row in range(len(population))]
        method = default_explainer(members[0]) if method is None else method
        maps = torch.stack([explain(member, checked_bags, method) for member in members]).mean(0)
        return [part.numpy() for part in maps.split(checked_bags.sizes.tolist())]

    def save_pretrained(self, folder: str | Path, *, push_to: str | None = None) -> None:
        """Write config.json and weights.safetensors; with push_to="owner/name" also to the Hugging Face hub (carmil[hub])."""
        population, folder = self._fitted(), Path(folder)
        facts = {
            "carmil": __version__,
            "target": self._target.kind,
            "parameters": {name: native(value) for name, value in self.get_params().items() if name != "device"},
            "features": self.n_features_in_,
            **self._facts(),
        }
        write_text(folder / "config.json", json.dumps(facts, indent=2))
        write_tensors(folder / "weights.safetensors", population.state())
        if push_to is not None:
            _hub().upload_folder(repo_id=push_to, folder_path=str(folder))

    @classmethod
    def from_pretrained(cls, name: str | Path, *, device: str = "auto") -> Self:
        """Load an estimator that `save_pretrained` wrote: a local folder, or the name of a repository on the Hugging Face hub."""
        folder = Path(name)
        if not folder.is_dir():
            if str(name).count("/") != 1 or str(name).startswith((".", "/")):
                raise CarmilError(
                    f"{name} is not a folder: expected one with config.json, or a hub name such as owner/name"
                )
            folder = Path(_hub().snapshot_download(str(name), allow_patterns=["config.json", "weights.safetensors"]))
        path = folder / "config.json"
        facts = read_json(path, AGAIN)
        parse_as(facts, _Config, str(path), AGAIN)
        own, kind = cls._target_type.kind, facts.get("target", "classes")  # 0.1.0 had classes only
        if kind != own:
            raise CarmilError(f"{path} is a model of the target {kind!r}: {cls.__name__} loads {own!r} only")
        parameters = facts["parameters"]
        parse_as(parameters, _Parameters, f"{path}: parameters", AGAIN)
        if surplus := set(parameters) - set(cls().get_params()):
            raise CarmilError(f"{path}: unknown parameter {min(surplus)!r}: {AGAIN}")
        if not 1 <= parameters.get("seeds", 1) <= 1000 or not 0 <= parameters.get("seed", 0) < 2**31:
            raise CarmilError(f"{path}: seeds or seed is outside its range: {AGAIN}")
        as_before = {"scale": "none", "init": "own"}  # 0.1.0 trained with these settings and did not record them
        loaded = cls(
            **{**as_before, **parameters, "options": checked_options(parameters.get("options"), f"{path}: options")}
        )
        try:
            loaded._check_parameters()
        except CarmilError as error:
            raise CarmilError(f"{path}: {error}: {AGAIN}") from None
        loaded.device = device
        loaded.n_features_in_ = facts["features"]
        loaded._restore(facts, str(path))
        members = [Member(seed=loaded.seed + i, lr=loaded.lr) for i in range(loaded.seeds)]
        loaded.population_ = read_population(
            folder / "weights.safetensors",
            loaded._build,
            members,
            device=pick_device(device),
            precision=loaded.precision,
            advice=AGAIN,
        )
        return loaded

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.three_d_array = True
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "population_")

    @property
    def _target(self) -> Target:
        """Return the target, once its outcomes have been read."""
        raise NotImplementedError

    def _read_training(self, y: Any) -> NDArray[Any]:
        """Return the outcomes (b) or (b, t) of training bags in the form that the target uses; refuse y that cannot be
        learned.
        """
        raise NotImplementedError

    def _finish(self, bags: Bags, outcomes: NDArray[Any], roles: Tensor) -> None:
        """Fit the attributes that depend on the trained models. roles (b)."""

    def _facts(self) -> dict[str, Any]:
        """Return the contents of config.json besides the parameters."""
        return {}

    def _restore(self, facts: Any, where: str) -> None:
        """Check and restore the contents that `_facts` returned."""

    def _own_labels(self, bags: Bags) -> NDArray[Any]:
        if bags.labels is None:
            raise CarmilError("no labels: give y, or Bags that have them")
        return bags.labels.numpy()

    def _check_parameters(self) -> None:
        """Refuse invalid parameters before training."""
        check_name("model", self.model, list_models())
        check_name("scale", self.scale, SCALES)

    def _recipe(self) -> Recipe:
        return Recipe(
            epochs=self.epochs,
            batch=self.batch,
            optimizer="adam",
            weight_decay=self.weight_decay,
            shuffle=True,
            warmup=first_eligible_epoch(self.warmup, self.epochs),
            patience=self.patience,
            study_seed=self.seed,
            schedule=self.schedule,
        )

    def _build(self) -> Any:
        return build(self, self.n_features_in_, self._target)

    def _predictions(self, bags: SomeBags) -> Tensor:
        """Return the predictions (seeds, b, p) of every model."""
        return predict(self._fitted(), self._same_width(_as_bags(bags)), maps=False).values

    def _roles(self, bags: Bags, strata: np.ndarray, classes: Sequence[str], groups: Any) -> Tensor:
        """Return (1, b) VALIDATION for the bags that the epoch is chosen on, TRAIN for the others.

        strata (b): the number of the class of each bag, or of another stratum; `classes` are their names.
        """
        names = tuple(str(i) for i in range(len(bags)))
        patients = names if groups is None else tuple(str(group) for group in groups)
        if len(patients) != len(bags):
            raise CarmilError(f"{plural(len(patients), 'group')} for {plural(len(bags), 'bag')}: expected one per bag")
        if not 0 < self.validation < 1:
            raise CarmilError(f"validation={self.validation}: expected a share between 0 and 1, like 0.15")
        # The validation part is the test part of a split whose number of folds gives this share.
        folds = max(2, round(1 / self.validation))
        present = np.unique(strata).tolist()
        counts = [len({p for p, label in zip(patients, strata, strict=True) if label == c}) for c in present]
        fewest = min(counts)
        word = self._target_type.strata_word
        if fewest < 2:
            raise CarmilError(
                f"{word} {classes[present[counts.index(fewest)]]!r} has one bag (or group) only: "
                "expected at least two, one of them to choose the epoch on"
            )
        roles = make_splits(
            names,
            patients,
            strata.tolist(),
            folds=min(folds, fewest),
            seed=self.seed,
            classes=classes,
            word=word,
        ).roles[0]
        return torch.where(torch.from_numpy(roles) == 3, VALIDATION, TRAIN).long().unsqueeze(0)

    def _fitted(self) -> Population:
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(self)
        return self.population_

    def _same_width(self, bags: Bags) -> Bags:
        if bags.width != self.n_features_in_:
            raise CarmilError(f"bags with {bags.width} features: expected {self.n_features_in_}, as in training")
        return bags


def check_name(kind: str, name: str, known: Collection[str]) -> None:
    """Refuse a name that is not among the known ones."""
    if name not in known:
        raise CarmilError(unknown(kind, name, known))


def check_not_missing(y: Any) -> None:
    """Refuse missing labels before numpy converts them to the text 'nan'."""
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


def native(value: Any) -> Any:
    """Return a numpy scalar, as in a parameter grid, as a Python scalar."""
    return value.item() if isinstance(value, np.generic) else value


def _as_bags(bags: SomeBags) -> Bags:
    if isinstance(bags, Bags):
        return bags
    if len(bags) > 0 and isinstance(bags[0], Bags):  # scikit-learn makes a list of Bags when it selects some of them
        return Bags.concatenate(bags)
    return Bags.from_list([torch.as_tensor(_as_array(bag, i)) for i, bag in enumerate(bags)])


def _as_array(bag: Any, place: int) -> np.ndarray:
    try:
        return np.asarray(bag, dtype=np.float32)
    except (TypeError, ValueError):
        raise CarmilError(
            f"bag {place} contains values that are not numbers: expected an array (instances, features)"
        ) from None


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise CarmilError("the Hugging Face hub needs an extra: pip install 'carmil[hub]'") from error
    return huggingface_hub
