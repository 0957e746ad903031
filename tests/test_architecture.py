"""Subpackages import in one direction only, and no modules import each other.

ROOMS follows the order of data processing: a subpackage imports only those listed before it.
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
    "explanations",
    "estimators",
    "report",
    "viewer",
    "reproduce",
    "cli",
)
FRONT_DOORS = ("carmil", "carmil.__main__")  # what a user imports or runs: they may import every subpackage


def modules() -> dict[str, Path]:
    """Return the path of every module by its dotted name."""
    results = {}
    for path in PACKAGE.rglob("*.py"):
        parts = ("carmil", *path.relative_to(PACKAGE).with_suffix("").parts)
        results[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return results


MODULES = modules()


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else "leaves"


def imports_of(module: str) -> set[str]:
    """Return the modules of the package that a module imports, also inside functions."""
    results = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            results |= {name.name for name in node.names if name.name in MODULES}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.module in MODULES:
            names = {f"{node.module}.{name.name}" for name in node.names}
            results |= {name if name in MODULES else node.module for name in names}
    return results - {module}


IMPORTS = {module: imports_of(module) for module in MODULES if module not in FRONT_DOORS}


def test_every_subpackage_is_listed():
    assert {room_of(module) for module in IMPORTS} <= set(ROOMS)


def test_subpackages_import_only_those_listed_before_them():
    violations = {
        (module, other)
        for module, others in IMPORTS.items()
        for other in others
        if other != "carmil" and ROOMS.index(room_of(other)) > ROOMS.index(room_of(module))
    }
    assert violations == set()


def test_no_modules_import_each_other():
    """The __init__ files are excluded: they only re-export names."""
    packages = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    graph = {module: {*others} - packages for module, others in IMPORTS.items() if module not in packages}
    cycle: list[str] = []
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle = error.args[1]
    assert cycle == []
