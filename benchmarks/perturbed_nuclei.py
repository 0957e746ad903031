"""Encode nuclei of crc as they are, blurred, stained otherwise, and at twice the magnification.

    python benchmarks/perturbed_nuclei.py --crc ../shared/data/crc --weights resnet50_caffe_layer3.safetensors --out nuclei

The same nuclei of every patient are perturbed at their own 27 x 27 pixels, enlarged to 224 x 224 by bicubic interpolation, and
encoded by the network that made features.npy. Writes OUT/rows.npy, the rows of the nuclei, and one array of features per
perturbation; an array that exists is kept. `benchmarks/out_of_scope.py` reads them.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from PIL import Image, ImageFilter
from speed.script import run_script

from carmil.datasets.crc_nuclei import PATCH, read_nuclei
from carmil.progress import count_progress
from carmil.slides.encoders import load_encoder

INPUT = 224


def _blurred(picture: Image.Image) -> Image.Image:
    return picture.filter(ImageFilter.GaussianBlur(1.5))


def _stained(picture: Image.Image, *, haematoxylin: float, eosin: float) -> Image.Image:
    from skimage.color import hed2rgb, rgb2hed

    stains = rgb2hed(np.asarray(picture)) * (haematoxylin, eosin, 1)
    return Image.fromarray((255 * hed2rgb(stains).clip(0, 1)).round().astype(np.uint8))


def _magnified(picture: Image.Image) -> Image.Image:
    quarter = PATCH / 4
    return picture.resize((PATCH, PATCH), Image.Resampling.BICUBIC, box=(quarter, quarter, 3 * quarter, 3 * quarter))


def _enlarged(picture: Image.Image) -> Image.Image:
    return picture.resize((INPUT, INPUT), Image.Resampling.BICUBIC)


PERTURBATIONS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "untouched": lambda picture: picture,
    "blurred": _blurred,
    "stained": partial(_stained, haematoxylin=2.5, eosin=0.3),  # beyond any patient of the cohort
    "stained a little": partial(_stained, haematoxylin=1.4, eosin=0.7),  # a standard deviation between its patients
    "magnified": _magnified,
}


def main(
    crc: Annotated[Path, typer.Option(help="Folder with features.npy, instances.csv and patches.npz.")],
    weights: Annotated[Path, typer.Option(help="Weights of Caffe's ResNet50.")],
    out: Annotated[Path, typer.Option(help="Folder for the features.")],
    nuclei: Annotated[int, typer.Option(help="Nuclei per patient.")] = 12,
) -> None:
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    rows = chosen_nuclei(crc, nuclei)
    np.save(out / "rows.npy", rows)
    with np.load(crc / "patches.npz", allow_pickle=False) as file:
        pictures = [Image.fromarray(picture) for picture in file["im"][rows]]
    encoder = load_encoder("resnet50.caffe", weights=weights)
    for name, perturb in PERTURBATIONS.items():
        if (out / f"{name}.npy").exists():
            continue
        parts = []
        with count_progress(name, "nuclei") as on_part:
            for first in range(0, len(pictures), 16):
                batch = np.stack([np.asarray(_enlarged(perturb(one))) for one in pictures[first : first + 16]])
                with torch.inference_mode():
                    parts.append(encoder(torch.from_numpy(batch)).float().numpy())
                on_part(min(first + 16, len(pictures)), len(pictures))
        np.save(out / f"{name}.npy", np.concatenate(parts))
    known = np.load(crc / "features.npy")[rows].astype(np.float32)
    again = np.load(out / "untouched.npy")
    off = np.linalg.norm(again - known, axis=1) / np.linalg.norm(known, axis=1)
    print(
        f"untouched nuclei against features.npy: relative difference {np.median(off):.4f} (median), {off.max():.4f} (largest)"
    )


def chosen_nuclei(crc: Path, count: int) -> np.ndarray:
    """Return the rows of `count` nuclei of each patient, of all where a patient has fewer, drawn once."""
    patients, draw = read_nuclei(crc).patients, np.random.default_rng(0)
    rows = [draw.permutation(np.flatnonzero(patients == patient))[:count] for patient in np.unique(patients)]
    return np.sort(np.concatenate(rows))


if __name__ == "__main__":
    run_script(main)
