"""Slides are optional to install: what every run needs does not ask for that room."""

import re
from pathlib import Path

import carmil

SOURCE = Path(carmil.__file__).parent
NEEDED = ("bags", "models", "counterfactual", "training", "evidence", "studies", "maps", "report")


def test_no_room_that_every_run_needs_imports_slides():
    files = [path for room in NEEDED for path in (SOURCE / room).rglob("*.py")]
    asking = [
        str(path.relative_to(SOURCE))
        for path in files
        if re.search(r"^\s*(from|import) carmil\.slides", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(files) > 100 and asking == []
