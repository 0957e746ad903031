"""What would be released: everything is in the wheel, and tree and sdist give the same one."""

import importlib.util
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("release", ROOT / "tools" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built(tool, tmp_path_factory):
    """The wheel's files, those of the wheel built from the sdist, and the sdist."""
    folder = tmp_path_factory.mktemp("release")
    wheel, sdist = tool.build(ROOT, folder / "dist")
    again, _ = tool.build(tool.unpacked(sdist, folder / "sdist"), folder / "again")
    return tool.contents(wheel), tool.contents(again), sdist


def test_everything_is_in_the_wheel(tool, built):
    not_fetched = [f"{name} is missing" for name in tool.NEEDED if name not in tool.sources(ROOT)]
    assert all("openseadragon" in line for line in not_fetched)
    assert tool.problems(built[0], ROOT) == not_fetched


def test_tree_and_sdist_give_the_same_wheel(tool, built):
    assert tool.differences(built[0], built[1]) == []


def test_the_sdist_brings_its_tests_and_licence_and_nothing_of_this_machine(built):
    with tarfile.open(built[2]) as package:
        names = {name.partition("/")[2] for name in package.getnames()}
    assert {"LICENSE", "tests/conftest.py", "tools/wheel_hook.py", "docs/methods.md"} <= names
    assert not [name for name in names if name.startswith((".venv", ".uv", ".git/", "dist", "site/"))]


def test_a_wheel_that_lacks_something_or_has_too_much_is_told(tool, built):
    wheel = dict(built[0])
    del wheel["carmil/py.typed"]
    wheel["carmil/errors.py"] = b"changed"
    wheel["carmil/left_over.py"] = b""
    (metadata,) = (name for name in wheel if name.endswith(".dist-info/METADATA"))
    wheel[metadata] = b"License-Expression: MIT"
    told = tool.problems(wheel, ROOT)
    assert "carmil/py.typed is missing" in told
    assert "carmil/errors.py is not as in the tree" in told
    assert "carmil/left_over.py is not in the tree" in told
    assert "its metadata does not say 'Classifier: Typing :: Typed'" in told
    assert tool.differences(wheel, built[0]) == sorted(
        ["carmil/py.typed", "carmil/errors.py", "carmil/left_over.py", metadata]
    )


def test_one_version_is_named_everywhere(tool):
    found = tool.versions(ROOT)
    assert len(found) == 4 and len(set(found.values())) == 1
