"""Install OpenSeadragon, which the viewer's page needs, and its licence, from a pinned npm package.

    python tools/fetch_openseadragon.py

Without npm or a network connection it prints a note and exits with status 0: only the zoom of slides needs it.
"""

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "6.1.1"
PAGE = Path(__file__).resolve().parents[1] / "src" / "carmil" / "viewer" / "page"
FILES = {  # where it goes: where it lies in the package, and its sha256
    "openseadragon.min.js": (
        "package/build/openseadragon/openseadragon.min.js",
        "14d587cd3ee7c4861f1a41077ce642029364a21029956ba635bd8fb1202cf9ad",
    ),
    "openseadragon.LICENSE.txt": (
        "package/LICENSE.txt",
        "17da96b26ac706d2cbd06d4555dedb43026782f4943faf0156fe7acf89454228",
    ),
}


def fetch(page: Path = PAGE) -> str | None:
    """Fetches what is not there. One line if that cannot be; a file that is not the expected one is never put there."""
    if all(_is(page / name, checksum) for name, (_, checksum) in FILES.items()):
        return None
    with tempfile.TemporaryDirectory() as aside:
        try:
            words = ["npm", "pack", f"openseadragon@{VERSION}", "--silent", "--pack-destination", aside]
            subprocess.run(words, check=True, capture_output=True, timeout=120, cwd=aside)
            with tarfile.open(next(Path(aside).glob("*.tgz"))) as package:
                found = {name: _member(package, inside) for name, (inside, _) in FILES.items()}
        except FileNotFoundError:
            return f"npm is not installed, so OpenSeadragon {VERSION} was not fetched: the viewer's slides have no zoom"
        except (OSError, subprocess.SubprocessError, StopIteration, KeyError, tarfile.TarError) as error:
            return f"OpenSeadragon {VERSION} could not be fetched ({error}): the viewer's slides have no zoom"
    for name, data in found.items():
        if hashlib.sha256(data).hexdigest() != FILES[name][1]:
            return f"{name} of openseadragon {VERSION} is not the file that was expected (its sha256 differs): not used"
    page.mkdir(parents=True, exist_ok=True)
    for name, data in found.items():
        (page / name).write_bytes(data)
    return None


def _is(path: Path, checksum: str) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == checksum


def _member(package: tarfile.TarFile, name: str) -> bytes:
    stream = package.extractfile(name)
    if stream is None:
        raise KeyError(name)
    return stream.read()


if __name__ == "__main__":
    problem = fetch()
    if problem:
        print(problem, file=sys.stderr)
