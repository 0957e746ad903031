"""The rooms of the package import in one direction only, and no two files import one another.

ROOMS is the order of the data's way: a room imports those above it.
"""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import carmil

PACKAGE = Path(carmil.__file__).parent
ROOMS = (
    "leaves",
    "statistics",
    "bags",
    "targets",
    "slides",
    "datasets",
    "models",
    "counterfactual",
    "training",
    "evidence",
    "maps",
    "runs",
    "studies",
    "report",
    "viewer",
    "reproduce",
    "cli",
)
FRONT_DOORS = ("carmil", "carmil.__main__")  # what a user imports or runs: they may name every room


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = ("carmil", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else "leaves"


def imports_of(module: str) -> set[str]:
    """Modules of the package that a module imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name in MODULES}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.module in MODULES:
            names = {f"{node.module}.{name.name}" for name in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return found - {module}


IMPORTS = {module: imports_of(module) for module in MODULES if module not in FRONT_DOORS}


def test_every_room_is_on_the_plan():
    assert {room_of(module) for module in IMPORTS} <= set(ROOMS)


def test_a_room_imports_only_rooms_above_it():
    against = {
        (module, other)
        for module, others in IMPORTS.items()
        for other in others
        if other != "carmil" and ROOMS.index(room_of(other)) > ROOMS.index(room_of(module))
    }
    assert against == set()


def test_no_files_import_one_another():
    """Packages' __init__ files and the version are left out: they import to show, not to use."""
    packages = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    graph = {module: {*others} - packages for module, others in IMPORTS.items() if module not in packages}
    cycle: list[str] = []
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle = error.args[1]
    assert cycle == []
