"""The rooms that the documents name are the folders there are."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def rooms() -> set[str]:
    return {path.parent.name for path in (ROOT / "src" / "carmil").glob("*/__init__.py")}


def test_contributing_names_every_room_and_no_other():
    named = re.findall(r"^(\w+)/ {2,}\S", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(rooms())


def test_the_architecture_s_table_and_picture_have_every_room_once():
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted(rooms())
    assert sorted(re.findall(r'<text class="room"[^>]*>(\w+)<', page)) == sorted(rooms())


def test_every_page_is_in_the_navigation():
    named = re.findall(r"([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_the_api_page_has_what_the_package_exports():
    import carmil

    page = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in carmil.__all__ if not re.search(rf"\.{name}(\W|$)", page, re.MULTILINE)] == []


def test_the_readme_counts_models_and_explainers_right():
    from carmil.evidence import EXPLAINERS
    from carmil.models import registered_models

    readme = (ROOT / "README.md").read_text()
    words = {13: "thirteen", 14: "fourteen", 17: "seventeen", 18: "eighteen", 19: "nineteen"}
    assert f"{words[len(registered_models())].capitalize()} models" in readme
    assert f"{words[len(EXPLAINERS)]} explainers" in readme


def test_the_page_of_recipes_has_every_recipe():
    from carmil.cli.reproduce import reproduce

    page = (ROOT / "docs" / "reproducing.md").read_text()
    names = [command.name or command.callback.__name__.replace("_", "-") for command in reproduce.registered_commands]
    assert len(names) > 10
    assert [name for name in names if not re.search(rf"`?carmil reproduce {name}\b", page)] == []
