"""The documents name exactly the subpackages and pages that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def subpackages() -> set[str]:
    return {path.parent.name for path in (ROOT / "src" / "carmil").glob("*/__init__.py")}


def test_contributing_page_lists_exactly_the_existing_subpackages():
    named = re.findall(r"^(\w+)/ {2,}\S", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(subpackages())


def test_architecture_page_lists_every_subpackage_once():
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted(subpackages())
    assert sorted(re.findall(r'<text class="room"[^>]*>(\w+)<', page)) == sorted(subpackages())


def test_every_page_is_in_the_navigation():
    named = re.findall(r"([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_api_page_lists_every_public_name():
    import carmil

    page = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in carmil.__all__ if not re.search(rf"\.{name}(\W|$)", page, re.MULTILINE)] == []


def test_readme_states_the_number_of_models_and_explainers():
    from carmil.evidence import EXPLAINERS
    from carmil.models import registered_models

    readme = (ROOT / "README.md").read_text()
    words = {13: "thirteen", 14: "fourteen", 17: "seventeen", 18: "eighteen", 19: "nineteen"}
    assert f"{words[len(registered_models())].capitalize()} models" in readme
    assert f"{words[len(EXPLAINERS)]} explainers" in readme


def test_reproducing_page_lists_every_recipe():
    from carmil.cli.reproduce import reproduce

    page = (ROOT / "docs" / "reproducing.md").read_text()
    names = [command.name or command.callback.__name__.replace("_", "-") for command in reproduce.registered_commands]
    assert len(names) > 10
    assert [name for name in names if not re.search(rf"`?carmil reproduce {name}\b", page)] == []
