"""Check of the installation: packages, readable slide formats, devices, and how to install what is missing."""

import importlib
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

_CORE = ("torch", "numpy", "scipy", "pandas", "scikit-learn", "h5py", "safetensors", "matplotlib", "pillow")
_EXTRAS = {
    "slides": (
        "openslide-python",
        "openslide-bin",
        "tifffile",
        "imagecodecs",
        "zarr",
        "scikit-image",
        "timm",
        "torchvision",
    ),
    "dicom": ("pydicom", "highdicom"),
    "viewer": ("starlette", "uvicorn"),
    "hub": ("huggingface_hub",),
    "cluster": ("ray",),
}
_OPENSLIDE = "Aperio .svs, Hamamatsu .ndpi .vms, Leica .scn, MIRAX .mrxs, Philips and Ventana .tiff .bif, DICOM .dcm"


@dataclass(frozen=True)
class Finding:
    """One check: whether it passed, its result, and advice if it failed."""

    what: str
    well: bool
    seen: str
    advice: str = ""


def examine() -> list[Finding]:
    """Run all checks. No extra is needed, and no file is opened."""
    from carmil import __version__

    about = f"carmil {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return [
        Finding("carmil", True, about),
        *(_package(name, "pip install carmil") for name in _CORE),
        *(
            _package(name, f"pip install 'carmil[{extra}]'", extra)
            for extra, names in _EXTRAS.items()
            for name in names
        ),
        _formats("slides by OpenSlide", _openslide),
        _formats("slides by tifffile", _tifffile),
        _device(),
        Finding("CPU", True, f"{_cores()} cores"),
    ]


def _package(name: str, advice: str, extra: str = "") -> Finding:
    what = f"{name} ({extra})" if extra else name
    try:
        return Finding(what, True, version(name))
    except PackageNotFoundError:
        return Finding(what, False, "not installed", advice)


def _formats(what: str, seen: Callable[[], str]) -> Finding:
    try:
        return Finding(what, True, seen())
    except (ImportError, OSError) as error:
        return Finding(what, False, f"cannot be loaded: {_line(error)}", "pip install 'carmil[slides]'")


def _openslide() -> str:
    openslide = importlib.import_module("openslide")
    return f"{_OPENSLIDE} (OpenSlide {openslide.__library_version__})"


def _tifffile() -> str:
    for name in ("tifffile", "skimage"):
        importlib.import_module(name)
    plain = "plain and pyramidal TIFF, OME-TIFF"
    try:
        importlib.import_module("imagecodecs")
    except ImportError:
        return f"{plain}; only uncompressed or deflated ones, without imagecodecs"
    return f"{plain}; JPEG, JPEG 2000, LZW, deflate, zstd"


def _device() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("GPU", False, f"torch cannot be loaded: {_line(error)}", "pip install carmil")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return Finding("GPU", True, "; ".join(f"{each.name}, {each.total_memory / 2**30:.0f} GiB" for each in names))
    if torch.version.cuda is None:
        return Finding("GPU", False, "none: this torch is built for the CPU", "with a GPU, install torch's CUDA build")
    advice = "all works on the CPU, slower; with an NVIDIA GPU, see whether nvidia-smi finds it"
    return Finding("GPU", False, f"none seen (torch for CUDA {torch.version.cuda})", advice)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
