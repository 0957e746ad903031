"""A run on features of a tiny encoder, and slides for it: `carmil slides run` and `carmil view SLIDE` take seconds."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import timm
import torch
from tools.small_study import train_small_run

from carmil.bags.geometry import TileGeometry
from carmil.bags.sources import Bag
from carmil.bags.writers import write_bag
from carmil.explanations.slide_pipeline import answer_slides
from carmil.slides.encoders import Encoder, load_encoder

from ..conftest import draw_tissue, write_slide

ENCODER = "timm/test_resnet"


@dataclass(frozen=True)
class TinyStudy:
    """A run, and what answers for new slides: the encoder's weights."""

    folder: Path
    run: Path
    weights: Path

    @property
    def encoder(self) -> Encoder:
        return load_encoder(ENCODER, weights=self.weights)

    def answer(self, slides: list[Path], out: Path) -> Path:
        answer_slides(slides, self.run, out, self.encoder, device="cpu", log=lambda line: None)
        return out


def train_tiny_study(folder: Path) -> TinyStudy:
    """Train on made-up features under the name of the encoder."""
    torch.manual_seed(0)
    torch.save(timm.create_model("test_resnet", pretrained=False).state_dict(), folder / "weights.pt")
    study = TinyStudy(folder, folder / "run", folder / "weights.pt")
    encoder, rng = study.encoder, np.random.default_rng(0)
    lines = ["slide_id,case_id,label"]
    for s in range(8):
        features = np.abs(rng.normal(size=(6, encoder.width))).astype(np.float16) * (1 + s % 2)
        bag = Bag(f"s{s}", features, encoder=encoder.name, pooling=encoder.pooling, geometry=TileGeometry(256, 0.5))
        write_bag(bag, folder / "features", "safetensors")
        lines.append(f"s{s},P{s},{'calm' if s % 2 else 'crowded'}")
    train_small_run(folder, lines, folds=2, epochs=2)
    return study


def write_tissue(path: Path, height: int = 1400, width: int = 1800) -> Path:
    """Write a slide with about twenty tiles of 256 pixels."""
    return write_slide(path, draw_tissue(height, width)[0])
