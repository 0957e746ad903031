"""The libraries of slides and the viewer are optional: all other packages can be imported without them."""

import subprocess
import sys
from pathlib import Path

import carmil

SOURCE = Path(carmil.__file__).parent
NEEDED = ("bags", "models", "counterfactual", "training", "evidence", "maps", "studies", "report")
OPTIONAL = ("openslide", "tifffile", "timm", "torchvision", "skimage", "starlette", "uvicorn", "ray", "huggingface_hub")
WITH_SLIDES = "carmil.explanations.slide_pipeline"  # `carmil slides run`
SCRIPT = """
import importlib, sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
for name in sys.argv[2].split(","):
    importlib.import_module(name)
"""


def test_required_packages_import_without_optional_libraries():
    files = [path for room in NEEDED for path in (SOURCE / room).rglob("*.py") if path.stem != "__init__"]
    modules = [".".join(("carmil", *path.relative_to(SOURCE).with_suffix("").parts)) for path in files]
    assert len(modules) > 100
    words = [sys.executable, "-c", SCRIPT, ",".join(OPTIONAL), ",".join(m for m in modules if m != WITH_SLIDES)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
