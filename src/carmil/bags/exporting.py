"""Bags of a store as files for other tools. Only files that an export of the same store wrote are replaced.

OUT/carmil_export.json has the fingerprint of the store of each file. It is written before the files, so that an interrupted
export can be run again.
"""

import json
from pathlib import Path

from carmil.bags.names import names_for, write_names
from carmil.bags.store import Store
from carmil.bags.writers import files_of
from carmil.errors import CarmilError
from carmil.files import write_text
from carmil.untrusted import parse_as, read_json

TABLE = "carmil_export.json"


def begin_export(store: Store, folder: Path, layout: str) -> dict[str, str]:
    """List the files of an export and return the names that `write_bag` gives them, by the id of the bag.

    Refuses the export, before anything is written, if it would replace other files. layout: clam or trident.
    """
    names, known = names_for(folder, store.ids), _table(folder)
    files = [file for entry in store.entries for file in files_of(layout, folder, names[entry.id], entry.encoder)]
    own = {file.relative_to(folder).as_posix(): store.fingerprint for file in files}
    others = [name for name in own if known.get(name) != store.fingerprint and (folder / name).exists()]
    if others:
        more = f" (and {len(others) - 1:,} more)" if len(others) > 1 else ""
        raise CarmilError(
            f"{folder / others[0]}{more} exists, and no export of {store.path} wrote it: it would be replaced; "
            "choose another --out"
        )
    write_text(folder / TABLE, json.dumps(known | own, indent=1))
    return write_names(folder, store.ids)


def _table(folder: Path) -> dict[str, str]:
    if not (folder / TABLE).exists():
        return {}
    found = read_json(folder / TABLE, again := "choose another --out")
    parse_as(found, dict[str, str], str(folder / TABLE), again)
    return found
