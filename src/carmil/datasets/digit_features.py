"""What a model sees of a digit: principal components of its pixels, a given array, or a pretrained encoder's features."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from carmil.datasets.digit_images import DigitImages, cache_folder
from carmil.errors import CarmilError
from carmil.files import atomic_file
from carmil.untrusted import short_message
from carmil.weights import read_weights

Track = Callable[[Iterable[int], str], Iterable[int]]


def pixel_features(digits: DigitImages, fit_on: np.ndarray, *, components: int = 64) -> np.ndarray:
    """Principal components of the pixels, scaled to unit variance in all, fitted on the rows `fit_on` only. (m, components)."""
    pixels = digits.images.reshape(len(digits.images), -1).astype(np.float32) / 255
    centre = pixels[fit_on].mean(0)
    fitted = pixels[fit_on] - centre
    variances, directions = np.linalg.eigh(fitted.T @ fitted / len(fitted))
    directions = directions[:, ::-1][:, :components]
    scale = np.sqrt(variances[::-1][:components].mean())
    return ((pixels - centre) @ directions / scale).astype(np.float32)


def read_features(path: Path) -> np.ndarray:
    """A floating-point (rows, features) matrix from a .npy file; stays on disk until rows are asked for. No pickle."""
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
    """Features from a .npy file, one row per image in the order of the images."""
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
    """The paper's: torchvision's ImageNet ResNet18 without its last layer, (m, 512), kept in the cache.

    weights: a state dict (.pt, .pth or .safetensors); without it torchvision downloads its own.
    """
    try:
        import torchvision
    except ImportError as error:
        raise CarmilError("features by ResNet18 need torchvision: pip install 'carmil[encoder]'") from error
    from torchvision.models import ResNet18_Weights

    state, name = _resnet_state(weights)
    kept = cache_folder() / "digits" / f"resnet18-{digits.fingerprint}-{name}.npy"
    if kept.exists():
        return np.load(kept, mmap_mode="r", allow_pickle=False)
    network = torchvision.models.resnet18()
    _load_resnet(network, state, weights)
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


def _resnet_state(weights: Path | None) -> tuple[dict[str, torch.Tensor], str]:
    if weights is None:
        from torchvision.models import ResNet18_Weights

        try:
            state = ResNet18_Weights.IMAGENET1K_V1.get_state_dict(progress=True, check_hash=True)
        except (OSError, RuntimeError) as error:
            raise CarmilError(
                f"could not download ResNet18's weights ({short_message(error)}): give a file of them with --weights FILE"
            ) from error
        return dict(state), "imagenet1k_v1"
    return read_weights(weights), hashlib.sha256(weights.read_bytes()).hexdigest()[:16]


def _load_resnet(network: torch.nn.Module, state: dict[str, torch.Tensor], weights: Path | None) -> None:
    try:
        network.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise CarmilError(
            f"{weights} does not hold torchvision's ResNet18: {str(error).splitlines()[-1].strip()}"
        ) from error
