"""Folds by patient: the slides to train on, to select by and to test. `split_files` reads and writes those of other tools.

s slides, p patients, f folds (nested: outer x inner, row outer * inner + i).
No patient is ever in two parts of a fold; `audit` checks that of any split, wherever it comes from.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from carmil.bags.columns import PART_OF_WORD
from carmil.errors import CarmilError
from carmil.words import examples, plural

UNUSED, TRAIN, VALIDATION, TEST = 0, 1, 2, 3
NAMES = ("", "train", "val", "test")

_DRAWS = 20  # sites, and patients of several classes, may need another draw until every part has what it needs


@dataclass(frozen=True, eq=False)
class Splits:
    """roles (f, s): UNUSED, TRAIN, VALIDATION or TEST for each slide in each fold.

    `inner` > 1 is a nested split: each outer fold comes `inner` times in a row, with the same test slides.
    """

    slides: tuple[str, ...]
    patients: tuple[str, ...]
    roles: np.ndarray
    inner: int = 1
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        s = len(self.slides)
        if self.roles.ndim != 2 or self.roles.shape[1] != s or len(self.patients) != s or len(self.roles) % self.inner:
            raise CarmilError(
                f"roles of shape {self.roles.shape} and {len(self.patients)} patients for {s} slides and "
                f"{self.inner} inner folds: expected (outer x inner folds, {s})"
            )

    @property
    def folds(self) -> int:
        """Outer folds: how often there is another test part."""
        return len(self.roles) // self.inner

    def name(self, row: int) -> str:
        """Fold 2 is "fold 2", its first inner fold "fold 2.0"."""
        return f"fold {row}" if self.inner == 1 else f"fold {row // self.inner}.{row % self.inner}"


@dataclass(frozen=True, eq=False)
class Cohort:
    """Slides with patients as numbers, in the order of their names, so that the order of the rows changes nothing."""

    slides: tuple[str, ...]
    patients: tuple[str, ...]
    labels: np.ndarray  # (s)
    of: np.ndarray  # (s) number of the slide's patient
    strata: np.ndarray  # (p) the largest label of the patient
    classes: tuple[str, ...]  # their names; the numbers themselves where none are given

    @classmethod
    def checked(
        cls,
        slides: Sequence[str],
        patients: Sequence[str],
        labels: Sequence[int],
        classes: Sequence[str] | None = None,
    ) -> "Cohort":
        if not len(slides) == len(patients) == len(labels):
            raise CarmilError(
                f"{plural(len(slides), 'slide')}, {plural(len(patients), 'patient')} and {plural(len(labels), 'label')}: "
                "expected as many"
            )
        if twice := [slide for slide, times in Counter(slides).items() if times > 1]:
            raise CarmilError(f"slide {twice[0]!r} appears twice: expected each slide once; keep one of them")
        numbers = np.asarray(labels, dtype=np.int64)
        if len(numbers) and (numbers < 0).any():
            raise CarmilError(
                f"slide {slides[int(numbers.argmin())]!r} has class {numbers.min()}: expected 0, 1, 2, ..."
            )
        if classes is None:
            classes = [str(number) for number in range(numbers.max(initial=-1) + 1)]
        if len(numbers) and numbers.max() >= len(classes):
            raise CarmilError(
                f"labels up to {numbers.max()} for {len(classes)} classes: expected 0 to {len(classes) - 1}"
            )
        if len(different := np.unique(numbers)) < 2:
            only = f", all {classes[different[0]]!r}" if len(different) else ""
            raise CarmilError(
                f"{plural(len(slides), 'slide')}{only}: a split needs at least two classes; look at the labels that found a bag"
            )
        names, of = np.unique(np.asarray(patients, dtype=object), return_inverse=True)
        strata = np.zeros(len(names), dtype=np.int64)
        np.maximum.at(strata, of, numbers)
        return cls(tuple(slides), tuple(patients), numbers, of, strata, tuple(classes))

    def patients_by_class(self, slides: np.ndarray) -> dict[str, int]:
        """How many patients have a slide of each class, among the slides of a mask (s)."""
        return {self.classes[c]: len(np.unique(self.of[slides & (self.labels == c)])) for c in np.unique(self.labels)}


def make_splits(
    slides: Sequence[str],
    patients: Sequence[str],
    labels: Sequence[int],
    *,
    folds: int = 5,
    seed: int = 0,
    validation: float = 0.15,
    inner: int = 1,
    sites: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
) -> Splits:
    """Divide slides into folds: every slide is tested once, patients stay together, classes are spread evenly.

    A patient with slides of several classes counts as the largest of them. `validation` is the share
    of the training patients of each class that selects; with `inner` > 1 the training part is cut into `inner` folds
    instead, and each of them selects once. With `sites` no site is both trained on and tested; selection stays by
    patient. `classes` are the names of the labels, for messages. The same arguments give the same split, in whatever
    order the rows come.
    """
    cohort = Cohort.checked(slides, patients, labels, classes)
    _check_arguments(folds, inner, validation, seed)
    groups, notes = _groups(cohort, sites, folds)
    everyone = np.ones(len(cohort.slides), dtype=bool)
    _check_patients(cohort, everyone, folds)
    how = (
        f"{inner} inner folds" if inner > 1 else f"{validation:.0%} of the training patients of a class for validation"
    )
    notes = [f"{folds} folds of {plural(len(cohort.strata), 'patient')} by class, {how} (seed {seed})", *notes]
    for draw in range(_DRAWS):
        roles = _drawn(cohort, groups, folds=folds, inner=inner, validation=validation, seed=(seed, draw))
        splits = Splits(cohort.slides, cohort.patients, roles, inner, tuple(notes))
        errors, _ = audit(splits, cohort.labels, cohort.classes)
        if not errors:
            return splits
    raise CarmilError(
        f"no way found to cut {len(cohort.strata)} patients into {folds} folds{'' if sites is None else ' by site'} "
        f"(patients by class: {_counts(cohort.patients_by_class(everyone))}): "
        f"{errors[0]}; ask for fewer folds or bring more patients"
    )


def official_splits(
    slides: Sequence[str],
    patients: Sequence[str],
    labels: Sequence[int],
    official: Sequence[str],
    *,
    validation: float = 0.15,
    seed: int = 0,
    classes: Sequence[str] | None = None,
) -> Splits:
    """One fold, as a column of the label table has it: train, val and test in the usual spellings; empty is unused."""
    cohort = Cohort.checked(slides, patients, labels, classes)
    if len(official) != len(slides):
        raise CarmilError(f"{len(official)} words of train, val and test for {len(slides)} slides: expected as many")
    roles = np.array([[role_of(w, f"slide {s!r}") for w, s in zip(official, slides, strict=True)]], dtype=np.int8)
    return complete_folds(cohort, roles, validation=validation, seed=seed, where="the split column")


def audit(splits: Splits, labels: Sequence[int] | np.ndarray, classes: Sequence[str]) -> tuple[list[str], list[str]]:
    """Errors of a split, which must not be trained on, and remarks about it."""
    numbers = np.asarray(labels)
    if len(numbers) != len(splits.slides) or numbers.max() >= len(classes):
        raise CarmilError(
            f"{len(numbers)} labels up to {numbers.max()} for {len(splits.slides)} slides and {len(classes)} classes: "
            "expected one label a slide, each the number of a class"
        )
    errors: list[str] = []
    remarks: list[str] = []
    for row, roles in enumerate(splits.roles):
        fold = splits.name(row)
        errors += _in_two_parts("slide", splits.slides, roles, fold)
        errors += _in_two_parts("patient", splits.patients, roles, fold)
        for role in (TRAIN, VALIDATION, TEST):
            there = set(numbers[roles == role].tolist())
            if not there:
                errors.append(f"{fold} has no {NAMES[role]} slides: expected at least one in every part")
                continue
            for number in sorted(set(numbers.tolist()) - there):
                what = f"class {classes[number]!r} has no slide in {NAMES[role]} of {fold}"
                if role == TRAIN:
                    errors.append(f"{what}: it cannot be learned; take other splits or leave the class out")
                else:
                    remarks.append(what)
    tested = splits.roles.reshape(splits.folds, splits.inner, -1) == TEST
    for outer in np.flatnonzero((tested != tested[:, :1]).any(axis=(1, 2))):
        errors.append(f"the inner folds of fold {outer} test different slides: expected the same")
    if splits.folds > 1:
        times = tested[:, 0].sum(axis=0)
        remarks += _some_slides(splits.slides, times > 1, "tested in more than one fold")
        remarks += _some_slides(splits.slides, times == 0, "never tested")
    return errors, remarks


def complete_folds(
    cohort: Cohort,
    roles: np.ndarray,
    *,
    validation: float,
    seed: int,
    where: str,
    inner: int = 1,
    notes: Iterable[str] = (),
) -> Splits:
    """Complete folds from outside with a validation part each, and refuse them if the audit finds errors."""
    _check_validation(validation, seed)
    notes = list(notes)
    without = [row for row in range(len(roles)) if not (roles[row] == VALIDATION).any()]
    # a patient torn between two parts must be found as the file has it, before the validation part is taken
    torn = (_in_two_parts("patient", cohort.patients, parts, f"fold {row}") for row, parts in enumerate(roles))
    _refuse([error for errors in torn for error in errors], where)
    for row in without:
        roles[row, _validation_of(cohort, roles[row] == TRAIN, validation, (seed, row))] = VALIDATION
    if without:
        notes.append(
            f"{len(without)} of {plural(len(roles), 'fold')} without a validation part: {validation:.0%} of the training patients "
            f"of each class are taken for it (seed {seed})"
        )
    unused = roles == UNUSED
    notes += _some_slides(cohort.slides, unused.all(axis=0), "in no fold")
    notes += _some_slides(cohort.slides, unused.any(axis=0) & ~unused.all(axis=0), "in some folds only")
    splits = Splits(cohort.slides, cohort.patients, roles, inner, tuple(notes))
    _refuse(audit(splits, cohort.labels, cohort.classes)[0], where)
    return splits


def _some_slides(slides: Sequence[str], chosen: np.ndarray, what: str) -> list[str]:
    """One sentence about the slides of a mask, if there are any."""
    names = [slides[i] for i in np.flatnonzero(chosen).tolist()]
    be = "is" if len(names) == 1 else "are"
    return [f"{len(names)} of {plural(len(slides), 'slide')} {be} {what} ({examples(names)})"] if names else []


def role_of(word: str, where: str) -> int:
    """The part that a word names, in the usual spellings; UNUSED for none."""
    if not word.strip():
        return UNUSED
    part = PART_OF_WORD.get(word.strip().casefold())
    if part is None:
        raise CarmilError(f"{where} says {word!r}: expected train, val or test, or nothing")
    return NAMES.index(part)


def _in_two_parts(kind: str, names: Sequence[str], roles: np.ndarray, fold: str) -> list[str]:
    different, of = np.unique(np.asarray(names, dtype=object), return_inverse=True)
    there = np.zeros((len(different), len(NAMES)), dtype=bool)
    there[of, roles] = True
    there[:, UNUSED] = False
    return [
        f"{kind} {different[i]!r} is in {' and '.join(NAMES[role] for role in np.flatnonzero(there[i]))} of {fold}: "
        f"expected in one part only; move all of it to one"
        for i in np.flatnonzero(there.sum(axis=1) > 1)
    ]


def _check_arguments(folds: int, inner: int, validation: float, seed: int) -> None:
    if folds < 2:
        raise CarmilError(
            f"{plural(folds, 'fold')}: expected at least 2, so that every slide is tested by a model that has not seen it"
        )
    if inner < 1:
        raise CarmilError(f"{plural(inner, 'inner fold')}: expected 1 (one validation part) or more (nested)")
    _check_validation(validation, seed)


def _check_validation(validation: float, seed: int) -> None:
    if seed < 0:
        raise CarmilError(f"seed {seed}: expected 0 or more")
    if not 0 < validation < 1:
        raise CarmilError(f"validation share {validation}: expected between 0 and 1, like 0.15")


def _check_patients(cohort: Cohort, slides: np.ndarray, folds: int, what: str = "folds") -> None:
    counts = cohort.patients_by_class(slides)
    rarest = min(counts, key=lambda c: counts[c])
    if counts[rarest] < folds:
        option, least = ("--folds", 3) if what == "folds" else ("--inner", 2)  # one to train on, select by and test
        fewer = f"use {option} {counts[rarest]}" if counts[rarest] >= least else "add patients"
        raise CarmilError(
            f"class {rarest!r} has {plural(counts[rarest], 'patient')} for {folds} {what}: expected at least one per fold "
            f"(patients by class: {_counts(counts)}); {fewer}, or leave the class out"
        )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name!r}: {count}" for name, count in counts.items())


def _groups(cohort: Cohort, sites: Sequence[str] | None, folds: int) -> tuple[np.ndarray, list[str]]:
    """(s) the group that stays in one fold: the patient, or the whole site."""
    if sites is None:
        return cohort.of, []
    if len(sites) != len(cohort.slides):
        raise CarmilError(
            f"{plural(len(sites), 'site')} for {plural(len(cohort.slides), 'slide')}: expected one per slide"
        )
    site_of: dict[str, str] = {}
    for patient, site in zip(cohort.patients, sites, strict=True):
        if site_of.setdefault(patient, site) != site:
            raise CarmilError(
                f"patient {patient!r} has slides of the sites {site_of[patient]!r} and {site!r}: expected one site per "
                "patient; correct the table or split without sites"
            )
    counts = Counter(site_of.values())
    if len(counts) < folds:
        raise CarmilError(
            f"{plural(len(counts), 'site')} for {folds} folds: expected at least one per fold; ask for fewer folds"
        )
    notes = [f"{len(counts)} sites, each in the test part of one fold only"]
    largest, patients = counts.most_common(1)[0]
    if 2 * patients > len(site_of):
        notes.append(
            f"WARNING: site {largest!r} has {patients} of {len(site_of)} patients: "
            "the fold that tests it trains on little"
        )
    return np.unique(np.asarray(sites, dtype=object), return_inverse=True)[1], notes


def _drawn(
    cohort: Cohort, groups: np.ndarray, *, folds: int, inner: int, validation: float, seed: tuple[int, int]
) -> np.ndarray:
    everyone = np.ones(len(cohort.slides), dtype=bool)
    fold_of = _divided(cohort, everyone, groups, folds, seed)
    roles = np.full((folds * inner, len(cohort.slides)), TRAIN, dtype=np.int8)
    for fold in range(folds):
        test = fold_of == fold
        roles[fold * inner : (fold + 1) * inner, test] = TEST
        if inner == 1:
            roles[fold, _validation_of(cohort, ~test, validation, (*seed, fold))] = VALIDATION
            continue
        _check_patients(cohort, ~test, inner, f"inner folds in the training part of fold {fold}")
        inner_of = _divided(cohort, ~test, cohort.of, inner, (*seed, fold))
        for i in range(inner):
            roles[fold * inner + i, inner_of == i] = VALIDATION
    return roles


def _divided(cohort: Cohort, chosen: np.ndarray, groups: np.ndarray, folds: int, seed: tuple[int, ...]) -> np.ndarray:
    """(s) the fold of each chosen slide, -1 for the others; groups stay together."""
    from sklearn.model_selection import StratifiedGroupKFold

    # the library sorts groups by number and looks at counts only, so that the order of the rows does not matter
    strata = _merged(cohort.strata, np.unique(cohort.of[chosen]), folds)[cohort.of[chosen]]
    state = int(np.random.SeedSequence(seed).generate_state(1)[0])
    cut = StratifiedGroupKFold(folds, shuffle=True, random_state=state)
    where = np.flatnonzero(chosen)
    fold_of = np.full(len(chosen), -1)
    for fold, (_, held) in enumerate(cut.split(where, strata, groups[chosen])):
        fold_of[where[held]] = fold
    return fold_of


def _merged(strata: np.ndarray, patients: np.ndarray, least: int) -> np.ndarray:
    """Merge a stratum with few patients into its neighbour: patients of several classes can leave a class with few of its own."""
    merged = strata.copy()
    present = np.unique(strata[patients])
    for stratum, below in zip(present[:0:-1], present[-2::-1], strict=True):
        if (merged[patients] == stratum).sum() < least:
            merged[merged == stratum] = below
    present = np.unique(merged[patients])
    if len(present) > 1 and (merged[patients] == present[0]).sum() < least:
        merged[merged == present[0]] = present[1]
    return merged


def _validation_of(cohort: Cohort, train: np.ndarray, share: float, seed: tuple[int, ...]) -> np.ndarray:
    """A mask (s) of slides: a share of the training patients of each class, at least one of two."""
    draw = np.random.default_rng(seed)
    chosen: list[int] = []
    patients = np.unique(cohort.of[train])
    for stratum in np.unique(cohort.strata[patients]):
        members = patients[cohort.strata[patients] == stratum]
        if len(members) > 1:
            many = min(max(1, round(share * len(members))), len(members) - 1)
            chosen += draw.permutation(members)[:many].tolist()
    return train & np.isin(cohort.of, chosen)


def _refuse(errors: list[str], where: str) -> None:
    if errors:
        more = f" ({len(errors) - 1} more like this)" if len(errors) > 1 else ""
        raise CarmilError(f"{where}: {errors[0]}{more}")
