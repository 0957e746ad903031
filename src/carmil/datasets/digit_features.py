"""Features of digits: principal components of the pixels, a given array, or the output of a pretrained encoder."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from carmil.datasets.digit_images import DigitImages, cache_folder
from carmil.errors import CarmilError
from carmil.files import atomic_file
from carmil.untrusted import short_message
from carmil.weights import download_weights, fill_network, read_weights

Track = Callable[[Iterable[int], str], Iterable[int]]


def pixel_features(digits: DigitImages, fit_on: np.ndarray, *, components: int = 64) -> np.ndarray:
    """Return principal components of the pixels, (m, components), fitted on the rows `fit_on` only.

    One common factor scales them to a mean variance of 1.
    """
    pixels = digits.images.reshape(len(digits.images), -1).astype(np.float32) / 255
    centre = pixels[fit_on].mean(0)
    fitted = pixels[fit_on] - centre
    variances, directions = np.linalg.eigh(fitted.T @ fitted / len(fitted))
    directions = directions[:, ::-1][:, :components]
    scale = np.sqrt(variances[::-1][:components].mean())
    return ((pixels - centre) @ directions / scale).astype(np.float32)


def read_features(path: Path) -> np.ndarray:
    """Open a floating-point matrix (rows, features) in a .npy file as a memory map. Pickled arrays are refused."""
    try:
        features = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise CarmilError(f"{path} cannot be read as a .npy array ({short_message(error)})") from error
    if not isinstance(features, np.ndarray):
        raise CarmilError(f"{path} holds several arrays: expected one, as numpy.save writes it")
    if features.ndim != 2 or features.dtype.kind != "f":
        raise CarmilError(
            f"{path} holds {features.dtype} of shape {features.shape}: expected floating-point (rows, features)"
        )
    return features


def array_features(path: Path, digits: DigitImages) -> np.ndarray:
    """Read features from a .npy file, one row per image in the order of the images."""
    features = read_features(path)
    if len(features) != len(digits.images):
        raise CarmilError(
            f"{path} has {len(features):,} rows for {len(digits.images):,} images ({digits.source}): "
            "expected one row per image, in the same order"
        )
    return features


def resnet18_features(
    digits: DigitImages, *, weights: Path | None = None, device: str = "cpu", track: Track = lambda steps, _: steps
) -> np.ndarray:
    """Return the paper's features: torchvision's ImageNet ResNet18 without its last layer, (m, 512), stored in the
    cache.

    weights: a state dict (.pt, .pth or .safetensors); by default torchvision downloads its own.
    """
    try:
        import torchvision
    except ImportError as error:
        raise CarmilError("features by ResNet18 need torchvision: pip install 'carmil[encoder]'") from error
    from torchvision.models import ResNet18_Weights

    if weights is None:
        name, state = "imagenet1k_v1", download_weights(ResNet18_Weights.IMAGENET1K_V1, "ResNet18")
    else:
        name, state = hashlib.sha256(weights.read_bytes()).hexdigest()[:16], read_weights(weights)
    kept = cache_folder() / "digits" / f"resnet18-{digits.fingerprint}-{name}.npy"
    if kept.exists():
        return np.load(kept, mmap_mode="r", allow_pickle=False)
    network = torchvision.models.resnet18()
    fill_network(network, state, weights, "torchvision's ResNet18")
    network.fc = torch.nn.Identity()
    network.eval().to(device)
    transform = ResNet18_Weights.IMAGENET1K_V1.transforms()
    features = np.empty((len(digits.images), 512), dtype=np.float32)
    with torch.inference_mode():
        for start in track(range(0, len(features), 64), "encoding digits with ResNet18"):
            images = torch.from_numpy(digits.images[start : start + 64].copy()).to(device)
            batch = transform(images.unsqueeze(1).expand(-1, 3, -1, -1).float() / 255)
            features[start : start + 64] = network(batch).cpu().numpy()
    with atomic_file(kept) as aside:
        np.save(aside, features)
    return features
