"""What was measured once is not measured again: a command that was killed goes on."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from carmil.files import write_text
from carmil.provenance import config_key, machine_line, plain


def compute_once(path: Path, asked: Mapping[str, Any], measure: Callable[[], Any], *, device: str) -> tuple[Any, str]:
    """What `measure` gives, as JSON has it, and the machine that measured it: read from `path` if just this was asked before,
    written there if not."""
    key = config_key(asked)
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts["key"] == key:
            return facts["measured"], facts["measured_on"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or of another time
    where = f"{device}: {machine_line()}"
    text = json.dumps({"key": key, "measured_on": where, "measured": plain(measure())})
    write_text(path, text)
    return json.loads(text)["measured"], where
