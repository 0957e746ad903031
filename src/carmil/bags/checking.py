"""What is wrong with a cohort: with the files that it comes in, or with the store they were packed into."""

from dataclasses import dataclass

import numpy as np

from carmil.bags.readers import read_bag
from carmil.bags.sources import Bag, Found, Header, Source
from carmil.bags.store import ITEM_SIZE, OnBag, Store, checksum
from carmil.bags.workers import in_parallel, worker_count
from carmil.errors import CarmilError


@dataclass(frozen=True)
class Problem:
    """Something wrong with a bag, or with the cohort as a whole (`bag` is then empty)."""

    bag: str
    kind: str
    what: str


def check_bags(found: Found, *, workers: int | None = None, on_bag: OnBag = lambda done, total: None) -> list[Problem]:
    """Reads everything once and says what is wrong: unreadable, not finite, another width or encoder than most."""
    problems: list[Problem] = []
    headers: dict[str, Header] = {}
    jobs = ((source, (source,)) for source in found.sources)
    for done, (source, result) in enumerate(in_parallel(_looked_at, jobs, worker_count(workers, found.sources)), 1):
        on_bag(done, len(found.sources))
        if isinstance(result, Header):
            headers[source.id] = result
            if result.rows == 0:
                problems.append(Problem(source.id, "empty", "no tile; it is left out of a store"))
        else:
            problems.append(Problem(source.id, "not finite" if "NaN" in str(result) else "unreadable", str(result)))
    for kind, of in (("width", "width"), ("encoder", "encoder")):
        values = [getattr(header, of) for header in headers.values() if header.rows]
        usual = max(set(values), key=values.count) if values else None
        problems += [
            Problem(bag, kind, f"{kind} {getattr(header, of)}, most bags have {usual}")
            for bag, header in headers.items()
            if header.rows and getattr(header, of) != usual
        ]
    return sorted(problems, key=lambda problem: (problem.bag, problem.kind))


def check_store(store: Store, *, on_bag: OnBag = lambda done, total: None) -> list[Problem]:
    """Compares every bag with the checksum it was written with."""
    problems, first = [], 0
    size = store.width * ITEM_SIZE[store.dtype]
    with (store.path / "features.bin").open("rb") as file:
        for done, entry in enumerate(store.entries, 1):
            file.seek(first * size)
            if checksum(file.read(entry.rows * size)) != entry.checksum:
                problems.append(Problem(entry.id, "checksum", "its bytes are not those that were written: build again"))
            first += entry.rows
            on_bag(done, len(store.entries))
    return problems


def finite(bag: Bag, source: Source) -> Bag:
    """The bag, if all its features are numbers; else it is refused."""
    bad = ~np.isfinite(bag.features).all(axis=1)
    if bad.any():
        raise CarmilError(
            f"{source.path}: NaN or infinite features in {int(bad.sum())} of {len(bad)} instances, first in {int(bad.argmax())}: "
            "extract them again or leave the slide out"
        )
    return bag


def _looked_at(source: Source) -> Header | CarmilError:
    try:
        bag = finite(read_bag(source), source)
        return Header(len(bag.features), bag.features.shape[1], str(bag.features.dtype), bag.encoder)
    except CarmilError as error:
        return error
