"""Features are assigned to the right tiles regardless of reading order; readers never run far ahead."""

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
    """A slide with a different grey level at every position, where some tiles are read more slowly than others."""

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
        self.seen, self.threads = [], []

    def forward(self, x):
        self.seen.append(len(x))
        self.threads.append(torch.get_num_threads())
        return x.mean((2, 3))


def tiles(count: int) -> Tiles:
    corners = np.array([(32 * (i % 11), 32 * (i // 11)) for i in range(count)], np.int64).reshape(-1, 2)
    return Tiles("numbered", corners, 32.0, 8, 2.0, 640, 640, 0.5)


@pytest.fixture
def encoder() -> Encoder:
    return Encoder("mean", MeanColour(), 3, 8, (0.0, 0.0, 0.0), (1 / 255,) * 3)


@pytest.mark.parametrize("count", [1, 5, 6, 100])
@pytest.mark.parametrize(("at_once", "readers"), [(1, 1), (1, 5), (4, None)])
def test_features_are_assigned_to_their_tiles(encoder, count, at_once, readers):
    some = tiles(count)
    result = encode(Numbered(), some, DeviceEncoder(encoder, "cpu", batch=6, at_once=at_once), readers=readers)
    expected = (some.corners[:, 0] // 32 + some.corners[:, 1] // 32 * 7) % 256
    assert result.features.dtype == np.float16
    assert np.array_equal(result.features, np.repeat(expected[:, None], 3, axis=1).astype(np.float16))
    assert sum(encoder.network.seen) == count and max(encoder.network.seen) <= 6


def test_every_batch_is_computed_on_one_core(encoder):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        times = encode(Numbered(), tiles(50), DeviceEncoder(encoder, "cpu", batch=6)).times
        assert set(encoder.network.threads) == {1}
        assert torch.get_num_threads() == 2  # for what comes after
        assert times.tiles == 50 and 0 < times.reading + times.computing <= times.seconds
    finally:
        torch.set_num_threads(before)


def test_bfloat16_gives_nearly_the_same_features_under_another_name(small_weights):
    plain, rounded = (
        load_encoder("timm/resnet10t", weights=small_weights, precision=precision)
        for precision in ("float32", "bfloat16")
    )
    assert rounded.name == plain.name.replace("timm_resnet10t-", "timm_resnet10t.bfloat16-")
    results = [encode(Numbered(), tiles(6), DeviceEncoder(each, "cpu")).features for each in (plain, rounded)]
    assert not np.array_equal(*results)
    assert np.abs(results[0] - results[1]).max() < 0.02 * np.abs(results[0]).max()
    with pytest.raises(CarmilError, match="--precision bfloat16 is for CPUs: a GPU computes in float16"):
        DeviceEncoder(rounded, "cuda")


def test_readers_run_ahead_by_a_limited_number_of_batches(encoder):
    slide, ahead = Numbered(), []
    plain = encoder.network.forward

    def slow(x):
        until = time.monotonic() + 60
        time.sleep(0.02)
        while slide.reads <= 4 and time.monotonic() < until:
            time.sleep(0.02)
        ahead.append(slide.reads - sum(encoder.network.seen))
        return plain(x)

    encoder.network.forward = slow
    encode(slide, tiles(100), DeviceEncoder(encoder, "cpu", batch=4, at_once=1), readers=3)
    assert max(ahead) <= AHEAD * 4
    assert max(ahead) > 4  # readers do read ahead


@pytest.mark.parametrize("at_once", [1, 3])
def test_unreadable_tile_raises_the_error_of_the_reader(encoder, at_once):
    class Torn(Numbered):
        def read(self, x, y, width, height, pixels):
            if y == 96:
                raise CarmilError("torn.svs cannot be read at y 96")
            return super().read(x, y, width, height, pixels)

    with pytest.raises(CarmilError, match="cannot be read at y 96"):
        encode(Torn(), tiles(100), DeviceEncoder(encoder, "cpu", batch=8, at_once=at_once), readers=3)


def test_features_too_large_for_float16_raise_an_error(encoder):
    large = Encoder("large", encoder.network, 3, 8, (0.0, 0.0, 0.0), (1e-7,) * 3)
    with pytest.raises(CarmilError, match=r"numbered\.svs: large computed features .* too large for float16"):
        encode(Numbered(), tiles(30), DeviceEncoder(large, "cpu"))


def test_progress_counts_each_tile_once(encoder):
    counts = []
    encode(Numbered(), tiles(20), DeviceEncoder(encoder, "cpu", batch=8, at_once=2), on_tiles=counts.append)
    assert counts == [8, 8, 4]


def test_summary_names_the_bottleneck():
    slow_device = Times(1000, 10.0, 2.0, 9.5)
    slow_reader = Times(1000, 10.0, 9.9, 3.0)
    assert "100 tiles/s; limited by the device (computing 95% of the time" in slow_device.summary()
    assert "limited by the readers (computing 30%" in slow_reader.summary()
    assert slow_device + slow_reader == Times(2000, 20.0, 11.9, 12.5)
    assert Times().summary() == "nothing was encoded"


def test_times_separate_reading_from_computing(encoder):
    class Slow(Numbered):
        def read(self, x, y, width, height, pixels):
            time.sleep(0.03)
            return super().read(x, y, width, height, pixels)

    times = encode(Slow(), tiles(40), DeviceEncoder(encoder, "cpu", batch=8, at_once=1), readers=2).times
    assert times.tiles == 40 and times.reading >= 0.6  # 40 tiles of 30 ms by two readers
    assert times.computing < times.reading
    assert "limited by the readers" in times.summary()


def everywhere(slide: Slide) -> Tissue:
    """Return tissue that covers the whole slide."""
    shape = (int(slide.height * slide.mpp / 8) + 1, int(slide.width * slide.mpp / 8) + 1)
    return Tissue((TissueRegion(np.zeros((4, 2)), ()),), np.ones(shape, bool), 0)


def both_sizes(picture: np.ndarray, folder: Path, make_slide, halve_picture) -> list[Path]:
    """Write a 40x slide without smaller levels, and the same slide scanned at 20x."""
    fine = make_slide(folder / "fine.tif", picture, mpp=0.25)
    coarse = make_slide(folder / "coarse.tif", halve_picture(picture), mpp=0.5)
    return [fine, coarse]


def similarities(paths: list[Path], encoder: Encoder) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosine similarity of each 40x tile to the same 20x tile, and to its neighbour."""
    results = []
    for path in paths:
        with open_slide(path) as slide:
            tiles = cut(slide, everywhere(slide))
            encoded = encode(slide, tiles, DeviceEncoder(encoder, "cpu"))
        results.append((tiles.corners * slide.mpp, torch.from_numpy(encoded.features).float()))
    (fine_um, a), (coarse_um, b) = results
    assert len(a) == len(b) > 1 and np.abs(fine_um - coarse_um).max() <= 0.5
    return torch.cosine_similarity(a, b).numpy(), torch.cosine_similarity(a, b.roll(1, 0)).numpy()


def test_same_tissue_at_40x_and_20x_gives_the_same_features(tmp_path, make_slide, halve_picture, small_weights):
    rng = np.random.default_rng(0)
    patches = rng.integers(0, 256, (4, 4, 3)).astype(np.uint8).repeat(256, 0).repeat(256, 1)
    noise = rng.integers(-20, 20, patches.shape)
    picture = np.clip(patches + noise, 0, 255).astype(np.uint8)
    slides = both_sizes(picture, tmp_path, make_slide, halve_picture)
    same, other = similarities(slides, load_encoder("timm/resnet10t", weights=small_weights))
    assert same.min() > 0.999
    assert same.min() > other.max()


def test_real_slide_at_40x_and_20x_gives_the_same_features(shared_data, tmp_path, make_slide, halve_picture):
    with open_slide(shared_data / "slides" / "tcga-cr-7395-01a-01-ts1.svs", mpp=0.25) as slide:
        picture = slide.read(1000, 1000, 1536, 1024, (1536, 1024))
    weights = shared_data / "weights" / "resnet50_caffe_layer3.safetensors"
    slides = both_sizes(picture, tmp_path, make_slide, halve_picture)
    same, other = similarities(slides, load_encoder("resnet50.caffe", weights=weights))
    assert same.min() >= 0.95
    assert same.min() > other.max()


def test_jpeg_pyramid_level_gives_features_close_to_full_size(shared_data, tmp_path):
    """The 20x JPEG level of a 40x slide gives nearly the same features as the full size."""
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
