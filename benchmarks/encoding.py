"""Find the bottleneck of encoding a slide: readers and encoder together, and each of them alone, in one run.

    python benchmarks/encoding.py SLIDE... [--encoder resnet50.caffe] [--weights FILE] [--tiles 20000] [--device cuda] [--mpp 0.5]

Tiles of 256 pixels at 0.5 micrometres per pixel, at random places, so that small slides give as many as large ones. Libraries and
the device are warm before timing starts.

On a CPU three ways of encoding take turns, and the best of --rounds counts, in seconds and in seconds of a core: that of 0.1.0 (all
cores share every operation, while threads read), one batch per core, and the same in bfloat16.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from speed.script import run_script
from speed.timing import DEVICE

from carmil.slides import encoding
from carmil.slides.device_encoder import DeviceEncoder
from carmil.slides.encoders import Encoder, load_encoder
from carmil.slides.opening import open_slide
from carmil.slides.slide import Slide, Tiles

PIXELS, MPP = 256, 0.5


def random_tiles(slide: Slide, count: int) -> Tiles:
    size = PIXELS * MPP / slide.mpp
    farthest = np.array([slide.width - size, slide.height - size])
    corners = (np.random.default_rng(0).random((count, 2)) * farthest).astype(np.int64)
    return Tiles(slide.name, corners, size, PIXELS, MPP, slide.width, slide.height, slide.mpp)


def encoder_speed(encoder: DeviceEncoder, count: int) -> float:
    """Tiles per second, the same pictures again and again."""
    pictures = encoder.pictures(min(count, encoder.batch), PIXELS).random_(0, 256)
    encoder(pictures)
    batches = max(1, count // len(pictures))
    begin = time.perf_counter()
    for _ in range(batches):
        encoder(pictures)
    return batches * len(pictures) / (time.perf_counter() - begin)


def smallest_cosine(encoder: DeviceEncoder) -> float:
    """The smallest cosine of a tile's features with those of the same network in float32, without CUDA graphs."""
    pictures = encoder.pictures(32, PIXELS).random_(0, 256)
    features = torch.from_numpy(encoder(pictures).features).float()
    with torch.inference_mode():
        reference = encoder.encoder(pictures.to(encoder.device)).float().cpu()
    return torch.cosine_similarity(features, reference).min().item()


def reader_speed(slide: Slide, tiles: Tiles) -> float:
    """Tiles per second that are read and discarded."""

    def read(corners: np.ndarray) -> None:
        encoding._read(slide, tiles, corners, np.empty((len(corners), PIXELS, PIXELS, 3), np.uint8))

    count = encoding.reader_count()
    begin = time.perf_counter()
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(read, np.array_split(tiles.corners, max(count, len(tiles) // 8))))
    return len(tiles) / (time.perf_counter() - begin)


def compare_on_cpu(encoder: Encoder, slide: Slide, tiles: Tiles, rounds: int) -> None:
    """Print the speed of each way, and how far its features are from those of 0.1.0."""
    ways = {
        "0.1.0": DeviceEncoder(encoder, "cpu", batch=16, at_once=1),
        "one batch per core": DeviceEncoder(encoder, "cpu"),
        "the same in bfloat16": DeviceEncoder(replace(encoder, precision="bfloat16"), "cpu"),
    }
    fastest = dict.fromkeys(ways, np.array([np.inf, np.inf]))  # seconds, seconds of a core
    features: dict[str, torch.Tensor] = {}
    for _ in range(rounds):
        for name, placed in ways.items():
            begin = np.array([time.perf_counter(), time.process_time()])
            features[name] = torch.from_numpy(encoding.encode(slide, tiles, placed).features).float()
            taken = np.array([time.perf_counter(), time.process_time()]) - begin
            fastest[name] = np.minimum(fastest[name], taken)
    plain = features["0.1.0"]
    for name, found in features.items():
        seconds, of_core = len(tiles) / fastest[name]
        times, times_of_core = fastest["0.1.0"] / fastest[name]
        print(
            f"{slide.path.name}, {name}: {seconds:.1f} tiles/s ({times:.1f} times 0.1.0), {of_core:.1f} tiles per second "
            f"of a core ({times_of_core:.1f} times); cosine with 0.1.0 at least "
            f"{torch.cosine_similarity(found, plain).min():.5f}, largest difference "
            f"{(found - plain).abs().max() / plain.abs().max():.1e} of the largest feature"
        )


def main(
    slides: list[Path],
    encoder: str = "resnet50.caffe",
    weights: Path | None = None,
    tiles: int = 20_000,
    device: str = DEVICE,
    mpp: float | None = None,
    rounds: int = 5,
) -> None:
    loaded = load_encoder(encoder, weights=weights)
    if device == "cpu":
        for path in slides:
            with open_slide(path, mpp=mpp) as slide:
                compare_on_cpu(loaded, slide, random_tiles(slide, tiles), rounds)
        return
    placed = DeviceEncoder(loaded, device)
    print(f"features compared with float32: cosine at least {smallest_cosine(placed):.5f}")
    print(f"the encoder alone: {encoder_speed(placed, tiles):,.0f} tiles/s")
    for path in slides:
        with open_slide(path, mpp=mpp) as slide:
            corners = random_tiles(slide, tiles)
            encoding.encode(slide, random_tiles(slide, 64), placed)
            print(f"{path.name}, the readers alone: {reader_speed(slide, corners):,.0f} tiles/s")
            print(f"{path.name}: {encoding.encode(slide, corners, placed).times.summary()}")


if __name__ == "__main__":
    run_script(main)
