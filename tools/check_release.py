"""Try the release as a new user would: build it, install it into a new environment, use it outside the checkout.

    make release-check

The tree and the sdist must give the same wheel. In the new environment, carmil and python -m carmil run, the demo trains and writes
its report, and a script that uses the public names is type-checked against the installed package.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from release import ROOT, build, contents, differences, problems, unpacked, versions


def main(uv: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        aside = Path(folder)
        wheel = built(aside)
        python = installed(uv, wheel, aside / "venv")
        used(python, aside)
        typed(python, aside)


def built(aside: Path) -> Path:
    found = versions(ROOT)
    expect(len(set(found.values())) == 1, f"one version everywhere: {found}")
    wheel, sdist = build(ROOT, aside / "dist")
    again, _ = build(unpacked(sdist, aside / "sdist"), aside / "again")
    wrong = problems(contents(wheel), ROOT)
    expect(not wrong, f"everything is in the wheel: {wrong or wheel.name}")
    wrong = differences(contents(wheel), contents(again))
    expect(not wrong, f"tree and sdist give the same wheel: {wrong or sdist.name}")
    return wheel


def installed(uv: str, wheel: Path, venv: Path) -> Path:
    python = venv / "bin" / "python"
    call(uv, "venv", "--quiet", "--python", sys.executable, venv)
    call(uv, "pip", "install", "--quiet", "--python", python, "--constraint", ROOT / "constraints.txt", wheel)
    where = call(python, "-I", "-c", "import carmil; print(carmil.__file__)", cwd=venv)
    expect(Path(where.strip()).is_relative_to(venv), "it is installed, and what is imported is that")
    return python


def used(python: Path, aside: Path) -> None:
    carmil = python.with_name("carmil")
    expect(call(carmil, "--version", cwd=aside) == f"carmil {versions(ROOT)['pyproject.toml']}\n", "carmil --version")
    helps = [call(*words, "--help", cwd=aside) for words in ((carmil,), (python, "-m", "carmil"))]
    expect(helps[0].startswith("Usage: carmil ") and helps[0] == helps[1], "python -m carmil --help is carmil --help")
    call(carmil, "demo", "--fast", "--device", "cpu", "--out", "demo", cwd=aside)
    page = (aside / "demo" / "report.html").read_text("utf-8")
    expect("car/abmil" in page and page.rstrip().endswith("</html>"), "carmil demo --fast writes its report")


def typed(python: Path, aside: Path) -> None:
    words = ["--strict", "--config-file", os.devnull, "--cache-dir", ROOT / ".mypy_cache" / "release"]
    call(
        sys.executable, "-m", "mypy", *words, "--python-executable", python, ROOT / "tools" / "typed_use.py", cwd=aside
    )
    expect(True, "a script that uses the public names type-checks against what is installed")


def call(*words: object, cwd: Path | None = None) -> str:
    """What a command printed; what it said, and an end, if it fails. Nothing of the checkout's environment is handed on."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    ended = subprocess.run([str(word) for word in words], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"{' '.join(str(word) for word in words)}\n{ended.stdout}{ended.stderr}release: this failed")
    return ended.stdout


def expect(so: bool, what: str) -> None:
    if not so:
        sys.exit(f"release: not so: {what}")
    print(f"{time.perf_counter() - STARTED:5.1f} s  {what}", flush=True)


if __name__ == "__main__":
    STARTED = time.perf_counter()
    main(sys.argv[1])
