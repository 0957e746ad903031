"""The tiles of a case as a table for a spreadsheet: their positions, the values of the maps, and the regions that
contain them.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from carmil.csv_files import csv_text
from carmil.maps.drawn_regions import DrawnRegion
from carmil.viewer.annotations import Annotations
from carmil.viewer.cases import RunCases
from carmil.viewer.maps import CaseMaps
from carmil.viewer.pictures import Pictures, Places
from carmil.viewer.whatif import inside


def tile_table(run: RunCases, maps: CaseMaps, pictures: Pictures, annotations: Annotations, number: int) -> str:
    """Return one row per tile, in the order of the features."""
    n, places = run.size(number), pictures.places(number)
    columns: dict[str, Sequence[object]] = {"slide": [run.cases[number].slide] * n, "tile": range(n)}
    if places is not None:
        unit = places.unit
        columns |= {f"x_{unit}": places.corners[:, 0].tolist(), f"y_{unit}": places.corners[:, 1].tolist()}
        columns[f"size_{unit}"] = [places.tile_size] * n
    for kind in maps.kinds.values():
        for of in range(len(run.outputs) if kind.of_class else 1):
            title = f"{kind.title} {run.outputs[of]}" if kind.of_class else kind.title
            columns[title] = [f"{value:.6g}" for value in maps.values(number, kind.name, of).tolist()]
    found = annotations.of(number)
    if places is not None and (regions := [*found.drawn, *found.truth]):
        columns["regions"] = _regions_of(places, regions)
    return csv_text([list(columns), *zip(*columns.values(), strict=True)], for_people=True)


def _regions_of(places: Places, regions: Sequence[DrawnRegion]) -> list[str]:
    """Return the names of the regions that the middle of each tile lies in."""
    names: list[list[str]] = [[] for _ in places.corners]
    for region in regions:
        odd: NDArray[np.bool_] = np.zeros(len(names), dtype=bool)
        for ring in region.rings:
            odd[inside(places.centres, ring)] ^= True
        for j in np.flatnonzero(odd):
            names[j].append(region.name)
    return ["; ".join(dict.fromkeys(of)) for of in names]
