import gc
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # one worker per core; read by torch on import and inherited by subprocesses

import torch
from filelock import FileLock
from scipy import ndimage

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run in Triton's interpreter; must be set before they are imported

from carmil.cli import main

SHARED = Path(__file__).parents[2] / "shared" / "data"


def pytest_collection_finish() -> None:
    gc.freeze()  # no collection visits the imported modules and the thousands of tests again


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries report frozen objects as leaks when the process ends


@pytest.fixture
def shared_data() -> Path:
    if not SHARED.is_dir():
        pytest.skip("needs ../shared/data, which is not part of the repository")
    return SHARED


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.manual_seed(0)
    torch.set_flush_denormal(False)  # earlier training in this process may have enabled it


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output folder of `carmil demo --fast`: one worker runs it, the others copy it."""
    from carmil.reproduce.demo import run_demo

    parallel = "PYTEST_XDIST_WORKER" in os.environ
    shared = tmp_path_factory.getbasetemp().parent / "shared" if parallel else tmp_path_factory.mktemp("shared")
    shared.mkdir(exist_ok=True)
    with FileLock(shared / "demo.lock"):
        if not (shared / "finished").exists():
            run_demo(shared / "demo", fast=True)  # its runs record where their cohorts are, so the folder stays there
            (shared / "finished").touch()
    return Path(shutil.copytree(shared / "demo", tmp_path_factory.mktemp("copied") / "demo"))


@pytest.fixture
def run_cli(capsys, monkeypatch):
    """Return a function that runs a command line in this process and returns exit status, stdout and stderr."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["carmil", *words])
        with pytest.raises(SystemExit) as left:
            main()
        return (left.value.code or 0, *capsys.readouterr())

    return run


# Synthetic slides: pink tissue with dark nuclei on white glass, written as TIFF.


def write_slide(path: Path, picture: np.ndarray, *, mpp: float | None = 0.5, levels: int = 1, **how) -> Path:
    """Write a tiled TIFF whose levels halve in size; `mpp` is written as its resolution."""
    import tifffile

    known = {} if mpp is None else {"resolution": (1e4 / mpp, 1e4 / mpp), "resolutionunit": "CENTIMETER"}
    options = {"tile": (256, 256), "photometric": "rgb", "compression": "deflate", "metadata": None} | how
    if options["compression"] == "deflate":
        options["compressionargs"] = {"level": 1}
    with tifffile.TiffWriter(path) as file:
        for level in range(levels):
            file.write(picture, subfiletype=int(level > 0), **(known if level == 0 else {}), **options)
            picture = halve(picture)
    return path


def halve(picture: np.ndarray) -> np.ndarray:
    height, width = picture.shape[0] // 2 * 2, picture.shape[1] // 2 * 2
    parts = picture[:height, :width].reshape(height // 2, 2, width // 2, 2, *picture.shape[2:])
    return np.rint(parts.mean(axis=(1, 3))).astype(picture.dtype)


def draw_tissue(height: int, width: int, *, mpp: float = 0.5, hole: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return a picture of an ellipse of pink tissue with 6 um nuclei about every 12 um, and the tissue mask."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:height, :width]
    far = ((y / height - 0.5) / 0.4) ** 2 + ((x / width - 0.5) / 0.4) ** 2
    tissue = (far < 1) & ((far > 0.1) | (not hole))
    some = ndimage.gaussian_filter(rng.standard_normal((512, 512)).astype(np.float32), 2.5 / mpp, mode="wrap")
    nuclei = np.tile(some, (-(-height // 512), -(-width // 512)))[:height, :width]
    picture = np.full((height, width, 3), 245, np.uint8)
    picture[tissue] = (225, 130, 180)
    picture[tissue & (nuclei > nuclei.std())] = (95, 55, 130)
    return picture, tissue


@pytest.fixture(scope="session")
def ellipse(tmp_path_factory) -> Path:
    """Return a 20x slide of 1.5 x 1.2 mm with two levels."""
    return write_slide(tmp_path_factory.mktemp("slides") / "ellipse.tif", draw_tissue(2400, 3000)[0], levels=2)


@pytest.fixture(scope="session")
def copies(tmp_path_factory) -> tuple[Path, Path]:
    """Return a 40x slide with several levels and its 20x copy with a single level."""
    folder = tmp_path_factory.mktemp("copies")
    picture = draw_tissue(3200, 3600, mpp=0.25, hole=True)[0]
    fine = write_slide(folder / "fine.tif", picture, mpp=0.25, levels=4)
    return fine, write_slide(folder / "coarse.tif", halve(picture), mpp=0.5)


@pytest.fixture
def make_slide():
    return write_slide


@pytest.fixture
def make_tissue():
    return draw_tissue


@pytest.fixture
def halve_picture():
    return halve


@pytest.fixture
def plain_slide():
    """Return a class of uniformly grey slides without a file; `reads` lists the sizes (width, height) that were read."""
    from carmil.slides.slide import Level, Slide

    class PlainSlide(Slide):
        def __init__(self, width: int, height: int, mpp: float = 0.5) -> None:
            self.path, self.width, self.height, self.mpp, self.mpp_from = Path("plain.svs"), width, height, mpp, "made"
            self.levels, self.reads = (Level(width, height, 1.0),), []

        def read(self, x, y, width, height, pixels):
            self.reads.append(pixels)
            return np.full((pixels[1], pixels[0], 3), 200, np.uint8)

    return PlainSlide


@pytest.fixture
def grid_of_tiles():
    """Return a function that cuts a slide into adjacent tiles, row by row."""
    from carmil.slides.slide import Tiles

    def make(slide, size: float) -> Tiles:
        x, y = np.meshgrid(np.arange(0, slide.width - size + 1, size), np.arange(0, slide.height - size + 1, size))
        corners = np.stack([x.ravel(), y.ravel()], axis=1).round().astype(np.int64)
        return Tiles(slide.name, corners, float(size), 256, 0.5, slide.width, slide.height, slide.mpp)

    return make


@pytest.fixture(scope="session")
def small_weights(tmp_path_factory) -> Path:
    """Return a file with random weights of timm/resnet10t."""
    import timm
    import torch

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "resnet10t.pt"
    torch.save(timm.create_model("resnet10t", pretrained=False).state_dict(), path)
    return path
