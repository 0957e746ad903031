"""No name from a table or a file becomes a path: the source is read for places where one could."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import carmil

SOURCE = Path(carmil.__file__).parent
NAMED = {"id", "slide", "stem", "patient", "encoder", "label", "title", "name"}  # what an outsider may have chosen
METHODS = {"with_name", "with_stem", "joinpath"}
OURS = (
    "reproduce/",
    "datasets/stand_in.py",
    "cli/reproduce",
    "cli/findings",
)  # names of recipes, tasks and models, all in the source

# What is put together there is a number, a word of the source, or a name that is safe already.
ALLOWED = {
    "bags/building.py": {"out.with_name(f'{out.name}.lock')"},
    "datasets/digit_features.py": {"cache_folder() / 'digits' / f'resnet18-{digits.fingerprint}-{name}.npy'"},
    "datasets/digit_cohorts.py": {"out / f'{task}-{key}'"},  # a task of the source, a checksum
    "datasets/paper_files.py": {"data / dataset.name", "Path('DATA') / dataset.name"},  # a cohort of the source
    "datasets/digit_images.py": {"folder / f'{name}.gz'"},
    "bags/finding.py": {"place / f'{source.id}.h5'"},  # read only, and the id is the name of a file beside
    "bags/split_files.py": {f"path / f'splits_{{row}}{kind}.csv'" for kind in ("", "_bool", "_descriptor")},
    "bags/store.py": {"out.with_name(out.name + '.building')"},
    "bags/writers.py": {  # `name` is given by write_names
        *(f"folder / f'{{name}}.{kind}'" for kind in ("h5", "npy", "npz", "pt", "safetensors", "index.npz")),
        *(f"folder / '{kind}' / f'{{name}}.h5'" for kind in ("h5_files", "patches")),
        "folder / 'features' / f'{name}.npy'",
        "folder / 'pt_files' / f'{name}.pt'",
        "folder / kind / f'{name}.npy'",
        "folder / f\"features_{safe_name(encoder or 'unknown')}\" / f'{name}.h5'",
    },
    "cli/datasets.py": {"folder_for(out) / one.name"},
    "cli/slide_maps.py": {"path / f'{tiles.slide}{suffix}'"},  # read only, and the slide is the stem of a file
    "report/heat_map_figure.py": {"path.with_name(f'{path.stem}_large.png')"},
    "maps/drawing.py": {"out / f'tiles_{name}.png'", "out / f'{name}.ome.tiff'", "out / f'{name}.png'"},  # file_names
    "slides/features.py": {"out.with_name(f'{out.name}.encoding')"},
    "plot_style.py": {"fonts / f\"DejaVuSans{'-Bold' * bold}.ttf\""},
    "slides/contact_sheets.py": {"path.with_stem(f'{path.stem}_{page + 1}')"},
    "slides/tiling.py": {"folder / 'patches' / f'{slide}_patches.h5'"},  # read only, if it is one name
    "runs/evidence.py": {"folder / f'{kind}.json'"},
    "studies/agreement.py": {"run.folder / 'agreement' / f'{bags}-{name}.json'"},  # a map of the source, a checksum
    "studies/faithfulness.py": {"cache / f'{safe_name(name)}-{i}.json'"},
    "runs/writing.py": {"folder / f'{kind}.json'"},
    "studies/sweep.py": {"sweep.out / f'checkpoint-{i}.safetensors'"},
    "training/partition.py": {"folder / f'{name}.begun.safetensors'", "folder / f'{name}{_ENDED}'"},  # a checksum
}


def paths_of_names(tree: ast.AST) -> Iterator[str]:
    """Every expression that puts a text which is no literal into a path, other than by `safe_name`."""
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(op=ast.Div(), right=ast.JoinedStr() as right) if not _safe(right):
                yield ast.unparse(node)
            case ast.BinOp(op=ast.Div(), right=ast.Attribute(attr=name)) if name in NAMED:
                yield ast.unparse(node)
            case ast.BinOp(op=ast.Div(), right=ast.Call(func=ast.Attribute(attr="replace" | "join" | "format"))):
                yield ast.unparse(node)
            case ast.Call(func=ast.Attribute(attr=name), args=[argument]) if name in METHODS:
                if not isinstance(argument, ast.Constant):
                    yield ast.unparse(node)


def _safe(text: ast.JoinedStr) -> bool:
    """Whether all that is put in comes from safe_name, or out of a mapping of names that safe_names made."""
    held = [part.value for part in text.values if isinstance(part, ast.FormattedValue)]
    return all(
        (isinstance(one, ast.Call) and ast.unparse(one.func) == "safe_name")
        or (isinstance(one, ast.Subscript) and ast.unparse(one.value) == "names")
        for one in held
    )


@pytest.mark.finding(n=10)
def test_every_path_made_of_a_name_goes_through_safe_name_or_is_known():
    found: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        paths = set(paths_of_names(ast.parse(path.read_text(encoding="utf-8"))))
        if paths and not name.startswith(OURS):
            found[name] = paths
    assert found == ALLOWED, "put the name through carmil.files.safe_name, or add it to ALLOWED with the reason"


@pytest.mark.parametrize(
    "code", ['out / f"{bag.id}.pt"', "out / slide.name", "path.with_name(slide)", 'out / model.replace("/", "-")']
)
def test_a_path_of_a_name_is_found(code):
    assert list(paths_of_names(ast.parse(code))) == [ast.unparse(ast.parse(code))]


@pytest.mark.parametrize(
    "code", ['out / f"{safe_name(bag.id)}.pt"', 'out / "a.txt"', 'out / f"{names[id]}.h5"', "a / b"]
)
def test_safe_names_and_literals_are_no_such_path(code):
    assert list(paths_of_names(ast.parse(code))) == []
