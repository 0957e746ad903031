"""Names of the files of bags.

The id of a bag may be any text, but not every text is a valid file name. If the file of a bag cannot be named after
its id, FOLDER/carmil_names.json maps the name of the file to the id.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from carmil.errors import CarmilError
from carmil.files import safe_name, safe_names, write_text
from carmil.untrusted import read_json

NAMES_TABLE = "carmil_names.json"


def write_names(folder: Path, ids: Iterable[str]) -> dict[str, str]:
    """Return the file name of each bag below `folder`, without extension, and record in the table those that differ from the id."""
    known, names = _table(folder), names_for(folder, ids)
    new = {name: id for id, name in names.items() if name != id}
    if not new.items() <= known.items():
        write_text(folder / NAMES_TABLE, json.dumps(known | new, indent=1))
    return names


def names_for(folder: Path, ids: Iterable[str]) -> dict[str, str]:
    """Return the names of `write_names` without recording them. Pass all ids of a cohort at once, so that no two
    names differ only in case.
    """
    before = {id: name for name, id in _table(folder).items()}
    return {id: before.get(id, name) for id, name in safe_names(ids).items()}


def read_names(folder: Path) -> dict[str, str]:
    """Read the ids of bags by the names of their files in `folder`, or in the exported folder above it."""
    return _table(folder.parent) | _table(folder)


def _table(folder: Path) -> dict[str, str]:
    """Read the table, without entries whose id would not get this name, so that no table can give a file the name of
    another slide.
    """
    if not (folder / NAMES_TABLE).is_file():
        return {}
    entries = read_json(folder / NAMES_TABLE, "remove it, or export the bags again")
    if not isinstance(entries, dict) or not all(isinstance(id, str) for id in entries.values()):
        raise CarmilError(f"{folder / NAMES_TABLE} is not a table of names: remove it, or export the bags again")
    return {name: id for name, id in entries.items() if name in (safe_name(id), safe_name(id, taken=[id]))}
