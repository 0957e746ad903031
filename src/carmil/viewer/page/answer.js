// The right side: what is answered, what speaks most for and against it, and what its loss would cost.
import { loadPicture, pictureOf } from "./ask.js";
import { capital, element, many, number, percent, roving, shown, signed, svg } from "./words.js";

const waiting = words => element("p", { class: "soft waits", text: words });
export const refused = (box, text, again) =>
  box.replaceChildren(
    element("div", {
      class: "notice small",
      role: "alert",
      children: [
        element("p", { text }),
        element("button", { type: "button", text: "Try again", on: { click: again } }),
      ],
    }),
  );
export const wait = (box, words) => box.replaceChildren(waiting(words));

// A share fills its bar; any other number is a mark between the lowest and the highest of the run's slides, and 0 a thin one.
function gauge(value, { share, signed: hasSign, low, high }, kind) {
  if (share) {
    const filled = element("span", { class: kind });
    filled.style.width = `${100 * value}%`;
    return element("div", { class: "bar", children: [filled] });
  }
  const at = place => `${high > low ? (100 * Math.max(0, Math.min(high - low, place - low))) / (high - low) : 50}%`;
  const marks = [[value, `to ${kind}`]];
  if (hasSign && low < 0 && high > 0) marks.unshift([0, "from"]);
  return element("div", {
    class: "track",
    children: marks.map(([place, names]) => {
      const mark = element("i", { class: names });
      mark.style.left = at(place);
      return mark;
    }),
  });
}

export function showAnswer(box, { info, target, chosen, choose }) {
  const { prediction, label, predicted, rule, prediction_set: set, outside, counterfactual_predicted: counter } = info;
  const wrong = info.right === false,
    several = target.outputs.length > 1,
    scaled = target.rows.find(({ format }) => !format.share)?.format;
  const head = element("p", {
    class: "verdict",
    children: [
      element("span", {
        children: ["answer ", element("b", { class: wrong ? "wrong" : "", text: `${wrong ? "✗ " : ""}${prediction}` })],
      }),
      element("span", { children: ["label ", element("b", { text: label ?? "unknown" })] }),
      wrong ? element("span", { class: "wrong", text: "wrong" }) : null,
    ],
  });
  const cell = (value, format, kind) =>
    element("td", {
      children: [
        element("div", {
          class: "gauge",
          children: [gauge(value, format, kind), element("span", { class: "figure", text: shown(value, format) })],
        }),
      ],
    });
  const heading = ({ name, output }) =>
    several && output !== null
      ? element("button", {
          type: "button",
          class: "class-name",
          "aria-pressed": output === chosen,
          title: `show the evidence for and against “${name}”`,
          text: name,
          on: { click: () => choose(output) },
        })
      : name;
  const table = element("table", {
    class: "chances",
    children: [
      element("thead", {
        children: [
          element("tr", {
            children: [
              element("th", { scope: "col", text: target.predicted }),
              element("th", { scope: "col", text: "factual" }),
              counter ? element("th", { scope: "col", text: "counterfactual" }) : null,
            ],
          }),
        ],
      }),
      element("tbody", {
        children: target.rows.map((row, i) =>
          element("tr", {
            class: row.output === chosen ? "chosen" : "",
            children: [
              element("th", { scope: "row", children: [heading(row)] }),
              cell(predicted[i], row.format, "factual"),
              counter ? cell(counter[i], row.format, "counter") : null,
            ],
          }),
        ),
      }),
    ],
  });
  const focused = box.contains(document.activeElement) && document.activeElement.matches(".class-name");
  box.replaceChildren(
    head,
    table,
    scaled
      ? element("p", {
          class: "soft note",
          text: `${capital(target.note)}${target.note ? ". " : ""}Scale: from ${shown(scaled.low, scaled)} to ${shown(scaled.high, scaled)}, the slides of this run.`,
        })
      : "",
    outside ? element("p", { class: "note outside wrong", text: `${capital(outside)}.` }) : "",
    set ? element("p", { class: "note set", text: `Prediction set: ${set}.` }) : "",
    element("p", { class: "soft note rule", text: `Decision rule: ${rule}.` }),
    element("p", {
      class: "soft note",
      text: counter
        ? "Counterfactual: what the same model answers with its counterfactual attention."
        : "This model has no counterfactual attention.",
    }),
  );
  if (focused) box.querySelector("tr.chosen button").focus();
}

// `isSigned`: the map has a sign; if not, its largest values say only where the model looks. `output`: words for its evidence.
export function showTiles(box, { top, info, target, output, explainer, isSigned, fly }) {
  const one = info.places ? "tile" : "instance";
  const group = (words, tiles, kind) => {
    const list = element("div", {
      class: info.images ? "tiles" : "tiles plain",
      role: "group",
      "aria-label": words,
      children: tiles.map(({ instance, value }) =>
        element("button", {
          type: "button",
          class: `tile ${kind}`,
          "data-instance": instance,
          "data-told": `${one} ${instance}, ${signed(value)}`,
          "data-does": info.places ? "go there" : "show it",
          on: { click: () => fly(instance) },
          children: [
            info.images
              ? loadPicture(element("img", { alt: "", decoding: "async" }), pictureOf(info.number, instance))
              : element("span", { class: "which", text: `${one} ${instance}` }),
            element("span", { class: "figure", text: signed(value) }),
          ],
        }),
      ),
    });
    roving(list);
    return [
      element("h3", { class: kind, text: words }),
      tiles.length
        ? list
        : element("p", {
            class: "soft note",
            text: top.negligible
              ? `No ${one}: the evidence is negligible.`
              : `Nothing ${kind === "against" ? output.negative : output.positive} here.`,
          }),
    ];
  };
  const groups = isSigned
    ? [
        ...group(output.most_positive, top.supporting, "for"),
        ...group(output.most_negative, top.refuting, "against"),
      ]
    : [
        ...group("Largest values", top.supporting, "for"),
        element("p", {
          class: "note",
          text: `This map has no sign: it shows how much a tile counts, not whether it ${target.either}.`,
        }),
      ];
  box.replaceChildren(
    ...groups,
    element("p", { class: "note gone", hidden: true }),
    element("p", {
      class: "soft note",
      text: top.negligible
        ? `${capital(top.negligible)}.`
        : `${info.places ? "Select a tile to go to it" : "Select one to find it"}. Ranked by ${explainer}.` +
          (isSigned ? ` Less than 5 % of the largest evidence ${target.neither}.` : ""),
    }),
  );
  for (const picture of box.querySelectorAll("img"))
    picture.addEventListener(
      "error",
      () => picture.replaceWith(element("span", { class: "which", text: "no picture" })),
      { once: true },
    );
}

// After a removal, say which of the listed tiles are removed: the lists rank the tiles of the whole slide.
export function showGone(box, removed, one) {
  const tiles = [...box.querySelectorAll(".tile")],
    gone = tiles.filter(tile => removed.has(Number(tile.dataset.instance)));
  for (const tile of tiles) {
    const { told, does } = tile.dataset,
      isGone = gone.includes(tile);
    tile.classList.toggle("gone", isGone);
    tile.setAttribute("aria-label", `${told}${isGone ? ", removed" : ""}: ${does}`);
  }
  const words = box.querySelector(".note.gone");
  if (!words) return;
  words.hidden = !removed.size || !tiles.length;
  words.textContent = `Of the whole slide, before the removal: ${gone.length || "none"} of these ${many(tiles.length, one)} ${gone.length === 1 ? "is" : "are"} removed.`;
}

const WIDTH = 320,
  HEIGHT = 190,
  BOTTOM = 34,
  TOP = 8,
  RIGHT = 8,
  DIGIT = 6.2; // width of a character of the scale
const COMPARED = 0.2; // share of the tiles after which a number is told

// Four or five round numbers that enclose a range.
function ticks(low, high) {
  const rough = (high - low || Math.abs(high) || 1) / 4,
    power = 10 ** Math.floor(Math.log10(rough)),
    step = power * [1, 2, 2.5, 5, 10].find(times => times * power >= rough * 0.999);
  const first = Math.floor(low / step + 1e-9),
    last = Math.max(first + 1, Math.ceil(high / step - 1e-9));
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(6)));
}

export function showDeletion(box, { curve, target, output, flat }) {
  const { format } = target,
    curves = [
      ["most", target.first],
      ["random", "in random order"],
      ["least", target.last],
    ].filter(([name]) => curve[name]),
    every = curves.flatMap(([name]) => curve[name]);
  const scale = format.share ? [0, 0.25, 0.5, 0.75, 1] : ticks(Math.min(...every), Math.max(...every)),
    labels = scale.map(tick => (format.share ? `${100 * tick}` : format.signed ? signed(tick) : number(tick))),
    left = Math.max(34, 8 + DIGIT * Math.max(...labels.map(text => text.length)));
  const [low, high] = [scale[0], scale.at(-1)],
    x = share => left + (WIDTH - left - RIGHT) * share,
    y = value => TOP + ((HEIGHT - TOP - BOTTOM) * (high - value)) / (high - low);
  const grid = [
    ...scale.flatMap((tick, i) => [
      svg("line", { class: "grid-line", x1: x(0), x2: x(1), y1: y(tick), y2: y(tick) }),
      svg("text", { x: left - 5, y: y(tick) + 3.5, "text-anchor": "end", text: labels[i] }),
    ]),
    ...[0, 0.25, 0.5, 0.75, 1].map(share =>
      svg("text", {
        x: x(share),
        y: HEIGHT - BOTTOM + 14,
        "text-anchor": share === 1 ? "end" : "middle",
        text: `${100 * share} %`,
      }),
    ),
  ];
  const line = name =>
    svg("path", {
      class: `curve ${name}`,
      d: curve.share
        .map((share, i) => `${i ? "L" : "M"}${x(share).toFixed(1)},${y(curve[name][i]).toFixed(1)}`)
        .join(""),
    });
  const things = flat ? "instances" : "tiles";
  const words = format.share ? half(curve, output.name, things) : change(curve, target, things);
  const drawing = svg(
    "svg",
    {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      role: "img",
      "aria-label": `${output.curve} as ${things} are removed. ${words}`,
      class: "plot",
    },
    [
      ...grid,
      ...curves.map(([name]) => line(name)),
      svg("text", { x: x(0.5), y: HEIGHT - 3, "text-anchor": "middle", text: `share of the ${things} removed` }),
    ],
  );
  const key = element("div", {
    class: "key",
    children: curves.map(([name, text]) => element("span", { children: [element("i", { class: name }), text] })),
  });
  box.replaceChildren(
    element("p", { class: "soft note", text: `${output.curve}${format.share ? ", in %" : ""}` }),
    drawing,
    key,
    element("p", { class: "note", text: words }),
  );
}

// The curve of a probability in one sentence: when half of it is gone.
function half({ share, most, random }, name, things) {
  const falls = curve => curve.findIndex(p => p < most[0] / 2);
  const first = falls(most),
    chance = random ? falls(random) : -1;
  if (first < 0) return `Removed in the map's order, “${name}” never loses half of its probability.`;
  if (share[first] === 1)
    return `Removed in the map's order, “${name}” keeps half of its probability until no ${things} are left: this map does not show what the answer depends on.`;
  const compared = chance < 0 ? "in random order it never does" : `in random order after ${percent(share[chance])}`;
  return `“${name}” loses half of its probability after ${percent(share[first])} of the ${things}, ${compared}.`;
}

// The curve of any other number in one sentence: what it is without the first tiles.
function change({ share, most, random }, { format, quantity }, things) {
  const at = share.findIndex(gone => gone >= COMPARED - 1e-9),
    value = curve => shown(curve[at], format);
  const compared = random ? `; in random order it is ${value(random)}` : "";
  return `Without the first ${percent(share[at])} of the ${things} in the map's order, the ${quantity} is ${value(most)} instead of ${shown(most[0], format)}${compared}.`;
}
