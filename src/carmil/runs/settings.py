"""The settings of a study, as options of a command or keys of a YAML file."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from typing_extensions import TypeAliasType

from carmil.bags.store import Dtype
from carmil.errors import CarmilError, unknown
from carmil.targets import Target
from carmil.untrusted import describe_value, parse_as, validated

# A value of a setting as a user writes it, or as JSON has it.
Value = TypeAliasType("Value", "str | int | float | bool | Path | Sequence[Value] | Mapping[str, Value] | None")
MOST_VALUES = 10_000  # of a YAML file
LARGEST_OPTION = 2**16
LONGEST_PART = 255  # bytes of a file's name
WHERE = (
    "out",
    "device",
    "models_at_once",
    "cluster",
)  # where a study runs and is written: they do not change its results


def _text(value: object) -> str:
    """Return text, also for a whole number: YAML reads a name that consists of digits as one."""
    if not isinstance(value, str | Path | int) or isinstance(value, bool):
        raise ValueError("text")
    if "\0" in str(value):
        raise ValueError("text without a null character")
    return str(value)


def _short_path(path: Path) -> Path:
    if max(len(os.fsencode(part)) for part in (*path.parts, "")) > LONGEST_PART:
        raise ValueError(f"the name of a file, at most {LONGEST_PART} bytes long")
    return path


def _number(value: object) -> int | float:
    """Return a number, also for text: YAML reads 2e-4 as text, and a command line contains only text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("a number")
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError("a number") from None


Text = Annotated[str, BeforeValidator(_text)]
File = Annotated[Path, BeforeValidator(_text), AfterValidator(_short_path)]
Whole = Annotated[int, BeforeValidator(_number)]
Real = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_number)]
Many = Real | Annotated[list[Real], Field(min_length=1)]


@dataclass(frozen=True)
class Settings:
    """The settings of a study. If a setting has a list of values, all are trained, and the best on validation bags is
    kept.
    """

    bags: File
    out: File
    labels: File | None = None
    model: Text = "car/abmil.gated"
    options: dict[str, Value] | None = None

    # Columns of the label table, guessed unless named.
    slide: Text | None = None
    patient: Text | None = None
    label: Text | None = None
    site: Text | None = None
    split: Text | None = None
    positive: Text | None = None
    truth: Text | None = None

    # What is predicted: classes of the column `label`, unless other columns are named.
    target: Text | None = None  # a column, or several labels separated by commas
    event: Text | None = None  # the column of events, if the target is a time
    kind: Literal["classes", "ordinal", "labels", "value", "survival"] | None = None  # guessed unless named
    loss: Literal["cox", "discrete", "squared", "huber"] | None = None
    grades: Text | None = None  # of an ordinal target, the lowest first, separated by commas
    adjust: Text | None = None  # other columns, whose Cox model is fitted with and without the risk

    # Who is trained on what.
    folds: Whole = 5
    seeds: Whole = 1
    inner: Whole = 1
    splits: File | None = None
    official: bool = False
    validation: Real = 0.15
    reshuffle: bool = False
    patients: Literal["mean", "max", "one-bag"] = "mean"
    seed: Whole = 0
    allow_duplicates: bool = False  # the same features under two patients

    # How.
    epochs: Whole = 100
    batch: Whole | None = None  # bags per step: 1, or 32 for a time to an event
    optimizer: Literal["adam", "sgd"] = "adam"
    lr: Many = 5e-4
    weight_decay: Real = 1e-2
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup: Whole | None = None  # epochs before one can be chosen; half of them unless given
    patience: Whole = 20
    class_weights: Literal["none", "balanced"] = "none"
    label_smoothing: Real | None = None  # 0.1 for classes and labels, 0 for other targets
    alpha: Many | None = None
    lambda_: Many | None = None
    distance: Literal["relative", "l1", "cosine"] | None = None
    scale: Literal["none", "common", "halfway", "own"] = "halfway"
    init: Literal["xavier", "own"] = "xavier"
    precision: Literal["bfloat16", "float32"] = "bfloat16"  # of products on a GPU; a CPU computes in float32
    warm_start: File | None = None

    # What is made of the answers.
    threshold: Text = "balanced"
    abstain: Real = 0.0
    conformal: Real | None = None  # the coverage of prediction sets, calibrated on patients set aside from all folds

    dtype: Dtype = "float16"
    skip_broken: bool = False  # bags that cannot be packed are left out
    device: Literal["auto", "cpu", "cuda"] = "auto"
    models_at_once: Whole | None = None
    cluster: Text | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("folds", 2, 1000),
            ("seeds", 1, 1000),
            ("inner", 1, 100),
            ("validation", 0.01, 0.9),
            ("seed", 0, 2**31),
            ("abstain", 0, 0.99),
        ):
            if not low <= getattr(self, name) <= high:
                raise CarmilError(f"{name} is {getattr(self, name)}: expected {low} to {high}")
        if self.conformal is not None and not 0 < self.conformal < 1:
            raise CarmilError(f"conformal is {self.conformal}: expected a coverage between 0 and 1, such as 0.9")
        if self.models_at_once is not None and self.models_at_once < 2:
            raise CarmilError(f"models_at_once is {self.models_at_once}: expected at least 2")
        if self.splits is not None and (self.official or self.inner > 1 or self.reshuffle):
            raise CarmilError(
                "splits from a file leave no room for official, inner or reshuffle: give one or the other"
            )
        if self.official and (self.inner > 1 or self.reshuffle):
            raise CarmilError("an official split leaves no room for inner or reshuffle: give one or the other")

    @classmethod
    def of(cls, given: Mapping[str, Value], *, where: str) -> "Settings":
        """Return the settings of a file or a command line, which error messages call `where`."""
        known = [field.name for field in fields(cls)]
        given = with_preset(current_names(given), where)
        for name in given:
            if name not in known:
                names = [setting.rstrip("_") for setting in (*known, "preset")]
                raise CarmilError(f"{where}: {unknown('setting', name.rstrip('_'), names)}")
        for name, meaning in _MEANT.items():
            if given.get(name) is None:
                raise CarmilError(f"{where}: {name!r} is missing; expected {meaning}")
        options = checked_options(given.get("options"), f"{where}: options")
        return validated(given | {"options": options}, cls, where)

    def completed(self, target: Target) -> "Settings":
        """Return the settings of a study of this target, with the target's own values for settings that were left to
        it.
        """
        open_ones = {name: value for name, value in set_by(target).items() if getattr(self, name) is None}
        return replace(self, **open_ones)

    def lasting(self) -> dict[str, Value]:
        """Return the settings that define a run, which are all but WHERE, as JSON values."""
        return {name: value for name, value in self.as_json().items() if name not in WHERE}

    def as_json(self) -> dict[str, Value]:
        """Return all settings as JSON values; paths are text."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def set_by(target: Target) -> dict[str, Any]:
    """Return the settings whose default depends on the target."""
    return {"batch": target.batch, "label_smoothing": target.label_smoothing}


# Settings under a name; what is given beside it wins. 0.1: the defaults of version 0.1.0, which are the paper's objective.
PRESETS: dict[str, dict[str, Value]] = {
    "0.1": {
        "epochs": 50,
        "warmup": 5,
        "lr": 2e-4,
        "weight_decay": 1e-5,
        "label_smoothing": 0.0,
        "scale": "none",
        "init": "own",
    }
}


def with_preset(given: Mapping[str, Value], where: str) -> dict[str, Value]:
    """Replace the name of a preset by its settings; settings given beside it take precedence."""
    given = dict(given)
    name = given.pop("preset", None)
    if name is None:
        return given
    if str(name) not in PRESETS:
        raise CarmilError(f"{where}: {unknown('preset', str(name), PRESETS)}")
    branch = {"distance": "l1"} if str(given.get("model", Settings.model)).startswith("car/") else {}
    return {**PRESETS[str(name)], **branch, **given}


def preset_of(settings: Settings) -> str | None:
    """Return the preset that all settings of a study agree with; None if there is none."""
    for name in PRESETS:
        whole = with_preset({"preset": name, "model": settings.model}, where=name)
        if all(getattr(settings, key) == value for key, value in whole.items()):
            return name
    return None


def current_names(given: Mapping[str, Value]) -> dict[str, Value]:
    """Return settings under their current names: 0.1.0 wrote `standardise` for `scale: own`."""
    current = dict(given)
    if (standardise := current.pop("standardise", None)) is not None and "scale" not in current:
        current["scale"] = "own" if standardise in (True, "true") else "none"
    return current


_MEANT = {"bags": "a store or a folder of features", "out": "a folder for the run"}


def read_settings(path: Path) -> dict[str, Value]:
    """Read the keys and values of a YAML file."""
    from carmil.runs.yaml_files import read_yaml

    given = read_yaml(path, expected="lines such as 'model: car/abmil.gated'")
    _check_size(given, path)
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise CarmilError(f"{path}: expected lines such as 'model: car/abmil.gated'")
    plain: dict[str, Value] = {}
    for name, value in given.items():
        if plain_name(name) in plain:
            raise CarmilError(f"{path} gives {describe_value(name)} twice, spelled in two ways: keep one of them")
        plain[plain_name(name)] = value
    return plain


def _check_size(given: Value, path: Path) -> None:
    """Refuse content that YAML aliases expand to too many values."""
    waiting, count = [given], 0
    while waiting:
        value = waiting.pop()
        count += 1
        if count > MOST_VALUES:
            raise CarmilError(f"{path} holds more than {MOST_VALUES:,} values, or repeats itself: expected settings")
        if isinstance(value, dict | list | tuple | set):
            waiting += [*value, *value.values()] if isinstance(value, dict) else value


def checked_options(value: Value, where: str) -> dict[str, Value] | None:
    """Check the options of a model: names with numbers, text or lists of these. Numbers are bounded, since they set its size."""
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise CarmilError(f"{where} is {describe_value(value)}: expected names with values, such as {{hidden: 256}}")
    plain = float | str | bool | None
    parse_as(value, dict[str, plain | list[plain]], where)
    for name, one in value.items():
        if isinstance(one, int | float) and abs(one) > LARGEST_OPTION:
            raise CarmilError(f"{where}.{name} is {one}: expected at most {LARGEST_OPTION:,}")
    return value


def plain_name(name: str) -> str:
    """Return the name of a setting as a Python identifier: lambda is a keyword."""
    name = name.replace("-", "_")
    return "lambda_" if name == "lambda" else name
