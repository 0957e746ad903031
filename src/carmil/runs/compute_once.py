"""Results that are kept in a file, so that an interrupted command resumes."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from carmil.errors import CarmilError
from carmil.files import write_text
from carmil.provenance import config_key, machine_line, to_json
from carmil.untrusted import parse_as


def compute_once(
    path: Path, request: Mapping[str, Any], compute: Callable[[], Any], *, device: str, kind: Any = Any
) -> tuple[Any, str]:
    """Return what `compute` returns, and the machine it ran on; read it from `path` if the same was requested before.

    kind: the type of the result, see `carmil.untrusted.parse_as`. Without one it is as JSON has it: NaN is None.
    """
    key = config_key(request)
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts["key"] == key:
            return parse_as(facts["measured"], kind, str(path)), facts["measured_on"]
    except (OSError, ValueError, KeyError, TypeError, CarmilError):
        pass  # not there, or of another request
    where, result = f"{device}: {machine_line()}", to_json(compute())
    write_text(path, json.dumps({"key": key, "measured_on": where, "measured": result}))
    return parse_as(result, kind, str(path)), where
