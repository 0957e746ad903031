"""Provenance of results: fingerprints of configurations, the machine, and values as JSON."""

import hashlib
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch


def config_key(config: Mapping[str, Any]) -> str:
    """Return a fingerprint of a configuration: equal configurations have equal keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]


def machine() -> dict[str, str]:
    """Return the versions and hardware with which results are measured."""
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cpu": f"{_cpu_name()}, {torch.get_num_threads()} threads",
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def machine_line() -> str:
    return ", ".join(f"{name} {value}" for name, value in machine().items())


def to_json(value: Any) -> Any:
    """Convert dataclasses to objects, tensors and arrays to nested lists, and NaN and infinity, which JSON lacks, to null."""
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(asdict(value))
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor | np.ndarray):
        return to_json(value.tolist())
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
