"""Slides are optional to install: nothing but the viewer and the command line asks for that room."""

import re
from pathlib import Path

import carmil

SOURCE = Path(carmil.__file__).parent


def test_nobody_else_imports_slides():
    asking = {
        path.relative_to(SOURCE).parts[0]
        for path in SOURCE.rglob("*.py")
        if re.search(r"^\s*(from|import) carmil\.slides", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert asking == {"slides", "viewer", "cli"}
