"""The readers that are fuzzed: each has a folder of good files, and a function that reads it as a command would.

`make` writes variants below a folder, one folder each; `read` gets a variant's folder and the file in it that was changed.
Whatever `read` raises but `CarmilError` is a failure.
"""

import asyncio
import atexit
import gzip
import json
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from carmil.errors import CarmilError

FEATURES = np.arange(24, dtype=np.float32).reshape(6, 4) / 7
GRID = np.array([(x * 256, y * 256) for y in range(2) for x in range(3)])
CLASSES, WIDTH = ("a", "b"), 6


@dataclass(frozen=True)
class Target:
    """`only`: the endings or names of the files that are changed; all, if there are none."""

    name: str
    make: Callable[[Path], None]
    read: Callable[[Path, Path], None]
    only: tuple[str, ...] = ()


def _picture(width: int = 160, height: int = 120) -> np.ndarray:
    picture = np.full((height, width, 3), 240, np.uint8)
    picture[20:100, 30:130] = (180, 60, 140)
    picture[::7, ::5, 1] = 99
    return picture


def _make_tiffs(folder: Path) -> None:
    import tifffile

    scale: dict[str, Any] = {"resolution": (20_000, 20_000), "resolutionunit": "CENTIMETER", "metadata": None}
    plain = {
        "tiled": {"tile": (32, 48), **scale},
        "strips": {"rowsperstrip": 16, **scale},
        "jpeg": {"tile": (32, 32), "compression": "jpeg", **scale},
        "lzw": {"tile": (32, 32), "compression": "lzw", "predictor": True, **scale},
        "deflate": {"tile": (32, 32), "compression": "zlib", **scale},
        "big": {"tile": (32, 32), "bigtiff": True, **scale},
        "motorola": {"tile": (32, 32), "byteorder": ">", **scale},
        "planes": {"tile": (32, 32), "planarconfig": "separate", **scale},
    }
    for name, how in plain.items():
        (folder / name).mkdir(parents=True)
        picture = _picture().transpose(2, 0, 1) if name == "planes" else _picture()
        big, order = how.pop("bigtiff", False), how.pop("byteorder", None)
        with tifffile.TiffWriter(folder / name / "s.tif", bigtiff=big, byteorder=order) as file:
            file.write(picture, photometric="rgb", **how)
    (folder / "grey").mkdir()
    tifffile.imwrite(folder / "grey" / "s.tif", _picture()[..., 0], photometric="minisblack", tile=(32, 32), **scale)
    (folder / "pyramid").mkdir()
    with tifffile.TiffWriter(folder / "pyramid" / "s.ome.tif", ome=True) as file:
        size = {"PhysicalSizeX": 0.5, "PhysicalSizeXUnit": "µm", "PhysicalSizeY": 0.5, "PhysicalSizeYUnit": "µm"}
        file.write(_picture(), subifds=1, tile=(32, 32), photometric="rgb", metadata={"axes": "YXS", **size})
        file.write(_picture()[::2, ::2], subfiletype=1, tile=(32, 32), photometric="rgb")


def _make_svs(folder: Path) -> None:
    """What OpenSlide takes for Aperio's, Trestle's and a plain TIFF with tiles."""
    import tifffile

    words = {
        "aperio": "Aperio Image Library v11.2.1\r\n160x120 [0,0 160x120] (32x32) JPEG/RGB Q=70|AppMag = 20|MPP = 0.4990",
        "jpeg2000": "Aperio Image Library v10.0.51\r\n160x120 (32x32) J2K/KDU Q=70|AppMag = 40|MPP = 0.25",
    }
    for name, description in words.items():
        (folder / name).mkdir(parents=True)
        how: dict[str, Any] = {"compression": "jpeg"} if name == "aperio" else {"compression": "aperio_jp2000_rgb"}
        with tifffile.TiffWriter(folder / name / "s.svs") as file:
            for picture in (_picture(), _picture(80, 60)):
                file.write(picture, photometric="rgb", tile=(32, 32), description=description, metadata=None, **how)


def _make_dicom(folder: Path) -> None:
    from tests.dicom_files import write_series

    write_series(folder / "one", _picture(), container="S1")
    write_series(folder / "levels", _picture(), container="S2", description="H&E", levels=2)


def _read_dicom(folder: Path, file: Path) -> None:
    from carmil.slides.dicom_series import slide_name
    from carmil.slides.opening import find_slides

    for path in find_slides([folder]):
        slide_name(path)
        _read_slide(folder, path)


def _make_pictures(folder: Path) -> None:
    from PIL import Image

    for name, mode in (("a.png", "RGB"), ("b.png", "RGBA"), ("c.png", "P"), ("d.jpg", "RGB"), ("e.jpg", "L")):
        path = folder / f"mpp-{name.replace('.', '-')}" / name
        path.parent.mkdir(parents=True)
        Image.fromarray(_picture()).convert(mode).save(path)


def _make_deep_tiffs(folder: Path) -> None:
    import tifffile

    deep = _picture().astype(np.uint16) * 257
    how: dict[str, Any] = {"photometric": "minisblack", "tile": (32, 32)}
    metadata = {"axes": "CYX", "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5}
    for name, pixels, more in (
        ("channels", _picture(), {"Channel": {"Name": ["Red", "Green", "Blue"]}}),
        ("deep", deep, {"SignificantBits": 16}),
    ):
        (folder / name).mkdir(parents=True)
        tifffile.imwrite(
            folder / name / "s.ome.tif", pixels.transpose(2, 0, 1), ome=True, metadata=metadata | more, **how
        )


def _read_slide(folder: Path, file: Path) -> None:
    from carmil.slides.opening import open_slide

    with open_slide(file, mpp=0.5 if "mpp" in folder.name else None) as slide:
        slide.read(0, 0, slide.width, slide.height, (64, 64))
        slide.read(slide.width / 3, slide.height / 3, 48, 48, (48, 48))
        slide.read(-10, -10, 64, 64, (32, 32))


def _make_tiles(folder: Path) -> None:
    import h5py

    from carmil.slides.slide import Tiles
    from carmil.slides.tiling import write_tiles

    for name, more in (("ours", {"tissue": 0.4}), ("more", None)):
        write_tiles(Tiles("s", GRID, 256.0, 256, 0.5, 3000, 2000, 0.5), folder / name, more=more)
    (folder / "trident").mkdir()
    with h5py.File(folder / "trident" / "s_patches.h5", "w") as file:
        coords = file.create_dataset("coords", data=GRID, chunks=(4, 2), maxshape=(None, 2), compression="gzip")
        coords.attrs.update(patch_size=256, patch_size_level0=512, level0_magnification=40, target_magnification=20)
        coords.attrs.update(name="s", savetodir="x", level0_width=3000, level0_height=2000, overlap=0)


def _read_tiles(folder: Path, file: Path) -> None:
    from shapely import Polygon

    from carmil.maps.regions import Region
    from carmil.maps.tile_labels import label_tiles
    from carmil.slides.tiling import read_more, read_tiles

    tiles = read_tiles(file)
    read_more(file)
    label_tiles(tiles, [Region("tumour", Polygon([(10.0, 10.0), (900.0, 10.0), (500.0, 700.0)]))])


def _make_annotations(folder: Path) -> None:
    square = [[10, 10], [900, 10], [900, 800], [10, 800], [10, 10]]
    hole = [[100, 100], [200, 100], [200, 200], [100, 100]]
    properties = {"objectType": "annotation", "classification": {"name": "Tumor", "color": [200, 0, 0]}}

    def feature(geometry: dict[str, Any]) -> dict[str, Any]:
        return {"type": "Feature", "geometry": geometry, "properties": properties}

    features = [
        feature({"type": "Polygon", "coordinates": [square, hole]}),
        feature({"type": "MultiPolygon", "coordinates": [[square], [hole]]}),
        feature({"type": "GeometryCollection", "geometries": [{"type": "Polygon", "coordinates": [square]}]}),
        feature({"type": "Point", "coordinates": [3, 4]}),
    ]
    written = {
        "collection.geojson": json.dumps({"type": "FeatureCollection", "features": features}),
        "list.geojson": json.dumps(
            [features[0], {**features[0], "properties": {"name": "x", "classification": {"names": ["a", "b"]}}}]
        ),
        "asap.xml": '<?xml version="1.0"?><ASAP_Annotations><Annotations>'
        '<Annotation Name="A0" Type="Polygon" PartOfGroup="Tumor" Color="#F4FA58"><Coordinates>'
        '<Coordinate Order="0" X="10.5" Y="10" /><Coordinate Order="1" X="900" Y="10" />'
        '<Coordinate Order="2" X="500" Y="700" /></Coordinates></Annotation></Annotations></ASAP_Annotations>',
        "aperio.xml": '<Annotations MicronsPerPixel="0.25"><Annotation Id="1" Name="" Type="4"><Regions>'
        '<Region Id="1" Type="0" NegativeROA="0" Text="Tumor"><Vertices><Vertex X="10" Y="10"/><Vertex X="900" Y="10"/>'
        '<Vertex X="500" Y="700"/></Vertices></Region><Region Id="2" Type="2" NegativeROA="1" Text=""><Vertices>'
        '<Vertex X="50" Y="50"/><Vertex X="90" Y="90"/></Vertices></Region></Regions></Annotation></Annotations>',
    }
    for name, text in written.items():
        (folder / name.replace(".", "_")).mkdir(parents=True)
        (folder / name.replace(".", "_") / name).write_text(text, encoding="utf-8")


def _make_histomics(folder: Path) -> None:
    outline = [[10, 10, 0], [900, 10, 0], [900, 800, 0], [10, 800, 0]]
    box = {"center": [500, 400, 0], "width": 300, "height": 200, "rotation": 0.4}
    elements = [
        {"type": "polyline", "points": outline, "closed": True, "group": "tumour", "holes": [outline[:3]]},
        {"type": "rectangle", **box, "label": {"value": "stroma"}},
        {"type": "ellipse", **box},
        {"type": "circle", "center": [300, 300, 0], "radius": 90},
        {"type": "arrow", "points": outline[:2]},
    ]
    for name, document in (
        ("list", [{"annotation": {"name": "a", "elements": elements}}]),
        ("one", {"name": "a", "elements": elements}),
    ):
        (folder / name).mkdir(parents=True)
        (folder / name / "s.json").write_text(json.dumps(document))


def _make_png_masks(folder: Path) -> None:
    from PIL import Image

    mask = np.zeros((100, 150), np.uint8)
    mask[10:60, 20:90], mask[30:40, 30:50] = 1, 0
    for name, picture in (
        ("numbers", Image.fromarray(mask)),
        ("deep", Image.fromarray(mask.astype(np.uint16))),
        ("colours", Image.fromarray(np.stack([mask * 255, mask, mask], axis=-1))),
        ("palette", Image.fromarray(mask).convert("P")),
    ):
        (folder / name).mkdir(parents=True)
        picture.save(folder / name / "mask.png")


def _make_masks(folder: Path) -> None:
    import tifffile

    mask = np.zeros((100, 150), np.uint8)
    mask[10:60, 20:90], mask[30:40, 30:50], mask[70:95, 100:140] = 1, 0, 7
    for name, values, how in (
        ("tiled", mask, {"tile": (32, 32)}),
        ("packed", mask.astype(np.uint16), {"tile": (32, 32), "compression": "zlib"}),
        ("signed", mask.astype(np.int32), {}),
        ("three", np.stack([mask] * 3, axis=-1), {"photometric": "rgb"}),
        ("bits", mask > 0, {}),
    ):
        (folder / name).mkdir(parents=True)
        tifffile.imwrite(folder / name / "mask.tif", values, metadata=None, **how)


def _read_annotations(folder: Path, file: Path) -> None:
    from carmil.maps.annotations import read_annotations
    from carmil.maps.tile_labels import label_tiles
    from carmil.slides.slide import Tiles

    regions = read_annotations(file, width=3000, height=2000)
    label_tiles(Tiles("s", GRID, 256.0, 256, 0.5, 3000, 2000, 0.5), regions)


def _label_rows() -> list[list[str]]:
    rows = [["slide_id", "case_id", "label", "split", "site"]]
    rows += [
        [f"s{i}", f"P{i // 2}", "ab"[i % 4 // 2], ("train", "val", "test")[i // 2 % 3], "xy"[i % 2]] for i in range(12)
    ]
    return rows


def _make_labels(folder: Path) -> None:
    import pandas as pd

    rows = _label_rows()
    texts = {
        "comma.csv": "\n".join(",".join(row) for row in rows) + "\n",
        "tab.tsv": "\n".join("\t".join(row) for row in rows) + "\n",
        "bare.csv": "\n".join(f"{row[0]}.svs,{row[2]}" for row in rows[1:]) + "\n",
        "comments.tsv": "#x\n#y\n" + "\n".join("\t".join(row) for row in rows) + "\n",
    }
    for name, text in texts.items():
        (folder / name.replace(".", "_")).mkdir(parents=True)
        (folder / name.replace(".", "_") / name).write_text(text, encoding="utf-8")
    (folder / "parquet").mkdir()
    frame = pd.DataFrame(rows[1:], columns=rows[0])
    frame.to_parquet(folder / "parquet" / "labels.parquet")
    (folder / "numbers").mkdir()
    frame.assign(label=[i % 2 for i in range(12)], case_id=range(12)).to_parquet(folder / "numbers" / "labels.parquet")


def _read_labels(folder: Path, file: Path) -> None:
    from carmil.bags.labels import match, read_labels

    table = read_labels(file)
    match(table, [f"s{i}" for i in range(12)])


def _split_cohort() -> tuple[list[str], list[str], list[int]]:
    return [f"s{i}" for i in range(12)], [f"P{i}" for i in range(12)], [i % 2 for i in range(12)]


def _make_splits(folder: Path) -> None:
    from carmil.bags.split_files import write_splits
    from carmil.bags.splits import make_splits

    slides, patients, labels = _split_cohort()
    splits = make_splits(slides, patients, labels, folds=3)
    for form in ("carmil", "clam", "patho-bench", "stamp"):
        (folder / form).mkdir(parents=True)
        write_splits(folder / form, splits, form=form, labels=labels, classes=CLASSES)
    (folder / "torchmil").mkdir()
    lines = ["bag_name,split", *(f"s{i},{'train' if i < 8 else 'test'}" for i in range(12))]
    (folder / "torchmil" / "splits.csv").write_text("\n".join(lines) + "\n")


def _read_splits(folder: Path, file: Path) -> None:
    from carmil.bags.split_files import read_splits

    for path in (folder, file):
        read_splits(path, *_split_cohort())


def _make_settings(folder: Path) -> None:
    text = (
        "bags: features\nout: run\nlabels: labels.csv\nmodel: car/abmil.gated\noptions: {hidden: 8, attention: 4}\n"
        "folds: 3\nseeds: 2\nlr: [1e-4, 2e-4]\nepochs: 4\nlambda: 0.5\nofficial: false\npatients: mean\nlabel: label\n"
    )
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "study.yaml").write_text(text)


def _read_settings(folder: Path, file: Path) -> None:
    from carmil.runs.settings import Settings, read_settings

    json.dumps(Settings.of(read_settings(file), where=str(file)).as_json())


def _bag(name: str = "s0") -> Any:
    from carmil.bags.sources import Bag

    labels = np.array([0, 0, 1, 0, 0, 1])
    places = GRID.astype(np.float32)
    return Bag(name, FEATURES, places, "level0_px", 256.0, "made", labels)


def _make_bags(*layouts: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        from dataclasses import replace

        from carmil.bags.writers import write_bag

        for layout in layouts:
            unit = {"coordinate_unit": "um"} if layout == "stamp" else {}
            for name in ("s0", "s1"):
                write_bag(replace(_bag(name), **unit), folder / layout, layout)

    return make


def _make_h5_bags(folder: Path) -> None:
    import h5py

    _make_bags("clam", "trident", "stamp", "torchmil")(folder)
    (folder / "acmil").mkdir()
    with h5py.File(folder / "acmil" / "all.h5", "w") as file:
        for name in ("s0", "s1"):
            file[f"{name}/feat"] = FEATURES
            file[f"{name}/coords"] = GRID
            file[name].attrs["label"] = 1
    (folder / "packed").mkdir()
    with h5py.File(folder / "packed" / "s0.h5", "w", libver="latest") as file:
        file.create_dataset("features", data=FEATURES, chunks=(2, 4), compression="gzip", shuffle=True)
        file.create_dataset("coords", data=GRID, chunks=(2, 2), fletcher32=True)
        file["coords"].attrs["patch_size_level0"] = 256


def _make_matrices(folder: Path) -> None:
    (folder / "npy").mkdir(parents=True)
    np.save(folder / "npy" / "features.npy", np.tile(FEATURES, (2, 1)))
    lines = ["bag,instance_label", *(f"s{i // 6},{i % 2}" for i in range(12))]
    (folder / "npy" / "instances.csv").write_text("\n".join(lines) + "\n")
    (folder / "npz").mkdir()
    bags = np.repeat([0, 1], 6)
    np.savez(folder / "npz" / "cohort.npz", X=np.tile(FEATURES, (2, 1)), bag=bags, y_bag=np.array([0, 1]), y_inst=bags)


def _read_bags(folder: Path, file: Path) -> None:
    from carmil.bags.finding import find_bags
    from carmil.bags.readers import read_bag, read_header

    for source in find_bags(folder if folder.name != "npz" else file).sources:
        read_header(source)
        read_bag(source)


def _make_store(folder: Path) -> None:
    from carmil.bags.building import build_store

    with tempfile.TemporaryDirectory() as name:
        for layout in ("trident", "npz"):
            _make_bags(layout)(Path(name))
            build_store(Path(name) / layout, folder / layout, workers=1, log=lambda line: None)
        build_store(Path(name) / "npz", folder / "bfloat", dtype="bfloat16", workers=1, log=lambda line: None)


def _read_store(folder: Path, file: Path) -> None:
    from carmil.bags.checking import check_store
    from carmil.bags.store import open_store

    store = open_store(folder)
    store.bags()
    for position in range(min(4, len(store.entries))):
        store.bag(position)
    check_store(store)


@cache
def study() -> Path:
    """A folder with a small study, made once per process: features, labels.csv and its run."""
    from small_study import train_small_study

    folder = Path(_KEPT.enter_context(tempfile.TemporaryDirectory()))
    train_small_study(folder, tiles=10)
    return folder


_KEPT = ExitStack()
atexit.register(_KEPT.close)


def _make_run(folder: Path) -> None:
    shutil.copytree(study() / "run", folder / "run")


def _read_run(folder: Path, file: Path) -> None:
    """Open the run with all its files, then read it as the report, `predict`, the viewer or the card does.

    Which of these is decided by the mutant: a tenth of them gets a report, which takes longest.
    """
    from carmil.report import run as report
    from carmil.runs.run import read_run
    from carmil.studies import card, evaluate
    from carmil.viewer.cases import read_cases

    run = read_run(folder)
    run.predictions()
    run.history()
    run.population()
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        match zlib.crc32(file.read_bytes()) % 10:
            case 0:
                report.write_report(run, Path(name) / "report.html")
            case 1 | 2 | 3:
                evaluate.predict_bags(folder, folder / "cohort", Path(name), device="cpu", log=lambda line: None)
            case 4 | 5 | 6:
                read_cases(folder)
            case _:
                card.card(run)


def _make_imported(folder: Path) -> None:
    """Runs of an imported model: measured on slides, and without slides."""
    import torch

    from carmil.studies.import_checkpoint import import_checkpoint

    with tempfile.TemporaryDirectory() as name:
        checkpoint = Path(name) / "clam.pt"
        torch.save(_clam_weights(WIDTH), checkpoint)
        given: dict[str, Any] = {"classes": CLASSES, "device": "cpu"}
        slides = {"bags": study() / "run" / "cohort", "labels": study() / "labels.csv"}
        import_checkpoint(checkpoint, "clam", folder / "measured", **slides, **given)
        import_checkpoint(checkpoint, "clam", folder / "plain", **given)


def _read_imported(folder: Path, file: Path) -> None:
    """Read the run as `carmil report` and `predict` do; every fifth mutant predicts, which takes longest."""
    from carmil.runs.run import read_run
    from carmil.studies import card, evaluate, tables

    run = read_run(folder)
    run.predictions()
    run.population()
    card.card(run)
    tables.figures_lines(run)
    if zlib.crc32(file.read_bytes()) % 5 == 0:
        with tempfile.TemporaryDirectory(dir=folder.parent) as name:
            evaluate.predict_bags(folder, study() / "run" / "cohort", Path(name), device="cpu", log=lambda line: None)


def _make_evidence(folder: Path) -> None:
    from carmil.explanations.explain import explain_run

    with tempfile.TemporaryDirectory() as name:
        explain_run(
            study() / "run",
            Path(name) / "evidence",
            bags=None,
            methods=(),
            searched=False,
            device="cpu",
            log=lambda line: None,
        )
        (folder / "a").mkdir(parents=True)
        for slide in ("s0", "s1"):
            (folder / "a" / f"{slide}.parquet").write_bytes((Path(name) / "evidence" / f"{slide}.parquet").read_bytes())


def _make_evidence_figures(folder: Path) -> None:
    """A run with the figures of `carmil explain` and `carmil faithfulness`."""
    from carmil.explanations.explain import explain_run
    from carmil.explanations.faithfulness import measure_faithfulness
    from carmil.report.faithfulness import write_faithfulness

    _make_run(folder)
    run = folder / "run"
    how: dict[str, Any] = {"methods": (), "device": "cpu", "log": lambda line: None}
    explain_run(run, None, bags=None, searched=True, **how)
    judged = measure_faithfulness([run], run / "faithfulness", steps=10, random_orders=1, **how)
    write_faithfulness(judged, run / "faithfulness", command="carmil faithfulness")


@cache
def _run_and_cases(folder: Path) -> Any:
    from carmil.report.cases import decide_cases, one_row_per_slide
    from carmil.runs.run import read_run

    run = read_run(folder)
    return run, decide_cases(run, one_row_per_slide(run))


def _read_evidence_figures(folder: Path, file: Path) -> None:
    """As the report of a run reads them. What is wrong with a file of faithfulness is written into the report."""
    from unittest.mock import patch

    from carmil.report import run as run_report

    with patch.object(
        run_report, "gallery", lambda *_, **__: []
    ):  # drawn from the slides' files, a target of their own
        run_report.evidence_part(*_run_and_cases(folder))
    found = run_report.measured_faithfulness(_run_and_cases(folder)[0])
    if isinstance(found, str):
        raise CarmilError(found)


def _read_evidence(folder: Path, file: Path) -> None:
    from carmil.runs.slide_evidence import read_slide_evidence

    found = read_slide_evidence(file)
    found.coordinates  # noqa: B018 - computed when looked at
    found.maps()
    len(found)


def _make_requests(folder: Path) -> None:
    (folder / "a").mkdir(parents=True)
    bodies = (
        {"remove": [0, 3, 5]},
        {"keep": [0, 3, 5]},
        {"top": 0.3, "map": "evidence", "class": 1},
        {"polygon": [[0, 0], [300, 0], [300, 200.5], [0, 200]]},
    )
    for i, body in enumerate(bodies):
        (folder / "a" / f"body{i}.json").write_text(json.dumps(body))
    targets = (
        *(
            "/",
            "/api/cohort",
            "/api/case/0",
            "/api/case/1/places",
            "/api/case/0/map/evidence?class=1",
            "/page/viewer.js",
        ),
        *(
            "/api/case/2/top?class=0&count=5",
            "/api/case/0/map/factual",
            "/api/case/3/zoom/3/0_0.jpeg",
            "/api/case/1/annotations",
            "/api/case/1/annotations.geojson",
            "/api/case/1/tiles.csv",
            "/?token=abcdef",
        ),
        *("/api/case/0/instance/0.jpeg", "/api/case/0/deletion?class=1"),
    )
    for i, target in enumerate(targets):
        (folder / "a" / f"target{i}.txt").write_text(target)


@cache
def _viewer() -> tuple[Any, asyncio.Runner]:
    """The viewer's application, made once per process."""
    from carmil.viewer.app import guarded_app
    from carmil.viewer.cases import read_cases
    from carmil.viewer.guard import known_hosts
    from carmil.viewer.responses import Responses
    from carmil.viewer.slide_files import SlideFiles

    run = read_cases(study() / "run")
    answers = Responses(run, SlideFiles(None, [case.slide for case in run.cases]))
    runner = _KEPT.enter_context(asyncio.Runner())
    return guarded_app(answers, is_known=known_hosts([], any_address=False)), runner


def _read_request(folder: Path, file: Path) -> None:
    """Asks the viewer; a status of 400 to 499 with one line is a refusal, 500 a failure."""
    from urllib.parse import unquote

    content = file.read_bytes()
    body, target, method = (content, b"/api/case/0/whatif", "POST") if file.suffix == ".json" else (b"", content, "GET")
    raw, _, query = target.partition(b"?")
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(raw.decode("latin-1")),
        "raw_path": raw,
        "query_string": query,
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    parts, answer = [body], []

    async def receive() -> dict[str, Any]:
        if not parts:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": parts.pop(0), "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        answer.append(message)

    app, runner = _viewer()
    runner.run(app(scope, receive, send))
    status, said = answer[0]["status"], b"".join(part.get("body", b"") for part in answer[1:])
    if status >= 500:
        raise AssertionError(f"status {status}: {said[:200]!r}")
    if status >= 400:
        raise CarmilError(json.loads(said)["error"])


def _make_idx(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name, packed in (("plain", False), ("gz", True)):
        (folder / name).mkdir(parents=True)
        for part, many in (("train", 6), ("t10k", 4)):
            images = struct.pack(">HBBIII", 0, 8, 3, many, 28, 28) + rng.integers(0, 9, many * 784, np.uint8).tobytes()
            labels = struct.pack(">HBBI", 0, 8, 1, many) + rng.integers(0, 9, many, np.uint8).tobytes()
            for kind, content in (("images-idx3", images), ("labels-idx1", labels)):
                file = folder / name / f"{part}-{kind}-ubyte{'.gz' if packed else ''}"
                file.write_bytes(gzip.compress(content) if packed else content)


def _read_idx(folder: Path, file: Path) -> None:
    from carmil.datasets.digit_images import mnist_from_folder

    mnist_from_folder(folder).fingerprint  # noqa: B018 - computed when looked at


def _make_weights(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    state = {
        "conv.weight": torch.ones(4, 3, 2, 2),
        "conv.bias": torch.zeros(4),
        "bn.num_batches_tracked": torch.tensor(3),
    }
    for name in ("pt", "wrapped", "old", "safetensors"):
        (folder / name).mkdir(parents=True)
    torch.save(state, folder / "pt" / "weights.pt")
    torch.save({"state_dict": state, "epoch": 3}, folder / "wrapped" / "weights.pt")
    torch.save(state, folder / "old" / "weights.pt", _use_new_zipfile_serialization=False)
    save_file(state, folder / "safetensors" / "weights.safetensors")


def _read_weights(folder: Path, file: Path) -> None:
    import torch

    from carmil.weights import fingerprint, read_weights

    network = torch.nn.Module()
    for i, (_, value) in enumerate(read_weights(file).items()):
        network.register_buffer(f"b{i}", value)
    fingerprint(network)


def _clam_weights(width: int) -> dict[str, Any]:
    gates = {f"attention_net.3.attention_{gate}.0": (2, 4) for gate in "ab"}
    heads = {f"instance_classifiers.{c}": (2, 4) for c in range(2)}
    layers = {"attention_net.0": (4, width), **gates, "attention_net.3.attention_c": (1, 2), "classifiers": (2, 4)}
    return _linear_layers(layers | heads)


def _linear_layers(sizes: dict[str, tuple[int, int]]) -> dict[str, Any]:
    import torch

    parts = {"weight": torch.ones, "bias": lambda rows, _: torch.zeros(rows)}
    return {f"{name}.{part}": make(*size) for name, size in sizes.items() for part, make in parts.items()}


def _make_checkpoints(folder: Path) -> None:
    """Checkpoints as CLAM and xMIL write them, with what they hold besides weights."""
    import torch

    xmil = {"linear_layers.0.0": (4, 3), "attention.0": (2, 4), "attention.2": (1, 2), "classifier": (2, 4)}
    state = {
        "model_state_dict": _linear_layers(xmil),
        "epoch": 3,
        "auc": {"auc": np.float64(0.5)},
        "where": folder.name,
    }
    contents = {"clam": _clam_weights(3) | {"instance_loss_fn.labels": torch.tensor([0, 1])}, "xmil": state}
    for name, content in contents.items():
        for form in ("zip", "old"):
            (folder / f"{name}-{form}").mkdir()
            torch.save(content, folder / f"{name}-{form}" / "model.pt", _use_new_zipfile_serialization=form == "zip")


def _read_checkpoint(folder: Path, file: Path) -> None:
    from carmil.models.checkpoint_layouts import recognise
    from carmil.torch_files import read_state_dicts

    recognise(folder.name.partition("-")[0], read_state_dicts(file), file)


def _make_classifier(folder: Path) -> None:
    from carmil import MILClassifier

    rng = np.random.default_rng(0)
    bags = [rng.normal(size=(5, 4)).astype(np.float32) for _ in range(12)]
    fitted = MILClassifier(model="car/abmil", options={"hidden": 8, "attention": 4}, epochs=2, seeds=2, device="cpu")
    fitted.fit(bags, [i % 2 for i in range(12)])
    fitted.save_pretrained(folder / "a")


def _read_classifier(folder: Path, file: Path) -> None:
    from carmil import MILClassifier

    MILClassifier.from_pretrained(folder, device="cpu").predict_proba([FEATURES])


_HEADS = (".json", ".parquet", ".safetensors", ".tsv")
_FIGURES = ("summary.json", "explanation.json", "faithfulness.json")
TARGETS = {
    target.name: target
    for target in (
        Target("slides-tifffile", _make_tiffs, _read_slide),
        Target("slides-openslide", _make_svs, _read_slide),
        Target("slides-dicom", _make_dicom, _read_dicom),
        Target("slides-pictures", _make_pictures, _read_slide),
        Target("slides-deep", _make_deep_tiffs, _read_slide),
        Target("tiles-h5", _make_tiles, _read_tiles),
        Target("annotations", _make_annotations, _read_annotations),
        Target("histomics", _make_histomics, _read_annotations),
        Target("masks", _make_masks, _read_annotations),
        Target("png-masks", _make_png_masks, _read_annotations),
        Target("labels", _make_labels, _read_labels),
        Target("splits", _make_splits, _read_splits),
        Target("settings-yaml", _make_settings, _read_settings),
        Target("bags-h5", _make_h5_bags, _read_bags, (".h5",)),
        Target("bags-npy", _make_bags("npy"), _read_bags),
        Target("bags-npz", _make_bags("npz"), _read_bags),
        Target("bags-pt", _make_bags("pt", "slideflow"), _read_bags),
        Target("bags-safetensors", _make_bags("safetensors"), _read_bags),
        Target("bags-matrix", _make_matrices, _read_bags),
        Target("stores", _make_store, _read_store),
        Target("runs", _make_run, _read_run, _HEADS),
        Target("runs-imported", _make_imported, _read_imported, _HEADS),
        Target("evidence", _make_evidence, _read_evidence),
        Target("evidence-figures", _make_evidence_figures, _read_evidence_figures, _FIGURES),
        Target("viewer-requests", _make_requests, _read_request),
        Target("mnist-idx", _make_idx, _read_idx),
        Target("encoder-weights", _make_weights, _read_weights),
        Target("checkpoints", _make_checkpoints, _read_checkpoint),
        Target("classifiers", _make_classifier, _read_classifier),
    )
}
