// Colours of maps: violet for attention, blue and orange for what speaks for and against. All change in lightness, and
// none needs red told from green. The light ones are those of drawn maps (carmil/maps/colours.py); the dark ones are of the
// same hues.
//
// A colour is [r, g, b, strength]; strength 0..1 makes weak values let the tissue through.

const STEPS = 32;

// [where on the scale, colour]
const ATTENTION = {
  light: [
    [0, [238, 234, 244]],
    [0.6, [128, 80, 170]],
    [1, [52, 16, 88]],
  ],
  dark: [
    [0, [44, 42, 60]],
    [0.4, [94, 62, 138]],
    [0.75, [178, 132, 220]],
    [1, [240, 226, 255]],
  ],
};
const SIGNED = {
  light: [
    [-1, [140, 55, 0]],
    [-0.75, [200, 90, 0]],
    [0, [236, 236, 238]],
    [0.75, [20, 100, 200]],
    [1, [8, 58, 140]],
  ],
  dark: [
    [-1, [255, 222, 180]],
    [-0.67, [255, 154, 61]],
    [-0.33, [150, 84, 20]],
    [0, [44, 51, 63]],
    [0.33, [40, 90, 160]],
    [0.67, [90, 160, 255]],
    [1, [198, 224, 255]],
  ],
};

function along(stops, t) {
  const above = Math.max(
      1,
      stops.findIndex(([at]) => at >= t),
    ),
    [low, from] = stops[above - 1],
    [high, to] = stops[above];
  return from.map((value, channel) => Math.round(value + ((t - low) / (high - low)) * (to[channel] - value)));
}

// The palette of a kind of map: 2 * STEPS + 1 colours around the neutral one, or STEPS + 1 from little to much.
export function palette(diverging, dark) {
  const stops = (diverging ? SIGNED : ATTENTION)[dark ? "dark" : "light"],
    first = diverging ? -STEPS : 0;
  return Array.from({ length: STEPS - first + 1 }, (_, i) => {
    const t = (first + i) / STEPS;
    return [...along(stops, t), Math.abs(t)];
  });
}

export const css = ([r, g, b], alpha = 1) => `rgb(${r} ${g} ${b} / ${alpha})`;

// How strongly each instance is coloured: -1..1 (or 0..1), by value on [low, high], or by its rank. The server says whether a
// map is negligible, or even: then colours would be made of noise; and the share of the scale that a small map fills.
function strengths({ values, low, high, diverging, negligible, even, fill = 1 }, byRank) {
  const strength = new Float32Array(values.length);
  if (negligible || (even && byRank)) return strength;
  if (!byRank) {
    const bound = diverging ? Math.max(Math.abs(low), Math.abs(high)) : high - low;
    values.forEach((value, i) => {
      strength[i] =
        bound > 0 ? Math.min(Math.max((diverging ? value : value - low) / bound, diverging ? -1 : 0), 1) : 0;
    });
    return strength;
  }
  // Of a signed map each side has its own ranks, so that a sign never turns.
  const rank = (indices, size, sign) => {
    indices.sort((a, b) => size(a) - size(b));
    let first = 0;
    indices.forEach((i, at) => {
      if (at && size(i) !== size(indices[at - 1])) first = at;
      strength[i] =
        (fill * sign * (diverging ? first + 1 : indices.length > 1 ? (first * indices.length) / (indices.length - 1) : 1)) /
        indices.length;
    });
  };
  const all = Array.from(values, (_, i) => i);
  if (!diverging) rank(all, i => values[i], 1);
  else {
    rank(
      all.filter(i => values[i] > 0),
      i => values[i],
      1,
    );
    rank(
      all.filter(i => values[i] < 0),
      i => -values[i],
      -1,
    );
  }
  return strength;
}

// A map ready to draw: each instance's place in the palette, and the instances in drawing order (weak first).
export function paint(map, { byRank, dark }) {
  const strength = strengths(map, byRank),
    colours = palette(map.diverging, dark);
  const place = Uint8Array.from(strength, s => Math.round((map.diverging ? s + 1 : s) * STEPS));
  const order = Uint32Array.from(strength, (_, i) => i).sort(
    (a, b) => Math.abs(strength[a]) - Math.abs(strength[b]) || place[a] - place[b],
  );
  return { ...map, byRank, strength, place, order, colours };
}

export const colourOf = (painted, i) => painted.colours[painted.place[i]];

export function gradient(painted) {
  const step = Math.max(1, Math.floor(painted.colours.length / 16));
  return `linear-gradient(to right, ${painted.colours
    .filter((_, i) => i % step === 0)
    .map(colour => css(colour))
    .join(", ")})`;
}
