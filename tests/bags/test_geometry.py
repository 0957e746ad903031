"""Tile geometry is read wherever a file records it, saved in the store, and never mixed."""

import json

import h5py
import numpy as np
import pytest

from carmil.bags.building import build_store
from carmil.bags.checking import check_bags
from carmil.bags.finding import find_bags
from carmil.bags.geometry import UNKNOWN, TileGeometry, check_geometry
from carmil.bags.readers import read_bag, read_header
from carmil.bags.sources import Bag
from carmil.bags.store import open_store
from carmil.bags.writers import write_bag
from carmil.datasets.packing import regroup
from carmil.errors import CarmilError

AT_10X = TileGeometry(256, 1.0)
AT_20X = TileGeometry(256, 0.5)


def bag(name: str, geometry: TileGeometry = AT_10X, **others) -> Bag:
    features = np.random.default_rng(list(name.encode())).normal(size=(4, 3)).astype(np.float32)
    given = dict(coordinates=np.ones((4, 2), np.float32), coordinate_unit="level0_px", tile_size=512.0, encoder="uni")
    return Bag(name, features, geometry=geometry, **{**given, **others})


def only(folder):
    (source,) = find_bags(folder).sources
    assert read_header(source).geometry == read_bag(source).geometry
    return read_bag(source)


def clam(folder, **attributes):
    (folder / "h5_files").mkdir(parents=True)
    (folder / "patches").mkdir()
    with h5py.File(folder / "h5_files" / "a.h5", "w") as file:
        file["features"], file["coords"] = np.ones((2, 3), "f4"), np.ones((2, 2), "i4")
    with h5py.File(folder / "patches" / "a.h5", "w") as file:
        file["coords"] = np.ones((2, 2), "i4")
        file["coords"].attrs.update(attributes)


@pytest.mark.finding(n=1)
@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (TileGeometry(256, 1.04), False),  # the same nominal magnification
        (TileGeometry(256, 1.06), True),
        (TileGeometry(256, 0.5), True),
        (TileGeometry(224, 1.0), True),
        (TileGeometry(256, None), False),
        (TileGeometry(224, None), True),
        (UNKNOWN, False),
    ],
)
def test_geometries_match_if_pixels_are_equal_and_micrometres_within_five_per_cent(other, differs):
    assert AT_10X.differs_from(other) is other.differs_from(AT_10X) is differs


@pytest.mark.finding(n=1)
def test_different_geometry_raises_an_error_and_unknown_geometry_is_logged():
    lines: list[str] = []
    words = {"what": "new", "whose": "the run", "todo": f"use `{AT_10X.command}`", "log": lines.append}
    check_geometry(AT_10X, AT_10X, **words)
    assert lines == []
    check_geometry(UNKNOWN, AT_10X, **words)
    assert len(lines) == 1 and "of new is not fully known" in lines[0] and "could not be checked" in lines[0]
    with pytest.raises(CarmilError) as refused:
        check_geometry(AT_20X, AT_10X, **words)
    assert str(refused.value) == (
        "new has tiles of 256 pixels at 0.5 um/px, the run has 256 pixels at 1 um/px: "
        "use `carmil slides tile --pixels 256 --tile-mpp 1`"
    )


@pytest.mark.finding(n=1)
@pytest.mark.parametrize("layout", ["trident", "clam", "slideflow", "npz", "pt", "safetensors"])
def test_export_preserves_tile_geometry_in_layouts_that_support_it(tmp_path, layout):
    geometry = TileGeometry(224, 256 / 224)
    write_bag(bag("a", geometry), tmp_path / layout, layout)
    result = only(tmp_path / layout).geometry
    assert result.tile_pixels == 224 and result.tile_mpp == pytest.approx(256 / 224)


@pytest.mark.finding(n=1)
def test_stamp_tile_geometry_is_read_from_pixels_and_micrometres(tmp_path):
    write_bag(bag("a", TileGeometry(224, 256 / 224), coordinate_unit="um", tile_size=256.0), tmp_path, "stamp")
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        del (
            file.attrs["tile_mpp"],
            file.attrs["tile_pixels"],
        )  # written by carmil only; STAMP records tile_size_px and tile_size_um
    result = only(tmp_path).geometry
    assert result.tile_pixels == 224 and result.tile_mpp == pytest.approx(256 / 224)


@pytest.mark.finding(n=1)
def test_trident_tile_geometry_is_read_from_magnification(tmp_path):
    (tmp_path / "features_uni_v1").mkdir()
    with h5py.File(tmp_path / "features_uni_v1" / "a.h5", "w") as file:
        file["features"], file["coords"] = np.ones((2, 3), "f4"), np.ones((2, 2), "i8")
        file["coords"].attrs.update(patch_size=512, patch_size_level0=1024, target_magnification=20)
    assert only(tmp_path).geometry == TileGeometry(512, 0.5)


@pytest.mark.finding(n=1)
def test_clam_tile_geometry_has_pixels_only(tmp_path):
    clam(tmp_path, patch_size=256, patch_level=1, downsample=np.array([4.0, 4.0]))
    assert only(tmp_path).geometry == TileGeometry(256, None)


@pytest.mark.finding(n=1)
def test_slideflow_tile_geometry_is_read_from_micrometres_or_magnification(tmp_path):
    for side, mpp in ((302, 302 / 299), ("20x", 0.5)):
        folder = tmp_path / str(side)
        write_bag(bag("a"), folder, "slideflow")
        (folder / "bags_config.json").write_text(json.dumps({"extractor": None, "tile_px": 299, "tile_um": side}))
        assert only(folder).geometry == TileGeometry(299, mpp)


@pytest.mark.finding(n=1)
def test_bag_with_different_geometry_raises_an_error_or_is_skipped(tmp_path):
    for name in ("a", "b", "c"):
        write_bag(bag(name, AT_20X if name == "c" else AT_10X), tmp_path / "src", "trident")
    with pytest.raises(
        CarmilError, match=r"c\.h5: tiles of 256 pixels at 0\.5 um/px, others have 256 pixels at 1 um/px"
    ):
        build_store(tmp_path / "src", tmp_path / "store")
    (problem,) = check_bags(find_bags(tmp_path / "src")).problems
    assert (problem.bag, problem.kind) == ("c", "geometry")
    store = build_store(tmp_path / "src", tmp_path / "store", skip_broken=True)
    assert store.ids == ("a", "b") and store.geometry == AT_10X


@pytest.mark.finding(n=1)
def test_bags_without_recorded_geometry_are_logged(tmp_path):
    lines: list[str] = []
    for name in ("a", "b"):
        write_bag(bag(name, UNKNOWN if name == "b" else AT_10X), tmp_path / "src", "safetensors")
    store = build_store(tmp_path / "src", tmp_path / "store", log=lines.append)
    assert store.geometry == AT_10X and [entry.geometry for entry in store.entries] == [AT_10X, UNKNOWN]
    assert any("the tile geometry of 1 of 2 bags is not recorded ('b')" in line for line in lines)


@pytest.mark.finding(n=1)
def test_regrouping_and_export_preserve_geometry_encoder_and_pooling(tmp_path):
    for name in ("a", "b"):
        write_bag(bag(name, pooling="class token"), tmp_path / "src", "trident")
    store = build_store(tmp_path / "src", tmp_path / "store")
    patients = regroup(store, {"a": "p", "b": "p"}, tmp_path / "patients")
    for result in (open_store(tmp_path / "store"), patients):
        assert (result.geometry, result.encoder, result.pooling) == (AT_10X, "uni", "class token")
    write_bag(store.bag(0), tmp_path / "again", "trident")
    assert (only(tmp_path / "again").geometry, only(tmp_path / "again").pooling) == (AT_10X, "class token")


@pytest.mark.finding(n=1)
def test_store_of_version_one_opens_with_unknown_geometry(tmp_path):
    write_bag(bag("a"), tmp_path / "src", "trident")
    build_store(tmp_path / "src", tmp_path / "store")
    index = tmp_path / "store" / "index.json"
    facts = json.loads(index.read_text())
    assert facts["version"] == 2
    facts["version"] = 1
    for entry in facts["bags"]:
        for name in ("tile_pixels", "tile_mpp", "pooling"):
            del entry[name]
    index.write_text(json.dumps(facts))
    store = open_store(tmp_path / "store")
    assert store.geometry == UNKNOWN and store.pooling is None and store.bag(0).geometry == UNKNOWN
    facts["bags"][0]["tile_mpp"] = "wide"
    index.write_text(json.dumps(facts))
    with pytest.raises(CarmilError, match=r"index\.json cannot be read.*tile_mpp is 'wide'"):
        open_store(tmp_path / "store")
