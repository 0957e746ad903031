"""The release: the wheel is complete, and source tree and sdist give the same wheel."""

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
    """Return the contents of the wheel, of the wheel built from the sdist, and the sdist."""
    folder = tmp_path_factory.mktemp("release")
    wheel, sdist = tool.build(ROOT, folder / "dist")
    again, _ = tool.build(tool.unpacked(sdist, folder / "sdist"), folder / "again")
    return tool.contents(wheel), tool.contents(again), sdist


def test_wheel_is_complete(tool, built):
    not_fetched = [f"{name} is missing" for name in tool.NEEDED if name not in tool.sources(ROOT)]
    assert all("openseadragon" in line for line in not_fetched)
    assert tool.problems(built[0], ROOT) == not_fetched


def test_source_tree_and_sdist_give_the_same_wheel(tool, built):
    assert tool.differences(built[0], built[1]) == []


def test_sdist_contains_tests_and_licence_and_no_local_files(built):
    with tarfile.open(built[2]) as package:
        names = {name.partition("/")[2] for name in package.getnames()}
    assert {"LICENSE", "tests/conftest.py", "tools/wheel_hook.py", "docs/methods.md"} <= names
    assert not [name for name in names if name.startswith((".venv", ".uv", ".git/", "dist", "site/"))]


def test_missing_changed_and_extra_files_of_a_wheel_are_reported(tool, built):
    wheel = dict(built[0])
    del wheel["carmil/py.typed"]
    wheel["carmil/errors.py"] = b"changed"
    wheel["carmil/left_over.py"] = b""
    (metadata,) = (name for name in wheel if name.endswith(".dist-info/METADATA"))
    wheel[metadata] = b"License-Expression: MIT"
    problems = tool.problems(wheel, ROOT)
    assert "carmil/py.typed is missing" in problems
    assert "carmil/errors.py is not as in the tree" in problems
    assert "carmil/left_over.py is not in the tree" in problems
    assert "its metadata does not say 'Classifier: Typing :: Typed'" in problems
    assert tool.differences(wheel, built[0]) == sorted(
        ["carmil/py.typed", "carmil/errors.py", "carmil/left_over.py", metadata]
    )


def test_version_is_the_same_everywhere(tool):
    result = tool.versions(ROOT)
    assert len(result) == 4 and len(set(result.values())) == 1
