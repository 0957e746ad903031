"""How fast a store is read."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from carmil.files import passing_folder

from .arithmetic import WIDTH
from .bench import Bench
from .measure import synchronize
from .records import Fact


def store(bench: Bench) -> Iterator[Fact]:
    """How fast bags come out of a store: from disk as far as the system lets us ask, and from the system's memory."""
    from carmil.bags.store import open_store

    with passing_folder(bench.out) as folder:
        path = write_noise_store(folder / "store", bench.plan.store_bags, bench.plan.bag)
        size = (path / "features.bin").stat().st_size
        about = f"{bench.plan.store_bags} bags of {bench.plan.bag:,} x {WIDTH}, float16"
        for what, cold in (("read from disk", True), ("read again, from the system's memory", False)):
            if cold and not _forgotten(path / "features.bin"):
                yield Fact("store", what, None, "GB/s", "this system cannot be asked to forget a file")
                continue
            bags = open_store(path).bags()
            begun = time.perf_counter()
            for features in bags.features.split(bags.sizes.tolist()):
                features.to(bench.device, copy=True)
            synchronize(bench.device)
            yield Fact("store", what, size / (time.perf_counter() - begun) / 1e9, "GB/s", f"{about}, to {bench.device}")


def write_noise_store(path: Path, count: int, rows: int) -> Path:
    """A store of `count` bags that hold the same noise."""
    from carmil.bags.store import VERSION, Entry

    path.mkdir(parents=True)
    block = torch.randn(rows, WIDTH).half().numpy().tobytes()
    with (path / "features.bin").open("wb") as file:
        for _ in range(count):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    with (path / "coordinates.bin").open("wb") as file:
        file.truncate(8 * rows * count)
    entries = [asdict(Entry(f"{i:05d}", rows, None, None, None, False, "")) for i in range(count)]
    facts = {
        "version": VERSION,
        "dtype": "float16",
        "width": WIDTH,
        "encoder": None,
        "origin": "noise",
        "fingerprint": "",
    }
    (path / "index.json").write_text(json.dumps({**facts, "empty": [], "left_out": [], "bags": entries}))
    return path


def _forgotten(path: Path) -> bool:
    """Asks the system to drop a file from its memory."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True
