"""Features belong to their tiles, whoever read them when; and readers never run far ahead."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from torch import nn

from carmil.errors import CarmilError
from carmil.slides.device_encoder import DeviceEncoder
from carmil.slides.encoders import Encoder, load_encoder
from carmil.slides.encoding import AHEAD, Times, encode
from carmil.slides.opening import open_slide
from carmil.slides.slide import Slide, Tiles
from carmil.slides.tiling import cut
from carmil.slides.tissue import Tissue, TissueRegion


class Numbered(Slide):
    """Every place has a grey of its own. Later tiles are read faster than earlier ones."""

    def __init__(self) -> None:
        self.path, self.width, self.height, self.mpp = Path("numbered.svs"), 640, 640, 0.5
        self.reads, self._lock = 0, threading.Lock()

    def read(self, x, y, width, height, pixels):
        with self._lock:
            self.reads += 1
        time.sleep(0.002 * (self.reads % 3 == 0))
        if (x, y) == (96, 64):
            time.sleep(0.02)
        return np.full((pixels[1], pixels[0], 3), (x // 32 + y // 32 * 7) % 256, np.uint8)


class MeanColour(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(len(x))
        return x.mean((2, 3))


def tiles(count: int) -> Tiles:
    corners = np.array([(32 * (i % 11), 32 * (i // 11)) for i in range(count)], np.int64).reshape(-1, 2)
    return Tiles("numbered", corners, 32.0, 8, 2.0, 640, 640, 0.5)


@pytest.fixture
def encoder() -> Encoder:
    return Encoder("mean", MeanColour(), 3, 8, (0.0, 0.0, 0.0), (1 / 255,) * 3)


@pytest.mark.parametrize("count", [1, 5, 6, 100])
@pytest.mark.parametrize("readers", [1, 5])
def test_every_tile_gets_its_own_features(encoder, count, readers):
    some = tiles(count)
    found = encode(Numbered(), some, DeviceEncoder(encoder, "cpu", batch=6), readers=readers)
    expected = (some.corners[:, 0] // 32 + some.corners[:, 1] // 32 * 7) % 256
    assert found.features.dtype == np.float16
    assert np.array_equal(found.features, np.repeat(expected[:, None], 3, axis=1).astype(np.float16))
    assert sum(encoder.network.seen) == count and max(encoder.network.seen) <= 6


def test_readers_are_never_further_ahead_than_the_batches_in_memory(encoder):
    slide, ahead = Numbered(), []
    plain = encoder.network.forward

    def slow(x):
        time.sleep(0.02)
        ahead.append(slide.reads - sum(encoder.network.seen))
        return plain(x)

    encoder.network.forward = slow
    encode(slide, tiles(100), DeviceEncoder(encoder, "cpu", batch=4), readers=3)
    assert max(ahead) <= AHEAD * 4
    assert max(ahead) > 4  # and yet they do read ahead


def test_a_tile_that_cannot_be_read_ends_it_with_the_readers_own_words(encoder):
    class Torn(Numbered):
        def read(self, x, y, width, height, pixels):
            if y == 96:
                raise CarmilError("torn.svs cannot be read at y 96")
            return super().read(x, y, width, height, pixels)

    with pytest.raises(CarmilError, match="cannot be read at y 96"):
        encode(Torn(), tiles(100), DeviceEncoder(encoder, "cpu", batch=8), readers=3)


def test_features_that_are_no_numbers_are_refused(encoder):
    large = Encoder("large", encoder.network, 3, 8, (0.0, 0.0, 0.0), (1e-7,) * 3)
    with pytest.raises(CarmilError, match=r"numbered\.svs: large gives features .* too large for float16"):
        encode(Numbered(), tiles(30), DeviceEncoder(large, "cpu"))


def test_progress_counts_every_tile_once(encoder):
    told = []
    encode(Numbered(), tiles(20), DeviceEncoder(encoder, "cpu", batch=8), on_tiles=told.append)
    assert told == [8, 8, 4]


def test_the_summary_says_who_waited_for_whom():
    slow_device = Times(1000, 10.0, 2.0, 9.5)
    slow_reader = Times(1000, 10.0, 9.9, 3.0)
    assert "100 tiles/s; limited by the device (computing 95% of the time" in slow_device.summary()
    assert "limited by the readers (computing 30%" in slow_reader.summary()
    assert slow_device + slow_reader == Times(2000, 20.0, 11.9, 12.5)
    assert Times().summary() == "nothing was encoded"


def test_times_tell_reading_from_computing(encoder):
    class Slow(Numbered):
        def read(self, x, y, width, height, pixels):
            time.sleep(0.01)
            return super().read(x, y, width, height, pixels)

    times = encode(Slow(), tiles(40), DeviceEncoder(encoder, "cpu", batch=8), readers=2).times
    assert times.tiles == 40 and times.reading >= 0.2  # 40 tiles of 10 ms by two readers
    assert times.computing < times.reading
    assert "limited by the readers" in times.summary()


def everywhere(slide: Slide) -> Tissue:
    """As if all of it were tissue."""
    shape = (int(slide.height * slide.mpp / 8) + 1, int(slide.width * slide.mpp / 8) + 1)
    return Tissue((TissueRegion(np.zeros((4, 2)), ()),), np.ones(shape, bool), 0)


def both_sizes(picture: np.ndarray, folder: Path, make_slide, smaller) -> list[Path]:
    """A slide of 40x, without a smaller level that would be the other one's, and the same scanned at 20x."""
    fine = make_slide(folder / "fine.tif", picture, mpp=0.25)
    coarse = make_slide(folder / "coarse.tif", smaller(picture), mpp=0.5)
    return [fine, coarse]


def similarities(paths: list[Path], encoder: Encoder) -> tuple[np.ndarray, np.ndarray]:
    """Cosine of each tile at 40x with itself at 20x, and with its neighbour."""
    found = []
    for path in paths:
        with open_slide(path) as slide:
            tiles = cut(slide, everywhere(slide))
            made = encode(slide, tiles, DeviceEncoder(encoder, "cpu"))
        found.append((tiles.corners * slide.mpp, torch.from_numpy(made.features).float()))
    (fine_um, a), (coarse_um, b) = found
    assert len(a) == len(b) > 1 and np.abs(fine_um - coarse_um).max() <= 0.5
    return torch.cosine_similarity(a, b).numpy(), torch.cosine_similarity(a, b.roll(1, 0)).numpy()


def test_the_same_tissue_at_40x_and_20x_gives_the_same_features(tmp_path, make_slide, smaller, small_weights):
    rng = np.random.default_rng(0)
    patches = rng.integers(0, 256, (4, 4, 3)).astype(np.uint8).repeat(256, 0).repeat(256, 1)
    noise = rng.integers(-20, 20, patches.shape)
    picture = np.clip(patches + noise, 0, 255).astype(np.uint8)
    slides = both_sizes(picture, tmp_path, make_slide, smaller)
    same, other = similarities(slides, load_encoder("timm/resnet10t", weights=small_weights))
    assert same.min() > 0.999
    assert same.min() > other.max()


def test_a_real_slide_at_40x_and_20x_gives_the_same_features(shared_data, tmp_path, make_slide, smaller):
    with open_slide(shared_data / "slides" / "tcga-cr-7395-01a-01-ts1.svs", mpp=0.25) as slide:
        picture = slide.read(1000, 1000, 1536, 1024, (1536, 1024))
    weights = shared_data / "weights" / "resnet50_caffe_layer3.safetensors"
    slides = both_sizes(picture, tmp_path, make_slide, smaller)
    same, other = similarities(slides, load_encoder("resnet50.caffe", weights=weights))
    assert same.min() >= 0.95
    assert same.min() > other.max()


def test_a_jpeg_pyramid_is_read_at_the_level_below(shared_data, tmp_path):
    """The 20x level of a 40x slide, stored as JPEG, gives nearly the features of its full size."""
    with open_slide(shared_data / "slides" / "tcga-cr-7395-01a-01-ts1.svs", mpp=0.25) as slide:
        picture = slide.read(1000, 1000, 1024, 512, (1024, 512))
        half = slide.read(1000, 1000, 1024, 512, (512, 256))
    options = {"tile": (256, 256), "photometric": "ycbcr", "compression": "jpeg", "metadata": None}
    with tifffile.TiffWriter(tmp_path / "fine.tif") as file:
        file.write(picture, resolution=(40_000, 40_000), resolutionunit="CENTIMETER", **options)
        file.write(half, subfiletype=1, **options)
    with tifffile.TiffWriter(tmp_path / "coarse.tif") as file:
        file.write(half, resolution=(20_000, 20_000), resolutionunit="CENTIMETER", **options)
    weights = shared_data / "weights" / "resnet50_caffe_layer3.safetensors"
    slides = [tmp_path / "fine.tif", tmp_path / "coarse.tif"]
    same, _ = similarities(slides, load_encoder("resnet50.caffe", weights=weights))
    assert same.min() >= 0.95
