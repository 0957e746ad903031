"""Build the release and check it: the tree and the sdist must give the same wheel, with all files in it.

A wheel is represented by the content of its files, by name.
"""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = (  # without these a wheel installs, but something does not work
    "carmil/py.typed",
    "carmil/report/pages/run.html",
    "carmil/viewer/page/index.html",
    "carmil/viewer/page/openseadragon.min.js",
    "carmil/viewer/page/openseadragon.LICENSE.txt",
)
SAID = (
    "License-Expression: Apache-2.0",
    "Requires-Python: >=3.11",
    "Classifier: Programming Language :: Python :: 3.11",
    "Classifier: Typing :: Typed",
)


def build(tree: Path, out: Path) -> tuple[Path, Path]:
    """The wheel and the sdist of a tree, without a network: hatchling is that of this environment."""
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(out)]
    subprocess.run(words, cwd=tree, check=True, capture_output=True, timeout=300)
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


def unpacked(sdist: Path, out: Path) -> Path:
    with tarfile.open(sdist) as package:
        package.extractall(out, filter="data")
    return next(out.iterdir())


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as package:
        return {name: package.read(name) for name in package.namelist()}


def sources(tree: Path) -> dict[str, bytes]:
    """What lies in the package's folder, as a wheel names it."""
    package = tree / "src" / "carmil"
    files = (path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {f"carmil/{path.relative_to(package).as_posix()}": path.read_bytes() for path in files}


def problems(wheel: dict[str, bytes], tree: Path) -> list[str]:
    """What is wrong with a wheel of this tree, a line each."""
    expected, found = sources(tree), {name: data for name, data in wheel.items() if name.startswith("carmil/")}
    lines = [f"{name} is missing" for name in NEEDED if name not in found]
    lines += [f"{name} is not as in the tree" for name in expected if found.get(name) != expected[name]]
    lines += [f"{name} is not in the tree" for name in found if name not in expected]
    told = b"\n".join(data for name, data in wheel.items() if name.endswith(".dist-info/METADATA")).decode()
    return lines + [f"its metadata does not say {line!r}" for line in SAID if line not in told.splitlines()]


def differences(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    """Files that two wheels do not have in common, or that differ."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def versions(tree: Path) -> dict[str, str]:
    """The version as each file that names it has it."""
    places = {
        "pyproject.toml": r'^version = "(.+)"$',
        "src/carmil/__init__.py": r'^__version__ = "(.+)"$',
        "CITATION.cff": r"^version: (.+)$",
        "CHANGELOG.md": r"^## (\S+)",
    }
    found = {name: re.search(words, (tree / name).read_text("utf-8"), re.MULTILINE) for name, words in places.items()}
    return {name: match[1] if match else "none" for name, match in found.items()}
