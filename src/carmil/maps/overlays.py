"""Maps for other programs: GeoJSON for QuPath, and pyramidal OME-TIFF. Both are written in parts.

The GeoJSON has the form that QuPath (0.4 and later) itself writes: a FeatureCollection, `objectType` "tile" or
"annotation", values as `measurements`, a `classification` with its colour, and the tile's own `color`, which QuPath
shows in place of its class's.
"""

import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import shapely
from numpy.typing import NDArray

from carmil.files import atomic_file
from carmil.maps.colours import ATTENDED, REFUTES, SUPPORTS, to_colours
from carmil.maps.legend import RESEARCH
from carmil.maps.mosaic import picture_size
from carmil.maps.painting import Painter
from carmil.maps.regions import signed_top_regions
from carmil.maps.tile_maps import Scale, TileMap, leading_map
from carmil.slides.slide import Tiles

EDGE = 512  # pixels per side of a TIFF tile
SMALLEST = 1024  # the pyramid ends at the first level whose longer side has at most this many pixels
_IDS = uuid.UUID(
    "6f1c5a52-6a8b-4f0e-9d0c-0f3d2b6a7c11"
)  # carmil's namespace: the same tile has the same id in every file


def write_geojson(tiles: Tiles, maps: Sequence[TileMap], path: Path, *, scale: Scale = "minmax") -> Path:
    """Write every tile with the values of all maps, coloured by the leading one (see `leading_map`), and its top regions."""
    leading = leading_map(maps)
    with atomic_file(path) as aside, aside.open("w", encoding="utf-8") as file:
        about = {"slide": tiles.slide, "coloured_by": leading.title, "scale": leading.scaling(scale), "note": RESEARCH}
        file.write(f'{{"type": "FeatureCollection", "carmil": {json.dumps(about)}, "features": [\n')
        before = ""
        for feature in chain(_regions(tiles, leading), _tiles(tiles, maps, leading, scale)):
            file.write(before + feature)
            before = ",\n"
        file.write("\n]}\n")
    return path


def _tiles(tiles: Tiles, maps: Sequence[TileMap], leading: TileMap, scale: Scale) -> Iterator[str]:
    """Yield one line per tile. Corners are whole pixels, and the edges of tiles with a fractional size are rounded."""
    names = [json.dumps(one.title) for one in maps]
    columns = [one.values for one in maps]
    shades = to_colours(leading.shades(scale), signed=leading.signed).tolist()
    classes = {sign: _class(leading, sign) for sign in (-1, 0, 1)}
    signs = leading.signs.tolist()
    for i, (x, y) in enumerate(tiles.corners.tolist()):
        value = float(leading.values[i])
        values = ", ".join(
            f"{name}: {column[i]:.9g}" for name, column in zip(names, columns, strict=True) if column[i] == column[i]
        )
        classified = "" if value != value else classes[signs[i]]
        colour = "" if value != value else f', "color": {shades[i]}'
        yield (
            f'{{"type": "Feature", "id": "{uuid.uuid5(_IDS, f"{tiles.slide}/{x}/{y}/{i}")}", "geometry": '
            f'{_square(x, y, tiles.size)}, "properties": {{"objectType": "tile"{colour}{classified}, '
            f'"measurements": {{{values}}}}}}}'
        )


def _square(x: int, y: int, size: float) -> str:
    right, bottom = f"{x + size:.10g}", f"{y + size:.10g}"
    ring = f"[[{x}, {y}], [{right}, {y}], [{right}, {bottom}], [{x}, {bottom}], [{x}, {y}]]"
    return f'{{"type": "Polygon", "coordinates": [{ring}]}}'


def _class(leading: TileMap, sign: int) -> str:
    """Return the classification of a tile. Colons, which mean a subclass in QuPath, are replaced."""
    if not leading.signed:
        words, colour = leading.ends[1], ATTENDED
    elif sign == 0:
        return ""
    else:
        words, colour = leading.ends[sign > 0], SUPPORTS if sign > 0 else REFUTES
    return f', "classification": {json.dumps({"name": words.replace(":", " "), "color": list(colour)})}'


def _regions(tiles: Tiles, leading: TileMap) -> Iterator[str]:
    counts = {1: 0, -1: 0}
    of = [f"run {leading.model}"] if leading.model else []
    of += [f"smoothed over {leading.smoothed}"] if leading.smoothed else []
    for sign, region in signed_top_regions(tiles, leading):
        counts[sign] += 1
        words = leading.ends[sign > 0].replace(":", " ")
        colour = ATTENDED if not leading.signed else SUPPORTS if sign > 0 else REFUTES
        properties: dict[str, Any] = {
            "objectType": "annotation",
            "name": ", ".join([words, *of, f"region {counts[sign]}"]),
            "classification": {"name": words, "color": list(colour)},
            "isLocked": True,
            "measurements": {f"mean {leading.title}": region.mean, "area µm²": region.shape.area * tiles.slide_mpp**2},
        }
        number = uuid.uuid5(_IDS, f"{tiles.slide}/region/{leading.title}/{sign}/{counts[sign]}")
        rings = [ring.round(3).tolist() for ring in map(shapely.get_coordinates, shapely.get_rings(region.shape))]
        geometry = {"type": "Polygon", "coordinates": rings}
        yield json.dumps({"type": "Feature", "id": str(number), "geometry": geometry, "properties": properties})


def write_ome_tiff(painter: Painter, paths: Sequence[Path], *, longest: int) -> list[Path]:
    """Write one pyramid per map, without a legend: tiled, levels in SubIFDs, with its pixel size in micrometres."""
    slide = painter.slide
    sizes = [picture_size(slide.width, slide.height, longest)]
    while max(sizes[-1]) > SMALLEST:
        sizes.append((max(1, sizes[-1][0] // 2), max(1, sizes[-1][1] // 2)))
    for i, path in enumerate(paths):
        one = Painter(slide, painter.tiles, painter.maps[i : i + 1], painter.scale, painter.annotations, painter.grey)
        _write_pyramid(one, sizes, path)
    return list(paths)


def _write_pyramid(painter: Painter, sizes: Sequence[tuple[int, int]], path: Path) -> None:
    import tifffile

    slide, first_map = painter.slide, painter.maps[0]
    mpp = [slide.mpp * slide.width / sizes[0][0], slide.mpp * slide.height / sizes[0][1]]
    options = {
        "axes": "YXS",
        "Name": f"{slide.name}: {first_map.title}",
        "Description": f"{first_map.title}; {first_map.ends[0]} to {first_map.ends[1]}; {RESEARCH}",
        "PhysicalSizeX": mpp[0],
        "PhysicalSizeXUnit": "µm",
        "PhysicalSizeY": mpp[1],
        "PhysicalSizeYUnit": "µm",
    }
    with ExitStack() as stack:
        aside = stack.enter_context(atomic_file(path))
        file = stack.enter_context(tifffile.TiffWriter(aside, bigtiff=True, ome=True))
        for level, pixels in enumerate(sizes):
            x, y = (1e4 / (um * sizes[0][axis] / pixels[axis]) for axis, um in enumerate(mpp))
            file.write(
                _tiff_tiles(painter, pixels),
                shape=(pixels[1], pixels[0], 3),
                dtype=np.uint8,
                photometric="rgb",
                tile=(EDGE, EDGE),
                compression="zlib",
                predictor=True,
                resolution=(x, y),
                resolutionunit="CENTIMETER",
                subifds=len(sizes) - 1 if level == 0 else None,
                subfiletype=int(level > 0),
                metadata=options if level == 0 else None,
                maxworkers=1,
            )


def _tiff_tiles(painter: Painter, pixels: tuple[int, int]) -> Iterator[NDArray[np.uint8]]:
    """Yield the tiles of the TIFF row by row, all of one size."""
    for (picture,) in painter.strips(pixels, line=max(2, max(pixels) // 700), rows=EDGE):
        for left in range(0, pixels[0], EDGE):
            tile = picture[:, left : left + EDGE]
            missing = [(0, EDGE - side) for side in tile.shape[:2]]
            yield np.pad(tile, (*missing, (0, 0)), constant_values=255)
