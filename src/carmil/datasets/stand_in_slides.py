"""The stand-in for the paper's slides: four cohorts of synthetic slides made from crc's nuclei.

crc     the patients as they are, one bag each; five folds by patient
foci    the question of CAMELYON16: slides with and without discs of tumour nuclei among others, small and large discs
kinds   that of BRACS: six classes, by the amount of planted tumour (none, little, much) and the presence of inflammation
weak    that of LUAD-TP53: no focus at all; slides of one class have a few per cent more inflammatory nuclei, anywhere

The nuclei are real, the slides synthetic. `foci`, `kinds` and `weak` use only patients whose nuclei all have a kind;
these are divided into train, validation and test (foci, kinds) or into groups (weak) before anything is drawn, and a
slide is made from a few patients, its donors. Every set of donors has equally many slides of each class, of the same
size, and everything except the planted nuclei is drawn independently of the label: neither stain, nor size, nor
background reveals the label. Nuclei are drawn with replacement, as a slide has more places than its donors have
nuclei.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from carmil.datasets.crc_nuclei import INFLAMMATORY, NORMAL, STROMA, TUMOUR, Nuclei
from carmil.datasets.planting import Focus, SyntheticSlide, plant, tissue
from carmil.errors import CarmilError

SPLITS = {"train": 1 / 2, "val": 1 / 6, "test": 1 / 3}  # shares of the patients
FEWEST = 20  # distinct nuclei of every kind that the donors of a slide must have together
DRAWS = 1000

LITTLE, MUCH, INFLAMED = (0.01, 0.03), (0.1, 0.3), (0.05, 0.15)  # shares of a slide of `kinds`
MICRO, MACRO = (0.005, 0.02), (0.05, 0.2)  # shares of a slide of `foci`
KINDS: dict[str, tuple[tuple[str, tuple[float, float]], ...]] = {
    "0 stroma": (),
    "1 inflamed": ((INFLAMMATORY, INFLAMED),),
    "2 little tumour": ((TUMOUR, LITTLE),),
    "3 little tumour, inflamed": ((TUMOUR, LITTLE), (INFLAMMATORY, INFLAMED)),
    "4 much tumour": ((TUMOUR, MUCH),),
    "5 much tumour, inflamed": ((TUMOUR, MUCH), (INFLAMMATORY, INFLAMED)),
}
TUMOUR_SHARE = (0.2, 0.5)  # share of a slide of `weak`, independent of its label
INFLAMED_SHARE, INFLAMED_DEVIATION, SHIFT = 0.25, 0.07, 0.1


@dataclass(frozen=True)
class Size:
    """Donor sets per part (foci, kinds), groups, slides per group and class (weak), and instances per slide."""

    instances: tuple[int, int]
    foci: dict[str, int]
    kinds: dict[str, int]
    groups: int
    slides_per_group: int
    patients: int | None = None  # patients of crc, half of each class; None for all
    nuclei: int | None = None


FULL = Size(
    (2_000, 10_000),
    {"train": 50, "val": 15, "test": 35},
    {"train": 17, "val": 5, "test": 11},
    groups=15,
    slides_per_group=6,
)
FAST = Size(
    (100, 300), {"train": 6, "val": 3, "test": 4}, {"train": 3, "val": 1, "test": 2}, groups=15, slides_per_group=1,
    patients=40, nuclei=60,
)  # fmt: skip
NAMES = ("crc", "foci", "kinds", "weak")


def make_slides(name: str, nuclei: Nuclei, size: Size, seed: int) -> list[SyntheticSlide]:
    """Make the slides of a cohort; features are not read."""
    makers = {"crc": _crc, "foci": _foci, "kinds": _kinds, "weak": _weak}[name]
    return list(makers(nuclei, size, np.random.default_rng([seed, crc32(name.encode())])))


def _crc(nuclei: Nuclei, size: Size, rng: np.random.Generator) -> Iterator[SyntheticSlide]:
    positive = set(nuclei.patients[nuclei.cancerous])
    patients = sorted(set(nuclei.patients))
    if size.patients is not None:
        parts = [[p for p in patients if (p in positive) == wanted] for wanted in (False, True)]
        patients = sorted(p for part in parts for p in rng.permutation(part)[: size.patients // 2])
    for patient in patients:
        rows = np.flatnonzero(nuclei.patients == patient)
        if size.nuclei is not None and len(rows) > size.nuclei:
            rows = np.sort(rng.choice(rows, size.nuclei, replace=False))
        label = "cancerous" if nuclei.cancerous[rows].any() else "benign"
        truth = nuclei.cancerous[rows].astype(np.int64)
        yield SyntheticSlide(f"patient_{patient}", patient, label, rows, truth=truth)


def _foci(nuclei: Nuclei, size: Size, rng: np.random.Generator) -> Iterator[SyntheticSlide]:
    pools = _pools(nuclei, rng)
    for split, blocks in size.foci.items():
        for block in range(blocks):
            donors = _donors(nuclei, pools[split], (NORMAL, (TUMOUR,)), rng)
            n, share = _instances(size, rng), rng.uniform(*(MICRO, MACRO)[block % 2])
            for label, foci in (("normal", ()), ("tumour", (Focus(nuclei.rows(donors, (TUMOUR,)), share),))):
                yield _planted(nuclei, donors, NORMAL, foci, n, rng, (f"foci_{split}_{block:02}", label, split))


def _kinds(nuclei: Nuclei, size: Size, rng: np.random.Generator) -> Iterator[SyntheticSlide]:
    pools = _pools(nuclei, rng)
    for split, blocks in size.kinds.items():
        for block in range(blocks):
            donors = _donors(nuclei, pools[split], (STROMA, (TUMOUR,), (INFLAMMATORY,)), rng)
            n = _instances(size, rng)
            for label, parts in KINDS.items():
                foci = [Focus(nuclei.rows(donors, (kind,)), rng.uniform(*share)) for kind, share in parts]
                yield _planted(nuclei, donors, STROMA, foci, n, rng, (f"kinds_{split}_{block:02}", label, split))


def _weak(nuclei: Nuclei, size: Size, rng: np.random.Generator) -> Iterator[SyntheticSlide]:
    kinds = ((TUMOUR,), (INFLAMMATORY,), STROMA)
    for number, donors in enumerate(_divide(nuclei, size.groups, kinds, rng)):
        rows = [nuclei.rows(donors, kind) for kind in kinds]
        for slide in range(size.slides_per_group):
            n = _instances(size, rng)
            for label in ("base", "more"):
                tumour = rng.uniform(*TUMOUR_SHARE)
                inflamed = np.clip(rng.normal(INFLAMED_SHARE, INFLAMED_DEVIATION), 0.02, 0.4) + SHIFT * (
                    label == "more"
                )
                drawn = rng.choice(3, n, p=(tumour, inflamed, 1 - tumour - inflamed))
                picked = np.stack([rng.choice(of_kind, n) for of_kind in rows])[drawn, np.arange(n)]
                name, patient = f"weak_{number:02}_{slide:02}_{label}", f"group_{number:02}"
                yield SyntheticSlide(name, patient, label, picked, tissue(n, rng))


def _planted(
    nuclei: Nuclei,
    donors: Iterable[str],
    background: tuple[str, ...],
    foci: Iterable[Focus],
    n: int,
    rng: np.random.Generator,
    identity: tuple[str, str, str],
) -> SyntheticSlide:
    """Make a slide of background with foci. identity: its set of donors, label and split."""
    donor_set, label, split = identity
    places = tissue(n, rng)
    filling = rng.choice(nuclei.rows(tuple(donors), background), n)
    rows, truth = plant(filling, places, tuple(foci), rng)
    return SyntheticSlide(f"{donor_set}_{label.split()[0]}", donor_set, label, rows, places, truth, split)


def _instances(size: Size, rng: np.random.Generator) -> int:
    """Draw a number of instances, uniform on a logarithmic scale."""
    return round(float(np.exp(rng.uniform(*np.log(size.instances)))))


def _by_tumour(nuclei: Nuclei, rng: np.random.Generator) -> tuple[list[str], list[str]]:
    """Return the patients with known kinds in random order: those with tumour nuclei, and those without."""
    known = nuclei.known_patients
    ill = set(nuclei.patients[nuclei.kinds == TUMOUR])
    shuffled = [str(patient) for patient in rng.permutation(known)]
    return [p for p in shuffled if p in ill], [p for p in shuffled if p not in ill]


def _pools(nuclei: Nuclei, rng: np.random.Generator) -> dict[str, tuple[list[str], list[str]]]:
    """Return the patients of train, val and test, each as (with tumour nuclei, without)."""
    with_tumour, without = _by_tumour(nuclei, rng)
    bounds = np.cumsum([0, *SPLITS.values()])

    def part(patients: list[str], first: float, last: float) -> list[str]:
        return patients[round(first * len(patients)) : round(last * len(patients))]

    return {
        split: (part(with_tumour, first, last), part(without, first, last))
        for split, first, last in zip(SPLITS, bounds, bounds[1:], strict=False)
    }


def _donors(
    nuclei: Nuclei, pool: tuple[list[str], list[str]], kinds: Iterable[tuple[str, ...]], rng: np.random.Generator
) -> tuple[str, ...]:
    """Draw three patients with tumour nuclei and two without, who together have enough nuclei."""
    kinds = tuple(kinds)
    if len(pool[0]) < 3 or len(pool[1]) < 2:
        raise _too_few(nuclei)
    for _ in range(DRAWS):
        donors = (*rng.choice(pool[0], 3, replace=False), *rng.choice(pool[1], 2, replace=False))
        if _suffice(nuclei, donors, kinds):
            return tuple(str(donor) for donor in donors)
    raise _too_few(nuclei)


def _divide(
    nuclei: Nuclei, groups: int, kinds: tuple[tuple[str, ...], ...], rng: np.random.Generator
) -> list[tuple[str, ...]]:
    """Divide all patients with known kinds into groups that each have enough nuclei of every kind."""
    for _ in range(DRAWS):
        with_tumour, without = _by_tumour(nuclei, rng)
        order = [*with_tumour, *without]
        divided = [tuple(order[group::groups]) for group in range(groups)]
        if all(_suffice(nuclei, donors, kinds) for donors in divided):
            return divided
    raise _too_few(nuclei)


def _suffice(nuclei: Nuclei, donors: Iterable[str], kinds: Iterable[tuple[str, ...]]) -> bool:
    return all(len(nuclei.rows(tuple(donors), kind)) >= FEWEST for kind in kinds)


def _too_few(nuclei: Nuclei) -> CarmilError:
    return CarmilError(
        f"{nuclei.folder}: {len(nuclei.known_patients)} patients have nuclei of known kind, too few to make "
        "slides; expected crc as it was published, 60 of 98"
    )
