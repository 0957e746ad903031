"""`carmil.audit`: compute the maps of a trained PyTorch module from elsewhere, and test whether it relies on what they
show.

The module becomes a model of carmil by functions of the user (`models/outside.py`); maps, removal curves and the
randomisation test are those of `carmil explain` and `carmil faithfulness`. b bags, n instances, k outputs, p predictions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from carmil.bags.bags import Bags
from carmil.bags.geometry import Unit
from carmil.errors import CarmilError, unknown
from carmil.evidence.explainers import check_explainers, explain, explainers_of
from carmil.evidence.randomisation import shuffle_weights
from carmil.explanations.faithfulness import curve_words, has_learned, summarise_maps
from carmil.explanations.faithfulness_probe import TWINS, Accumulator, Explained, Floats, ProbeSettings, probe
from carmil.models.outside import Function, OutsideFunctions, OutsideModel, wrap_module
from carmil.models.pooling import Offsets
from carmil.progress import count_progress
from carmil.runs.faithfulness import RunFaithfulness
from carmil.studies.figures import mean_text
from carmil.tables import ResultTable, as_text
from carmil.targets import Classes, Labels, Survival, Target, Value
from carmil.targets.links import Cox, Scale
from carmil.words import plural

KINDS = ("classes", "labels", "value", "survival")
METHODS = ("path", "attention", "coalition", "single", "input_x_gradient", "integrated_gradients")
TRIED = 3  # bags, the largest, on which the abilities of a module are tried: pooling cannot be tried on one instance
PART = 2**14  # instances that are probed at once
SHOWN = {
    "deletion_area": "deletion area ↓",
    "insertion_area": "insertion area ↑",
    "srg": "SRG ↑",
    "msk": "MSK ↓",
    "aukc": "AUKC ↑",
    "aopc_over_random": "AOPC over random ↑",
    "randomisation": "likeness to shuffled weights ↓",
    "aopc_gain": "AOPC gained ↑",
}


@dataclass(frozen=True, eq=False)
class Audit:
    """The result of `audit`.

    evidence: for each map one (n, k) array per bag; predictions (b, p): probabilities of classes or labels, a value or a risk.
    faithfulness: curves, figures with intervals and the randomisation test of each map, as `carmil faithfulness` has them.
    notes: abilities that the module lacks, and tests that were omitted.
    """

    faithfulness: RunFaithfulness
    evidence: Mapping[str, tuple[NDArray[np.float32], ...]]
    outputs: tuple[str, ...]
    predictions: Floats
    bags: Bags
    notes: tuple[str, ...]

    @property
    def verdicts(self) -> dict[str, str]:
        """Return the verdict on each map in words, with the reasons for which it fails."""
        maps = self.faithfulness.maps
        return {one.method: "; ".join((one.verdict, *one.failures)) for one in maps}

    @property
    def table(self) -> ResultTable:
        """Return one row per map: its verdict, and its figures with 95 % intervals over patients."""
        maps, words = self.faithfulness.maps, self.faithfulness.words
        names = [name for name in SHOWN if any(name in one.figures for one in maps)]
        rows = tuple((one.method, one.verdict, *(mean_text(one.figures.get(name)) for name in names)) for one in maps)
        title = f"{self.faithfulness.name}: {words.value}, over {words.slides}, 95 % intervals over patients"
        return ResultTable(title, ("map", "verdict", *(SHOWN[name] for name in names)), rows, names=2)

    def tiles(self, bag: int | str) -> pd.DataFrame:
        """Return one row per instance of a bag, by position or name: x and y if known, and a column METHOD.OUTPUT per map."""
        if isinstance(bag, str) and bag not in self.bags.ids:
            raise CarmilError(unknown("bag", bag, self.bags.ids))
        at = self.bags.ids.index(bag) if isinstance(bag, str) else bag
        columns: dict[str, NDArray[Any]] = {}
        coordinates = self.bags[at].coordinates
        if coordinates is not None:
            columns |= dict(zip("xy", coordinates.T.numpy(), strict=True))
        for method, maps in self.evidence.items():
            columns |= {f"{method}.{output}": maps[at][:, i] for i, output in enumerate(self.outputs)}
        return pd.DataFrame(columns)

    def __str__(self) -> str:
        reasons = [
            f"{one.method} FAILS the randomisation test: {words}"
            for one in self.faithfulness.maps
            for words in one.failures
        ]
        return "\n".join([as_text(self.table).rstrip(), *reasons, *(f"note: {note}" for note in self.notes)])


def audit(
    model: nn.Module,
    bags: Bags | Sequence[Tensor | NDArray[Any]],
    *,
    predict: Function | None = None,
    embed: Function | None = None,
    attend: Function | None = None,
    classify: Function | None = None,
    target: str = "classes",
    outputs: Sequence[str] = (),
    labels: ArrayLike | None = None,
    patients: Sequence[str] | None = None,
    coordinates: Sequence[Tensor | NDArray[Any]] | None = None,
    coordinate_unit: Unit = "level0_px",
    methods: Sequence[str] = (),
    steps: int = 20,
    random_orders: int = 5,
    device: str | torch.device | None = None,
) -> Audit:
    """Compute the maps of a trained PyTorch module, and test whether it relies on what they show.

    bags: one (n, d) array or tensor per bag, or a `carmil.Bags`. predict(module, x) returns the outputs (k,) of one bag x
    (n, d); by default module(x). It must call the module that it is given, which is a copy: your own is left as it is.
    embed(module, x) -> z (n, e), attend(module, z) -> attention scores before the softmax (n,) or (n, heads), and
    classify(module, Z) -> (k,) of the pool Z (heads, e) add attention and path evidence. Without embed, z is x.

    target: classes (outputs are logits; a single one is that of the second of two classes), labels (log-odds), value or
    survival (a log risk). outputs: their names. labels: class numbers; for survival (b, 2) times and events; for
    several labels (b, k) of 0, 1 or NaN. Without labels, maps are tested on the model's own answers, and whether it has
    learned anything is not tested. patients: one per bag, for the intervals. methods: maps of `carmil.EXPLAINERS`; by
    default all of METHODS that the module allows. steps: the number of steps in which all instances of a bag are
    removed, a multiple of 10.
    """
    if not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
        raise CarmilError(
            f"model is a {type(model).__name__}: expected a torch.nn.Module with parameters, whose shuffling tests the maps"
        )
    if steps < 10 or steps % 10 or random_orders < 1:
        raise CarmilError(
            f"steps {steps} and random_orders {random_orders}: expected a multiple of 10, and at least one random order"
        )
    if target not in KINDS:
        raise CarmilError(f"{unknown('target', target, KINDS)}; a grade is audited as a value")
    check_explainers(methods)
    functions = OutsideFunctions(predict or (lambda module, x: module(x)), embed, attend, classify)
    given = _as_bags(bags, coordinates, coordinate_unit)
    largest = given.sizes.argsort(descending=True, stable=True)[:TRIED].tolist()
    tried = [given[i].features for i in largest]
    wrapped, notes = wrap_module(model, functions, tried, pair=target == "classes", device=device)
    what = _target(target, tuple(outputs), wrapped)
    wrapped.link = what.link()
    logits = _all_outputs(wrapped, given)
    if target in ("classes", "labels"):
        _refuse_probabilities(wrapped, logits, tried)
    _centre(wrapped, logits)
    predicted = wrapped.link.predictions(_all_outputs(wrapped, given).double().cpu()).detach().numpy()
    chosen = _fitting(wrapped, methods, notes)
    truth = None if labels is None else _outcomes(labels, what, len(given))
    who = _patients(patients, given)
    subjects = _Subjects(given, what, predicted, truth, who)
    evidence, faithfulness = _measured(wrapped, subjects, ProbeSettings(chosen, steps, random_orders))
    if truth is None:
        notes += ("no labels: whether the model has learned anything was not tested; give labels",)
    return Audit(faithfulness, MappingProxyType(evidence), what.outputs, predicted, given, notes)


@dataclass(frozen=True, eq=False)
class _Subjects:
    """The bags of an audit, their predictions (b, p), outcomes (b) or (b, t) if known, and patients (b)."""

    bags: Bags
    target: Target
    predicted: Floats
    truth: NDArray[Any] | None
    patients: tuple[str, ...]

    @property
    def explained(self) -> Tensor:
        """Return (b) the class of the label, or the output that the model itself ranks first."""
        if isinstance(self.target, Classes) and self.truth is not None:
            return torch.from_numpy(self.truth)
        decision = self.target.decision()
        return torch.tensor([self.target.outputs.index(decision.explained(row)) for row in self.predicted])


def _as_bags(bags: Any, coordinates: Any, unit: Unit) -> Bags:
    if isinstance(bags, Bags):
        if coordinates is not None:
            raise CarmilError("coordinates beside a carmil.Bags: expected them in the Bags; leave coordinates out")
        return Bags.trusted(**{**vars(bags), "labels": None})
    if isinstance(bags, Tensor | np.ndarray) and bags.ndim == 2:
        raise CarmilError(
            f"bags is one array of shape {tuple(bags.shape)}: expected a list of them, one (n, d) per bag"
        )
    arrays = [_as_tensor(bag, i) for i, bag in enumerate(bags)]
    arrays = [bag.float() if not bag.is_floating_point() or bag.dtype == torch.float64 else bag for bag in arrays]
    return Bags.from_list(arrays, coordinates=coordinates, coordinate_unit=None if coordinates is None else unit)


def _as_tensor(bag: Any, i: int) -> Tensor:
    try:
        return bag.detach().cpu() if isinstance(bag, Tensor) else torch.as_tensor(np.asarray(bag))
    except (TypeError, ValueError):
        raise CarmilError(f"bag {i} is a {type(bag).__name__}: expected an array or tensor (n, d) of numbers") from None


def _target(kind: str, names: tuple[str, ...], model: OutsideModel) -> Target:
    """Return the target with these names of outputs; refuse another number of outputs."""
    width = model.classes
    if kind in ("value", "survival") and width != 1:
        raise CarmilError(f"predict returned {width} outputs: expected one for target={kind!r}; select it in predict")
    if names and (len(names) != width or len(set(names)) < width):
        raise CarmilError(
            f"{plural(len(names), 'name')} in outputs ({', '.join(names)}): expected {width} different names, one per output of "
            "predict"
        )
    numbered = names or tuple(str(i) for i in range(width))
    match kind:
        case "classes":
            return Classes(names=numbered)
        case "labels":
            return Labels(columns=numbered)
        case "value":
            return Value(columns=names or ("value",))
    return Survival()


def _all_outputs(model: OutsideModel, bags: Bags) -> Tensor:
    """Return F (b, k) of all bags; refuse outputs that are not finite."""
    first, parts = next(model.parameters()), []
    with torch.no_grad():
        for part in bags.parts(PART):
            parts.append(model(part.features.to(first.device).to(first), Offsets(part.offsets, first.device)).logits)
    outputs = torch.cat(parts)
    odd = (~outputs.isfinite().all(1)).nonzero().flatten().tolist()
    if odd:
        n = int(bags.sizes[odd[0]])
        raise CarmilError(
            f"predict returned NaN or infinity for bag {bags.ids[odd[0]]!r} of {plural(n, 'instance')} ({len(odd)} of "
            f"{plural(len(bags), 'bag')} in all): check these features, and that the module was loaded with its weights"
        )
    return outputs


def _refuse_probabilities(model: OutsideModel, logits: Tensor, bags: Sequence[Tensor]) -> None:
    """Refuse outputs that are already probabilities: they sum to 1, or stay between 0 and 1 with any weights."""
    outputs = 2 * logits[:, 1:] if model.paired else logits
    if not _within_01(outputs):
        return
    if outputs.shape[1] > 1 and bool(((outputs.sum(1) - 1).abs() < 1e-3).all()):
        raise CarmilError(
            "predict returned probabilities, which sum to 1 for every bag: expected the outputs before the softmax (or their log)"
        )
    answers = [outputs.flatten()]
    with torch.no_grad():
        for seed in range(TWINS):
            twin = shuffle_weights(model, seed=seed)
            assert isinstance(twin, OutsideModel)
            for parameter in twin.parameters():
                parameter.mul_(-10)  # logits leave the range from 0 to 1, a sigmoid does not
            answers += [twin.ask("predict", bag.to(parameter)).flatten() for bag in bags]
    tried = torch.cat(answers)
    if _within_01(tried) and tried.min() < tried.max():
        raise CarmilError(
            "predict returned numbers from 0 to 1 for every bag, also with shuffled and enlarged weights, so they are "
            "probabilities: expected the outputs before the sigmoid (or torch.logit of them)"
        )


def _within_01(values: Tensor) -> bool:
    return bool(((values >= 0) & (values <= 1)).all())


def _centre(model: OutsideModel, outputs: Tensor) -> None:
    """Measure a value or a risk relative to the mean of these bags: curves follow the distance from it."""
    middle = outputs.mean(0).detach()
    if isinstance(model.link, Scale):
        model.middle.copy_(middle)
        model.link.mean.copy_(middle)
    elif isinstance(model.link, Cox):
        model.link.centre.copy_(middle)


def _fitting(model: OutsideModel, methods: Sequence[str], notes: Sequence[str]) -> tuple[str, ...]:
    fitting = explainers_of(model)
    for method in methods:
        if method not in fitting:
            raise CarmilError(f"{method!r} does not fit this module: expected one of {', '.join(fitting)}")
    chosen = tuple(dict.fromkeys(methods)) or tuple(method for method in METHODS if method in fitting)
    if not chosen:
        raise CarmilError(f"no map fits this module: {'; '.join(notes)}")
    return chosen


def _outcomes(labels: ArrayLike, target: Target, bags: int) -> NDArray[Any]:
    """Return the outcomes in the form that the target uses, (b) or (b, t)."""
    given = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
    if len(given.shape) == 0 or len(given) != bags:
        raise CarmilError(f"labels have shape {given.shape} for {plural(bags, 'bag')}: expected one label per bag")
    if isinstance(target, Classes):
        if given.dtype.kind in "USO":
            known = {name: i for i, name in enumerate(target.names)}
            if unknown_names := sorted({str(one) for one in given.tolist()} - set(known)):
                raise CarmilError(f"labels: {unknown('class', unknown_names[0], known)}; name the classes in outputs")
            return np.array([known[str(one)] for one in given.tolist()], dtype=np.int64)
        if given.ndim != 1 or given.dtype.kind not in "iub" or given.min() < 0 or given.max() >= len(target.names):
            raise CarmilError(
                f"labels must be the numbers of the {len(target.names)} classes, from 0: found {given[:3]}"
            )
        return given.astype(np.int64)
    width = {"value": 1, "survival": 2}.get(target.kind, len(target.outputs))
    try:
        numbers = given.astype(np.float64).reshape(bags, -1)
    except ValueError:
        raise CarmilError(f"labels of a target {target.kind!r} must be numbers: found {given[:1]}") from None
    if numbers.shape[1] != width or (not isinstance(target, Labels) and not np.isfinite(numbers).all()):
        raise CarmilError(
            f"labels have shape {given.shape} for target={target.kind!r}: expected ({bags}, {width}) finite numbers"
        )
    if isinstance(target, Labels) and not np.isin(numbers[~np.isnan(numbers)], (0, 1)).all():
        raise CarmilError("labels of target='labels' must be 0, 1 or NaN: found other numbers")
    if isinstance(target, Survival) and not ((numbers[:, 0] >= 0) & np.isin(numbers[:, 1], (0, 1))).all():
        raise CarmilError(
            "labels of target='survival' must be a time of 0 or more, and 1 for an event or 0: found others"
        )
    return numbers


def _patients(patients: Sequence[str] | None, bags: Bags) -> tuple[str, ...]:
    if patients is None:
        return bags.ids
    if len(patients) != len(bags):
        raise CarmilError(f"{plural(len(patients), 'patient')} for {plural(len(bags), 'bag')}: expected one per bag")
    return tuple(map(str, patients))


def _measured(
    model: OutsideModel, subjects: _Subjects, settings: ProbeSettings
) -> tuple[dict[str, tuple[NDArray[np.float32], ...]], RunFaithfulness]:
    """Return the maps of all bags, and their faithfulness."""
    bags, target, methods = subjects.bags, subjects.target, settings.methods
    accumulator = Accumulator(
        len(bags),
        len(methods),
        steps=settings.steps,
        random_orders=settings.random_orders,
        twins=TWINS,
        predictions=len(target.prediction_columns()),
    )
    maps: dict[str, list[NDArray[np.float32]]] = {method: [] for method in methods}
    explained, at = subjects.explained, 0
    with count_progress(f"auditing {model.method}", "bags") as on_bags:
        on_bags(0, len(bags))
        for part in bags.parts(min(PART, len(bags.features) // 10 + 1)):
            for method in methods:
                columns = explain(model, part, method).float()
                maps[method] += [one.numpy() for one in columns.split(part.sizes.tolist())]
            where = np.arange(at, at + len(part))
            slides = Explained(part, target, explained[where])
            probe(model, slides, settings, accumulator, where, 0, target.decision(), range(TWINS))
            at += len(part)
            on_bags(at, len(bags))
    cohort = _cohort(accumulator, subjects, len(methods), settings)
    patients, truth = subjects.patients, subjects.truth
    learned = None if truth is None else has_learned(target, accumulator, cohort, truth)
    faithfulness = RunFaithfulness(
        name=model.method,
        run="",
        weights="",
        data="",
        model=model.method,
        slides=len(bags),
        rightly_answered=int((accumulator.rights > 0).sum()),
        random_order=accumulator.band(accumulator.at_random, patients),
        random_order_auc=tuple(cohort[1].tolist()),
        auc_of_twins=tuple(cohort[2].tolist()),
        maps=summarise_maps(methods, accumulator, cohort[0], patients, learned),
        words=curve_words(target),
    )
    return {method: tuple(of_bags) for method, of_bags in maps.items()}, faithfulness


def _cohort(
    accumulator: Accumulator, subjects: _Subjects, maps: int, settings: ProbeSettings
) -> tuple[Floats, Floats, Floats]:
    """Return the figure of the cohort as `Accumulator.cohort` does; NaN without labels."""
    if subjects.truth is None:
        steps = settings.steps + 1
        return np.full((2 * maps, steps), np.nan), np.full(steps, np.nan), np.full(TWINS, np.nan)
    folds = np.zeros((1, len(subjects.bags)), dtype=np.int64)
    return accumulator.cohort(subjects.target.key_measure, subjects.truth, folds)
