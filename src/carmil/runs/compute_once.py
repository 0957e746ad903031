"""Cache results in a file, so that an interrupted command resumes."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from carmil.errors import CarmilError
from carmil.files import atomic_file, write_text
from carmil.provenance import config_key, machine_line, to_json
from carmil.untrusted import parse_as

Arrays = dict[str, NDArray[np.floating]]
KEY, MEASURED_ON = "key", "measured_on"  # of a file of arrays


def compute_once(
    path: Path, request: Mapping[str, Any], compute: Callable[[], Any], *, device: str, kind: Any = Any
) -> tuple[Any, str]:
    """Return the result of `compute`, and the machine it ran on; read both from `path` if the request is the same.

    kind: the type of the result, see `carmil.untrusted.parse_as`. Without it the result is plain JSON, where NaN
    becomes None.
    """
    key = config_key(request)
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts["key"] == key:
            return parse_as(facts["measured"], kind, str(path)), facts["measured_on"]
    except (OSError, ValueError, KeyError, TypeError, CarmilError):
        pass  # missing, or of another request
    where, result = f"{device}: {machine_line()}", to_json(compute())
    write_text(path, json.dumps({"key": key, "measured_on": where, "measured": result}))
    return parse_as(result, kind, str(path)), where


def compute_arrays_once(
    path: Path, request: Mapping[str, Any], compute: Callable[[], Arrays], *, device: str
) -> Arrays:
    """Return arrays by name, as `compute_once` returns other results; the file is a compressed .npz file."""
    key = config_key(request)
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            if str(file[KEY]) == key:
                return {name: file[name] for name in file.files if name not in (KEY, MEASURED_ON)}
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        pass  # missing, damaged, or of another version
    arrays = compute()
    notes = {KEY: np.array(key), MEASURED_ON: np.array(f"{device}: {machine_line()}")}
    with atomic_file(path) as aside, aside.open("wb") as output:
        np.savez_compressed(output, **arrays, **notes)  # type: ignore[arg-type]
    return arrays
