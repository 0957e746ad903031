// Smoothing of a map as in carmil/evidence/smoothing.py: every tile shares its value equally among all tiles within a
// radius, itself included. The total stays the same; single tiles stand out less.

const LARGEST = 10; // tiles; neighbours grow with the square of the radius

/** The radius in level-0 pixels, and in words; radius: as `slides draw --smooth` takes it, "2" (tiles) or "300um". */
export function reachOf(radius, side, mpp) {
  const asked = radius.endsWith("um") ? (mpp ? parseFloat(radius) / mpp / side : 0) : Number(radius),
    tiles = Math.min(asked, LARGEST);
  const inTiles = `${Number(tiles.toPrecision(3))} tile${tiles === 1 ? "" : "s"}`,
    words = mpp ? `${inTiles} (${Math.round(tiles * side * mpp)} µm)` : inTiles;
  return { pixels: tiles * side, words: tiles < asked ? `${words}, the largest radius` : words };
}

export function smoothed(values, { x, y }, radius) {
  const reach = radius * (1 + 1e-9), // a neighbour at exactly this distance is included
    cells = new Map(),
    key = (column, row) => column * 2 ** 26 + row,
    column = i => Math.floor(x[i] / reach),
    row = i => Math.floor(y[i] / reach);
  for (let i = 0; i < values.length; i++) {
    const cell = key(column(i), row(i));
    if (!cells.has(cell)) cells.set(cell, []);
    cells.get(cell).push(i);
  }
  const each = (i, does) => {
    for (let dx = -1; dx <= 1; dx++)
      for (let dy = -1; dy <= 1; dy++)
        for (const j of cells.get(key(column(i) + dx, row(i) + dy)) ?? [])
          if ((x[i] - x[j]) ** 2 + (y[i] - y[j]) ** 2 <= reach * reach) does(j);
  };
  const result = new Float64Array(values.length);
  for (let i = 0; i < values.length; i++) {
    let count = 0;
    each(i, () => count++);
    each(i, j => {
      result[j] += values[i] / count;
    });
  }
  return result;
}

/** A map as the server sent it, smoothed; a negligible one stays as it is, since it is drawn as 0. */
export function smoothMap(map, places, { pixels, words }) {
  if (!pixels || map.negligible) return map;
  const values = Array.from(smoothed(map.values, places, pixels)),
    largest = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0) / (map.diverging ? map.fill || 1 : 1),
    least = values.reduce((most, value) => Math.min(most, value), 0);
  return {
    ...map,
    values,
    low: map.diverging ? -largest : least,
    high: largest,
    of: `${map.of}. Smoothed: every tile shares its value equally with the tiles within ${words}; the total stays the same`,
  };
}
