// Contour lines: the edges between tiles that reach a level and those that do not. A level is a share of the colour scale.
const MOST = 6; // levels

/** Levels in per cent from what somebody typed, in order; null if it is not a list of numbers between 1 and 99. */
export function levelsOf(text) {
  const levels = text.split(/[\s,;%]+/).filter(Boolean).map(Number);
  const valid = levels.length <= MOST && levels.every(level => level >= 1 && level <= 99);
  return valid ? [...new Set(levels)].sort((a, b) => a - b) : null;
}

/** One {level, colour, edges} per level and sign; edges: [x0, y0, x1, y1, ...] in level-0 pixels. */
export function contours({ strength, diverging, colours }, places, levels) {
  const signs = diverging ? [1, -1] : [1];
  return levels.flatMap(level =>
    signs.map(sign => ({
      level,
      colour: colours[sign > 0 ? colours.length - 1 : 0],
      edges: edges(places, i => sign * strength[i] >= level / 100),
    })),
  );
}

function edges({ x, y, size, neighbours }, inside) {
  const found = [];
  for (let i = 0; i < x.length; i++) {
    if (!inside(i)) continue;
    const corners = [
      [x[i] + size, y[i]],
      [x[i] + size, y[i] + size],
      [x[i], y[i] + size],
      [x[i], y[i]],
    ];
    for (let side = 0; side < 4; side++) {
      const beside = neighbours[4 * i + side];
      if (beside < 0 || !inside(beside)) found.push(...corners[side], ...corners[(side + 1) % 4]);
    }
  }
  return found;
}
