"""Draw docstrings, messages and names of tests at random, for a review of their English (CONTRIBUTING.md).

python tools/draw_texts.py [SEED] [COUNT OF EACH KIND]
"""

import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)
WITH_MESSAGE = ("CarmilError", "Option", "Argument")  # calls whose text a user reads


def nodes(folder: str, pattern: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield every node of the syntax trees of a folder, with the place of its file."""
    for path in sorted((ROOT / folder).rglob(pattern)):
        for node in ast.walk(ast.parse(path.read_text())):
            yield str(path.relative_to(ROOT)), node


def docstrings() -> list[tuple[str, str]]:
    found = [
        (place, node, ast.get_docstring(node)) for place, node in nodes("src", "*.py") if isinstance(node, DOCUMENTED)
    ]
    return [(f"{place}: {getattr(node, 'name', 'module')}", text) for place, node, text in found if text]


def messages() -> list[tuple[str, str]]:
    calls = [(place, node) for place, node in nodes("src", "*.py") if isinstance(node, ast.Call)]
    return [
        (f"{place}:{node.lineno}", ast.unparse(node))
        for place, node in calls
        if ast.unparse(node.func).rpartition(".")[2] in WITH_MESSAGE
        and any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in ast.walk(node))
    ]


def test_names() -> list[tuple[str, str]]:
    defined = [(place, node) for place, node in nodes("tests", "test_*.py") if isinstance(node, ast.FunctionDef)]
    return [(f"{place}:{node.lineno}", node.name) for place, node in defined if node.name.startswith("test_")]


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    seed, count = given + [0, 10][len(given) :]
    rng = random.Random(seed)
    for texts in (docstrings(), messages(), test_names()):
        for place, text in rng.sample(texts, count):
            print(f"--- {place}\n{text}")
