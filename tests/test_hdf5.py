"""HDF5 files are opened in a single module, where hostile content raises an error of one line."""

import re
import struct
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import carmil
from carmil import hdf5
from carmil.array_files import open_arrays
from carmil.bags.finding import find_bags
from carmil.bags.readers import read_bag
from carmil.errors import CarmilError
from carmil.hdf5 import attribute_of, item_of, open_hdf5, values_of
from carmil.slides.slide import Tiles
from carmil.slides.tiling import read_more, read_tiles, write_tiles

CORNERS = np.array([(0, 0), (256, 0), (0, 256)])
SOURCE = Path(carmil.__file__).parent


def tiles(folder: Path) -> Path:
    """Write a valid file of tiles."""
    return write_tiles(Tiles("s", CORNERS, 256.0, 256, 0.5, 3000, 2000, 0.5), folder)


def with_coords(folder: Path, make) -> Path:
    """Write a file of tiles whose coords are created by `make(file)`."""
    path = tiles(folder)
    with h5py.File(path, "a") as file:
        attributes = dict(file["coords"].attrs)
        del file["coords"]
        created = make(file)
        if isinstance(created, h5py.Dataset):
            created.attrs.update(attributes)
    return path


def elsewhere(folder: Path) -> str:
    with h5py.File(folder / "other.h5", "w") as file:
        file["coords"] = CORNERS
    return str(folder / "other.h5")


def linked(folder: Path) -> Path:
    other = elsewhere(folder)
    return with_coords(folder, lambda file: file.__setitem__("coords", h5py.ExternalLink(other, "/coords")))


def virtual(folder: Path) -> Path:
    layout = h5py.VirtualLayout((3, 2), "i8")
    layout[:] = h5py.VirtualSource(elsewhere(folder), "coords", (3, 2))
    return with_coords(folder, lambda file: file.create_virtual_dataset("coords", layout))


def stored_outside(folder: Path) -> Path:
    (folder / "values.bin").write_bytes(CORNERS.tobytes())
    outside = [(str(folder / "values.bin"), 0, CORNERS.nbytes)]
    return with_coords(folder, lambda file: file.create_dataset("coords", (3, 2), "i8", external=outside))


def never_filled(folder: Path) -> Path:
    """Write two kilobytes that declare 4 GiB of one fill value."""
    return with_coords(
        folder, lambda file: file.create_dataset("coords", (2**28, 2), "i8", chunks=(4096, 2), fillvalue=7)
    )


def packed(folder: Path) -> Path:
    def make(file):
        created = file.create_dataset("coords", (2**28, 2), "i8", chunks=(4096, 2), compression="gzip")
        created[:4096] = 0
        return created

    return with_coords(folder, make)


def huge_chunk(folder: Path) -> Path:
    """Write three tiles in a chunk of 512 MiB, which would be decompressed as a whole."""

    def make(file):
        created = file.create_dataset("coords", (3, 2), "i8", maxshape=(None, 2), chunks=(2**25, 2), compression="gzip")
        created.id.write_direct_chunk((0, 0), b"packed")
        return created

    return with_coords(folder, make)


def endless_heap(folder: Path) -> Path:
    path = tiles(folder)
    content = bytearray(path.read_bytes())
    heap = content.index(b"GCOL")
    content[heap + 24 : heap + 32] = b"\xff" * 8
    path.write_bytes(bytes(content))
    return path


def with_attribute(name: str, value: object):
    def make(folder: Path) -> Path:
        path = tiles(folder)
        with h5py.File(path, "a", libver="latest") as file:
            file["coords"].attrs[name] = value
        return path

    return make


def large_attribute(folder: Path) -> Path:
    path = tiles(folder)
    with h5py.File(path, "w", libver="latest") as file:
        file["coords"] = CORNERS
        file["coords"].attrs["mpp"] = np.ones(2**18)
    return path


HOSTILE = {
    "an external link": (linked, "is not followed"),
    "a virtual data set": (virtual, "in other files"),
    "values in another file": (stored_outside, "in other files"),
    "chunks that were never written": (never_filled, "declares 4,294,967,296 bytes"),
    "chunks packed to nothing": (packed, "declares 4,294,967,296 bytes"),
    "a chunk larger than its array": (huge_chunk, "declares 536,870,912 bytes"),
    "a heap without an end": (endless_heap, "damaged attributes"),
    "words as coords": (
        lambda f: with_coords(f, lambda file: file.create_dataset("coords", data=["a", "b"])),
        "expected",
    ),
    "a group as coords": (lambda f: with_coords(f, lambda file: file.create_group("coords")), "is a group"),
    "no coords": (lambda f: with_coords(f, lambda file: None), "has no coords: found nothing"),
    "a compound attribute": (with_attribute("patch_size", np.zeros(2, "i4,f4")), "neither a number nor text"),
    "words as a number": (with_attribute("patch_size", "many"), "cannot be read"),
    "an infinite size": (with_attribute("patch_size", np.inf), "patch_size is inf: expected a positive number"),
    "a size below zero": (with_attribute("level0_width", -3), "level0_width is -3: expected a positive number"),
    "a size beyond any slide": (with_attribute("level0_width", 1e30), "expected at most 2,147,483,648"),
    "an empty attribute": (with_attribute("patch_size", h5py.Empty("f4")), "patch_size"),
    "an attribute of 2 MB": (large_attribute, "mpp is larger than 1,048,576 bytes"),
}


@pytest.mark.finding(n=12)
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_tile_file_raises_an_error_of_one_line_naming_it(kind, tmp_path):
    make, words = HOSTILE[kind]
    path = make(tmp_path)
    with pytest.raises(CarmilError) as refused:
        read_tiles(path)
    assert words in str(refused.value) and str(path) in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.finding(n=12)
def test_valid_tiles_are_read_back_unchanged(tmp_path):
    path = tiles(tmp_path)
    result = read_tiles(path)
    assert result.corners.tolist() == CORNERS.tolist() and result.corners.dtype == np.int64
    assert (result.slide, result.size, result.pixels, result.mpp) == ("s", 256.0, 256, 0.5)
    assert (result.width, result.height, result.slide_mpp) == (3000, 2000, 0.5) and read_more(path) == {}


@pytest.mark.finding(n=12)
def test_only_the_hdf5_module_opens_hdf5_files():
    opening = re.compile(r"h5py\.(?:File|h5f\.open)\(|h5f\.open\(|read_hdf\(|HDFStore\(")
    result = {
        path.relative_to(SOURCE).as_posix(): line.strip()
        for path in SOURCE.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if opening.search(line)
    }
    assert set(result) == {"hdf5.py"}, result


@pytest.mark.finding(n=13)
def test_hdf5_write_error_is_one_line_without_a_crash_at_exit(tmp_path):
    code = """
import resource
from pathlib import Path
import numpy as np
from carmil.hdf5 import new_hdf5
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
with new_hdf5(Path("a.h5")) as file:
    file.create_dataset("x", data=np.ones((500, 64)), chunks=(1, 64), maxshape=(None, 64))
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, "a Python error, not a signal"
    assert "CarmilError: a.h5 cannot be written (File too large)" in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.finding(n=12)
def test_array_without_rows_is_read_as_empty(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (0, 4), "f4", maxshape=(None, 4), chunks=(1000, 4), compression="gzip")
    with open_arrays(tmp_path / "a.h5") as contents:
        assert contents.array("x").read().shape == (0, 4)


@pytest.mark.finding(n=12)
def test_numeric_and_text_attributes_are_read_unchanged(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["x"] = CORNERS
        file["x"].attrs.update(encoder="uni", size=3.5, names=["a", "b"])
    with open_hdf5(path) as file:
        x = item_of(file, "x")
        assert values_of(x).tolist() == CORNERS.tolist()
        assert attribute_of(x, "encoder") == "uni" and attribute_of(x, "size") == 3.5
        assert list(attribute_of(x, "names")) == ["a", "b"] and attribute_of(x, "none") is None


@pytest.mark.finding(n=14)
def test_file_with_too_many_groups_raises_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(hdf5, "MOST_NAMES", 5)
    with h5py.File(tmp_path / "all.h5", "w") as file:
        for i in range(6):
            file.create_group(f"s{i}")
    (source,) = find_bags(tmp_path).sources
    with pytest.raises(CarmilError, match=r"all\.h5 has 6 groups or arrays in one group: expected at most 5"):
        read_bag(source)


@pytest.mark.finding(n=14)
def test_heaps_of_a_file_are_checked_once_for_all_slides(tmp_path, monkeypatch):
    path = tmp_path / "all.h5"
    with h5py.File(path, "w") as file:
        for i in range(5):
            file[f"s{i}/feat"] = np.ones((2, 3), np.float32)
            file[f"s{i}"].attrs["label"] = "a"
    checked = []
    between = hdf5._between_values
    monkeypatch.setattr(hdf5, "_between_values", lambda *given: checked.append(given) or between(*given))
    sources = find_bags(path).sources
    assert [read_bag(source).features.shape for source in sources] == [(2, 3)] * 5
    assert [source.label for source in sources] == ["a"] * 5 and len(checked) == 1


@pytest.mark.finding(n=14)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_string_that_declares_gigabytes_raises_an_error_before_allocation(tmp_path, shape):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.attrs["encoder"] = "uni" if shape == () else ["uni"] * 3
        file.attrs["other"] = "x"
    content = bytearray(path.read_bytes())
    with open_hdf5(path) as file:
        assert np.ravel(attribute_of(file, "encoder")).tolist() == ["uni"] * (3 if shape else 1)
    place = struct.pack("<IQ", 3, content.find(b"GCOL"))  # length of a string and the address of its heap
    at = content.rfind(place)
    struct.pack_into("<I", content, at, 0x60000000)
    path.write_bytes(content)
    with pytest.raises(CarmilError, match=r"a\.h5 has damaged attributes"), open_hdf5(path) as file:
        attribute_of(file, "encoder")
    with open_hdf5(path) as file:
        assert attribute_of(file, "other") == "x"
