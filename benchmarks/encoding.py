"""Who waits for whom when a slide is encoded: readers and encoder together, and each of them alone, in one run.

    python benchmarks/encoding.py SLIDE... [--encoder resnet50.caffe] [--weights FILE] [--tiles 20000] [--device cuda] [--mpp 0.5]

Squares of 256 tile pixels at 0.5 micrometres, at places of chance: small slides then give as many as large ones. Libraries and the
device are warm before the clock starts.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from carmil.provenance import machine_line
from carmil.slides import encoding
from carmil.slides.encoders import load_encoder
from carmil.slides.opening import open_slide
from carmil.slides.placed_encoder import PlacedEncoder
from carmil.slides.slide import Slide, Tiles

PIXELS, MPP = 256, 0.5


def squares(slide: Slide, count: int) -> Tiles:
    size = PIXELS * MPP / slide.mpp
    most = np.array([slide.width - size, slide.height - size])
    corners = (np.random.default_rng(0).random((count, 2)) * most).astype(np.int64)
    return Tiles(slide.name, corners, size, PIXELS, MPP, slide.width, slide.height, slide.mpp)


def device_alone(encoder: PlacedEncoder, count: int) -> float:
    """Tiles a second, the same pictures again and again."""
    pictures = encoder.pictures(min(count, encoder.batch), PIXELS).random_(0, 256)
    encoder(pictures)
    begun = time.perf_counter()
    for _ in range(max(1, count // len(pictures))):
        encoder(pictures)
    return max(1, count // len(pictures)) * len(pictures) / (time.perf_counter() - begun)


def from_float32(encoder: PlacedEncoder) -> float:
    """The smallest cosine of a tile's features with those of the same network in float32, nothing recorded."""
    pictures = encoder.pictures(32, PIXELS).random_(0, 256)
    found = torch.from_numpy(encoder(pictures).features).float()
    with torch.inference_mode():
        fine = encoder.encoder(pictures.to(encoder.device)).float().cpu()
    return torch.cosine_similarity(found, fine).min().item()


def readers_alone(slide: Slide, tiles: Tiles) -> float:
    """Tiles a second, read and thrown away."""
    count = encoding.reader_count()
    begun = time.perf_counter()
    with ThreadPoolExecutor(count) as threads:
        few = np.array_split(tiles.corners, max(count, len(tiles) // 8))
        list(threads.map(lambda corners: _thrown_away(slide, tiles, corners), few))
    return len(tiles) / (time.perf_counter() - begun)


def _thrown_away(slide: Slide, tiles: Tiles, corners: np.ndarray) -> None:
    encoding._read(slide, tiles, corners, np.empty((len(corners), PIXELS, PIXELS, 3), np.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slides", nargs="+", type=Path)
    parser.add_argument("--encoder", default="resnet50.caffe")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--tiles", type=int, default=20_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mpp", type=float)
    given = parser.parse_args()
    print(machine_line())
    encoder = PlacedEncoder(load_encoder(given.encoder, weights=given.weights), given.device)
    print(f"features beside those in float32: cosine at least {from_float32(encoder):.5f}")
    print(f"the device alone: {device_alone(encoder, given.tiles):,.0f} tiles/s")
    for path in given.slides:
        with open_slide(path, mpp=given.mpp) as slide:
            tiles = squares(slide, given.tiles)
            encoding.encode(slide, squares(slide, 64), encoder)
            print(f"{path.name}, the readers alone: {readers_alone(slide, tiles):,.0f} tiles/s")
            print(f"{path.name}: {encoding.encode(slide, tiles, encoder).times.line()}")


if __name__ == "__main__":
    main()
