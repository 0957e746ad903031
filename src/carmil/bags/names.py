"""The names of the files of bags. The id of a bag may be any text; the name of a file may not.

A bag whose file cannot have its id as a name is listed in FOLDER/carmil_names.json, so that it is read back under its id.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from carmil.errors import CarmilError
from carmil.files import safe_name, safe_names, write_text
from carmil.untrusted import read_json

TABLE = "carmil_names.json"


def write_names(folder: Path, ids: Iterable[str]) -> dict[str, str]:
    """The file name of each bag below `folder`, without ending; recorded in the table where it is not the id."""
    known, names = _table(folder), names_for(folder, ids)
    new = {name: id for id, name in names.items() if name != id}
    if not new.items() <= known.items():
        write_text(folder / TABLE, json.dumps(known | new, indent=1))
    return names


def names_for(folder: Path, ids: Iterable[str]) -> dict[str, str]:
    """The names from `write_names`. Pass all ids of a cohort at once, so that no two names differ only in case."""
    before = {id: name for name, id in _table(folder).items()}
    return {id: before.get(id, name) for id, name in safe_names(ids).items()}


def read_names(folder: Path) -> dict[str, str]:
    """The ids of bags by the names of their files in `folder`, which may be one below the exported folder."""
    return _table(folder.parent) | _table(folder)


def _table(folder: Path) -> dict[str, str]:
    """An entry counts only if the id would get this name, so that no table can give a file the name of another slide."""
    if not (folder / TABLE).is_file():
        return {}
    found = read_json(folder / TABLE, "remove it, or export the bags again")
    if not isinstance(found, dict) or not all(isinstance(id, str) for id in found.values()):
        raise CarmilError(f"{folder / TABLE} is not a table of names: remove it, or export the bags again")
    return {name: id for name, id in found.items() if name in (safe_name(id), safe_name(id, taken=[id]))}
