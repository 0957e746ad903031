import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from carmil.bags.finding import find_bags
from carmil.bags.readers import read_bag, read_header
from carmil.bags.sources import Bag, Source
from carmil.bags.writers import write_bag
from carmil.errors import CarmilError

LAYOUTS = ("clam", "trident", "stamp", "torchmil", "slideflow", "npy", "npz", "pt", "safetensors")
# What each layout can store besides features.
COORDINATES = set(LAYOUTS) - {"npy"}
TILE_SIZE = {"clam", "trident", "stamp", "npz", "pt", "safetensors"}
ENCODER = {"trident", "stamp", "slideflow", "npz", "pt", "safetensors"}
INSTANCE_LABELS = {"torchmil", "npz", "pt", "safetensors"}


def features(rows: int = 5, width: int = 4, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(rows).normal(size=(rows, width)).astype(dtype)


def grid(rows: int = 5, step: float = 512) -> np.ndarray:
    return np.stack([np.arange(rows) % 3, np.arange(rows) // 3], axis=1).astype(np.float32) * np.float32(step)


def make_bag(id: str = "00123", *, rows: int = 5, dtype: str = "float32", unit: str = "level0_px") -> Bag:
    return Bag(id, features(rows, dtype=dtype), grid(rows), unit, 512.0, "uni_v1", np.arange(rows, dtype=np.int64) % 2)


def written(folder: Path, layout: str, *bags: Bag) -> Path:
    for bag in bags:
        write_bag(bag, folder, layout)
    return folder


def only(path: Path, **options) -> Bag:
    (source,) = find_bags(path, **options).sources
    return read_bag(source)


@pytest.mark.parametrize("rows", [5, 1, 0])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_written_bag_is_read_back_unchanged(tmp_path, layout, dtype, rows):
    bag = make_bag(rows=rows, dtype=dtype, unit="um" if layout == "stamp" else "level0_px")
    result = find_bags(written(tmp_path / "out", layout, bag))
    (source,) = result.sources
    again = read_bag(source)
    assert (result.layout, source.layout, again.id) == (layout, layout, "00123")
    assert again.features.dtype == dtype and again.features.flags.c_contiguous
    np.testing.assert_array_equal(again.features, bag.features)
    if layout in COORDINATES:
        np.testing.assert_array_equal(again.coordinates, bag.coordinates)
        assert again.coordinates.dtype == np.float32
    assert again.coordinate_unit == (bag.coordinate_unit if layout in COORDINATES else None)
    assert again.tile_size == (512.0 if layout in TILE_SIZE else None)
    assert again.encoder == ("uni_v1" if layout in ENCODER else None)
    if layout in INSTANCE_LABELS:
        np.testing.assert_array_equal(again.instance_labels, bag.instance_labels)
    else:
        assert again.instance_labels is None
    header = read_header(source)
    assert (header.rows, header.width, header.dtype, header.encoder) == (rows, 4, dtype, again.encoder)


@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"stamp"}))
def test_bag_with_features_only_is_written_and_read(tmp_path, layout):
    bag = Bag("a", features())
    again = only(written(tmp_path, layout, bag))
    np.testing.assert_array_equal(again.features, bag.features)
    assert (again.coordinates, again.coordinate_unit, again.tile_size, again.encoder) == (None, None, None, None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sources_are_sorted_by_id_and_can_be_pickled(tmp_path, layout):
    unit = "um" if layout == "stamp" else "level0_px"
    result = find_bags(
        written(tmp_path, layout, *(make_bag(id, unit=unit) for id in ("2", "10", "007", "TCGA-A1.9f-2.svs")))
    )
    assert [source.id for source in result.sources] == ["007", "10", "2", "TCGA-A1.9f-2.svs"]
    assert pickle.loads(pickle.dumps(result)) == result
    assert all(source.path.is_absolute() for source in result.sources)
    assert pickle.loads(pickle.dumps(read_bag(result.sources[0]))).id == "007"


@pytest.mark.parametrize(
    ("layout", "unit", "words"),
    [
        ("stamp", "level0_px", "need micrometres"),
        ("clam", "um", "need level-0 pixels"),
        ("trident", "um", "need level-0 pixels"),
        ("torchmil", "um", "need level-0 pixels"),
        ("slideflow", "um", "need level-0 pixels"),
        ("zarr", "um", "expected one of clam"),
    ],
)
def test_unsupported_layout_or_unit_raises_an_error_and_writes_nothing(tmp_path, layout, unit, words):
    with pytest.raises(CarmilError, match=words):
        write_bag(make_bag(unit=unit), tmp_path, layout)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_plain_files_preserve_micrometre_coordinates(tmp_path):
    for layout in ("npz", "pt", "safetensors"):
        assert only(written(tmp_path / layout, layout, make_bag(unit="um"))).coordinate_unit == "um"


def clam_folder(root: Path, *, ids=("s1",), kinds=("h5_files", "pt_files"), patches=True) -> Path:
    """Write RESULTS/patches and FEATS side by side, as CLAM's two scripts do."""
    for id in ids:
        for kind in kinds:
            (root / "FEATS" / kind).mkdir(parents=True, exist_ok=True)
        if "h5_files" in kinds:
            with h5py.File(root / "FEATS" / "h5_files" / f"{id}.h5", "w") as file:
                file.create_dataset("features", data=features(40), chunks=(32, 4), maxshape=(None, 4))
                file.create_dataset("coords", data=grid(40).astype(np.int32), chunks=(32, 2), maxshape=(None, 2))
        if "pt_files" in kinds:
            torch.save(torch.from_numpy(features(40)), root / "FEATS" / "pt_files" / f"{id}.pt")
        if patches:
            (root / "patches").mkdir(exist_ok=True)
            with h5py.File(root / "patches" / f"{id}.h5", "w") as file:
                coords = file.create_dataset("coords", data=grid(40).astype(np.int64))
                coords.attrs["patch_size"] = 256
                coords.attrs["patch_level"] = 1
                coords.attrs["downsample"] = np.array([2.0, 2.0])
                coords.attrs["downsampled_level_dim"] = np.array([1000, 1000])
                coords.attrs["level_dim"] = np.array([1000, 1000])
                coords.attrs["name"] = id
                coords.attrs["save_path"] = "RESULTS/patches"
    return root / "FEATS"


@pytest.mark.parametrize("kinds", [("h5_files", "pt_files"), ("h5_files",), ("pt_files",)])
@pytest.mark.parametrize("inner", [False, True])
def test_clam_tile_size_is_read_from_patches(tmp_path, kinds, inner):
    folder = clam_folder(tmp_path, kinds=kinds)
    result = find_bags(folder / kinds[0] if inner else folder)
    bag = read_bag(result.sources[0])
    assert result.layout == "clam"
    assert (bag.tile_size, bag.coordinate_unit) == (512.0, "level0_px")
    np.testing.assert_array_equal(bag.features, features(40))
    np.testing.assert_array_equal(bag.coordinates, grid(40))


@pytest.mark.finding(n=17)
def test_clam_slides_found_only_in_pt_files_are_read_and_noted(tmp_path):
    folder = clam_folder(tmp_path, patches=False)
    torch.save(torch.zeros(2, 4), folder / "pt_files" / "extra.pt")
    (folder / "pt_files" / "notes.txt").write_text("no features")
    result = find_bags(folder)
    assert [(source.id, source.path.name) for source in result.sources] == [("extra", "extra.pt"), ("s1", "s1.h5")]
    assert "read h5_files, not pt_files: they have coordinates" in result.notes
    assert "read 1 slide from pt_files, not in h5_files: 'extra'" in result.notes
    assert any("the size of a tile is unknown for 2 slides" in sentence for sentence in result.notes)
    assert read_bag(result.sources[0]).coordinates is None
    assert read_bag(result.sources[1]).tile_size is None


def test_single_file_of_a_clam_folder_is_read_with_its_patches(tmp_path):
    folder = clam_folder(tmp_path, ids=("s1", "s2"))
    bag = only(folder / "h5_files" / "s2.h5")
    assert (bag.id, bag.tile_size) == ("s2", 512.0)


def trident_job(
    root: Path, *, encoders=("uni_v1",), ids=("s1",), dtype="float32", overlap="20x_256px_0px_overlap"
) -> Path:
    for encoder in encoders:
        home = root / overlap / f"features_{encoder}"
        home.mkdir(parents=True)
        for i, id in enumerate(ids):
            with h5py.File(home / f"{id}.h5", "w") as file:
                stored = file.create_dataset("features", data=features(dtype=dtype), chunks=(1, 4), maxshape=(None, 4))
                stored.attrs.update(name=id, savetodir="out", encoder=encoder)
                coords = file.create_dataset("coords", data=grid().astype(np.int64), chunks=(1, 2), maxshape=(None, 2))
                coords.attrs.update(
                    patch_size=256, patch_size_level0=512 * (i + 1), level0_magnification=40, target_magnification=20,
                    overlap=0, name=id, savetodir="out", level0_width=9999, level0_height=9999,
                )  # fmt: skip
    for beside in ("thumbnails", "contours", f"{overlap}/patches", f"{overlap}/slide_features_titan"):
        (root / beside).mkdir(parents=True, exist_ok=True)
    with h5py.File(root / overlap / "patches" / "s1_patches.h5", "w") as file:
        file["coords"] = grid()
    return root


@pytest.mark.parametrize("inner", ["", "20x_256px_0px_overlap", "20x_256px_0px_overlap/features_uni_v1"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_trident_is_found_from_any_folder_level_and_tile_size_is_per_slide(tmp_path, inner, dtype):
    result = find_bags(trident_job(tmp_path, ids=("s1", "s2"), dtype=dtype) / inner)
    bags = [read_bag(source) for source in result.sources]
    assert result.layout == "trident"
    assert [bag.tile_size for bag in bags] == [512.0, 1024.0]
    assert {bag.encoder for bag in bags} == {"uni_v1"} and {bag.coordinate_unit for bag in bags} == {"level0_px"}
    np.testing.assert_array_equal(bags[0].features, features(dtype=dtype))


def test_trident_job_with_two_encoders_raises_an_error(tmp_path):
    with pytest.raises(CarmilError, match=r"several folders .*features_conch.*features_uni.*give the path of one"):
        find_bags(trident_job(tmp_path, encoders=("uni", "conch")))


def test_trident_encoder_is_read_from_folder_name_without_attributes(tmp_path):
    home = tmp_path / "features_conch_v15"
    home.mkdir()
    with h5py.File(home / "a.h5", "w") as file:
        file["features"] = features()
    assert only(home).encoder == "conch_v15"


def stamp_file(path: Path, *, coords=None, **attrs) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["feats"] = features(dtype="float16")
        file["coords"] = (grid(step=256) if coords is None else coords).astype(np.float32)
        file.attrs.update(attrs)
    return path


@pytest.mark.parametrize(
    "attrs",
    [
        {"stamp_version": "2.4.0", "unit": "um", "tile_size_um": 256.0, "tile_size_px": 224, "feat_type": "tile"},
        {"stamp_version": "2.0.0", "unit": "um", "tile_size": 256.0},
    ],
)
def test_stamp_coordinates_are_read_in_micrometres(tmp_path, attrs):
    stamp_file(tmp_path / "uni-1a2b3c4d" / "s1.h5", extractor="uni", code_hash="1a2b", **attrs)
    result = find_bags(tmp_path)
    bag = read_bag(result.sources[0])
    assert result.layout == "stamp"
    assert any("uni-1a2b3c4d" in sentence for sentence in result.notes)
    assert (bag.coordinate_unit, bag.tile_size, bag.encoder, bag.features.dtype) == ("um", 256.0, "uni", np.float16)
    np.testing.assert_array_equal(bag.coordinates, grid(step=256))


def test_old_stamp_coordinates_are_converted_to_micrometres_and_noted(tmp_path):
    stamp_file(tmp_path / "s1.h5", coords=grid(step=224), extractor="ctranspath")
    result = find_bags(tmp_path)
    bag = read_bag(result.sources[0])
    assert any("old STAMP files without a unit" in sentence for sentence in result.notes)
    assert (bag.coordinate_unit, bag.tile_size) == ("um", 256.0)
    np.testing.assert_allclose(bag.coordinates, grid(step=256), rtol=1e-6)


def torchmil_folder(root: Path, *, suffix="npy", truth="patch_labels", labels=True) -> Path:
    def save(kind: str, key: str, id: str, values: np.ndarray) -> None:
        path = root / kind / f"{id}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if suffix == "npy" or key == "instances":
            with path.open("wb") as stream:
                np.save(stream, values)
        else:
            with h5py.File(path, "w") as file:
                file[key] = values

    for number, id in enumerate(("0001", "0002")):
        save("features/features_uni", "features", id, features())
        save("coords", "coords", id, grid().astype(int))
        save(truth, "instances", id, np.arange(5) == 4 * number + 6)
        if labels:
            save("labels", "labels", id, np.array(number))
    return root


@pytest.mark.parametrize("suffix", ["npy", "h5"])
@pytest.mark.parametrize("inner", ["", "features", "features/features_uni"])
@pytest.mark.parametrize("truth", ["inst_labels", "patch_labels"])
def test_torchmil_bag_labels_and_instance_labels_are_read(tmp_path, suffix, inner, truth):
    result = find_bags(torchmil_folder(tmp_path, suffix=suffix, truth=truth) / inner)
    assert result.layout == "torchmil"
    assert [(source.id, source.label) for source in result.sources] == [("0001", "0"), ("0002", "1")]
    bag = read_bag(result.sources[1])
    assert (bag.coordinate_unit, bag.instance_labels.dtype, bag.instance_labels.tolist()) == (
        "level0_px",
        "int64",
        [0] * 5,
    )
    np.testing.assert_array_equal(bag.coordinates, grid())


def test_torchmil_bag_without_label_is_positive_if_any_instance_is(tmp_path):
    torchmil_folder(tmp_path, labels=False)
    np.save(tmp_path / "patch_labels" / "0002.npy", np.array([0, 0, 1, 0, 0]))
    assert [source.label for source in find_bags(tmp_path).sources] == ["0", "1"]


def test_slideflow_coordinates_and_encoder_are_read(tmp_path):
    torch.save(torch.from_numpy(features()), tmp_path / "s1.pt")
    np.savez(tmp_path / "s1.index.npz", grid().astype(int))
    config = {"extractor": {"class": "slideflow.model.extractors.retccl.RetCCLFeatures", "kwargs": {}}, "tile_px": 299}
    (tmp_path / "bags_config.json").write_text(json.dumps(config))
    result = find_bags(tmp_path)
    bag = read_bag(result.sources[0])
    assert (result.layout, len(result.sources)) == ("slideflow", 1)
    assert any("centre of a tile" in sentence for sentence in result.notes)
    assert (bag.encoder, bag.coordinate_unit) == ("RetCCLFeatures", "level0_px")
    np.testing.assert_array_equal(bag.coordinates, grid())


@pytest.mark.parametrize("key", ["features", "feats", "feat", "embeddings", "patch_embeddings"])
@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "chunks": (2, 4)}, {"chunks": (3, 3)}])
def test_h5_features_are_read_under_any_known_name(tmp_path, key, options):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset(key, data=features(), **options)
        file["coords"] = grid()
    result = find_bags(tmp_path)
    assert result.layout == "h5"
    assert "the files name no unit: coordinates are taken as level-0 pixels" in result.notes
    np.testing.assert_array_equal(read_bag(result.sources[0]).features, features())


def test_acmil_file_with_all_slides_is_read(tmp_path):
    with h5py.File(tmp_path / "patch_feats_pretrain_medical_ssl.h5", "w") as file:
        for number, id in enumerate(("tumor_001", "002")):
            group = file.create_group(id)
            group["feat"], group["coords"] = features(number + 3), grid(number + 3)
            group.attrs["label"] = number
    for path in (tmp_path, tmp_path / "patch_feats_pretrain_medical_ssl.h5"):
        result = find_bags(path)
        assert result.layout == "acmil"
        assert [(source.id, source.label, read_header(source).rows) for source in result.sources] == [
            ("002", "1", 4),
            ("tumor_001", "0", 3),
        ]
        np.testing.assert_array_equal(read_bag(result.sources[1]).features, features(3))


WIDE = features(dtype="float64")


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("a.npy", lambda path: np.save(path, WIDE)),
        ("a.npy", lambda path: np.save(path, np.asfortranarray(WIDE))),
        ("a.npy", lambda path: np.save(path, WIDE.astype(">f4"))),
        ("a.npy", lambda path: np.save(path, WIDE[None])),
        ("a.npz", lambda path: np.savez(path, WIDE)),
        ("a.npz", lambda path: np.savez_compressed(path, features=WIDE[None])),
        ("a.npz", lambda path: np.savez(path, embeddings=np.asfortranarray(WIDE.astype(">f8")))),
        ("a.pt", lambda path: torch.save(torch.from_numpy(WIDE), path)),
        ("a.pt", lambda path: torch.save(torch.from_numpy(WIDE)[None], path)),
        ("a.pt", lambda path: torch.save(torch.from_numpy(WIDE.T.copy()).T, path)),
        ("a.pt", lambda path: torch.save({"features": torch.from_numpy(WIDE), "epoch": 3}, path)),
        ("a.pth", lambda path: torch.save(torch.from_numpy(WIDE), path, _use_new_zipfile_serialization=False)),
        ("a.pt", lambda path: torch.save(torch.nn.Parameter(torch.from_numpy(WIDE)), path)),
        ("a.safetensors", lambda path: save_file({"features": torch.from_numpy(WIDE)[None]}, path)),
        ("a.h5", lambda path: h5py.File(path, "w").create_dataset("features", data=WIDE[None]).file.close()),
        ("a.hdf5", lambda path: h5py.File(path, "w").create_dataset("feats", data=WIDE.astype(">f8")).file.close()),
    ],
)
def test_any_stored_matrix_is_read_as_contiguous_float32(tmp_path, name, save):
    save(tmp_path / name)
    (source,) = find_bags(tmp_path).sources
    bag = read_bag(source)
    assert (source.id, bag.features.dtype, bag.features.dtype.isnative) == ("a", np.float32, True)
    assert bag.features.flags.c_contiguous and bag.features.flags.owndata and bag.features.flags.writeable
    np.testing.assert_array_equal(bag.features, WIDE.astype(np.float32))
    assert (read_header(source).rows, read_header(source).width, read_header(source).dtype) == (5, 4, "float32")


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_bfloat16_features_are_read_as_float32(tmp_path, name):
    values = torch.from_numpy(features()).bfloat16()
    if name == "a.pt":
        torch.save(values, tmp_path / name)
    else:
        save_file({"features": values}, tmp_path / name)
    (source,) = find_bags(tmp_path / name).sources
    assert read_header(source).dtype == "float32"
    np.testing.assert_array_equal(read_bag(source).features, values.float().numpy())


def test_features_too_large_for_float32_are_read_as_infinite(tmp_path):
    np.save(tmp_path / "a.npy", np.full((2, 2), 1e300))
    assert np.isinf(only(tmp_path).features).all()


def test_folder_may_mix_file_kinds_and_skipped_files_are_noted(tmp_path):
    np.save(tmp_path / "a.npy", features())
    torch.save(torch.from_numpy(features()), tmp_path / "b.pt")
    (tmp_path / ".b.pt.unfinished.pt").write_bytes(b"")
    (tmp_path / "labels.csv").write_text("slide_id,label\n")
    result = find_bags(tmp_path)
    assert [(source.id, source.layout) for source in result.sources] == [("a", "npy"), ("b", "pt")]
    assert result.layout == "npy+pt"
    assert result.notes == (
        "1 hidden file left out, whose name begins with a dot: '.b.pt.unfinished.pt'",
        "1 other file left out: 'labels.csv'",
    )


def matrix_folder(root: Path, table: str, rows: int = 4) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    np.save(root / "features.npy", features(rows, dtype="float16"))
    (root / "instances.csv").write_text(table)
    return root


def test_matrix_rows_are_assigned_to_bags_by_the_instance_table(tmp_path):
    folder = matrix_folder(tmp_path, "slide_id,patient_id,tumour\n007,1,0\n7,1,1\n007,1,False\n7,2,0\n")
    result = find_bags(folder, truth="tumour")
    assert [(source.id, source.label, read_header(source).rows) for source in result.sources] == [
        ("007", "0", 2),
        ("7", "1", 2),
    ]
    assert result.notes == ("a bag is a slide_id of instances.csv, which has patient_id as well",)
    bag = read_bag(result.sources[1])
    np.testing.assert_array_equal(bag.features, features(4, dtype="float16")[[1, 3]])
    assert (bag.instance_labels.tolist(), bag.instance_labels.dtype) == ([1, 0], np.int64)
    assert [source.label for source in find_bags(folder / "features.npy").sources] == [None, None]


def test_changed_instance_table_is_read_again(tmp_path):
    folder = matrix_folder(tmp_path, "bag\na\na\nb\nb\n")
    (a, b) = find_bags(folder).sources
    assert len(read_bag(a).features) == 2
    (folder / "instances.csv").write_text("bag\na\na\na\nb\n")
    os.utime(folder / "instances.csv", ns=(1, 1))
    assert (len(read_bag(a).features), len(read_bag(b).features)) == (3, 1)


@pytest.mark.parametrize(
    ("bags", "ids"), [(np.array([1, 0, 1, 2]), ["0", "1", "2"]), (np.array(["a", "a", "c", "d"]), ["a", "c", "d"])]
)
def test_single_npz_may_contain_all_bags(tmp_path, bags, ids):
    path = tmp_path / "cohort.npz"
    np.savez(path, features=features(4), bags=bags, labels=[7, 8, 9], inst=[0, 0, 0, 1])
    result = find_bags(path, truth="inst")
    assert result == find_bags(tmp_path, truth="inst")
    assert result.layout == "matrix_npz"
    assert [(source.id, source.label) for source in result.sources] == list(zip(ids, ["7", "8", "9"], strict=True))
    for source in result.sources:
        np.testing.assert_array_equal(read_bag(source).features, features(4)[bags.astype(str) == source.id])
    assert read_bag(result.sources[2]).instance_labels.tolist() == [1]


def test_circular_folder_links_are_followed_once(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "up").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "self").symlink_to(tmp_path / "self")
    with pytest.raises(CarmilError, match="holds no features"):
        find_bags(tmp_path)
    np.save(tmp_path / "a" / "b" / "s.npy", features())
    assert [source.id for source in find_bags(tmp_path).sources] == ["s"]


def test_relative_path_is_supported(tmp_path, monkeypatch):
    clam_folder(tmp_path)
    monkeypatch.chdir(tmp_path / "FEATS" / "h5_files")
    assert only(Path()).tile_size == 512.0


def test_colon_cancer_cohort_has_98_patients(shared_data):
    result = find_bags(shared_data / "crc", truth="is_cancerous")
    assert (result.layout, len(result.sources)) == ("matrix", 98)
    assert sum(source.label == "1" for source in result.sources) == 51
    bags = [read_bag(source) for source in result.sources]
    assert sum(len(bag.features) for bag in bags) == 20280
    assert (min(len(bag.features) for bag in bags), max(len(bag.features) for bag in bags)) == (6, 699)
    assert all(
        (bag.instance_labels.max() == 1) == (s.label == "1") for bag, s in zip(bags, result.sources, strict=True)
    )
    first = next(bag for bag in bags if bag.id == "1")
    whole = np.load(shared_data / "crc" / "features.npy", mmap_mode="r")
    np.testing.assert_array_equal(first.features, whole[: len(first.features)])


def test_musk_cohort_has_92_molecules(shared_data):
    result = find_bags(shared_data / "mil" / "musk1.npz")
    assert len(result.sources) == 92
    assert sum(source.label == "1" for source in result.sources) == 47
    bags = [read_bag(source) for source in result.sources]
    assert sum(len(bag.features) for bag in bags) == 476 and bags[0].features.shape[1] == 166
    assert read_header(result.sources[0]).rows == len(bags[0].features)


def test_source_is_hashable_and_can_be_pickled():
    source = Source("a", Path("/x/a.h5"), "h5")
    assert source == pickle.loads(pickle.dumps(source)) and hash(source)


def test_importing_readers_does_not_import_torch():
    """Only the modules themselves are imported here, without their package."""
    code = (
        "import sys, types; package = types.ModuleType('carmil.bags'); import carmil; "
        "package.__path__ = [carmil.__path__[0] + '/bags']; sys.modules['carmil.bags'] = package; "
        "import carmil.bags.finding, carmil.bags.readers, carmil.bags.writers; "
        "print([name for name in ('torch', 'h5py', 'pandas', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.finding(n=17)
def test_folder_per_slide_gives_slides_the_name_of_their_folder(tmp_path):
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=(3, 4)).astype(np.float32) for name in ("TCGA-1.a", "s2", "s3", "s4")}
    for name in values:
        (tmp_path / "cohort" / name).mkdir(parents=True)
    with h5py.File(tmp_path / "cohort" / "TCGA-1.a" / "features.h5", "w") as file:
        file["features"], file["coords"] = values["TCGA-1.a"], np.arange(6).reshape(3, 2)
    np.save(tmp_path / "cohort" / "s2" / "features.npy", values["s2"])
    np.save(tmp_path / "cohort" / "s2" / "coords.npy", np.arange(6).reshape(3, 2))
    torch.save(torch.from_numpy(values["s3"]), tmp_path / "cohort" / "s3" / "feats.pt")
    np.save(tmp_path / "cohort" / "s4" / "s4.npy", values["s4"])
    (tmp_path / "cohort" / "s4" / "thumbnail.png").write_bytes(b"")
    for place in (tmp_path, tmp_path / "cohort"):
        result = find_bags(place)
        assert [source.id for source in result.sources] == ["TCGA-1.a", "s2", "s3", "s4"]
        assert "one folder per slide: a slide has the name of its folder" in result.notes
        for source in result.sources:
            bag = read_bag(source)
            assert np.array_equal(bag.features, values[bag.id])
            assert (bag.coordinate_unit == "level0_px") == (bag.id in ("TCGA-1.a", "s2"))


@pytest.mark.finding(n=17)
def test_feature_file_in_a_slide_folder_is_chosen_by_name(tmp_path):
    for name in ("a", "b"):
        for file in ("features.npy", "mask.npy"):
            (tmp_path / name).mkdir(exist_ok=True)
            np.save(tmp_path / name / file, np.ones((2, 3), np.float32))
    torch.save(torch.zeros(2, 3), tmp_path / "a" / "features.pt")
    (tmp_path / "c").mkdir()
    np.save(tmp_path / "c" / "of_another_name.npy", np.ones((2, 3), np.float32))
    result = find_bags(tmp_path)
    kinds = {source.id: source.path.name for source in result.sources}
    assert kinds == {"a": "features.npy", "b": "features.npy"}
    assert any(
        line.startswith("other files in the folders of slides are not read: ") and "mask.npy" in line
        for line in result.notes
    )
    assert "WARNING: 1 folder with files of other names is left out: 'c'" in result.notes
    np.save(tmp_path / "b" / "feats.npy", np.ones((2, 3), np.float32))
    with pytest.raises(CarmilError, match=r"b holds 'feats\.npy', 'features\.npy', all with features: keep one"):
        find_bags(tmp_path)


@pytest.mark.finding(n=17)
def test_cohort_folder_is_not_mistaken_for_a_slide_folder(tmp_path):
    """A slide has the name of the cohort folder, and a matrix of all bags lies one folder deeper."""
    (tmp_path / "uni").mkdir()
    for name in ("uni", "other"):
        np.save(tmp_path / "uni" / f"{name}.npy", np.ones((2, 3), np.float32))
    assert [source.id for source in find_bags(tmp_path).sources] == ["other", "uni"]
    (tmp_path / "all" / "below").mkdir(parents=True)
    bags = np.array(["x", "x", "y"])
    np.savez(tmp_path / "all" / "below" / "features.npz", X=np.ones((3, 2), np.float32), bag=bags)
    assert [source.id for source in find_bags(tmp_path / "all").sources] == ["x", "y"]


@pytest.mark.finding(n=17)
def test_build_info_and_check_list_skipped_hidden_files(tmp_path, run_cli):
    folder = tmp_path / "features"
    folder.mkdir()
    for name in ("a.npy", ".hidden.npy", ".carmil-x-1-y.npy", ".note"):
        np.save(folder / "x.npy", np.ones((3, 2), np.float32))
        (folder / "x.npy").rename(folder / name)
    line = "1 hidden file left out, whose name begins with a dot: '.hidden.npy'"
    assert find_bags(folder).hidden == (".hidden.npy",) and line in find_bags(folder).notes
    for words in (("build", str(folder), "--out", str(tmp_path / "store")), ("check", str(folder))):
        status, out, err = run_cli("cohort", *words)
        assert status == 0 and line in " ".join((out + err).split())
    status, out, _ = run_cli("cohort", "info", str(tmp_path / "store"))
    left = next(row for row in out.splitlines() if "left out" in row)
    assert status == 0 and ".hidden.npy" in left and ".carmil" not in left
