import os
import sys
from pathlib import Path

import numpy as np
import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # a worker a core already; torch asks when it is imported, processes inherit it

import torch
from scipy import ndimage

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # kernels are run by Triton's interpreter; it must know before they are imported
    )

from carmil.cli import main

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture
def shared_data() -> Path:
    if not SHARED.is_dir():
        pytest.skip("needs ../shared/data, which is not part of the repository")
    return SHARED


@pytest.fixture(autouse=True)
def _same_every_time() -> None:
    torch.manual_seed(0)
    torch.set_flush_denormal(False)  # a training before this test may have set it, for the whole process


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `carmil demo --fast` leaves behind."""
    from carmil.reproduce.demo import run_demo

    out = tmp_path_factory.mktemp("demo")
    run_demo(out, fast=True)
    return out


@pytest.fixture
def said(capsys, monkeypatch):
    """Runs a command line in this process: its exit status, and what it said on stdout and stderr."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["carmil", *words])
        with pytest.raises(SystemExit) as left:
            main()
        return (left.value.code or 0, *capsys.readouterr())

    return run


# Slides made by hand: pink tissue with dark nuclei on white glass, written as TIFF.


def write_slide(path: Path, picture: np.ndarray, *, mpp: float | None = 0.5, levels: int = 1, **how) -> Path:
    """A tiled TIFF; each level half the one before. `mpp` goes into its resolution."""
    import tifffile

    known = {} if mpp is None else {"resolution": (1e4 / mpp, 1e4 / mpp), "resolutionunit": "CENTIMETER"}
    options = {"tile": (256, 256), "photometric": "rgb", "compression": "deflate", "metadata": None} | how
    if options["compression"] == "deflate":
        options["compressionargs"] = {"level": 1}
    with tifffile.TiffWriter(path) as file:
        for level in range(levels):
            file.write(picture, subfiletype=int(level > 0), **(known if level == 0 else {}), **options)
            picture = halved(picture)
    return path


def halved(picture: np.ndarray) -> np.ndarray:
    height, width = picture.shape[0] // 2 * 2, picture.shape[1] // 2 * 2
    parts = picture[:height, :width].reshape(height // 2, 2, width // 2, 2, *picture.shape[2:])
    return np.rint(parts.mean(axis=(1, 3))).astype(picture.dtype)


def stained(height: int, width: int, *, mpp: float = 0.5, hole: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """A picture of an ellipse of tissue, and where it is: pink, with a nucleus of some 6 um every 12 um or so."""
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
    """A slide of 1.5 x 1.2 mm, 20x, two levels."""
    return write_slide(tmp_path_factory.mktemp("slides") / "ellipse.tif", stained(2400, 3000)[0], levels=2)


@pytest.fixture(scope="session")
def copies(tmp_path_factory) -> tuple[Path, Path]:
    """A slide at 40x, with levels, and its copy at 20x, without."""
    folder = tmp_path_factory.mktemp("copies")
    picture = stained(3200, 3600, mpp=0.25, hole=True)[0]
    fine = write_slide(folder / "fine.tif", picture, mpp=0.25, levels=4)
    return fine, write_slide(folder / "coarse.tif", halved(picture), mpp=0.5)


@pytest.fixture
def make_slide():
    return write_slide


@pytest.fixture
def make_tissue():
    return stained


@pytest.fixture
def smaller():
    return halved


@pytest.fixture
def plain_slide():
    """Makes slides of one grey that are no file; `asked` lists the pictures that were read from one, (width, height)."""
    from carmil.slides.slide import Level, Slide

    class PlainSlide(Slide):
        def __init__(self, width: int, height: int, mpp: float = 0.5) -> None:
            self.path, self.width, self.height, self.mpp, self.mpp_from = Path("plain.svs"), width, height, mpp, "made"
            self.levels, self.asked = (Level(width, height, 1.0),), []

        def read(self, x, y, width, height, pixels):
            self.asked.append(pixels)
            return np.full((pixels[1], pixels[0], 3), 200, np.uint8)

    return PlainSlide


@pytest.fixture
def grid_of_tiles():
    """Makes the tiles of a slide that lie side by side, row after row."""
    from carmil.slides.slide import Tiles

    def make(slide, size: float) -> Tiles:
        x, y = np.meshgrid(np.arange(0, slide.width - size + 1, size), np.arange(0, slide.height - size + 1, size))
        corners = np.stack([x.ravel(), y.ravel()], axis=1).round().astype(np.int64)
        return Tiles(slide.name, corners, float(size), 256, 0.5, slide.width, slide.height, slide.mpp)

    return make


@pytest.fixture(scope="session")
def small_weights(tmp_path_factory) -> Path:
    """Weights of timm/resnet10t, as chance made them."""
    import timm
    import torch

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "resnet10t.pt"
    torch.save(timm.create_model("resnet10t", pretrained=False).state_dict(), path)
    return path
