"""Slides that are a PNG or JPEG picture: regions cut from a slide, or small scans. They are held in memory as a whole."""

import warnings
from pathlib import Path

import numpy as np
from PIL import Image

from carmil.errors import CarmilError
from carmil.slides.pyramid import Pyramid, over_white
from carmil.slides.slide import GivenMpp, Level, Picture, choose_mpp
from carmil.untrusted import one_line_errors

_MOST = 2**28  # pixels, 800 MB


class PictureSlide(Pyramid):
    """A picture of one level. The resolution that such a file records is that of a screen or a printer, and is ignored."""

    def __init__(self, path: Path, *, mpp: GivenMpp) -> None:
        self.path = path
        self.mpp, self.mpp_from = choose_mpp(path, None, mpp)
        with one_line_errors(path, "check that the file is complete"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, about pictures of more than 89 million pixels
            with Image.open(path, formats=("PNG", "JPEG")) as picture:
                self.width, self.height = picture.size
                if self.width * self.height > _MOST:
                    raise CarmilError(
                        f"{path} is {self.width:,} x {self.height:,} pixels, too large to be decoded as a whole; convert it "
                        "to a tiled TIFF"
                    )
                if picture.mode.startswith(("I", "F")):
                    raise CarmilError(
                        f"{path} has more than 8 bits per pixel and no colour: expected 8-bit RGB or grayscale"
                    )
                pixels = np.asarray(picture.convert("RGBA" if picture.has_transparency_data else "RGB"))
        self.levels = (Level(self.width, self.height, 1.0),)
        self._pixels = over_white(pixels[..., :3], pixels[..., 3]) if pixels.shape[2] == 4 else pixels

    def _region(self, level: int, x: int, y: int, width: int, height: int) -> Picture:
        return self._pixels[y : y + height, x : x + width]
