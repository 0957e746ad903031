"""Every code block of the README and the pages is run in page order, in a separate folder per page.

Python shares one namespace per page. In shell blocks, `carmil ...` lines are run, setup commands are compared with
the Makefile and pyproject.toml, and any other line fails. YAML blocks are written to the file named in their first line.
A block that cannot be run here has `<!-- not run: REASON -->` above it; the number of such blocks is limited.
"""

import contextlib
import io
import re
import shlex
import tomllib
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import pytest
import uvicorn

from carmil.bags.sources import READERS
from carmil.evidence import EXPLAINERS
from carmil.explanations import unit_tests
from carmil.models import registry
from carmil.viewer import serve

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = ("python", "sh", "yaml", "text")
MOST_NOT_RUN = 17

# Pages show commands for real cohorts. Here they run with these arguments appended; later arguments override earlier ones.
SMALL_ENCODER = "--encoder timm/test_resnet --weights test_resnet.pt"
FASTER = {
    "carmil demo": "--fast",
    "carmil train": "--epochs 2 --folds 2 --seeds 1",
    "carmil sweep": "--epochs 1 --folds 2 --seeds 1",
    "carmil faithfulness": "--steps 10 --random-orders 2",
    "carmil slides encode": SMALL_ENCODER,
    "carmil slides run": f"{SMALL_ENCODER} --longest 300",
    "carmil slides draw": "--longest 300",
    "carmil view new.svs": SMALL_ENCODER,
}
SMALLER = {
    "alpha=0,0.2,0.8,1": "alpha=0,0.2",
    "lambda=0,0.2,0.8,1": "lambda=0,1",
    "[0, 0.2, 0.8, 1]": "[0, 1]",
    "encode slides --tiles tiles --encoder resnet50 --weights": "encode slides/p01.svs --tiles tiles --encoder resnet50 --weights",
    "encode slides --tiles tiles --encoder timm": "encode slides/p01.svs --tiles tiles --encoder timm",
    "slides draw slides ": "slides draw slides/p01.svs ",
}
# Run unchanged, since these arguments are what the page demonstrates.
AS_IT_STANDS = ("--weights resnet50.safetensors", "--weights resnet10t.pt")

# Fixtures that pages need besides the material; all other pages create what they need.
GIVEN = {
    "sweep.md": ("store",),
    "choosing.md": ("store",),
    "architecture.md": ("store",),
    "explain.md": ("runs",),
    "maps.md": ("drawn",),
    "viewer.md": ("drawn", "demo"),
    "tutorial.md": ("demo",),
    "README.md": ("tiles",),  # cut in advance; the tutorial and own-slides.md cut their own tiles
    "slides.md": ("tiles",),
}
BLOCK = re.compile(
    r"(?:^ *<!-- not run: (?P<why>.+?) -->\n)?^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    body: str
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text, result = page.read_text(encoding="utf-8"), []
    for one in BLOCK.finditer(text):
        body = re.sub(rf"^{one['indent']}", "", one["body"], flags=re.MULTILINE)
        line = text.count("\n", 0, one.start("language")) + 1
        result.append(Block(page.name, line, one["language"], body, one["why"]))
    return result


def test_every_code_fence_has_a_known_language():
    for page in PAGES:
        fences = re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) == 2 * len(blocks_of(page)), page.name
        assert [str(block) for block in blocks_of(page) if block.language not in LANGUAGES] == []


def test_no_page_has_indented_code_without_a_fence():
    for page in PAGES:
        prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
        assert re.findall(r"\n\n {4,}(?:carmil|pip|make|python|import|from) .*", prose) == [], page.name


def test_few_code_blocks_are_skipped_and_each_has_a_reason(capsys):
    left = [block for page in PAGES for block in blocks_of(page) if block.not_run]
    with capsys.disabled():
        print(f"\n{len(left)} code blocks are not run:", *(f"  {block}: {block.not_run}" for block in left), sep="\n")
    assert len(left) <= MOST_NOT_RUN
    assert all(len(str(block.not_run)) > 5 for block in left)


def lines_of(body: str) -> list[list[str]]:
    """Return the words of each command; a backslash continues a line, # begins a comment."""
    return [words for line in body.replace("\\\n", " ").splitlines() if (words := shlex.split(line, comments=True))]


def with_faster(words: list[str]) -> list[str]:
    line = shlex.join(words)
    for start, faster in FASTER.items():
        if line.startswith(start) and not any(kept in line for kept in AS_IT_STANDS):
            return [*words, *faster.split()]
    return words


def check_setup(words: list[str]) -> None:
    """Check that make targets and pip extras exist, and that any other setup command is expected."""
    match words:
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
        case ["pip", "install", what]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert re.fullmatch(r"(\.|carmil)(\[[a-z,]+\])?", what), words
            assert set(re.findall(r"[a-z]+", what.partition("[")[2])) <= set(extras), words
        case ["git", "clone", "ADDRESS", "carmil"] | ["cd", "carmil"] | ["source", ".venv/bin/activate"]:
            pass
        case ["mkdir" | "cd", "../try"]:
            pass
        case _:
            raise AssertionError(f"this line is never run: {shlex.join(words)}")


@pytest.fixture
def visited(monkeypatch):
    """Make `carmil view` serve one visitor, who requests the page and the cohort, and exit."""
    answered, run, bound = [], uvicorn.Server.run, serve.bound

    def run_for_one(server, sockets):
        thread = Thread(target=run, args=(server,), kwargs={"sockets": sockets})
        thread.start()
        address = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        for path in ("/", "/api/cohort"):
            answered.append(urllib.request.urlopen(address + path, timeout=30).status)
        server.should_exit = True
        thread.join()

    monkeypatch.setattr(uvicorn.Server, "run", run_for_one)
    monkeypatch.setattr(serve, "bound", lambda host, port: bound(host, 0))
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    return answered


@pytest.fixture(autouse=True)
def _few_bags_of_unit_tests(monkeypatch):
    for name in ("TRAINED", "VALIDATED", "TESTED"):
        monkeypatch.setattr(unit_tests, name, 24)


@pytest.fixture(autouse=True)
def _registered_for_one_page_only():
    registries = (registry._MODELS, EXPLAINERS, READERS)
    before = [dict(one) for one in registries]
    yield
    for one, entries in zip(registries, before, strict=True):
        one.clear()
        one.update(entries)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_blocks_of_a_page_run(page, tmp_path, monkeypatch, request, material, lay_out, run_cli, visited):
    lay_out(material, tmp_path)
    for given in GIVEN.get(page.name, ()):
        source = request.getfixturevalue({"demo": "demo_folder"}.get(given, given))
        lay_out(source, tmp_path / {"demo": "demo", "store": "cohort", "tiles": "tiles"}.get(given, ""))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    namespace = {"__name__": page.stem}
    for block in blocks_of(page):
        if block.not_run or block.language == "text":
            continue
        body = block.body
        for long, short in SMALLER.items():
            body = body.replace(long, short)
        if block.language == "yaml":
            name = re.match(r"# (\w+\.yaml)\n", body)
            assert name, f"{block}: the first line of a YAML block names its file"
            Path(name[1]).write_text(body)
        elif block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile("\n" * block.line + body, page.name, "exec"), namespace)
        else:
            for words in lines_of(body):
                if words[:2] == ["python", "my_carmil.py"]:  # the Python of the page, which ends with carmil's main
                    words = ["carmil", *words[2:]]
                if words[0] == "carmil":
                    status, out, err = run_cli(*with_faster(words)[1:])
                    assert status == 0, f"{block}: {shlex.join(words)}\n{out}\n{err}"
                else:
                    check_setup(words)
    views = sum("carmil view" in block.body or "--view" in block.body for block in blocks_of(page))
    assert len(visited) >= 2 * views and set(visited) <= {200}
