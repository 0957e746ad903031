"""Split cohorts into folds by patient, with parts for training, validation, testing and, if requested, calibration.

`split_files` reads and writes splits of other tools. s slides, p patients, f folds (nested: outer x inner, row outer
* inner + i). No patient is in two parts of a fold, and every fold that tests a patient tests the same slides of the patient;
`audit` checks this for any split, whatever its origin.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from carmil.bags.columns import PART_OF_WORD
from carmil.errors import CarmilError
from carmil.words import examples, plural

UNUSED, TRAIN, VALIDATION, TEST, CALIBRATION = 0, 1, 2, 3, 4
NAMES = ("", "train", "val", "test", "cal")
CALIBRATION_SHARE = 0.2  # of the patients of each class, if the level of the prediction sets needs no more
MOST_OF_A_CLASS = 0.5  # the largest share of a class's patients that may calibrate

_DRAWS = 20  # with sites, or patients of several classes, several draws may be needed until every part has slides of every class


@dataclass(frozen=True, eq=False)
class Splits:
    """roles (f, s): UNUSED, TRAIN, VALIDATION, TEST or CALIBRATION for each slide in each fold.

    With `inner` > 1 the split is nested: the rows of an outer fold are its `inner` folds, with the same test slides.
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
        """Return the number of outer folds, that is, of distinct test parts."""
        return len(self.roles) // self.inner

    @property
    def calibration(self) -> np.ndarray:
        """Return a mask (s) of the slides that calibrate prediction sets: the same in every fold."""
        return (self.roles == CALIBRATION).all(axis=0)

    def name(self, row: int) -> str:
        """Return the name of a row: "fold 2", or "fold 2.0" for the first inner fold of fold 2."""
        return f"fold {row}" if self.inner == 1 else f"fold {row // self.inner}.{row % self.inner}"


@dataclass(frozen=True, eq=False)
class Cohort:
    """Slides with numbered patients, sorted by name, so that the order of the rows does not matter."""

    slides: tuple[str, ...]
    patients: tuple[str, ...]
    labels: np.ndarray  # (s)
    of: np.ndarray  # (s) number of the slide's patient
    strata: np.ndarray  # (p) the largest label of the patient
    classes: tuple[str, ...]  # names of the classes, or their numbers if no names are given
    word: str = "class"  # what messages call a class: patients may be stratified by something else

    @classmethod
    def checked(
        cls,
        slides: Sequence[str],
        patients: Sequence[str],
        labels: Sequence[int],
        classes: Sequence[str] | None = None,
        word: str = "class",
    ) -> "Cohort":
        if not len(slides) == len(patients) == len(labels):
            raise CarmilError(
                f"{plural(len(slides), 'slide')}, {plural(len(patients), 'patient')} and "
                f"{plural(len(labels), 'label')}: expected equal numbers, one patient and one label per slide"
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
                f"{plural(len(slides), 'slide')}{only}: a split needs at least two classes; check which labels "
                "were matched with bags"
            )
        names, of = np.unique(np.asarray(patients, dtype=object), return_inverse=True)
        strata = np.zeros(len(names), dtype=np.int64)
        np.maximum.at(strata, of, numbers)
        return cls(tuple(slides), tuple(patients), numbers, of, strata, tuple(classes), word)

    def patients_by_class(self, slides: np.ndarray) -> dict[str, int]:
        """Count the patients that have a slide of each class, among the slides of a mask (s)."""
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
    word: str = "class",
) -> Splits:
    """Divide slides into folds: every slide is tested once, patients stay together, classes are distributed evenly.

    A patient with slides of several classes counts as the largest of them. `validation` is the share of the training
    patients of each class that becomes the validation part; with `inner` > 1 the training part is divided into
    `inner` folds instead, each of which is the validation part once. With `sites` no site is both trained on and
    tested; the validation part is still divided by patient. `classes` are the names of the labels and `word` is the
    word for one of them in messages. The result does not depend on the order of the rows.
    """
    cohort = Cohort.checked(slides, patients, labels, classes, word)
    if folds < 2:
        raise CarmilError(
            f"{plural(folds, 'fold')}: expected at least 2, so that every slide is tested by a model that was not trained on it"
        )
    if inner < 1:
        raise CarmilError(f"{plural(inner, 'inner fold')}: expected 1 (one validation part) or more (nested)")
    _check_validation(validation, seed)
    groups, notes = _groups(cohort, sites, folds)
    everyone = np.ones(len(cohort.slides), dtype=bool)
    _check_patients(cohort, everyone, folds)
    how = (
        f"{inner} inner folds" if inner > 1 else f"{validation:.0%} of the training patients of a {word} for validation"
    )
    notes = [f"{folds} folds of {plural(len(cohort.strata), 'patient')} by {word}, {how} (seed {seed})", *notes]
    for draw in range(_DRAWS):
        roles = _drawn(cohort, groups, folds=folds, inner=inner, validation=validation, seed=(seed, draw))
        splits = Splits(cohort.slides, cohort.patients, roles, inner, tuple(notes))
        errors, _ = audit(splits, cohort.labels, cohort.classes, word)
        if not errors:
            return splits
    raise CarmilError(
        f"no way found to divide {len(cohort.strata)} patients into {folds} "
        f"folds{'' if sites is None else ' by site'} (patients by {word}: "
        f"{_counts(cohort.patients_by_class(everyone))}): {errors[0]}; use fewer folds or add patients"
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
    word: str = "class",
) -> Splits:
    """Return one fold from a column of the label table with train, val and test in the usual spellings; empty means unused."""
    cohort = Cohort.checked(slides, patients, labels, classes, word)
    if len(official) != len(slides):
        raise CarmilError(
            f"{len(official)} entries of train, val and test for {len(slides)} slides: expected one per slide"
        )
    roles = np.array([[role_of(w, f"slide {s!r}") for w, s in zip(official, slides, strict=True)]], dtype=np.int8)
    return complete_folds(cohort, roles, validation=validation, seed=seed, where="the split column")


def audit(
    splits: Splits, labels: Sequence[int] | np.ndarray, classes: Sequence[str], word: str = "class"
) -> tuple[list[str], list[str]]:
    """Return the errors that rule out training with a split, and remarks. word: the word for a class in messages."""
    numbers = np.asarray(labels)
    if len(numbers) != len(splits.slides) or numbers.max() >= len(classes):
        raise CarmilError(
            f"{len(numbers)} labels up to {numbers.max()} for {len(splits.slides)} slides and {len(classes)} "
            "classes: expected one label per slide, each the number of a class"
        )
    errors: list[str] = []
    remarks: list[str] = []
    for row, roles in enumerate(splits.roles):
        fold = splits.name(row)
        errors += _in_two_parts("slide", splits.slides, roles, fold)
        errors += _in_two_parts("patient", splits.patients, roles, fold)
        for role in (TRAIN, VALIDATION, TEST):
            classes_present = set(numbers[roles == role].tolist())
            if not classes_present:
                errors.append(f"{fold} has no {NAMES[role]} slides: expected at least one in every part")
                continue
            for number in sorted(set(numbers.tolist()) - classes_present):
                what = f"{word} {classes[number]!r} has no slide in {NAMES[role]} of {fold}"
                if role == TRAIN:
                    errors.append(f"{what}: it cannot be learned; take other splits or leave the {word} out")
                else:
                    remarks.append(what)
    tested = splits.roles.reshape(splits.folds, splits.inner, -1) == TEST
    for outer in np.flatnonzero((tested != tested[:, :1]).any(axis=(1, 2))):
        errors.append(f"the inner folds of fold {outer} test different slides: expected the same")
    errors += _tested_apart(splits, tested[:, 0])
    torn = (splits.roles == CALIBRATION).any(axis=0) & ~splits.calibration
    errors += [
        f"{line}: expected in every fold or in none"
        for line in _some_slides(splits.slides, torn, "in the calibration part of some folds only")
    ]
    if splits.folds > 1:
        times = tested[:, 0].sum(axis=0)
        remarks += _some_slides(splits.slides, times > 1, "tested in more than one fold")
        remarks += _some_slides(splits.slides, (times == 0) & ~splits.calibration, "never tested")
    return errors, remarks


def draw_calibration(
    slides: Sequence[str],
    patients: Sequence[str],
    labels: Sequence[int],
    *,
    fewest: int,
    free: np.ndarray | None = None,
    seed: int = 0,
    classes: Sequence[str] | None = None,
    word: str = "class",
) -> np.ndarray:
    """Return (s) the slides for calibrating prediction sets: a fifth of the patients per class, at least `fewest`.

    The draw is refused if this is more than half of a class. free (s): the slides to draw from, by default all.
    """
    cohort = Cohort.checked(slides, patients, labels, classes, word)
    everyone = np.unique(cohort.of if free is None else cohort.of[free])
    draw = np.random.default_rng((seed, CALIBRATION))
    chosen: list[int] = []
    for c in np.unique(cohort.strata):
        members = everyone[cohort.strata[everyone] == c]
        most = math.floor(MOST_OF_A_CLASS * len(members))
        if most < fewest:
            raise CarmilError(
                f"{word} {cohort.classes[c]!r} has {plural(len(members), 'patient')} "
                f"{'' if free is None else 'that are in no test part '}to calibrate on: {fewest} are needed, and at most half of "
                f"them are set aside, so expected at least {math.ceil(fewest / MOST_OF_A_CLASS)}"
            )
        chosen += draw.permutation(members)[: max(fewest, min(most, round(CALIBRATION_SHARE * len(members))))].tolist()
    return np.isin(cohort.of, chosen)


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
    """Complete folds read from a file with a validation part each; refuse them if the audit finds errors."""
    _check_validation(validation, seed)
    notes = list(notes)
    without = [row for row in range(len(roles)) if not (roles[row] == VALIDATION).any()]
    # A patient in two parts must be found in the split of the file, before the validation part is drawn.
    torn = (_in_two_parts("patient", cohort.patients, parts, f"fold {row}") for row, parts in enumerate(roles))
    _refuse([error for errors in torn for error in errors], where)
    for row in without:
        roles[row, _validation_of(cohort, roles[row] == TRAIN, validation, (seed, row))] = VALIDATION
    if without:
        notes.append(
            f"{len(without)} of {plural(len(roles), 'fold')} without a validation part: {validation:.0%} of the training patients "
            f"of each {cohort.word} are taken for it (seed {seed})"
        )
    unused = roles == UNUSED
    notes += _some_slides(cohort.slides, unused.all(axis=0), "in no fold")
    notes += _some_slides(cohort.slides, unused.any(axis=0) & ~unused.all(axis=0), "in some folds only")
    splits = Splits(cohort.slides, cohort.patients, roles, inner, tuple(notes))
    _refuse(audit(splits, cohort.labels, cohort.classes, cohort.word)[0], where)
    return splits


def _some_slides(slides: Sequence[str], chosen: np.ndarray, what: str) -> list[str]:
    """Describe the slides of a mask in one sentence, if there are any."""
    names = [slides[i] for i in np.flatnonzero(chosen).tolist()]
    be = "is" if len(names) == 1 else "are"
    return [f"{len(names)} of {plural(len(slides), 'slide')} {be} {what} ({examples(names)})"] if names else []


def role_of(word: str, where: str) -> int:
    """Return the part of a split that a word stands for, in the usual spellings; UNUSED for an empty word."""
    if not word.strip():
        return UNUSED
    part = PART_OF_WORD.get(word.strip().casefold())
    if part is None:
        raise CarmilError(f"{where} has {word!r}: expected train, val, test or cal, or nothing")
    return NAMES.index(part)


def _in_two_parts(kind: str, names: Sequence[str], roles: np.ndarray, fold: str) -> list[str]:
    different, of = np.unique(np.asarray(names, dtype=object), return_inverse=True)
    in_part = np.zeros((len(different), len(NAMES)), dtype=bool)
    in_part[of, roles] = True
    in_part[:, UNUSED] = False
    return [
        f"{kind} {different[i]!r} is in {' and '.join(NAMES[role] for role in np.flatnonzero(in_part[i]))} of {fold}: "
        f"expected in one part only; move all of it to one"
        for i in np.flatnonzero(in_part.sum(axis=1) > 1)
    ]


def _tested_apart(splits: Splits, tested: np.ndarray) -> list[str]:
    """Return an error for every patient whose tested slides are not all in the same test parts. tested (outer, s)."""
    names, of = np.unique(np.asarray(splits.patients, dtype=object), return_inverse=True)
    most = np.bincount(of[tested.any(axis=0)], minlength=len(names))
    counts = np.stack([np.bincount(of[fold], minlength=len(names)) for fold in tested])
    errors = []
    for i in np.flatnonzero(((counts > 0) & (counts < most)).any(axis=0)):
        in_part = int(np.flatnonzero((counts[:, i] > 0) & (counts[:, i] < most[i]))[0])
        left = np.flatnonzero(tested.any(axis=0) & (of == i) & ~tested[in_part])[0]
        other = int(np.flatnonzero(tested[:, left])[0])
        shown = np.flatnonzero(tested[in_part] & (of == i))[0]
        errors.append(
            f"slides of patient {names[i]!r} are tested in different folds ({splits.slides[shown]!r} in fold {in_part}, "
            f"{splits.slides[left]!r} in fold {other}): expected a patient's slides in the same test parts; move all to one"
        )
    return errors


def _check_validation(validation: float, seed: int) -> None:
    if seed < 0:
        raise CarmilError(f"seed {seed}: expected 0 or more")
    if not 0 < validation < 1:
        raise CarmilError(f"validation share {validation}: expected between 0 and 1, like 0.15")


def _check_patients(cohort: Cohort, slides: np.ndarray, folds: int, what: str = "folds") -> None:
    counts = cohort.patients_by_class(slides)
    rarest = min(counts, key=lambda c: counts[c])
    if counts[rarest] < folds:
        option, least = (
            ("--folds", 3) if what == "folds" else ("--inner", 2)
        )  # one each to train on, select by and test
        fewer = f"use {option} {counts[rarest]}" if counts[rarest] >= least else "add patients"
        raise CarmilError(
            f"{cohort.word} {rarest!r} has {plural(counts[rarest], 'patient')} for {folds} {what}: expected at least one per fold "
            f"(patients by {cohort.word}: {_counts(counts)}); {fewer}, or leave the {cohort.word} out"
        )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name!r}: {count}" for name, count in counts.items())


def _groups(cohort: Cohort, sites: Sequence[str] | None, folds: int) -> tuple[np.ndarray, list[str]]:
    """Return (s) the group that must stay in one fold: the patient, or the whole site."""
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
            f"{plural(len(counts), 'site')} for {folds} folds: expected at least one per fold; use fewer folds"
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
    """Return (s) the fold of each chosen slide, -1 for the others; groups stay together."""
    from sklearn.model_selection import StratifiedGroupKFold

    # The library sorts groups by number and uses counts only, so that the order of the rows does not matter.
    strata = _merged(cohort.strata, np.unique(cohort.of[chosen]), folds)[cohort.of[chosen]]
    state = int(np.random.SeedSequence(seed).generate_state(1)[0])
    cut = StratifiedGroupKFold(folds, shuffle=True, random_state=state)
    where = np.flatnonzero(chosen)
    fold_of = np.full(len(chosen), -1)
    for fold, (_, held) in enumerate(cut.split(where, strata, groups[chosen])):
        fold_of[where[held]] = fold
    return fold_of


def _merged(strata: np.ndarray, patients: np.ndarray, least: int) -> np.ndarray:
    """Merge each stratum with few patients into its neighbour; a class may have few if patients have several."""
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
    """Return the validation slides (s): a share of each class's training patients, at least one if there are two."""
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
