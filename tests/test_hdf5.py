"""HDF5 is open_arrays for reading in one place, and what is hostile there is one line for bags and tiles alike."""

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
    """A good file of tiles."""
    return write_tiles(Tiles("s", CORNERS, 256.0, 256, 0.5, 3000, 2000, 0.5), folder)


def with_coords(folder: Path, make) -> Path:
    """The same with other coords: `make(file)` creates them."""
    path = tiles(folder)
    with h5py.File(path, "a") as file:
        attributes = dict(file["coords"].attrs)
        del file["coords"]
        made = make(file)
        if isinstance(made, h5py.Dataset):
            made.attrs.update(attributes)
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
    """3 GiB of one fill value out of two kilobytes."""
    return with_coords(
        folder, lambda file: file.create_dataset("coords", (2**28, 2), "i8", chunks=(4096, 2), fillvalue=7)
    )


def packed(folder: Path) -> Path:
    def make(file):
        made = file.create_dataset("coords", (2**28, 2), "i8", chunks=(4096, 2), compression="gzip")
        made[:4096] = 0
        return made

    return with_coords(folder, make)


def huge_chunk(folder: Path) -> Path:
    """Three tiles in a chunk of 512 MiB, which would be unpacked whole."""

    def make(file):
        made = file.create_dataset("coords", (3, 2), "i8", maxshape=(None, 2), chunks=(2**25, 2), compression="gzip")
        made.id.write_direct_chunk((0, 0), b"packed")
        return made

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
def test_hostile_tiles_are_refused_in_one_line_that_names_the_file(kind, tmp_path):
    make, words = HOSTILE[kind]
    path = make(tmp_path)
    with pytest.raises(CarmilError) as refused:
        read_tiles(path)
    assert words in str(refused.value) and str(path) in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.finding(n=12)
def test_good_tiles_are_read_as_they_were_written(tmp_path):
    path = tiles(tmp_path)
    found = read_tiles(path)
    assert found.corners.tolist() == CORNERS.tolist() and found.corners.dtype == np.int64
    assert (found.slide, found.size, found.pixels, found.mpp) == ("s", 256.0, 256, 0.5)
    assert (found.width, found.height, found.slide_mpp) == (3000, 2000, 0.5) and read_more(path) == {}


@pytest.mark.finding(n=12)
def test_no_other_file_of_the_package_opens_hdf5():
    opening = re.compile(r"h5py\.(?:File|h5f\.open)\(|h5f\.open\(|read_hdf\(|HDFStore\(")
    found = {
        path.relative_to(SOURCE).as_posix(): line.strip()
        for path in SOURCE.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if opening.search(line)
    }
    assert set(found) == {"hdf5.py"}, found


@pytest.mark.finding(n=13)
def test_hdf5_that_the_disk_does_not_take_is_one_line_and_no_crash_at_exit(tmp_path):
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
def test_an_array_of_no_rows_is_empty_however_large_its_chunks_are(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (0, 4), "f4", maxshape=(None, 4), chunks=(1000, 4), compression="gzip")
    with open_arrays(tmp_path / "a.h5") as contents:
        assert contents.array("x").read().shape == (0, 4)


@pytest.mark.finding(n=12)
def test_numbers_and_words_are_read_as_they_are(tmp_path):
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
def test_a_file_of_very_many_groups_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(hdf5, "MOST_NAMES", 5)
    with h5py.File(tmp_path / "all.h5", "w") as file:
        for i in range(6):
            file.create_group(f"s{i}")
    (source,) = find_bags(tmp_path).sources
    with pytest.raises(CarmilError, match=r"all\.h5 has 6 groups or arrays beside one another: expected at most 5"):
        read_bag(source)


@pytest.mark.finding(n=14)
def test_the_heaps_of_a_file_are_walked_once_and_not_once_per_slide(tmp_path, monkeypatch):
    path = tmp_path / "all.h5"
    with h5py.File(path, "w") as file:
        for i in range(5):
            file[f"s{i}/feat"] = np.ones((2, 3), np.float32)
            file[f"s{i}"].attrs["label"] = "a"
    walked = []
    between = hdf5._between_values
    monkeypatch.setattr(hdf5, "_between_values", lambda *given: walked.append(given) or between(*given))
    sources = find_bags(path).sources
    assert [read_bag(source).features.shape for source in sources] == [(2, 3)] * 5
    assert [source.label for source in sources] == ["a"] * 5 and len(walked) == 1


@pytest.mark.finding(n=14)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_string_that_declares_gigabytes_is_refused_before_memory_is_taken(tmp_path, shape):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.attrs["encoder"] = "uni" if shape == () else ["uni"] * 3
        file.attrs["other"] = "x"
    content = bytearray(path.read_bytes())
    with open_hdf5(path) as file:
        assert np.ravel(attribute_of(file, "encoder")).tolist() == ["uni"] * (3 if shape else 1)
    place = struct.pack("<IQ", 3, content.find(b"GCOL"))  # length of a string, and the heap it is in
    at = content.rfind(place)
    struct.pack_into("<I", content, at, 0x60000000)
    path.write_bytes(content)
    with pytest.raises(CarmilError, match=r"a\.h5 has damaged attributes"), open_hdf5(path) as file:
        attribute_of(file, "encoder")
    with open_hdf5(path) as file:
        assert attribute_of(file, "other") == "x"
