import io
import json
import resource
import subprocess
import sys
import time
import zipfile

import h5py
import numpy as np
import pytest
import torch

from carmil.bags.building import build_store
from carmil.bags.checking import check_bags, check_store
from carmil.bags.finding import find_bags
from carmil.bags.readers import read_bag
from carmil.bags.sources import Bag
from carmil.bags.store import is_store, open_store
from carmil.bags.writers import write_bag
from carmil.datasets.packing import regroup
from carmil.errors import CarmilError
from carmil.truth import UNKNOWN


def bag(name: str, rows: int = 5, *, seed: int = 0, dtype=np.float32, **others) -> Bag:
    rng = np.random.default_rng([seed, *name.encode()])
    features = rng.normal(size=(rows, 4)).astype(dtype)
    coordinates = rng.integers(0, 9999, (rows, 2)).astype(np.float32)
    given = dict(coordinates=coordinates, coordinate_unit="level0_px", tile_size=256.0, encoder="uni")
    return Bag(id=name, features=features, **{**given, **others})


@pytest.fixture
def features(tmp_path):
    for i in range(7):
        write_bag(bag(f"{i:02d}", rows=3 + i), tmp_path / "src", "trident")
    return tmp_path / "src"


def content(store) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(store.iterdir())}


def test_store_contains_the_data_of_the_files(features, tmp_path):
    store = build_store(features, tmp_path / "store", dtype="float32")
    bags = store.bags()
    assert store.ids == tuple(f"{i:02d}" for i in range(7))
    assert store.encoder == "uni"
    assert bags.coordinate_unit == "level0_px"
    for i, source in enumerate(find_bags(features).sources):
        result = read_bag(source)
        assert np.array_equal(bags[i].features.numpy(), result.features)
        assert np.array_equal(bags[i].coordinates.numpy(), result.coordinates)
        assert store.entries[i].tile_size == 256.0
    assert check_store(store) == []


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-3), ("bfloat16", 8e-3)])
def test_half_precision_features_are_rounded_to_nearest(features, tmp_path, dtype, tolerance):
    exact = build_store(features, tmp_path / "exact", dtype="float32").bags().features
    half = build_store(features, tmp_path / "half", dtype=dtype).bags().features
    assert half.dtype == getattr(torch, dtype)
    assert torch.equal(half, exact.to(half.dtype))
    assert torch.allclose(half.float(), exact, rtol=tolerance)


def test_stores_built_with_one_and_two_workers_are_identical(features, tmp_path):
    build_store(features, tmp_path / "one", workers=1)
    build_store(features, tmp_path / "two", workers=2)
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_killed_build_resumes_and_gives_an_identical_store(features, tmp_path):
    """Kill the build twice; each time it has packed one more bag and waits to be killed."""
    script = (
        "import sys, time, carmil.bags.building as s\nfrom pathlib import Path\n"
        "pack, packed = s._pack_bag, []\n"
        "def waiting(*a):\n"
        "    if packed:\n        time.sleep(600)\n"
        "    packed.append(pack(*a))\n    return packed[-1]\n"
        "s._pack_bag = waiting\n"
        f"s.build_store(Path({str(features)!r}), Path(sys.argv[1]), workers=1)\n"
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    build_store(features, whole, workers=1)
    journal = tmp_path / "broken.building" / "journal.jsonl"
    for _ in range(2):
        size = journal.stat().st_size if journal.exists() else 0
        process = subprocess.Popen([sys.executable, "-c", script, str(broken)])
        while process.poll() is None and not (journal.exists() and journal.stat().st_size > size):
            time.sleep(0.005)
        assert process.poll() is None and not is_store(broken)
        process.kill()
        process.wait()
    build_store(features, broken, workers=1)
    assert content(whole) == content(broken)


def test_truncated_journal_line_is_ignored_on_resume(features, tmp_path):
    whole = build_store(features, tmp_path / "whole", workers=1)
    recorded = []

    def stop(done, total):
        recorded.append(done)
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_store(features, tmp_path / "store", workers=1, on_bag=stop)
    journal = tmp_path / "store.building" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-7])
    logged = []
    build_store(features, tmp_path / "store", workers=1, log=logged.append)
    assert any("2 of 7 bags already packed" in line for line in logged)
    assert content(whole.path) == content(tmp_path / "store")


def test_build_restarts_if_files_have_changed(features, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        build_store(features, tmp_path / "store", workers=1, on_bag=_interrupt)
    write_bag(bag("00", rows=9, seed=5), features, "trident")
    logged = []
    store = build_store(features, tmp_path / "store", workers=1, log=logged.append)
    assert any("starting again" in line for line in logged)
    assert store.entries[0].rows == 9


def _interrupt(done, total):
    raise KeyboardInterrupt


def test_repeated_build_does_nothing_and_another_cohort_raises_an_error(features, tmp_path):
    first = build_store(features, tmp_path / "store")
    assert build_store(features, tmp_path / "store") == first
    write_bag(bag("99"), features, "trident")
    with pytest.raises(CarmilError, match="holds another cohort"):
        build_store(features, tmp_path / "store")


def test_broken_bag_stops_the_build_and_keeps_packed_bags(tmp_path):
    for i in range(4):
        write_bag(bag(f"{i}", rows=5), tmp_path / "src", "npy")
    values = np.load(tmp_path / "src" / "2.npy")
    values[3, 1] = np.nan
    np.save(tmp_path / "src" / "2.npy", values)
    with pytest.raises(CarmilError, match=r"2\.npy: NaN or infinite.*2 of 4 bags are already packed") as error:
        build_store(tmp_path / "src", tmp_path / "store", workers=1)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "store").exists()
    problems = check_bags(find_bags(tmp_path / "src")).problems
    assert [(problem.bag, problem.kind) for problem in problems] == [("2", "not finite")]
    logged = []
    store = build_store(tmp_path / "src", tmp_path / "store", workers=1, skip_broken=True, log=logged.append)
    assert store.ids == ("0", "1", "3")
    assert store.index.left_out == ("2",)
    assert any(line.startswith("left out: 2") for line in logged)


def test_file_deleted_during_a_build_raises_an_error_naming_it(tmp_path, monkeypatch):
    for i in range(3):
        write_bag(bag(f"{i}"), tmp_path / "src", "npy")

    def remove(done, total):
        (tmp_path / "src" / "2.npy").unlink(missing_ok=True)

    with pytest.raises(CarmilError, match=r"2\.npy"):
        build_store(tmp_path / "src", tmp_path / "store", workers=1, on_bag=remove)


def test_bag_with_a_different_width_raises_an_error(tmp_path):
    for i in range(4):
        write_bag(bag(f"{i}"), tmp_path / "src", "npy")
    np.save(tmp_path / "src" / "9.npy", np.zeros((3, 7), np.float32))
    with pytest.raises(CarmilError, match="expected the same features for all slides"):
        build_store(tmp_path / "src", tmp_path / "store")
    problems = check_bags(find_bags(tmp_path / "src")).problems
    assert [(problem.bag, problem.kind, problem.what) for problem in problems] == [
        ("9", "width", "width 7, most bags have 4")
    ]


def test_empty_slides_are_skipped_and_logged(tmp_path):
    write_bag(bag("a"), tmp_path / "src", "npy")
    write_bag(bag("b", rows=0), tmp_path / "src", "npy")
    logged = []
    store = build_store(tmp_path / "src", tmp_path / "store", log=logged.append)
    assert store.index.empty == ("b",)
    assert any("1 empty slide has no tiles and is left out: 'b'" in line for line in logged)


def test_values_too_large_for_half_precision_raise_an_error(tmp_path):
    np.save(tmp_path / "a.npy", np.full((2, 3), 1e6, np.float32))
    with pytest.raises(
        CarmilError, match="do not fit into float16: pack them with `carmil cohort build --dtype float32`"
    ):
        build_store(_alone(tmp_path), tmp_path / "store")


@pytest.mark.finding(n=6)
@pytest.mark.parametrize("layout", ["um", "none"])
def test_each_slide_keeps_its_own_coordinate_unit(tmp_path, layout):
    write_bag(bag("a"), tmp_path / "src", "trident")
    folder = tmp_path / "src" / "features_uni"
    other = None if layout == "none" else "um"
    with h5py.File(folder / "b.h5", "w") as file:
        file["features"] = np.ones((3, 4), np.float32)
        if other is not None:
            file["coords"] = np.array([[1, 2], [3, 4], [5, 6]])
            file.attrs["unit"] = "um"
    logged = []
    store = build_store(tmp_path / "src", tmp_path / "store", log=logged.append)
    bags = store.bags()
    assert bags.units == ("level0_px", other)
    assert np.array_equal(bags[0].coordinates.numpy(), bag("a").coordinates)
    assert bags[0].coordinate_unit == "level0_px"
    assert bags[1].coordinate_unit == other
    assert (bags[1].coordinates is None) == (other is None)
    assert store.bag(1).coordinate_unit == other
    words = "in um" if other else "without any"
    line = f"coordinates differ between slides: 1 slide in level0_px ('a'), 1 slide {words} ('b'); each slide keeps its own"
    assert line in logged
    both = regroup(store, {"a": "p", "b": "p"}, tmp_path / "groups")
    assert both.bags().coordinates is None  # slides with different units share no coordinate system


@pytest.mark.finding(n=6)
def test_check_finds_every_bag_that_a_build_rejects(tmp_path):
    values = {
        "large": np.full((2, 3), 1e6, np.float32),
        "largest": np.full((2, 3), np.finfo(np.float32).max, np.float32),
        "small": np.full((2, 3), 1e-9, np.float32),
        "sound": np.ones((2, 3), np.float32),
    }
    for name, features in values.items():
        write_bag(Bag(id=name, features=features), tmp_path / "src", "npy")
    for dtype, expected in (
        ("float16", ["large", "largest", "small"]),
        ("bfloat16", ["largest"]),
        ("float32", []),
    ):
        checked = check_bags(find_bags(tmp_path / "src"), dtype=dtype)
        assert [(one.bag, one.kind) for one in checked.problems] == [(name, "does not fit") for name in expected]
        for name in values:
            out = tmp_path / f"{dtype}-{name}"
            if name in expected:
                with pytest.raises(CarmilError, match=rf"{name}\.npy: .*{dtype}.*--dtype float32"):
                    build_store(tmp_path / "src" / f"{name}.npy", out, dtype=dtype)
            else:
                assert build_store(tmp_path / "src" / f"{name}.npy", out, dtype=dtype).bags().features.isfinite().all()
    store = build_store(tmp_path / "src", tmp_path / "store", skip_broken=True)
    assert store.ids == ("sound",)
    assert {one.id: one.checksum for one in store.entries} == check_bags(find_bags(tmp_path / "src")).checksums


@pytest.mark.finding(n=6)
def test_share_of_tiny_features_rounded_to_zero_in_float16_is_logged(tmp_path):
    features = np.ones((10, 10), np.float32)
    features[:2] = 1e-9
    features[9] = 0
    write_bag(Bag(id="a", features=features), tmp_path / "src", "npy")
    write_bag(Bag(id="b", features=np.ones((2, 10), np.float32)), tmp_path / "src", "npy")
    logged = []
    store = build_store(tmp_path / "src", tmp_path / "store", log=logged.append)
    assert [entry.vanished for entry in store.entries] == [20 / 90, 0.0]
    (line,) = [line for line in logged if "became 0" in line]
    assert "tiny features of 1 slide became 0 in float16, up to 22.2% of the nonzero ones ('a')" in line
    assert "--dtype float32" in line
    assert check_bags(find_bags(tmp_path / "src")).remarks[0] == line
    logged.clear()
    build_store(tmp_path / "src", tmp_path / "exact", dtype="float32", log=logged.append)
    assert not [line for line in logged if "became 0" in line]


def _alone(tmp_path):
    folder = tmp_path / "src"
    folder.mkdir()
    (tmp_path / "a.npy").rename(folder / "a.npy")
    return folder


def test_truncated_or_modified_store_is_detected(features, tmp_path):
    store = build_store(features, tmp_path / "store")
    path = store.path / "features.bin"
    raw = bytearray(path.read_bytes())
    raw[10] ^= 255
    path.write_bytes(raw)
    assert [problem.bag for problem in check_store(open_store(store.path))] == ["00"]
    path.write_bytes(raw[:-1])
    with pytest.raises(CarmilError, match=r"features\.bin has .* bytes, expected"):
        open_store(store.path)
    facts = json.loads((store.path / "index.json").read_text())
    (store.path / "index.json").write_text(json.dumps({**facts, "version": 99}))
    with pytest.raises(CarmilError, match="newer carmil"):
        open_store(store.path)
    (store.path / "index.json").write_text("{")
    with pytest.raises(CarmilError, match="cannot be read"):
        open_store(store.path)


@pytest.mark.parametrize("layout", ["clam", "trident"])
def test_exported_store_is_read_back_unchanged(features, tmp_path, layout):
    store = build_store(features, tmp_path / "store", dtype="float32")
    for i in range(len(store.entries)):
        write_bag(store.bag(i), tmp_path / "out", layout)
    again = build_store(tmp_path / "out", tmp_path / "again", dtype="float32")
    assert torch.equal(again.bags().features, store.bags().features)
    assert torch.equal(again.bags().coordinates, store.bags().coordinates)
    assert [entry.tile_size for entry in again.entries] == [entry.tile_size for entry in store.entries]


@pytest.mark.finding(n=17)
def test_export_to_clam_keeps_slides_without_coordinates(tmp_path):
    write_bag(bag("a"), tmp_path / "src", "npz")
    write_bag(bag("b", coordinates=None, coordinate_unit=None, tile_size=None), tmp_path / "src", "npz")
    store = build_store(tmp_path / "src", tmp_path / "store", dtype="float32")
    for i in range(2):
        write_bag(store.bag(i), tmp_path / "out", "clam")
    logged = []
    again = build_store(tmp_path / "out", tmp_path / "again", dtype="float32", log=logged.append)
    assert again.ids == ("a", "b")
    assert torch.equal(again.bags().features, store.bags().features)
    assert again.bags().units == ("level0_px", None)
    assert "read 1 slide from pt_files, not in h5_files: 'b'" in logged
    assert any(line.endswith("1 slide without any ('b'); each slide keeps its own") for line in logged)


@pytest.mark.finding(n=6)
def test_build_and_check_report_missing_coordinates(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((2, 3), np.float32))
    folder, logged = _alone(tmp_path), []
    build_store(folder, tmp_path / "store", log=logged.append)
    line = "no coordinates in 1 slide: maps cannot be drawn onto slides"
    assert line in logged
    assert line in check_bags(find_bags(folder)).remarks


@pytest.mark.finding(n=6)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"coordinates": np.array([[1, 2], [np.nan, 3]], np.float32)}, r"1 tile of 2 at .*first tile 1 at \(nan, 3\)"),
        (
            {"coordinates": np.array([[1e9, 2], [-np.inf, 3]], np.float32)},
            r"2 tiles of 2 at .*first tile 0 at \(1e\+09, 2",
        ),
        ({"tile_size": 1e30}, r"tiles of 1e\+30 level0_px \(patch_size_level0, tile_size\): expected a side above 0"),
    ],
)
def test_build_and_check_reject_impossible_coordinates_and_tile_sizes(tmp_path, given, words):
    write_bag(bag("good", rows=2), tmp_path / "src", "npz")
    write_bag(bag("bad", rows=2, **given), tmp_path / "src", "npz")
    with pytest.raises(CarmilError, match=r"bad\.npz: " + words):
        build_store(tmp_path / "src", tmp_path / "store")
    (problem,) = check_bags(find_bags(tmp_path / "src")).problems
    assert (problem.bag, problem.kind) == ("bad", "coordinates")
    assert build_store(tmp_path / "src", tmp_path / "store", skip_broken=True).ids == ("good",)


@pytest.mark.finding(n=6)
def test_slides_without_instance_labels_have_unknown_truth(tmp_path):
    write_bag(bag("a", rows=2, instance_labels=np.array([0, 1])), tmp_path / "src", "npz")
    write_bag(bag("b", rows=3), tmp_path / "src", "npz")
    logged = []
    store = build_store(tmp_path / "src", tmp_path / "store", log=logged.append)
    assert store.bags().instance_labels.tolist() == [0, 1, UNKNOWN, UNKNOWN, UNKNOWN]
    assert store.bag(0).instance_labels.tolist() == [0, 1]
    assert store.bag(1).instance_labels is None
    line = "1 of 2 slides without instance labels ('b'): the truth about their instances is unknown"
    assert line in logged
    assert line in check_bags(find_bags(tmp_path / "src")).remarks
    both = regroup(store, {"a": "p", "b": "p"}, tmp_path / "groups")
    assert both.entries[0].truth
    assert both.bags().instance_labels.tolist() == [0, 1, UNKNOWN, UNKNOWN, UNKNOWN]
    (store.path / "instance_labels.bin").unlink()  # as in a store written by carmil 0.1
    assert open_store(store.path).bags().instance_labels is None


def test_regrouped_bags_are_sorted_by_group_name(features, tmp_path):
    store = build_store(features, tmp_path / "store")
    groups = {"00": "z", "03": "a", "06": "z"}
    result = regroup(store, groups, tmp_path / "groups")
    assert result.ids == ("a", "z")
    bags, old = result.bags(), store.bags()
    assert torch.equal(bags[0].features, old[3].features)
    assert torch.equal(bags[1].features, old[[0, 6]].features)
    assert torch.equal(bags[1].coordinates, old[[0, 6]].coordinates)
    assert check_store(result) == []
    assert regroup(store, groups, tmp_path / "groups") == result
    with pytest.raises(CarmilError, match="holds different bags or groups"):
        regroup(store, {**groups, "01": "a"}, tmp_path / "groups")


@pytest.mark.finding(n=13)
def test_concurrent_build_into_the_same_store_raises_an_error(features, tmp_path):
    refused = []

    def second(done, total):
        with pytest.raises(CarmilError, match=r"store is being written by process \d+ .*: wait until it ends") as error:
            build_store(features, tmp_path / "store")
        refused.append(error)

    assert build_store(features, tmp_path / "store", on_bag=second).ids == tuple(f"{i:02d}" for i in range(7))
    assert len(refused) == 7
    assert build_store(features, tmp_path / "store").rows == sum(3 + i for i in range(7))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src", "store"]


@pytest.mark.finding(n=13)
@pytest.mark.parametrize(("size", "file"), [(100, "features.bin"), (500, "journal.jsonl")])
def test_build_that_hits_the_file_size_limit_names_the_file_and_can_be_resumed(features, tmp_path, size, file):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises(
            CarmilError, match=rf"store\.building/{file} cannot be written \(File too large\): .*`ulimit -f`"
        ):
            build_store(features, tmp_path / "store")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(build_store(features, tmp_path / "store").ids) == 7


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda facts: facts.update(dtype="float64"), "dtype is 'float64'"),
        (lambda facts: facts.update(width="4"), "width is '4': expected a whole number"),
        (lambda facts: facts.update(width=-4), "width is -4: expected greater than or equal to 1"),
        (lambda facts: facts.update(version=-1), "version is -1: expected greater than or equal to 1"),
        (lambda facts: facts.update(version=0), "version is 0: expected greater than or equal to 1"),
        (lambda facts: facts.update(version="2"), "version is '2': expected a whole number"),
        (lambda facts: facts.pop("version"), "version is missing"),
        (lambda facts: facts["bags"][0].update(tile_size=-256), "bags[0].tile_size is -256: expected greater"),
        (lambda facts: facts["bags"][0].update(vanished=7), "bags[0].vanished is 7: expected less"),
        (lambda facts: facts.update(bags={}), "bags is an object: expected a list"),
        (lambda facts: facts["bags"][0].update(rows=-3), "bags[0].rows is -3: expected greater"),
        (lambda facts: facts["bags"][0].update(rows=1e400), "it contains NaN or an infinite number"),
        (lambda facts: facts["bags"][0].update(id=None), "bags[0].id is None: expected text"),
        (lambda facts: facts["bags"][0].update(id="01"), "two bags of the same name"),
        (lambda facts: facts["bags"][0].update(unit="furlong"), "unit is 'furlong'"),
        (lambda facts: facts["bags"][0].pop("checksum"), "checksum is missing"),
        (lambda facts: facts.update(fingerprint=[]), "fingerprint is a list: expected text"),
        (lambda facts: facts.update(empty=3), "empty is 3: expected a list"),
    ],
)
def test_store_with_an_invalid_index_raises_an_error_of_one_line(features, tmp_path, change, words):
    build_store(features, tmp_path / "store")
    index = tmp_path / "store" / "index.json"
    facts = json.loads(index.read_text())
    change(facts)
    index.write_text(json.dumps(facts))
    with pytest.raises(CarmilError) as refused:
        open_store(tmp_path / "store").bags()
    assert words in str(refused.value) and str(index) in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.finding(n=14)
@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts.update(fingerprint="0" * 32),
        lambda facts: facts["bags"][0].update(id="other"),
    ],
)
def test_check_detects_an_index_modified_after_the_build(features, tmp_path, change):
    index = build_store(features, tmp_path / "store").path / "index.json"
    assert check_store(open_store(tmp_path / "store")) == []
    facts = json.loads(index.read_text())
    change(facts)
    index.write_text(json.dumps(facts))
    assert [(problem.bag, problem.kind) for problem in check_store(open_store(tmp_path / "store"))] == [("", "index")]


@pytest.mark.finding(n=14)
@pytest.mark.parametrize("kind", ["npy", "npz", "pt", "h5"])
def test_file_with_a_false_declared_size_is_rejected_before_writing(tmp_path, kind):
    folder = tmp_path / "features"
    folder.mkdir()
    rows, false_header = np.ones((20, 8), np.float32), folder / f"liar.{kind}"
    np.save(folder / "good.npy", rows)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (10**9, 8)})
    match kind:
        case "npy":
            false_header.write_bytes(header.getvalue() + rows.tobytes())
        case "npz":
            with zipfile.ZipFile(false_header, "w") as archive:
                archive.writestr("features.npy", header.getvalue() + rows.tobytes())
        case "pt":
            torch.save(torch.ones(1).expand(10**9, 8), false_header)
        case "h5":
            with h5py.File(false_header, "w") as file:
                file.create_dataset("features", (10**9, 8), "f4", chunks=(64, 8), compression="gzip")
    with pytest.raises(CarmilError, match=rf"liar\.{kind}.* declares 32,000,000,000 bytes, but the file holds"):
        build_store(folder, tmp_path / "store", workers=1)
    assert [path.name for path in tmp_path.iterdir()] == ["features"]


@pytest.mark.finding(n=10)
@pytest.mark.parametrize("out", ["link", "link/below"])
def test_out_folder_that_is_a_broken_link_is_rejected_before_writing(features, tmp_path, run_cli, out):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    status, _, err = run_cli("cohort", "build", str(features), "--out", str(tmp_path / out))
    assert status == 2 and "link is a broken link: remove it or choose another --out" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "src"]


@pytest.mark.finding(n=10)
def test_store_is_built_at_the_target_of_a_symlinked_out_folder(features, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    build_store(features, tmp_path / "link")
    assert is_store(tmp_path / "disk") and (tmp_path / "link").is_symlink()
