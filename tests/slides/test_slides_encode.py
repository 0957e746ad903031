"""carmil slides encode: a store with the features of every slide, each computed once."""

import json
import os
from dataclasses import replace
from functools import partial
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
from carmil.slides.device_encoder import DeviceEncoder
from carmil.slides.opening import open_slide
from carmil.slides.tiling import read_tiles, tiles_file, write_tiles

ENCODER = "timm/resnet10t"


@pytest.fixture
def scans(tmp_path, make_slide, grid_of_tiles):
    """Return a function that writes slides of noise to `scans` and their tiles to `tiles`."""
    (tmp_path / "scans").mkdir()

    def make(*names: str, size: float = 128) -> list[str]:
        for name in names:
            noise = np.random.default_rng(list(name.encode())).integers(0, 256, (256, 384, 3)).astype(np.uint8)
            path = make_slide(tmp_path / "scans" / f"{name}.tif", noise)
            with open_slide(path) as slide:
                write_tiles(grid_of_tiles(slide, size), tmp_path / "tiles")
        return [str(tmp_path / "scans" / f"{name}.tif") for name in names]

    return make


CHOSEN = {
    "a": ("biopsy", "--preset biopsy --rule centre --overlap 0 --keep blank,pen"),
    "b": ("default", "--preset default --rule centre --overlap 0 --keep blank,pen"),
}


@pytest.fixture
def chosen(tmp_path, scans):
    """Return two slides whose tiles record that they were chosen by different presets."""
    paths = scans(*CHOSEN)
    for name, (preset, _) in CHOSEN.items():
        settings = {"preset": preset, "rule": "centre", "overlap": 0.0, "keep": ["pen", "blank"]}
        tiles = read_tiles(tiles_file(tmp_path / "tiles", name))
        write_tiles(tiles, tmp_path / "tiles", more={"settings": settings})
    return paths


@pytest.fixture
def encode(run_cli, tmp_path, small_weights):
    """Return a function that runs `carmil slides encode` on slides."""

    def run(slides: list[str], *more: str, out: str = "store", weights: Path = small_weights):
        words = ["--tiles", str(tmp_path / "tiles"), "--encoder", ENCODER, "--weights", str(weights), "--device", "cpu"]
        return run_cli("slides", "encode", *slides, *words, "--out", str(tmp_path / out), *more)

    return run


@pytest.fixture
def computed(monkeypatch):
    """Return the list of slides that are actually encoded, in order."""
    names, plain = [], features.encode

    def recording_encode(slide, *rest, **more):
        names.append(slide.name)
        return plain(slide, *rest, **more)

    monkeypatch.setattr(features, "encode", recording_encode)
    return names


def same_store(a: Path, b: Path) -> bool:
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in ("features.bin", "coordinates.bin"))


def test_encoding_writes_tile_features_to_a_store(tmp_path, scans, encode):
    status, out, err = encode(scans("a", "b"))
    store = open_store(tmp_path / "store")
    assert status == 0, err
    assert store.ids == ("a", "b") and store.width == 512 and store.dtype == "float16"
    assert store.encoder.startswith("timm_resnet10t-") and store.encoder in out
    assert [entry.tile_size for entry in store.entries] == [128.0, 128.0]
    assert store.bags()[0].coordinates.tolist() == [[x, y] for y in (0, 128) for x in (0, 128, 256)]
    assert "12 tiles in" in out and "limited by the" in out
    assert not (tmp_path / "store.encoding").exists()


def test_store_records_how_tiles_were_chosen_and_encode_notes_if_this_differs(tmp_path, chosen, encode, run_cli):
    a, b = (text for _, text in CHOSEN.values())
    status, _, err = encode(chosen[:1])
    assert status == 0 and "chosen" not in err
    assert open_store(tmp_path / "store").tilings == (a,)
    _, _, err = encode(chosen)
    assert err.strip().endswith(f"the tiles of {tmp_path / 'store'} were chosen in several ways: {a}; {b}")
    assert {entry.id: entry.tiling for entry in open_store(tmp_path / "store").entries} == {"a": a, "b": b}
    rows = run_cli("cohort", "info", str(tmp_path / "store"))[1].splitlines()
    assert sum("tiles chosen by" in row and (a in row or b in row) for row in rows) == 2


def test_store_of_tiles_without_recorded_settings_records_none(tmp_path, scans, encode):
    encode(scans("a"))
    assert open_store(tmp_path / "store").tilings == ()


def test_slides_are_encoded_once_and_new_slides_are_added_to_the_store(tmp_path, scans, encode, computed):
    slides = scans("a", "b")
    encode(slides)
    status, stdout, _ = encode(slides)
    assert status == 0 and computed == ["a", "b"]
    assert "nothing was encoded" in stdout and "2 slides were already in the store" in stdout
    status, _, _ = encode(scans("c"))
    assert status == 0 and computed == ["a", "b", "c"]
    assert open_store(tmp_path / "store").ids == ("a", "b", "c")
    encode(scans("a", "b", "c"), out="at_once")
    assert same_store(tmp_path / "store", tmp_path / "at_once")


@pytest.mark.finding(n=1)
def test_replaced_slide_file_is_encoded_again(tmp_path, scans, encode, computed, make_slide):
    slides = scans("a", "b")
    encode(slides)
    before = open_store(tmp_path / "store")
    noise = np.random.default_rng(1).integers(0, 256, (256, 384, 3)).astype(np.uint8)
    make_slide(Path(slides[0]), noise)
    os.utime(slides[0], (1e9, 1e9))
    status, out, err = encode(slides)
    assert status == 0 and computed == ["a", "b", "a"] and "1 slide was already in the store" in out
    assert "a.tif has changed since it was encoded (another size or modification time): encoding it again" in err
    after = open_store(tmp_path / "store")
    assert [one.checksum == other.checksum for one, other in zip(before.entries, after.entries, strict=True)] == [
        False,
        True,
    ]
    assert after.entries[0].slide_mtime == 1e9 and after.entries[0].slide_bytes == Path(slides[0]).stat().st_size
    assert (after.entries[1].slide_width, after.entries[1].slide_height) == (384, 256)


def test_store_without_recorded_slide_files_stays_valid(tmp_path, scans, encode, computed):
    slides = scans("a")
    encode(slides)
    index = tmp_path / "store" / "index.json"
    facts = json.loads(index.read_text())
    facts["bags"] = [{name: bag[name] for name in bag if not name.startswith("slide_")} for bag in facts["bags"]]
    index.write_text(json.dumps(facts))
    os.utime(slides[0], (1e9, 1e9))
    status, out, _ = encode(slides)
    assert status == 0 and computed == ["a"] and "1 slide was already in the store" in out


def test_interrupted_encoding_resumes_with_the_missing_slides(tmp_path, scans, encode, monkeypatch):
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


def test_interrupted_slide_resumes_with_its_missing_tiles(tmp_path, scans, encode, monkeypatch):
    """Features of a changed file are not used, and the result equals that of an uninterrupted call."""
    slides, computed = scans("a"), []
    monkeypatch.setattr(features, "DeviceEncoder", partial(DeviceEncoder, batch=2, at_once=1))
    encode(slides, out="at_once")
    monkeypatch.setattr(features, "PART_SECONDS", 0.0)
    plain = DeviceEncoder.__call__

    def recording(self, pictures):
        computed.append(len(pictures))
        if len(computed) == 2:
            raise KeyboardInterrupt
        return plain(self, pictures)

    monkeypatch.setattr(DeviceEncoder, "__call__", recording)
    status, _, _ = encode(slides)
    assert status == 130 and computed == [2, 2]
    (part,) = (tmp_path / "store.encoding").rglob("*.safetensors")
    before = part.read_bytes()
    status, out, _ = encode(slides)
    assert status == 0 and computed == [2, 2, 2, 2] and "4 tiles in" in out
    assert same_store(tmp_path / "store", tmp_path / "at_once") and not (tmp_path / "store.encoding").exists()

    part.parent.mkdir(parents=True)
    part.write_bytes(before)
    os.utime(slides[0], (1e9, 1e9))
    computed.extend([0])
    status, _, _ = encode(slides)
    assert status == 0 and computed == [2, 2, 2, 2, 0, 2, 2, 2]


def test_truncated_features_are_encoded_again(tmp_path, scans, encode, computed, monkeypatch):
    slides = scans("a")
    with monkeypatch.context() as patch:
        patch.setattr(features, "_pack", lambda *_: None)
        encode(slides)
    (file,) = (tmp_path / "store.encoding").rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    status, _, _ = encode(slides)
    assert status == 0 and computed == ["a", "a"] and open_store(tmp_path / "store").rows == 6


def test_changed_tiles_are_encoded_again(tmp_path, scans, encode, computed):
    slides = scans("a", "b")
    encode(slides)
    scans("b", size=64)
    status, _, _ = encode(slides)
    assert status == 0 and computed == ["a", "b", "b"]
    assert [entry.rows for entry in open_store(tmp_path / "store").entries] == [6, 24]


def test_broken_slides_are_skipped_and_listed(tmp_path, scans, encode, make_slide):
    slides = scans("a", "torn", "empty", "other")
    truncated = Path(slides[1])
    truncated.write_bytes(truncated.read_bytes()[:2000])
    Path(slides[2]).write_bytes(b"")
    make_slide(Path(slides[3]), np.zeros((300, 300, 3), np.uint8))
    untiled = str(make_slide(tmp_path / "scans" / "untiled.tif", np.zeros((300, 300, 3), np.uint8)))
    status, _, err = encode([*slides, untiled])
    assert status == 1 and open_store(tmp_path / "store").ids == ("a",)
    skipped = [line for line in err.splitlines() if "skipped" in line]
    assert len(skipped) == 4
    for name, why in (
        ("torn", ""),
        ("empty", "0 bytes"),
        ("other", "384 x 256: expected the same slide"),
        ("untiled", "no tiles"),
    ):
        assert any(f"{name}.tif" in line and why in line for line in skipped), (name, skipped)


@pytest.mark.parametrize("layout", ["trident", "clam"])
def test_h5_files_for_other_tools_are_read_back_as_the_same_bags(tmp_path, scans, encode, layout):
    encode(scans("a", "b"), "--h5", layout, str(tmp_path / "files"))
    store = open_store(tmp_path / "store")
    result = find_bags(tmp_path / "files")
    assert result.layout == layout and [source.id for source in result.sources] == ["a", "b"]
    for i, source in enumerate(result.sources):
        ours, expected = store.bag(i), read_bag(source)
        assert np.array_equal(ours.features, expected.features)
        assert np.array_equal(ours.coordinates, expected.coordinates) and expected.coordinate_unit == "level0_px"
        assert ours.tile_size == expected.tile_size
        assert expected.encoder == (store.encoder if layout == "trident" else None)


def test_features_of_other_weights_are_not_added_to_a_store(tmp_path, scans, encode, small_weights):
    slides = scans("a", "b")
    encode(slides[:1])
    state = torch.load(small_weights, weights_only=True)
    torch.save({name: value + 0.01 for name, value in state.items()}, tmp_path / "other.pt")
    status, _, err = encode(slides, weights=tmp_path / "other.pt")
    assert status == 2 and "was encoded by timm_resnet10t-" in err and "choose another --out" in err
    assert open_store(tmp_path / "store").ids == ("a",)


def recut(tmp_path, name, **geometry):
    """Rewrite the tiles of the slide with another geometry."""
    path = tiles_file(tmp_path / "tiles", name)
    write_tiles(replace(read_tiles(path), **geometry), tmp_path / "tiles")


@pytest.mark.finding(n=1)
def test_tiles_of_another_geometry_are_not_added_to_a_store(tmp_path, scans, encode, computed):
    encode(scans("a"))
    assert open_store(tmp_path / "store").geometry == TileGeometry(256, 0.5)
    slides = scans("b")
    recut(tmp_path, "b", mpp=1.0)
    status, _, err = encode(slides)
    assert status == 2 and computed == ["a"] and open_store(tmp_path / "store").ids == ("a",)
    assert "has tiles of 256 pixels at 1 um/px" in err and "has 256 pixels at 0.5 um/px: choose another --out" in err


@pytest.mark.finding(n=1)
def test_slides_with_different_tile_geometry_are_not_encoded_together(tmp_path, scans, encode, computed):
    slides = scans("a", "b")
    recut(tmp_path, "b", pixels=512)
    status, _, err = encode(slides)
    assert status == 2 and computed == [] and not (tmp_path / "store").exists()
    assert "b has tiles of 512 pixels at 0.5 um/px, a has 256 pixels at 0.5 um/px" in err


@pytest.mark.finding(n=1)
def test_store_of_version_one_is_extended_with_unchecked_geometry(tmp_path, scans, encode, computed):
    encode(scans("a"))
    index = tmp_path / "store" / "index.json"
    facts = json.loads(index.read_text()) | {"version": 1}
    for entry in facts["bags"]:
        for name in ("tile_pixels", "tile_mpp", "pooling", "slide_bytes", "slide_mtime", "slide_width", "slide_height"):
            del entry[name]
    index.write_text(json.dumps(facts))
    status, _, err = encode(scans("a", "b"))
    assert status == 0 and computed == ["a", "b"] and "could not be checked" in err
    assert open_store(tmp_path / "store").geometry == TileGeometry(256, 0.5)


def test_tiles_cut_by_trident_are_encoded(tmp_path, scans, encode):
    slides = scans("a")
    with h5py.File(tiles_file(tmp_path / "tiles", "a"), "r+") as file:
        for ours in ("mpp", "slide_mpp", "carmil"):
            del file["coords"].attrs[ours]
    status, _, err = encode(slides)
    assert status == 0, err
    assert open_store(tmp_path / "store").rows == 6


def test_folder_that_is_not_a_store_is_not_overwritten(tmp_path, scans, encode):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.txt").write_text("mine")
    status, _, err = encode(scans("a"))
    assert status == 2 and "is not a store" in err
    assert (tmp_path / "store" / "thesis.txt").read_text() == "mine"


@pytest.mark.finding(n=13)
def test_concurrent_encoding_into_one_store_is_rejected(tmp_path, scans, encode, computed):
    slides = scans("a")
    with folder_lock(lock_file(tmp_path / "store"), tmp_path / "store"):
        status, _, err = encode(slides)
    assert status == 2
    assert "store is being written by process" in err and computed == []
