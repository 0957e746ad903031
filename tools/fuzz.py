"""Fuzz every reader of carmil: a mutant of a valid file may be refused in one line or accepted, nothing else.

    python tools/fuzz.py --mutants 20000 --out fuzz            # all targets; run it again to resume
    python tools/fuzz.py --mutants 20000 --out fuzz --target runs --target labels
    python tools/fuzz.py --out fuzz --target runs --only 1234   # one case again, with its traceback

A case fails if its reader raises anything but a `CarmilError` of one line, ends the process, takes longer than 10 s (of the
processor) or more than 1 GiB of memory beyond what the process had. Failing files are kept in OUT/failures, with the case's
number in the name.
Case i of a target is a function of the seed, the target and i alone.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' makers of files
sys.path.insert(0, str(Path(__file__).parent))

import torch
from fuzzing.mutations import mutated
from fuzzing.targets import TARGETS, Target

from carmil.errors import LONGEST, CarmilError

SECONDS = 10.0  # of the processor, so that other work on the machine does not count
BYTES = 2**30
ALLOWED = 6 * 2**30  # of address space beyond the start: so that a bomb ends the case and not the machine
WATCHDOG = 300.0  # seconds after which a worker that does not answer is ended
REFUSED, ACCEPTED = "refused", "accepted"


class TooLateError(BaseException):
    """Raised by the alarm; no `except Exception` may keep it."""


@dataclass(frozen=True)
class Variant:
    """One folder of good files, and those of them that are changed."""

    folder: Path
    files: tuple[Path, ...]


def variants_of(target: Target, seeds: Path) -> list[Variant]:
    """The good files of a target, made once."""
    made = seeds / target.name
    if not made.is_dir():
        aside = Path(tempfile.mkdtemp(dir=seeds)) / target.name
        aside.mkdir()
        target.make(aside)
        aside.rename(made)
    found = []
    for folder in sorted(path for path in made.iterdir() if path.is_dir()):
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        chosen = [path for path in files if not target.only or {path.suffix, path.name} & {*target.only}]
        found.append(Variant(folder, tuple(path.relative_to(folder) for path in chosen)))
    return [variant for variant in found if variant.files]


class Cases:
    """The cases of a target, in a working copy of its good files."""

    def __init__(self, target: Target, seeds: Path, work: Path, seed: int) -> None:
        self.target, self.seed, self.work = target, seed, work / target.name
        variants = variants_of(target, seeds)
        self.good = {
            variant.folder.name: {file: (variant.folder / file).read_bytes() for file in variant.files}
            for variant in variants
        }
        self.others = tuple(content for files in self.good.values() for content in files.values())
        for variant in variants:
            shutil.copytree(variant.folder, self.work / variant.folder.name)

    def read_good(self) -> None:
        """Reads what is not changed, so that everything is imported; one file of each folder at least must be accepted."""
        for name, files in self.good.items():
            refused = []
            for file in files:
                try:
                    self.target.read(self.work / name, self.work / name / file)
                except CarmilError as error:
                    refused.append(error)
            if len(refused) == len(files):
                raise refused[0]

    def place(self, number: int) -> tuple[Path, Path, bytes]:
        """Folder, file and content of a case; the content is written there."""
        rng = Random(f"{self.seed}:{self.target.name}:{number}")
        name = rng.choice(list(self.good))
        file = rng.choice(list(self.good[name]))
        content = mutated(self.good[name][file], file.suffix, rng, self.others)
        folder = self.work / name
        (folder / file).write_bytes(content)
        return folder, folder / file, content

    def restore(self, folder: Path, file: Path) -> None:
        file.unlink(missing_ok=True)
        file.write_bytes(self.good[folder.name][file.relative_to(folder)])


@dataclass(frozen=True)
class Outcome:
    """The result of a case (refused, accepted or the kind of failure), its message, processor seconds and bytes of memory."""

    result: str
    message: str
    seconds: float
    memory: int


def tried(cases: Cases, number: int) -> Outcome:
    """Write a case's file, read it, and put the good file back."""
    folder, file, _ = cases.place(number)
    before, start = _reset_peak(), time.process_time()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        cases.target.read(folder, file)
        result, words = ACCEPTED, ""
    except CarmilError as error:
        words = str(error)
        result = REFUSED if words and len(words.splitlines()) == 1 and len(words) <= LONGEST else "several lines"
    except TooLateError:
        result, words = "too long", f"more than {SECONDS:g} s"
    except BaseException as error:
        trace = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in trace if "carmil" in frame.filename] or list(trace)
        result = f"{type(error).__name__} at {Path(ours[-1].filename).name}:{ours[-1].lineno}"
        words = " ".join(str(error).split())[:200]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = time.process_time() - start
    memory = max(0, _peak() - before)
    if memory > BYTES:
        result, words = "too much memory", f"{memory / 2**20:.0f} MiB"
    cases.restore(folder, file)
    return Outcome(result, words, seconds, memory)


def _late(*_: object) -> None:
    raise TooLateError


def _reset_peak() -> int:
    """Forgets the largest memory so far; returns what is used now, in bytes."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _peak()
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def quiet_worker() -> None:
    """Warnings and the libraries' own words are no findings; memory has an end."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, _late)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    import torch

    torch.set_num_threads(1)
    limit = _status("VmSize") + ALLOWED
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _work(name: str, seeds: Path, seed: int, first: int, end: int, pipe: Connection) -> None:
    with tempfile.TemporaryDirectory() as work:
        cases = Cases(TARGETS[name], seeds, Path(work), seed)
        cases.read_good()
        quiet_worker()
        for number in range(first, end):
            pipe.send((number, None))
            pipe.send((number, tried(cases, number)))
    pipe.send((end, None))


def fuzz(name: str, out: Path, *, mutants: int, seed: int) -> dict[str, Any]:
    """All cases of a target that have not been tried yet; the state is kept in OUT/NAME.json."""
    kept = out / f"{name}.json"
    state: dict[str, Any] = {"seed": seed, "next": 0, "results": {}, "failures": []}
    state |= {"slowest": 0.0, "slowest_case": 0, "largest": 0, "largest_case": 0}
    if kept.exists() and (known := json.loads(kept.read_text()))["seed"] == seed:
        state = known
    results = Counter(state["results"])
    variants_of(TARGETS[name], out / "seeds")

    def keep() -> None:
        state["results"] = dict(results)
        kept.write_text(json.dumps(state, indent=1))

    def failed(number: int, result: str, words: str) -> None:
        state["failures"].append({"case": number, "kind": result, "words": words})
        _keep_file(name, out, seed, number)

    while state["next"] < mutants:
        pipe, theirs = multiprocessing.Pipe(duplex=False)
        arguments = (name, out / "seeds", seed, state["next"], mutants, theirs)
        worker = multiprocessing.get_context("fork").Process(target=_work, args=arguments)
        worker.start()
        theirs.close()
        saved = time.monotonic()
        try:
            while pipe.poll(WATCHDOG):
                number, found = pipe.recv()
                if found is None:
                    continue
                results[found.result] += 1
                if found.result not in (REFUSED, ACCEPTED):
                    failed(number, found.result, found.message)
                if found.seconds > state["slowest"]:
                    state["slowest"], state["slowest_case"] = round(found.seconds, 2), number
                if found.memory > state["largest"]:
                    state["largest"], state["largest_case"] = found.memory, number
                state["next"] = number + 1
                if time.monotonic() - saved > 5:
                    keep()
                    saved = time.monotonic()
            ending = "no answer"
            worker.kill()
        except EOFError:
            ending = "the process ended"
        worker.join()
        if state["next"] < mutants:
            results[ending] += 1
            failed(state["next"], ending, f"exit status {worker.exitcode}")
            state["next"] += 1
        keep()
    return state


def _keep_file(name: str, out: Path, seed: int, number: int) -> None:
    with tempfile.TemporaryDirectory() as work:
        _, file, content = Cases(TARGETS[name], out / "seeds", Path(work), seed).place(number)
    (out / "failures").mkdir(exist_ok=True)
    (out / "failures" / f"{name}-{number}-{file.name}").write_bytes(content)


def table(states: dict[str, dict[str, Any]]) -> list[str]:
    """The table of docs/security.md."""
    lines = [
        "| reader | mutants | refused in one line | accepted | failures | longest | largest memory |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, state in states.items():
        results = state["results"]
        cells = (state["next"], results.get(REFUSED, 0), results.get(ACCEPTED, 0), len(state["failures"]))
        bounds = f"{state['slowest']:.1f} s | {state['largest'] / 2**20:.0f} MiB"
        lines.append(f"| {name} | {' | '.join(f'{cell:,}' for cell in cells)} | {bounds} |")
    return lines


def again(name: str, out: Path, seed: int, number: int) -> None:
    """One case with its traceback."""
    with tempfile.TemporaryDirectory() as work:
        cases = Cases(TARGETS[name], out / "seeds", Path(work), seed)
        folder, file, content = cases.place(number)
        print(f"{folder.name}/{file.relative_to(folder)}, {len(content):,} bytes")
        try:
            TARGETS[name].read(folder, file)
            print("accepted")
        except CarmilError as error:
            print(f"refused: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=300, help="of each target (300)")
    parser.add_argument(
        "--out", type=Path, default=Path("fuzz"), help="where seeds, state and failures are kept (fuzz)"
    )
    parser.add_argument("--target", action="append", choices=TARGETS, help="one target; may be repeated (all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="try this case alone and show its traceback")
    given = parser.parse_args()
    torch.set_num_threads(1)  # workers are forked: torch's threads would not be there, and be waited for
    (given.out / "seeds").mkdir(parents=True, exist_ok=True)
    names = given.target or list(TARGETS)
    if given.only is not None:
        again(names[0], given.out, given.seed, given.only)
        return
    states = {}
    for name in names:
        start = time.monotonic()
        states[name] = state = fuzz(name, given.out, mutants=given.mutants, seed=given.seed)
        kinds = Counter(failure["kind"] for failure in state["failures"])
        print(
            f"{name}: {state['next']:,} mutants, {time.monotonic() - start:.0f} s; failures {dict(kinds.most_common(12))}",
            flush=True,
        )
    print("\n".join(table(states)))
    sys.exit(1 if any(state["failures"] for state in states.values()) else 0)


if __name__ == "__main__":
    main()
