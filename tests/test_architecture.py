"""The rooms of the package import in one direction only, and no two files import one another.

ROOMS is the order of the data's way: a room imports those above it. EXCEPTIONS and CYCLES are what is still against the plan;
a line that is no longer needed fails, so that the lists can only become shorter.
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

# (importing room, imported room)
EXCEPTIONS = {
    ("viewer", "reproduce"),
}
# One file of each cycle that is left, and why it is there
CYCLES: set[frozenset[str]] = {
    frozenset({"carmil.reproduce.stand_in", "carmil.reproduce.slide_cohorts"}),
    frozenset({"carmil.viewer.digit_cases", "carmil.viewer.cases"}),
}


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
        (room_of(module), room_of(other))
        for module, others in IMPORTS.items()
        for other in others
        if other != "carmil" and ROOMS.index(room_of(other)) > ROOMS.index(room_of(module))
    }
    assert against == EXCEPTIONS


def test_no_files_import_one_another():
    """Packages' __init__ files and the version are left out: they import to show, not to use."""
    packages = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    graph = {module: {*others} - packages for module, others in IMPORTS.items() if module not in packages}
    found: set[frozenset[str]] = set()
    while True:
        try:
            TopologicalSorter(graph).prepare()
            break
        except CycleError as error:
            cycle = error.args[1]
            found.add(frozenset(cycle))
            graph[cycle[1]] = graph[cycle[1]] - {cycle[0]}
    assert found == CYCLES
