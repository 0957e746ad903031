"""Small made-up files that the pages expect: features in CLAM's layout, slides, weights and tables."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

SLIDES = 10


@pytest.fixture(scope="session")
def material(tmp_path_factory) -> Path:
    """Return a folder with every file that pages use but do not create."""
    folder = tmp_path_factory.mktemp("material")
    rng = np.random.default_rng(0)
    _cohort(folder / "features", folder / "labels.csv", rng, slides=SLIDES)
    _cohort(folder / "new_features", folder / "new.csv", rng, slides=3)
    _cohort(folder / "other", folder / "other.csv", rng, slides=12)
    _slides(folder, rng)
    _weights(folder)
    _crc(folder / "crc_files", rng)
    _musk(folder / "musk1.npz", rng)
    _tables(folder)
    _checkpoint(folder / "s_0_checkpoint.pt")
    (folder / "study.yaml").write_text("bags: cohort\nlabels: labels.csv\n")
    return folder


@pytest.fixture(scope="session")
def store(material, tmp_path_factory) -> Path:
    from carmil.bags.building import build_store

    path = tmp_path_factory.mktemp("store") / "cohort"
    build_store(material / "features", path, log=lambda line: None)
    return path


@pytest.fixture(scope="session")
def runs(material, store, tmp_path_factory) -> Path:
    """Return a folder with runs on the features, under the names used in the pages."""
    folder = tmp_path_factory.mktemp("runs")
    for name, model in (("run", "car/abmil"), ("run_abmil", "abmil"), ("run_car", "car/abmil")):
        _run(folder / name, store, material / "labels.csv", model)
    return folder


@pytest.fixture(scope="session")
def tiles(drawn) -> Path:
    return drawn / "tiles"


@pytest.fixture(scope="session")
def drawn(material, tmp_path_factory) -> Path:
    """Return a folder with tiles of the slides, two runs on their features, and the evidence of one."""
    from carmil.explanations.explain import explain_run
    from carmil.slides.encoders import load_encoder
    from carmil.slides.features import encode_slides
    from carmil.slides.tile_cohort import tile_slides

    folder = tmp_path_factory.mktemp("drawn")
    outcomes = tile_slides(sorted((material / "slides").iterdir()), folder / "tiles")
    encoder = load_encoder("timm/test_resnet", weights=material / "test_resnet.pt")
    cut = {one.path: one.tiles for one in outcomes}
    encode_slides(cut, folder / "store", encoder, device="cpu", say=lambda line: None)
    for name, model in (("run", "car/abmil"), ("run_abmil", "abmil")):
        _run(folder / name, folder / "store", material / "labels.csv", model)
    explain_run(folder / "run", None, bags=None, methods=(), searched=False, device="cpu", log=lambda line: None)
    return folder


def copy_files(source: Path, folder: Path) -> None:
    """Copy the files of `source` to `folder`; large files, which no page modifies, are linked."""
    shutil.copytree(source, folder, copy_function=_copy_or_link, dirs_exist_ok=True)


def _copy_or_link(source: str, target: str) -> None:
    (os.link if Path(source).suffix in (".svs", ".pt", ".safetensors") else shutil.copy2)(source, target)


@pytest.fixture
def lay_out():
    return copy_files


def _run(out: Path, bags: Path, labels: Path, model: str) -> None:
    from carmil.report.run import write_report
    from carmil.runs.settings import Settings
    from carmil.studies.train import run_study

    options = {"hidden": 8, "attention": 4}
    settings = Settings(bags=bags, labels=labels, out=out, model=model, options=options, folds=2, epochs=2, lr=1e-3)
    write_report(run_study(settings, log=lambda line: None), out / "report.html")


def _cohort(folder: Path, labels: Path, rng: np.random.Generator, *, slides: int) -> None:
    """Write a cohort of two classes that differ in one tile per slide, with the names of the slides."""
    from carmil.bags.sources import Bag
    from carmil.bags.writers import write_bag

    lines = ["slide_id,case_id,label"]
    for i in range(slides):
        features = rng.normal(size=(6, 16)).astype(np.float32)
        features[0, 0] += 5 * (i % 2)
        places = np.stack([256.0 * np.arange(6), np.zeros(6)], axis=1).astype(np.float32)
        write_bag(Bag(f"p{i:02d}", features, places, "level0_px", 256.0), folder, "clam")
        lines.append(f"p{i:02d},patient{i:02d},{'crowded' if i % 2 else 'calm'}")
    labels.write_text("\n".join([*lines, ""]))


def _slides(folder: Path, rng: np.random.Generator) -> None:
    """Write slides like those of Aperio scanners, just large enough for tissue detection, and new.svs and my_slide.svs."""
    import tifffile

    (folder / "slides").mkdir()
    for i in range(SLIDES):
        picture = np.full((1200, 1200, 3), 245, np.uint8)
        colour = (150, 90, 170) if i % 2 else (225, 130, 180)
        picture[40:1160, 40:1160] = np.clip(colour + rng.normal(0, 25, (1120, 1120, 1)), 0, 255)
        tifffile.imwrite(
            folder / "slides" / f"p{i:02d}.svs",
            picture,
            tile=(256, 256),
            photometric="rgb",
            description="Aperio Image Library v11.2.1\r\n1200x1200 -> 1200x1200|AppMag = 20|MPP = 0.5",
            metadata=None,
        )
    for name in ("new.svs", "my_slide.svs"):
        os.link(folder / "slides" / "p01.svs", folder / name)
    for i in range(2):
        home = folder / "slides_by_class" / ("crowded" if i else "calm")
        home.mkdir(parents=True)
        os.link(folder / "slides" / f"p{i:02d}.svs", home / f"p{i:02d}.svs")
    square = [[[100, 100], [400, 100], [400, 400], [100, 400], [100, 100]]]
    region = {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": square},
        "properties": {"classification": {"name": "tumour"}},
    }
    (folder / "p00.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": [region]}))


def _weights(folder: Path) -> None:
    """Write random weights of a tiny encoder, a small encoder, and ResNet50 up to its third stage."""
    import timm
    import torch
    from safetensors.torch import save_file
    from torchvision.models import resnet50

    torch.manual_seed(0)
    for name in ("test_resnet", "resnet10t"):
        torch.save(timm.create_model(name, pretrained=False).state_dict(), folder / f"{name}.pt")
    kept = {name: value for name, value in resnet50().state_dict().items() if not name.startswith(("layer4.", "fc."))}
    save_file(kept, folder / "resnet50.safetensors")


def _checkpoint(path: Path) -> None:
    """Write a checkpoint as CLAM does, with random weights."""
    import torch
    from tests.models.made_checkpoints import clam_state

    torch.manual_seed(0)
    torch.save(clam_state(width=16), path)


def _crc(folder: Path, rng: np.random.Generator) -> None:
    """Write a feature matrix and a table of its rows in the layout of crc."""
    folder.mkdir()
    np.save(folder / "features.npy", rng.normal(size=(120, 16)).astype(np.float16))
    lines = ["instance_id,patient_id,cell_type,is_cancerous"]
    for i in range(120):
        lines.append(f"{i},{i // 5},epithelial,{int(i // 5 % 2 and i % 5 == 0)}")
    (folder / "instances.csv").write_text("\n".join([*lines, ""]))


def _tables(folder: Path) -> None:
    """Write label tables of the paper's cohorts in common formats."""
    texts = {
        "tcga_brca.csv": "TCGA-E2-A154,IDC\nTCGA-AO-A0J6,ILC\n",
        "luad.tsv": "case\tsex\nTCGA-05-0001\tM\n",
        "lusc.tsv": "case\tsex\nTCGA-18-0003\tF\n",
        "luad.maf": "#version 2.4\nHugo_Symbol\tTumor_Sample_Barcode\nTP53\tTCGA-05-0001-01A\n",
        "cases.txt": "TCGA-05-0001\nTCGA-05-0002\n",
        "BRACS.csv": "WSI Filename,Patient Id,WSI label,Set\nBRACS_1,7,FEA,Training\nBRACS_2,8,N,Testing\n",
        "train.csv": "slide\nnormal_001\ntumor_001\n",
        "reference.csv": "test_001,Tumor,IDC,Macro\ntest_002,Normal,None,None\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)


def _musk(path: Path, rng: np.random.Generator) -> None:
    bag = np.repeat(np.arange(40), 3)
    np.savez(path, X=rng.normal(size=(120, 16)), bag=bag, y_bag=np.arange(40) % 2)
