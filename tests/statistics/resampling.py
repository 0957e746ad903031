"""The percentile bootstrap of any measure, one resample at a time."""

import numpy as np

from carmil.statistics.bootstrap import draws, percentiles


def bootstrap(measure, *arrays, groups=None, strata=None, repeats=2000, level=0.95, seed=0):
    """Return the interval of measure(*arrays) over resampled rows, or over groups of rows."""
    rows = [np.asarray(array) for array in arrays]
    places = np.arange(len(rows[0]))
    drawn = draws(len(places), groups, strata=strata, repeats=repeats, seed=seed)
    taken = (np.repeat(places, count) for counts in drawn for count in counts)
    values = np.array([measure(*(row[at] for row in rows)) for at in taken], dtype=np.float64)
    return percentiles(float(measure(*rows)), values, level)
