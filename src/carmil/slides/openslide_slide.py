"""Slides read with OpenSlide: Aperio, Hamamatsu, Leica, MIRAX, Philips, Ventana, DICOM and others."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import openslide

from carmil.errors import CarmilError
from carmil.slides.pyramid import Pyramid, over_white
from carmil.slides.slide import FileMpp, GivenMpp, Level, Picture, choose_mpp
from carmil.slides.tiff_slide import check_tiff, is_tiff, line_of
from carmil.words import number_in

_CACHE = 1 << 26  # bytes of decoded tiles, which neighbouring regions share

_LARGEST_TILE = 1 << 26  # pixels


def vendor(path: Path) -> str | None:
    """Return the vendor that OpenSlide detects; None if the format is unknown."""
    try:
        return openslide.OpenSlide.detect_format(path)
    except openslide.OpenSlideError:
        return None


class OpenSlideSlide(Pyramid):
    def __init__(self, path: Path, *, mpp: GivenMpp) -> None:
        self.path = path
        if is_tiff(path):
            check_tiff(path)
        try:
            self._file = openslide.OpenSlide(path)
            self._file.set_cache(openslide.OpenSlideCache(_CACHE))
        except openslide.OpenSlideError as error:
            raise CarmilError(f"{path} cannot be opened: {line_of(error)}; check that the file is complete") from None
        try:
            properties = self._file.properties
            self.width, self.height = self._file.dimensions
            self._refuse_huge_tiles(properties)
            self.levels = tuple(
                Level(width, height, downsample)
                for (width, height), downsample in zip(
                    self._file.level_dimensions, self._file.level_downsamples, strict=True
                )
            )
            objective = number_in(properties.get(openslide.PROPERTY_NAME_OBJECTIVE_POWER, ""))
            self.mpp, self.mpp_from = choose_mpp(path, _recorded_mpp(properties), mpp, objective=objective)
        except CarmilError:
            self.close()
            raise

    def _refuse_huge_tiles(self, properties: Mapping[str, str]) -> None:
        """Refuse very large stored tiles: OpenSlide decodes each tile as a whole, and aborts the process if memory is short."""
        for level in range(len(self._file.level_dimensions)):
            sides = [properties.get(f"openslide.level[{level}].tile-{side}", "0") for side in ("width", "height")]
            if int(sides[0]) * int(sides[1]) > _LARGEST_TILE:
                raise CarmilError(
                    f"{self.path} stores tiles of {sides[0]} x {sides[1]} pixels, too large to be decoded as a "
                    "whole; check that the file is complete"
                )

    def _region(self, level: int, x: int, y: int, width: int, height: int) -> Picture:
        downsample = self.levels[level].downsample
        corner = (round(x * downsample), round(y * downsample))
        try:
            picture = self._file.read_region(corner, level, (width, height))
        except openslide.OpenSlideError as error:
            raise CarmilError(
                f"{self.path} cannot be read at x {corner[0]}, y {corner[1]} (level-0 pixels): "
                f"{line_of(error)}; check that the file is complete"
            ) from None
        if picture.getchannel("A").getextrema()[0] == 255:  # true almost everywhere, and faster than blending
            return np.asarray(picture.convert("RGB"))
        pixels = np.asarray(picture)
        return over_white(pixels[..., :3], pixels[..., 3])

    def close(self) -> None:
        self._file.close()


def _recorded_mpp(properties: Mapping[str, str]) -> FileMpp | None:
    x, y = (number_in(properties.get(f"openslide.mpp-{axis}", "")) for axis in "xy")
    if x is not None and y is not None:
        return FileMpp(x, y, "OpenSlide's mpp-x, mpp-y")
    unit = {"centimeter": 10_000, "inch": 25_400}.get(properties.get("tiff.ResolutionUnit", ""))
    x, y = (number_in(properties.get(f"tiff.{axis}Resolution", "")) for axis in "XY")
    if unit is None or x is None or y is None or min(x, y) <= 0:
        return None
    return FileMpp(unit / x, unit / y, "its TIFF resolution")
