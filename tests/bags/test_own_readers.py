"""Readers registered by a user."""

import numpy as np
import pytest

from carmil.bags import Bag, register_reader
from carmil.bags.building import build_store
from carmil.bags.finding import find_bags
from carmil.bags.sources import READERS
from carmil.errors import CarmilError


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Return a folder of text files with one line per instance, and register a reader for them."""
    folder = tmp_path / "tables"
    folder.mkdir()
    for i, name in enumerate(("a", "b")):
        np.savetxt(folder / f"{name}.tiles", np.full((3 + i, 2), i + 0.5))
    monkeypatch.setitem(READERS, "tiles", None)  # removed after the test
    register_reader(
        "tiles",
        find=lambda path: {file.stem: file for file in path.glob("*.tiles")} if path.is_dir() else None,
        read=lambda name, file: Bag(name, np.loadtxt(file, dtype=np.float32), encoder="by hand"),
    )
    return folder


def test_store_is_built_from_files_of_a_registered_layout(tables, tmp_path):
    result = find_bags(tables)
    assert result.layout == "tiles" and [source.id for source in result.sources] == ["a", "b"]
    store = build_store(tables, tmp_path / "store", workers=4, log=lambda line: None)
    assert (store.encoder, store.width, [entry.rows for entry in store.entries]) == ("by hand", 2, [3, 4])
    assert (store.bag(1).features == 1.5).all()


def test_other_files_are_still_read_by_built_in_readers(tables, tmp_path):
    np.save(tmp_path / "c.npy", np.zeros((2, 2), np.float32))
    assert find_bags(tmp_path / "c.npy").layout == "npy"


def test_error_in_a_registered_reader_names_the_file(tables, tmp_path):
    (tables / "a.tiles").write_text("no numbers\n")
    with pytest.raises(CarmilError, match=r"a\.tiles cannot be read"):
        build_store(tables, tmp_path / "store", log=lambda line: None)


def test_invalid_bag_from_a_registered_reader_raises_an_error(tables, tmp_path):
    register_reader("tiles", find=READERS["tiles"].find, read=lambda name, file: Bag(name, np.loadtxt(file)))
    with pytest.raises(CarmilError, match=r"float64 of shape .*: expected float16 or float32"):
        build_store(tables, tmp_path / "store", log=lambda line: None)
