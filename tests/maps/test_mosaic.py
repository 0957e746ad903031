"""Tile values are converted to pixel values."""

import numpy as np

from carmil.maps.mosaic import mosaic, pixel_boxes


def test_mosaic_equals_painting_tiles_one_by_one():
    rng = np.random.default_rng(0)
    corners, values = rng.integers(-40, 300, (200, 2)), rng.normal(size=(2, 200))
    values[1, ::7] = np.nan
    total, count = np.zeros((2, 100, 128)), np.zeros((2, 100, 128))
    boxes = pixel_boxes(corners, 37.3, (0, 0, 256, 200), (128, 100))
    for i, (left, top, right, bottom) in enumerate(boxes):
        for m in np.flatnonzero(~np.isnan(values[:, i])):
            total[m, max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)] += values[m, i]
            count[m, max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)] += 1
    with np.errstate(invalid="ignore"):
        expected = total / count
    layout = mosaic(boxes, values, (128, 100))
    np.testing.assert_allclose([layout.spread(cells) for cells in layout.cells], expected, atol=1e-9)
