"""Survival with a known cause: bags of crc's nuclei whose hazard depends on their shares of two kinds of nuclei.

    log hazard = EFFECT (z_raising - z_lowering)

z are the shares of the raising and of the lowering kind among the nuclei of a bag, standardised over all bags. Times
are exponential with this hazard, censored independently of it and rounded up to whole months, so that there are ties.
The truth of a nucleus for the output `risk` is 1 if it is of the raising kind, -1 of the lowering kind, 0 otherwise.

All nuclei of a bag are of one donor, and folds by patient divide the donors. Only donors with nuclei of both kinds are
used, and the composition of a bag is drawn independently of its donor: neither stain nor background reveals the hazard.
The shares vary widely, from bags without a kind to bags of little else, since features of one kind differ so much between
donors that a model of unseen donors cannot tell similar shares apart. As shares of one whole they have a correlation of
-1/2. b bags, n nuclei of a bag.

OUT/SIZE-seedN/labels-C-censored.csv and labels-C-censored-shuffled.csv (C per cent), and OUT/SIZE-seedN/ENCODER (a store).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

from carmil.bags.sources import Bag
from carmil.csv_files import csv_text
from carmil.datasets.crc_nuclei import ENCODERS, INFLAMMATORY, STROMA, TUMOUR, Nuclei, read_nuclei
from carmil.datasets.packing import is_made_from, write_store
from carmil.datasets.study_cohort import SURVIVAL, StudyCohort
from carmil.errors import CarmilError, unknown
from carmil.files import write_text
from carmil.targets import Survival

VERSION = 1  # version of the bags, increased with every change to them
SEED = 0
RAISING, LOWERING, BACKGROUND = (TUMOUR,), (INFLAMMATORY,), STROMA
FEWEST = 5  # nuclei of the raising kind, of the lowering kind and of background that a donor must have
CONCENTRATION = (0.5, 0.5, 0.5)  # of the Dirichlet distribution of the shares of raising, lowering and background
EFFECT = 0.65  # log hazard ratio per standard deviation of either share: the C-index of the true hazard is .75 to .80
MEDIAN = 24.0  # months until half of the bags with a log hazard of 0 have an event
CENSORED = 0.5
COLUMNS = ("slide", "patient", "time", "event", "log_hazard", "share_raising", "share_lowering")


@dataclass(frozen=True)
class Size:
    """The smallest and the largest number of nuclei in a bag, and the number of bags per donor."""

    nuclei: tuple[int, int]
    bags: int


FULL, FAST = Size((200, 500), 12), Size((40, 80), 3)


@dataclass(frozen=True, eq=False)
class PlantedBag:
    """nuclei (n): positions in crc's files, all of the donor."""

    name: str
    donor: str
    nuclei: np.ndarray


def build_planted_hazards(
    crc: Path,
    out: Path,
    *,
    encoder: str = "resnet50",
    censored: float = CENSORED,
    shuffled: bool = False,
    fast: bool = False,
    seed: int = SEED,
) -> StudyCohort:
    """Build the cohort from crc's nuclei; its store is reused if it exists.

    censored: the expected share of bags without an event. shuffled: a null cohort, in which the pairs of time and event
    are permuted among the bags, which keep their true log hazard.
    """
    if encoder not in ENCODERS:
        raise CarmilError(f"planted hazards: {unknown('encoder', encoder, ENCODERS)}")
    if not 0 <= censored < 1:
        raise CarmilError(f"planted hazards: a share of {censored:g} censored: expected at least 0 and less than 1")
    nuclei, size = read_nuclei(crc), FAST if fast else FULL
    bags = draw_bags(nuclei, size, seed)
    home = out / f"{'fast' if fast else 'full'}-seed{seed}"
    labels = home / f"labels-{100 * censored:g}-censored{'-shuffled' if shuffled else ''}.csv"
    write_text(labels, csv_text(_label_rows(nuclei, bags, censored, shuffled, seed), for_people=False))
    key = {"version": VERSION, "crc": nuclei.fingerprint(encoder), "size": asdict(size), "seed": seed}
    store = home / encoder
    if not is_made_from(store, key):
        _write(nuclei, bags, encoder, store, key)
    return StudyCohort(
        name="planted-hazards-shuffled" if shuffled else "planted-hazards",
        title="planted hazards, times shuffled" if shuffled else "planted hazards",
        bags=store,
        labels=labels,
        measures=("c_index",),
        encoder=encoder,
        protocol=SURVIVAL,
        stand_in=True,
        notes=(
            f"planted hazards: real nuclei of crc in {len(bags)} synthetic bags of {len({bag.donor for bag in bags})} donors; "
            f"the log hazard rises by {EFFECT:g} per standard deviation of the share of {TUMOUR} nuclei, and falls as much with "
            f"that of {INFLAMMATORY} nuclei",
            *(
                ("times and events are permuted among the bags: no model can do better than chance",)
                if shuffled
                else ()
            ),
        ),
        folder=f"planted-hazards-{encoder}-{home.name}-{labels.stem}",
    )


def draw_bags(nuclei: Nuclei, size: Size, seed: int) -> list[PlantedBag]:
    """Draw the nuclei of the bags of each donor with replacement, with a composition of its own for each bag."""
    kinds, rng = (RAISING, LOWERING, BACKGROUND), _stream(seed, "bags")
    pools = {donor: [nuclei.rows((donor,), kind) for kind in kinds] for donor in nuclei.known_patients}
    pools = {donor: pool for donor, pool in pools.items() if min(map(len, pool)) >= FEWEST}
    if len(pools) < 2:
        raise CarmilError(
            f"{nuclei.folder}: patients with at least {FEWEST} nuclei each of {', '.join(map(' or '.join, kinds))}: {len(pools)}; "
            "expected crc as it was published, which has 30"
        )
    bags = []
    for donor, pool in pools.items():
        for number in range(size.bags):
            n = int(rng.integers(size.nuclei[0], size.nuclei[1], endpoint=True))
            counts = rng.multinomial(n, rng.dirichlet(CONCENTRATION))
            drawn = [rng.choice(rows, count) for rows, count in zip(pool, counts, strict=True)]
            bags.append(PlantedBag(f"donor_{donor}_{number:02}", donor, rng.permutation(np.concatenate(drawn))))
    return bags


def signed_truth(kinds: np.ndarray) -> np.ndarray:
    """Return (n, 1) the effect of the kinds (n) of nuclei on the risk: 1, -1 or 0."""
    return (np.isin(kinds, RAISING).astype(np.int8) - np.isin(kinds, LOWERING))[:, None]


def log_hazards(shares: np.ndarray) -> np.ndarray:
    """Return the log hazards (b) of bags with these shares (b, 2) of the raising and of the lowering kind."""
    z = (shares - shares.mean(axis=0)) / shares.std(axis=0)
    return EFFECT * (z[:, 0] - z[:, 1])


def draw_times(log_hazard: np.ndarray, censored: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw times (b) in whole months, and whether each (b) is the time of an event."""
    hazard = np.log(2) / MEDIAN * np.exp(log_hazard)
    event_time = _stream(seed, "events").exponential(1 / hazard)
    waiting = _stream(seed, "censoring").exponential(size=len(hazard))
    end = waiting / _censoring_rate(hazard, censored) if censored else np.full(len(hazard), np.inf)
    return np.ceil(np.minimum(event_time, end)).astype(np.int64), event_time <= end


def _censoring_rate(hazard: np.ndarray, censored: float) -> float:
    """Return the rate of exponential censoring by which this share of cases is expected to be censored."""
    from scipy.optimize import brentq

    def excess(log_rate: float) -> float:
        rate = np.exp(log_rate)
        return float((rate / (rate + hazard)).mean()) - censored

    middle = float(np.log(censored / (1 - censored)))  # of equal hazards
    return float(np.exp(brentq(excess, middle + np.log(hazard.min()), middle + np.log(hazard.max()))))


def _label_rows(
    nuclei: Nuclei, bags: Sequence[PlantedBag], censored: float, shuffled: bool, seed: int
) -> list[tuple[object, ...]]:
    """Return the label table: its header, then one row per bag."""
    truth = [signed_truth(nuclei.kinds[bag.nuclei]) for bag in bags]
    shares = np.array([((signs == 1).mean(), (signs == -1).mean()) for signs in truth])
    log_hazard = log_hazards(shares)
    time, event = draw_times(log_hazard, censored, seed)
    if shuffled:
        order = _stream(seed, "shuffle").permutation(len(bags))
        time, event = time[order], event[order]
    values = (time, event.astype(int), log_hazard, *shares.T)
    lines = zip(bags, *(column.tolist() for column in values), strict=True)
    return [COLUMNS, *((bag.name, bag.donor, *cells) for bag, *cells in lines)]


def _write(nuclei: Nuclei, bags: Sequence[PlantedBag], encoder: str, store: Path, key: object) -> None:
    features = np.asarray(nuclei.features(encoder), dtype=np.float16)
    write_store(
        (
            Bag(
                bag.name,
                features[bag.nuclei],
                encoder=encoder,
                instance_labels=signed_truth(nuclei.kinds[bag.nuclei]),
            )
            for bag in bags
        ),
        store,
        key=key,
        truth_classes=Survival().outputs,
    )


def _stream(seed: int, name: str) -> np.random.Generator:
    """Return the random numbers of one step, so that a change to one step leaves the others unchanged."""
    return np.random.default_rng([seed, crc32(f"planted hazards, {name}".encode())])
