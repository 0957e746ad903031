// The right side: what is answered, what speaks most for and against it, and what its loss would cost.
import { pictureOf } from "./ask.js";
import { capital, element, percent, roving, signed } from "./words.js";

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

function bar(p, kind) {
  const filled = element("span", { class: kind });
  filled.style.width = `${100 * p}%`;
  return element("div", { class: "bar", children: [filled] });
}

export function showAnswer(box, { info, classes, chosen, choose }) {
  const { prediction, label, probabilities, rule, counterfactual_probabilities: counter } = info;
  const wrong = info.right === false;
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
  const cell = (p, kind) =>
    element("td", {
      children: [
        element("div", {
          class: "gauge",
          children: [bar(p, kind), element("span", { class: "figure", text: percent(p) })],
        }),
      ],
    });
  const table = element("table", {
    class: "chances",
    children: [
      element("thead", {
        children: [
          element("tr", {
            children: [
              element("th", { scope: "col", text: "class" }),
              element("th", { scope: "col", text: "factual" }),
              counter ? element("th", { scope: "col", text: "counterfactual" }) : null,
            ],
          }),
        ],
      }),
      element("tbody", {
        children: classes.map((name, c) =>
          element("tr", {
            class: c === chosen ? "chosen" : "",
            children: [
              element("th", {
                scope: "row",
                children: [
                  element("button", {
                    type: "button",
                    class: "class-name",
                    "aria-pressed": c === chosen,
                    title: `show the evidence for and against “${name}”`,
                    text: name,
                    on: { click: () => choose(c) },
                  }),
                ],
              }),
              cell(probabilities[c], "factual"),
              counter ? cell(counter[c], "counter") : null,
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

// `isSigned`: the map speaks for and against; if not, its largest values say only where the model looks.
export function showTiles(box, { top, info, className, explainer, isSigned, fly }) {
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
          "aria-label": `${one} ${instance}, ${signed(value)}: ${info.places ? "go there" : "show it"}`,
          on: { click: () => fly(instance) },
          children: [
            info.images
              ? element("img", { src: pictureOf(info.number, instance), alt: "", loading: "lazy", decoding: "async" })
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
              : `Nothing ${kind === "against" ? "refutes" : "supports"} “${className}” here.`,
          }),
    ];
  };
  const groups = isSigned
    ? [
        ...group(`Most supporting “${className}”`, top.supporting, "for"),
        ...group(`Most refuting “${className}”`, top.refuting, "against"),
      ]
    : [
        ...group("Largest values", top.supporting, "for"),
        element("p", { class: "note", text: "This map has no sign: it shows how much a tile counts, not whether it is for or against." }),
      ];
  box.replaceChildren(
    ...groups,
    element("p", {
      class: "soft note",
      text: top.negligible
        ? `${capital(top.negligible)}.`
        : `${info.places ? "Select a tile to go to it" : "Select one to find it"}. Ranked by ${explainer}.` +
          (isSigned ? ` Less than 5 % of the largest evidence is neither for nor against.` : ""),
    }),
  );
  for (const picture of box.querySelectorAll("img"))
    picture.addEventListener(
      "error",
      () => picture.replaceWith(element("span", { class: "which", text: "no picture" })),
      { once: true },
    );
}

const WIDTH = 320,
  HEIGHT = 190,
  LEFT = 34,
  BOTTOM = 34,
  TOP = 8,
  RIGHT = 8;
const CURVES = [
  ["most", "most supporting first"],
  ["random", "in random order"],
  ["least", "least supporting first"],
];

function svg(tag, attributes, children = []) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes))
    name === "text" ? (made.textContent = value) : made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function showDeletion(box, { curve, className, flat }) {
  const x = share => LEFT + (WIDTH - LEFT - RIGHT) * share,
    y = p => TOP + (HEIGHT - TOP - BOTTOM) * (1 - p);
  const grid = [0, 0.25, 0.5, 0.75, 1].flatMap(tick => [
    svg("line", { class: "grid-line", x1: x(0), x2: x(1), y1: y(tick), y2: y(tick) }),
    svg("text", { x: LEFT - 5, y: y(tick) + 3.5, "text-anchor": "end", text: `${100 * tick}` }),
    svg("text", {
      x: x(tick),
      y: HEIGHT - BOTTOM + 14,
      "text-anchor": tick === 1 ? "end" : "middle",
      text: `${100 * tick} %`,
    }),
  ]);
  const line = name =>
    svg("path", {
      class: `curve ${name}`,
      d: curve.share
        .map((share, i) => `${i ? "L" : "M"}${x(share).toFixed(1)},${y(curve[name][i]).toFixed(1)}`)
        .join(""),
    });
  const words = summary(curve, className, flat);
  const things = flat ? "instances" : "tiles";
  const drawing = svg(
    "svg",
    {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      role: "img",
      "aria-label": `Probability of “${className}” as ${things} are removed. ${words}`,
      class: "plot",
    },
    [
      ...grid,
      ...CURVES.filter(([name]) => curve[name]).map(([name]) => line(name)),
      svg("text", { x: x(0.5), y: HEIGHT - 3, "text-anchor": "middle", text: `share of the ${things} removed` }),
    ],
  );
  const key = element("div", {
    class: "key",
    children: CURVES.filter(([name]) => curve[name]).map(([name, text]) =>
      element("span", { children: [element("i", { class: name }), text] }),
    ),
  });
  box.replaceChildren(
    element("p", { class: "soft note", text: `Probability of “${className}”, in %` }),
    drawing,
    key,
    element("p", { class: "note", text: words }),
  );
}

// The curve in one sentence: when half of the probability is gone.
function summary({ share, most, random }, className, flat) {
  const falls = curve => curve.findIndex(p => p < most[0] / 2),
    things = flat ? "instances" : "tiles";
  const first = falls(most),
    chance = random ? falls(random) : -1;
  if (first < 0) return `Removed in the map's order, “${className}” never loses half of its probability.`;
  const compared = chance < 0 ? "in random order it never does" : `in random order after ${percent(share[chance])}`;
  return `“${className}” loses half of its probability after ${percent(share[first])} of the ${things}, ${compared}.`;
}
