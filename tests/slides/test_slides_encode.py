"""carmil slides encode: features of every slide in a store, each computed once."""

import json
import os
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from carmil.bags.building import lock_file
from carmil.bags.finding import find_bags
from carmil.bags.geometry import TileGeometry
from carmil.bags.readers import read_bag
from carmil.bags.store import open_store
from carmil.locks import folder_lock
from carmil.slides import features
from carmil.slides.opening import open_slide
from carmil.slides.tiling import read_tiles, tiles_file, write_tiles

ENCODER = "timm/resnet10t"


@pytest.fixture
def scans(tmp_path, make_slide, grid_of_tiles):
    """Makes slides of noise with their tiles beside, in scans and tiles."""
    (tmp_path / "scans").mkdir()

    def make(*names: str, size: float = 128) -> list[str]:
        for name in names:
            noise = np.random.default_rng(list(name.encode())).integers(0, 256, (256, 384, 3)).astype(np.uint8)
            path = make_slide(tmp_path / "scans" / f"{name}.tif", noise)
            with open_slide(path) as slide:
                write_tiles(grid_of_tiles(slide, size), tmp_path / "tiles")
        return [str(tmp_path / "scans" / f"{name}.tif") for name in names]

    return make


@pytest.fixture
def encode(said, tmp_path, small_weights):
    """Runs the command on these slides."""

    def run(slides: list[str], *more: str, out: str = "store", weights: Path = small_weights):
        words = ["--tiles", str(tmp_path / "tiles"), "--encoder", ENCODER, "--weights", str(weights), "--device", "cpu"]
        return said("slides", "encode", *slides, *words, "--out", str(tmp_path / out), *more)

    return run


@pytest.fixture
def computed(monkeypatch):
    """The slides that are really encoded, in order."""
    names, plain = [], features.encode

    def noted(slide, *rest, **more):
        names.append(slide.name)
        return plain(slide, *rest, **more)

    monkeypatch.setattr(features, "encode", noted)
    return names


def same_store(a: Path, b: Path) -> bool:
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in ("features.bin", "coordinates.bin"))


def test_features_of_tiles_become_a_store(tmp_path, scans, encode):
    status, said, told = encode(scans("a", "b"))
    store = open_store(tmp_path / "store")
    assert status == 0, told
    assert store.ids == ("a", "b") and store.width == 512 and store.dtype == "float16"
    assert store.encoder.startswith("timm_resnet10t-") and store.encoder in said
    assert [entry.tile_size for entry in store.entries] == [128.0, 128.0]
    assert store.bags()[0].coordinates.tolist() == [[x, y] for y in (0, 128) for x in (0, 128, 256)]
    assert "12 tiles in" in said and "limited by the" in said
    assert not (tmp_path / "store.encoding").exists()


def test_a_slide_is_encoded_once_and_a_store_grows(tmp_path, scans, encode, computed):
    slides = scans("a", "b")
    encode(slides)
    status, said, _ = encode(slides)
    assert status == 0 and computed == ["a", "b"]
    assert "nothing was encoded" in said and "2 slides were already in the store" in said
    status, _, _ = encode(scans("c"))
    assert status == 0 and computed == ["a", "b", "c"]
    assert open_store(tmp_path / "store").ids == ("a", "b", "c")
    encode(scans("a", "b", "c"), out="at_once")
    assert same_store(tmp_path / "store", tmp_path / "at_once")


@pytest.mark.finding(n=1)
def test_a_slide_file_that_was_replaced_is_encoded_again(tmp_path, scans, encode, computed, make_slide):
    slides = scans("a", "b")
    encode(slides)
    before = open_store(tmp_path / "store")
    noise = np.random.default_rng(1).integers(0, 256, (256, 384, 3)).astype(np.uint8)
    make_slide(Path(slides[0]), noise)
    os.utime(slides[0], (1e9, 1e9))
    status, said, told = encode(slides)
    assert status == 0 and computed == ["a", "b", "a"] and "1 slide was already in the store" in said
    assert "a.tif has changed since it was encoded (another size or modification time): it is encoded again" in told
    after = open_store(tmp_path / "store")
    assert [one.checksum == other.checksum for one, other in zip(before.entries, after.entries, strict=True)] == [
        False,
        True,
    ]
    assert after.entries[0].slide_mtime == 1e9 and after.entries[0].slide_bytes == Path(slides[0]).stat().st_size
    assert (after.entries[1].slide_width, after.entries[1].slide_height) == (384, 256)


def test_a_store_that_does_not_record_slide_files_stays_valid(tmp_path, scans, encode, computed):
    slides = scans("a")
    encode(slides)
    index = tmp_path / "store" / "index.json"
    facts = json.loads(index.read_text())
    facts["bags"] = [{name: bag[name] for name in bag if not name.startswith("slide_")} for bag in facts["bags"]]
    index.write_text(json.dumps(facts))
    os.utime(slides[0], (1e9, 1e9))
    status, said, _ = encode(slides)
    assert status == 0 and computed == ["a"] and "1 slide was already in the store" in said


def test_a_killed_command_goes_on_with_the_slides_that_are_missing(tmp_path, scans, encode, monkeypatch):
    slides, done, plain = scans("a", "b", "c"), [], features.encode

    def killed(slide, *rest, **more):
        if slide.name == "b" and "b" not in done:
            done.append("b")
            raise KeyboardInterrupt
        done.append(slide.name)
        return plain(slide, *rest, **more)

    monkeypatch.setattr(features, "encode", killed)
    status, _, _ = encode(slides)
    assert status == 130 and not (tmp_path / "store").exists()
    status, _, _ = encode(slides)
    assert status == 0 and done == ["a", "b", "b", "c"]
    encode(slides, out="at_once")
    assert same_store(tmp_path / "store", tmp_path / "at_once")


def test_features_cut_short_are_made_again(tmp_path, scans, encode, computed, monkeypatch):
    slides = scans("a")
    with monkeypatch.context() as patch:
        patch.setattr(features, "_pack", lambda *_: None)
        encode(slides)
    (file,) = (tmp_path / "store.encoding").rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    status, _, _ = encode(slides)
    assert status == 0 and computed == ["a", "a"] and open_store(tmp_path / "store").rows == 6


def test_other_tiles_are_other_features(tmp_path, scans, encode, computed):
    slides = scans("a", "b")
    encode(slides)
    scans("b", size=64)
    status, _, _ = encode(slides)
    assert status == 0 and computed == ["a", "b", "b"]
    assert [entry.rows for entry in open_store(tmp_path / "store").entries] == [6, 24]


def test_broken_slides_are_listed_and_the_rest_goes_on(tmp_path, scans, encode, make_slide):
    slides = scans("a", "torn", "empty", "other")
    torn = Path(slides[1])
    torn.write_bytes(torn.read_bytes()[:2000])
    Path(slides[2]).write_bytes(b"")
    make_slide(Path(slides[3]), np.zeros((300, 300, 3), np.uint8))
    untiled = str(make_slide(tmp_path / "scans" / "untiled.tif", np.zeros((300, 300, 3), np.uint8)))
    status, _, told = encode([*slides, untiled])
    assert status == 1 and open_store(tmp_path / "store").ids == ("a",)
    skipped = [line for line in told.splitlines() if "skipped" in line]
    assert len(skipped) == 4
    for name, why in (
        ("torn", ""),
        ("empty", "0 bytes"),
        ("other", "384 x 256: expected the same slide"),
        ("untiled", "no tiles"),
    ):
        assert any(f"{name}.tif" in line and why in line for line in skipped), (name, skipped)


@pytest.mark.parametrize("layout", ["trident", "clam"])
def test_files_for_other_tools_are_read_back_to_the_same_bags(tmp_path, scans, encode, layout):
    encode(scans("a", "b"), "--h5", layout, str(tmp_path / "files"))
    store = open_store(tmp_path / "store")
    found = find_bags(tmp_path / "files")
    assert found.layout == layout and [source.id for source in found.sources] == ["a", "b"]
    for i, source in enumerate(found.sources):
        ours, theirs = store.bag(i), read_bag(source)
        assert np.array_equal(ours.features, theirs.features)
        assert np.array_equal(ours.coordinates, theirs.coordinates) and theirs.coordinate_unit == "level0_px"
        assert ours.tile_size == theirs.tile_size
        assert theirs.encoder == (store.encoder if layout == "trident" else None)


def test_features_of_other_weights_do_not_enter_a_store(tmp_path, scans, encode, small_weights):
    slides = scans("a", "b")
    encode(slides[:1])
    state = torch.load(small_weights, weights_only=True)
    torch.save({name: value + 0.01 for name, value in state.items()}, tmp_path / "other.pt")
    status, _, told = encode(slides, weights=tmp_path / "other.pt")
    assert status == 2 and "was encoded by timm_resnet10t-" in told and "choose another --out" in told
    assert open_store(tmp_path / "store").ids == ("a",)


def recut(tmp_path, name, **geometry):
    """As if the tiles of the slide had been cut with another geometry."""
    path = tiles_file(tmp_path / "tiles", name)
    write_tiles(replace(read_tiles(path), **geometry), tmp_path / "tiles")


@pytest.mark.finding(n=1)
def test_tiles_of_another_geometry_do_not_enter_a_store(tmp_path, scans, encode, computed):
    encode(scans("a"))
    assert open_store(tmp_path / "store").geometry == TileGeometry(256, 0.5)
    slides = scans("b")
    recut(tmp_path, "b", mpp=1.0)
    status, _, told = encode(slides)
    assert status == 2 and computed == ["a"] and open_store(tmp_path / "store").ids == ("a",)
    assert "has tiles of 256 pixels at 1 um/px" in told and "has 256 pixels at 0.5 um/px: choose another --out" in told


@pytest.mark.finding(n=1)
def test_slides_whose_tiles_differ_are_not_encoded_together(tmp_path, scans, encode, computed):
    slides = scans("a", "b")
    recut(tmp_path, "b", pixels=512)
    status, _, told = encode(slides)
    assert status == 2 and computed == [] and not (tmp_path / "store").exists()
    assert "b has tiles of 512 pixels at 0.5 um/px, a has 256 pixels at 0.5 um/px" in told


@pytest.mark.finding(n=1)
def test_a_store_of_version_one_grows_and_says_that_its_tiles_could_not_be_compared(tmp_path, scans, encode, computed):
    encode(scans("a"))
    index = tmp_path / "store" / "index.json"
    facts = json.loads(index.read_text()) | {"version": 1}
    for entry in facts["bags"]:
        for name in ("tile_pixels", "tile_mpp", "pooling", "slide_bytes", "slide_mtime", "slide_width", "slide_height"):
            del entry[name]
    index.write_text(json.dumps(facts))
    status, _, told = encode(scans("a", "b"))
    assert status == 0 and computed == ["a", "b"] and "could not be checked" in told
    assert open_store(tmp_path / "store").geometry == TileGeometry(256, 0.5)


def test_tiles_that_trident_cut_are_taken(tmp_path, scans, encode):
    slides = scans("a")
    with h5py.File(tiles_file(tmp_path / "tiles", "a"), "r+") as file:
        for ours in ("mpp", "slide_mpp", "carmil"):
            del file["coords"].attrs[ours]
    status, _, told = encode(slides)
    assert status == 0, told
    assert open_store(tmp_path / "store").rows == 6


def test_what_is_no_store_is_not_overwritten(tmp_path, scans, encode):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.txt").write_text("mine")
    status, _, told = encode(scans("a"))
    assert status == 2 and "is not a store" in told
    assert (tmp_path / "store" / "thesis.txt").read_text() == "mine"


@pytest.mark.finding(n=13)
def test_a_second_encoding_into_one_store_is_refused(tmp_path, scans, encode, computed):
    slides = scans("a")
    with folder_lock(lock_file(tmp_path / "store"), tmp_path / "store"):
        status, _, err = encode(slides)
    assert status == 2
    assert "store is being written by process" in err and computed == []
