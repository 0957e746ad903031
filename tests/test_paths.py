"""No name from a table or file is used as a path: the source code is searched for places where one could be."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import carmil

SOURCE = Path(carmil.__file__).parent
NAMED = {"id", "slide", "stem", "patient", "encoder", "label", "title", "name"}  # attributes that may come from a file
METHODS = {"with_name", "with_stem", "joinpath"}
OURS = (
    "reproduce/",
    "datasets/stand_in.py",
    "cli/reproduce",
)  # names of recipes, tasks and models, all defined in the source code

# These paths are made of numbers, constants of the source code, or names that are already safe.
ALLOWED = {
    "bags/building.py": {"out.with_name(f'{out.name}.lock')"},
    "datasets/digit_features.py": {"cache_folder() / 'digits' / f'resnet18-{digits.fingerprint}-{name}.npy'"},
    "datasets/digit_cohorts.py": {"out / f'{task}-{key}'"},  # a task of the source, a checksum
    "datasets/planted_hazards.py": {  # numbers and words of the source
        "out / f\"{('fast' if fast else 'full')}-seed{seed}\"",
        "home / f\"labels-{100 * censored:g}-censored{('-shuffled' if shuffled else '')}.csv\"",
    },
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
    "cli/options.py": {"request.out / f'{name}.json'", "request.out / f'{name}.md'"},  # a recipe of the source
    "cli/datasets.py": {"folder_for(out) / one.name"},
    "cli/slide_maps.py": {"path / f'{name}{suffix}'"},  # read only, and the name is that of a file, without a folder
    "cli/viewer.py": {"model.parent / f'{run.name}-answers'"},  # the folder that the user named
    "report/heat_map_figure.py": {"path.with_name(f'{path.stem}_large.png')"},
    "maps/drawing.py": {"out / f'tiles_{name}.png'", "out / f'{name}.ome.tiff'", "out / f'{name}.png'"},  # file_names
    "slides/features.py": {
        "out.with_name(f'{out.name}.encoding')",
        "work.with_name(f'{work.name}.parts')",
        "folder / f'{name}.safetensors'",  # `name` is given by write_names
    },
    "plot_style.py": {"Path(matplotlib.get_data_path()) / 'fonts' / 'ttf' / f\"DejaVuSans{'-Bold' * bold}.ttf\""},
    "slides/contact_sheets.py": {"path.with_stem(f'{path.stem}_{page + 1}')"},
    "slides/tiling.py": {"folder / 'patches' / f'{slide}_patches.h5'"},  # read only, if it is one name
    "runs/evidence.py": {"folder / f'{kind}.json'"},
    "studies/agreement.py": {"run.folder / 'agreement' / f'{bags}-{name}.json'"},  # a map of the source, a checksum
    "explanations/faithfulness.py": {"cache / f'{safe_name(name)}-{i}.npz'"},
    "runs/writing.py": {"folder / f'{kind}.json'"},
    "runs/unit_tests.py": {"files('carmil.runs').joinpath(FILE)"},  # a constant
    "viewer/opening.py": {"beside.parent / f'{beside.name}-annotations'"},  # the folder that the user named
    "studies/sweep.py": {"sweep.out / f'checkpoint-{i}.safetensors'"},
    "training/partition.py": {"folder / f'{name}.begun.safetensors'", "folder / f'{name}{_ENDED}'"},  # a checksum
}


def paths_of_names(tree: ast.AST) -> Iterator[str]:
    """Yield every expression that puts text other than a literal into a path without `safe_name`."""
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
    """Return whether every inserted value comes from safe_name, or from a mapping made by safe_names."""
    held = [part.value for part in text.values if isinstance(part, ast.FormattedValue)]
    return all(
        (isinstance(one, ast.Call) and ast.unparse(one.func) == "safe_name")
        or (isinstance(one, ast.Subscript) and ast.unparse(one.value) == "names")
        for one in held
    )


@pytest.mark.finding(n=10)
def test_every_path_made_from_a_name_uses_safe_name_or_is_listed():
    result: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        paths = set(paths_of_names(ast.parse(path.read_text(encoding="utf-8"))))
        if paths and not name.startswith(OURS):
            result[name] = paths
    assert result == ALLOWED, "put the name through carmil.files.safe_name, or add it to ALLOWED with the reason"


@pytest.mark.parametrize(
    "code", ['out / f"{bag.id}.pt"', "out / slide.name", "path.with_name(slide)", 'out / model.replace("/", "-")']
)
def test_path_made_from_a_name_is_detected(code):
    assert list(paths_of_names(ast.parse(code))) == [ast.unparse(ast.parse(code))]


@pytest.mark.parametrize(
    "code", ['out / f"{safe_name(bag.id)}.pt"', 'out / "a.txt"', 'out / f"{names[id]}.h5"', "a / b"]
)
def test_safe_names_and_literals_in_paths_are_accepted(code):
    assert list(paths_of_names(ast.parse(code))) == []
