"""A finding as files: NAME.md for people, NAME.json for programs, beside the pictures."""

import json
import os
from collections.abc import Mapping
from typing import Any

from carmil.files import write_text
from carmil.provenance import plain
from carmil.reproduce.recipes import Asked, Finding, recipe_named

FAST = "--fast: few bags and epochs, to see that it runs; the figures mean nothing"


def written(name: str, asked: Asked, finding: Finding, facts: Mapping[str, Any]) -> Finding:
    """Writes the recipe's finding to asked.out, and gives it. facts: what JSON has more than the page."""
    recipe = recipe_named(name)
    lines = [*([FAST] if asked.fast else []), *finding.lines]
    parts = [f"# {recipe.title} ({recipe.of})", "", *(f"- {line}" for line in lines), ""]
    for picture in finding.pictures:
        where = os.path.relpath(picture.path, asked.out)
        parts += [f"![{picture.caption}]({where})", "", picture.caption, ""]
    parts += [table.markdown() for table in finding.tables]
    if finding.conditions:
        parts += ["## How this was measured", "", *(f"- {line}" for line in finding.conditions), ""]
    write_text(asked.out / f"{name}.md", "\n".join(parts))
    tables = [{"title": one.title, "heads": one.heads, "lines": one.lines} for one in finding.tables]
    found = {"lines": lines, "tables": tables, "conditions": finding.conditions, **facts}
    write_text(asked.out / f"{name}.json", json.dumps(plain(found), indent=2))
    return finding
