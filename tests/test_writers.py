"""Every writer that derives file names from names in tables or files, with hostile, colliding or invalid names."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from carmil.bags.building import build_store
from carmil.bags.finding import find_bags
from carmil.bags.readers import read_bag
from carmil.bags.sources import Bag
from carmil.bags.split_files import write_splits
from carmil.bags.splits import make_splits
from carmil.bags.writers import files_of, write_bag
from carmil.datasets.packing import regroup
from carmil.errors import CarmilError
from carmil.maps.drawing import file_names
from carmil.maps.tile_labels import TileLabels, write_truth
from carmil.maps.tile_maps import TileMap
from carmil.recorded_names import NAMES_TABLE, names_for, write_names
from carmil.reproduce.method_runs import runs_folder
from carmil.runs.slide_evidence import evidence_file
from carmil.slides import features, tile_cohort
from carmil.slides.slide import Tiles
from carmil.slides.tiling import read_tiles, tiles_file, write_tiles
from carmil.studies.sweep import folder_name

HOSTILE = [
    "../../x",
    "/abs/x",
    "a/b",
    "..",
    "",
    "con",
    "x" * 300,
    "a\0b",
    "a\nb",
    "\u00e4/\u00f6",
    "a\\b",
    "~",
    ".hidden",
]
LAYOUTS = ["clam", "trident", "stamp", "torchmil", "slideflow", "npy", "npz", "pt", "safetensors"]
ONES = np.ones((3, 2), np.float32)


def make_bag(name: str, layout: str = "", encoder: str = "uni") -> Bag:
    return Bag(name, ONES, ONES * 4, "um" if layout == "stamp" else "level0_px", 4.0, encoder, np.ones(3, np.int64))


def make_tiles(name: str) -> Tiles:
    return Tiles(name, np.zeros((3, 2), np.int64), 4.0, 8, 0.5, 100, 100, 0.5)


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def drawn(out: Path, name: str) -> None:
    maps = [TileMap(name, np.ones(3), "evidence", model=name), TileMap("other", np.ones(3), "evidence", model=name)]
    for file in file_names(maps):
        touch(out / f"{file}.png")


def labelled(out: Path, name: str) -> None:
    write_truth([(make_tiles(name), TileLabels(np.ones(3, np.int64), np.ones(3), np.ones(3)))], out)


def divided(out: Path, name: str, form: str) -> None:
    names = [f"{name}{i}" for i in range(8)]
    splits = make_splits(names, names, [i % 2 for i in range(8)], folds=2, validation=0.25)
    write_splits(out, splits, form=form, labels=[i % 2 for i in range(8)], classes=[name, "other"])


def encoded(out: Path, name: str) -> None:
    encoder = SimpleNamespace(name=name, pooling=None)
    touch(out / features._work_name(encoder, make_tiles("a").geometry) / "file")


def reproduced(out: Path, name: str) -> None:
    cohort, request = (
        SimpleNamespace(name="brca", encoder=name, folder=None),
        SimpleNamespace(fast=True, shared=out, seed=0),
    )
    touch(runs_folder(cohort, request) / "file")


WRITERS = {
    **{
        f"bag as {layout}": lambda out, name, layout=layout: write_bag(make_bag(name, layout), out, layout)
        for layout in LAYOUTS
    },
    "bag of an encoder": lambda out, name: write_bag(make_bag("slide", encoder=name), out, "trident"),
    "tiles": lambda out, name: write_tiles(make_tiles(name), out),
    "sheet": lambda out, name: touch(tile_cohort._sheet_path(out, Path("scans") / f"{name.replace(chr(0), '')}.svs")),
    "evidence": lambda out, name: touch(evidence_file(out, name)),
    "maps": drawn,
    "labels of tiles": labelled,
    "point of a sweep": lambda out, name: touch(out / "points" / folder_name({"model": name}) / "file"),
    "encoding": encoded,
    "runs of a recipe": reproduced,
    **{
        f"splits of {form}": lambda out, name, form=form: divided(out, name, form)
        for form in ("carmil", "clam", "patho-bench")
    },
}


@pytest.mark.finding(n=10)
@pytest.mark.parametrize("writer", WRITERS)
def test_no_writer_leaves_its_output_folder_for_any_name(writer, tmp_path, monkeypatch):
    work = tmp_path / "deep" / "deeper"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    for i, name in enumerate(HOSTILE):
        out = work / f"out{i}"
        WRITERS[writer](out, name)
        assert any(path.is_file() for path in out.rglob("*")), name
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert [path.name for path in work.parent.iterdir()] == ["deeper"]
    assert {path.name for path in work.iterdir()} == {f"out{i}" for i in range(len(HOSTILE))}
    assert not Path("/abs").exists()


@pytest.fixture
def patients(tmp_path):
    """Return a store of patients with hostile names from a table."""
    for i in range(4):
        write_bag(Bag(f"{i}", ONES * i, ONES, "level0_px", 4.0, "uni/v2"), tmp_path / "in", "npz")
    store = build_store(tmp_path / "in", tmp_path / "store")
    names = dict(zip(store.ids, ["../../x", "/abs/x", "Slide", "slide"], strict=True))
    return regroup(store, names, tmp_path / "patients")


@pytest.mark.finding(n=10)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "stamp"])
def test_exported_bags_stay_in_the_out_folder_and_keep_their_names(patients, layout, tmp_path, run_cli):
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    if layout in ("clam", "trident"):
        status, _, err = run_cli(
            "cohort", "export", str(patients.path), "--out", str(tmp_path / "out"), "--layout", layout
        )
        assert status == 0, err
    else:
        names = write_names(tmp_path / "out", patients.ids)
        for i in range(4):
            write_bag(patients.bag(i), tmp_path / "out", layout, names=names)
    new = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    assert all((tmp_path / "out") in path.parents for path in new) and not Path("/abs").exists()
    stems = [path.name.partition(".")[0].casefold() for path in new if path.suffix in (".h5", ".npy", ".pt", ".npz")]
    assert layout == "safetensors" or len(set(stems)) == 4
    again = build_store(tmp_path / "out", tmp_path / "again")
    assert again.ids == patients.ids and again.encoder in (patients.encoder, None, "v2")
    for i in range(4):
        assert np.array_equal(again.bag(i).features, patients.bag(i).features)


@pytest.mark.finding(n=10)
def test_encoder_name_that_is_no_valid_folder_name_is_preserved(tmp_path):
    path = write_bag(make_bag("s", encoder="timm/resnet@../../x"), tmp_path, "trident")
    assert path.parent.parent == tmp_path
    (source,) = find_bags(tmp_path).sources
    assert read_bag(source).encoder == "timm/resnet@../../x"


@pytest.mark.finding(n=10)
def test_names_table_cannot_rename_a_file_to_another_slide(tmp_path):
    path = write_bag(make_bag("a/b"), tmp_path, "npz")
    (tmp_path / NAMES_TABLE).write_text(f'{{"{path.stem}": "another"}}')
    assert [source.id for source in find_bags(tmp_path).sources] == [path.stem]


@pytest.mark.finding(n=14)
@pytest.mark.parametrize("id", ["a/b", "plain"])
def test_invalid_names_table_raises_an_error_even_if_not_needed(id, tmp_path):
    write_bag(make_bag(id), tmp_path, "npz")
    for text, problem in (
        ('{"x": ["y"]}', "is not a table of names"),
        ("[" * 100_000, "is nested too deeply"),
        ("{", "cannot be"),
    ):
        (tmp_path / NAMES_TABLE).write_text(text)
        with pytest.raises(CarmilError, match=f"{NAMES_TABLE} {problem}"):
            find_bags(tmp_path)


@pytest.mark.finding(n=13)
@pytest.mark.parametrize("layout", ["clam", "trident"])
def test_export_replaces_only_its_own_files(patients, layout, tmp_path, run_cli):
    out = tmp_path / "out"
    export = ("cohort", "export", str(patients.path), "--out", str(out), "--layout", layout)
    foreign = files_of(layout, out, names_for(out, patients.ids)[patients.ids[-1]], patients.encoder)[0]
    touch(foreign)
    status, _, err = run_cli(*export)
    assert status == 2 and f"{foreign} exists, and no export of {patients.path} wrote it" in err
    assert [path for path in out.rglob("*") if path.is_file()] == [foreign] and foreign.read_bytes() == b""

    foreign.unlink()
    assert run_cli(*export)[0] == 0
    foreign.unlink()  # as if the export had been interrupted before its last bag
    assert run_cli(*export)[0] == 0 and foreign.stat().st_size > 0

    other = build_store(tmp_path / "in", tmp_path / "other", dtype="float32")
    other = regroup(other, dict(zip(other.ids, patients.ids, strict=True)), tmp_path / "other_patients")
    status, _, err = run_cli("cohort", "export", str(other.path), "--out", str(out), "--layout", layout)
    assert status == 2 and "it would be replaced; choose another --out" in err


@pytest.mark.finding(n=10)
@pytest.mark.parametrize("name", ["Fall 3 (\u00e4)", "a#b%20", "con"])
def test_tiles_of_carmil_and_trident_are_found_by_slide_name(name, tmp_path):
    written = write_tiles(make_tiles(name), tmp_path / "ours")
    assert tiles_file(tmp_path / "ours", name) == written and read_tiles(written).slide == name
    by_trident = tmp_path / "theirs" / "patches" / f"{name}_patches.h5"
    by_trident.parent.mkdir(parents=True)
    written.rename(by_trident)
    assert tiles_file(tmp_path / "theirs", name) == by_trident
