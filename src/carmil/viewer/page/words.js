// Numbers and elements as people read them.

export const $ = id => document.getElementById(id);

export function element(tag, { text, class: names, children = [], on = {}, ...attributes } = {}) {
  const made = document.createElement(tag);
  if (names) made.className = names;
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  for (const [name, does] of Object.entries(on)) made.addEventListener(name, does);
  made.append(...children.filter(child => child !== null));
  return made;
}

export function svg(tag, attributes, children = []) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes))
    name === "text" ? (made.textContent = value) : made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** What went wrong, and a button to try again. */
export const notice = (text, again) =>
  element("div", {
    class: "notice",
    role: "alert",
    children: [
      element("p", { text }),
      element("button", { type: "button", text: "Try again", on: { click: again } }),
    ],
  });

export const options = (pairs, chosen) =>
  pairs.map(([value, text]) => element("option", { value, text, selected: value === chosen }));

export const percent = p => {
  const hundred = 100 * p;
  return hundred > 99.5 && p < 1 ? "> 99 %" : hundred > 0 && hundred < 0.5 ? "< 1 %" : `${Math.round(hundred)} %`;
};

/** A probability as `carmil.words.probability_text` writes it: never "0 %" or "100 %", since no model is certain. */
export const probability = p => {
  const tenths = Math.floor(1000 * p + 0.5);
  return tenths > 999 ? "> 99.9 %" : tenths < 1 ? "< 0.1 %" : `${(tenths / 10).toFixed(1)} %`;
};

export const points = change => {
  const hundred = 100 * change;
  if (Math.abs(hundred) < 0.05) return "±0";
  return `${hundred > 0 ? "+" : "−"}${Math.abs(hundred).toFixed(Math.abs(hundred) < 9.95 ? 1 : 0)}`;
};

export const number = value => {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  const text =
    size === 0
      ? "0"
      : size >= 100
        ? size.toFixed(0)
        : size >= 0.001
          ? size.toPrecision(size < 0.01 ? 2 : 3)
          : power(size);
  return (value < 0 ? "−" : "") + text;
};

const power = size => {
  const [digits, exponent] = size.toExponential(1).split("e");
  return `${digits}·10⁻${[...exponent.slice(1)].map(digit => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("")}`;
};

/** A number of an answer, in the format that the server gives. */
export const shown = (value, { share, signed: hasSign, decimals }) => {
  if (share) return probability(value);
  const text = Math.abs(value).toFixed(decimals),
    sign = Number(text) === 0 ? "" : value < 0 ? "−" : hasSign ? "+" : "";
  return sign + text;
};

/** The change of such a number: of a share in percentage points. */
export const changed = (change, { share, decimals }) => {
  const text = share ? points(change) : shown(change, { signed: true, decimals });
  return /[1-9]/.test(text) ? text : "±0";
};

/** Where a pointer is on an element, in CSS pixels. */
export const pointOn = (box, { clientX, clientY }) => {
  const { left, top } = box.getBoundingClientRect();
  return [clientX - left, clientY - top];
};

export const capital = text => text.charAt(0).toUpperCase() + text.slice(1);

/** What the ends and the middle of a colour scale mean, from left to right; `output` has the words for its evidence. */
export function meanings(name, output, { diverging }) {
  if (name === "evidence" && diverging) return [output.negative, "neither", output.positive];
  if (name === "difference") return ["more counterfactual attention", "equal", "more attention"];
  if (name === "counterfactual") return ["no counterfactual attention", null, "most on this slide"];
  return name === "factual" ? ["no attention", null, "most on this slide"] : ["little", null, "much"];
}

export const signed = value => (value > 0 ? "+" : "") + number(value);

export const many = (count, one, more = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : more}`;

const region = document.getElementById("said");
export const say = text => {
  region.textContent = text;
};

// One tab stop for a group of buttons; arrow keys go through it.
export function roving(group) {
  const items = () => [...group.querySelectorAll("button")];
  const offer = chosen =>
    items().forEach(item => {
      item.tabIndex = item === chosen ? 0 : -1;
    });
  offer(items()[0]);
  group.addEventListener("focusin", event => event.target.matches("button") && offer(event.target));
  group.addEventListener("keydown", event => {
    const all = items(),
      at = all.indexOf(event.target);
    if (at < 0 || event.ctrlKey || event.altKey || event.metaKey) return;
    const top = event.target.offsetTop;
    const row = all.filter(item => item.offsetTop === top).length || 1;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row, Home: -at, End: all.length - 1 - at }[
      event.key
    ];
    if (step === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    all[Math.max(0, Math.min(all.length - 1, at + step))].focus();
  });
}
