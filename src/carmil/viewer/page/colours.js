// Colours of maps: one sequence for attention, blue and orange for what speaks for and against. Both change in
// lightness, and neither needs red told from green.
//
// A colour is [r, g, b, strength]; strength 0..1 makes weak values let the tissue through.

const STEPS = 32;

const SEQUENCE = {
  light: [
    [222, 241, 230],
    [120, 205, 184],
    [46, 150, 156],
    [24, 90, 124],
    [14, 42, 82],
  ],
  dark: [
    [38, 50, 66],
    [30, 84, 116],
    [40, 138, 150],
    [104, 200, 178],
    [222, 250, 228],
  ],
};
const FOR = {
  light: [
    [236, 236, 238],
    [140, 182, 232],
    [20, 100, 200],
    [6, 50, 124],
  ],
  dark: [
    [44, 51, 63],
    [40, 90, 160],
    [90, 160, 255],
    [198, 224, 255],
  ],
};
const AGAINST = {
  light: [
    [236, 236, 238],
    [244, 178, 110],
    [222, 104, 0],
    [136, 56, 0],
  ],
  dark: [
    [44, 51, 63],
    [150, 84, 20],
    [255, 154, 61],
    [255, 222, 180],
  ],
};

function along(stops, t) {
  const at = Math.min(Math.max(t, 0), 1) * (stops.length - 1),
    i = Math.min(Math.floor(at), stops.length - 2),
    part = at - i;
  return stops[i].map((from, channel) => Math.round(from + part * (stops[i + 1][channel] - from)));
}

// The palette of a kind of map: 2 * STEPS + 1 colours around the neutral one, or STEPS + 1 from little to much.
export function palette(diverging, dark) {
  const side = dark ? "dark" : "light";
  if (!diverging) return Array.from({ length: STEPS + 1 }, (_, i) => [...along(SEQUENCE[side], i / STEPS), i / STEPS]);
  return Array.from({ length: 2 * STEPS + 1 }, (_, i) => {
    const t = (i - STEPS) / STEPS;
    return [...along((t < 0 ? AGAINST : FOR)[side], Math.abs(t)), Math.abs(t)];
  });
}

export const css = ([r, g, b], alpha = 1) => `rgb(${r} ${g} ${b} / ${alpha})`;

// How strongly each instance is coloured: -1..1 (or 0..1), by value on [low, high], or by its rank.
function strengths({ values, low, high, diverging }, byRank) {
  const strength = new Float32Array(values.length);
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
        (sign * (diverging ? first + 1 : indices.length > 1 ? (first * indices.length) / (indices.length - 1) : 1)) /
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

// What the ends of the colour scale mean, from left to right.
export function meanings(name, className, { diverging }) {
  if (name === "evidence" && diverging) return [`refutes “${className}”`, "neither", `supports “${className}”`];
  if (name === "difference" && diverging) return ["the counterfactual looks here", "alike", "the model looks here"];
  if (diverging) return ["against", "neither", "for"];
  if (name === "counterfactual") return ["little counterfactual attention", null, "much"];
  return name === "factual" ? ["little attention", null, "much"] : ["little", null, "much"];
}
