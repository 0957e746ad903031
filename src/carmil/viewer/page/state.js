// What is looked at, kept in the URL's hash: a link shows the same again, and the back button goes back.
//   #slide=S12-004&map=evidence&class=1&split=factual&opacity=0.6
// `slide` absent: the first. `class` absent: the class that is answered. `grey`: the slide without its colours, so that
// hue means one thing. `run`, `split_run`: of several runs, those of the first and the second pane; `split=none`: one pane.
// `smooth`: the radius as `slides draw --smooth` takes it; `contours`: levels in per cent of the colour scale.
// `view` is where one looks: centre and width in level-0 pixels. `removed=0-5.9:NAME`: a removal of the table, the instances
// that it removes (after `!`, those that it keeps) and its name; `removal`: the number of the one that is shown, from 0. `find`,
// `errors`, `sort`: what the list shows, and by which column it is sorted, after `-` the largest first.
import { levelsOf } from "./contours.js";

export const fresh = {
  slide: null,
  run: null,
  map: null,
  class: null,
  split: null,
  splitRun: null,
  splitClass: null,
  scale: "value",
  opacity: 0.6,
  grey: false,
  smooth: "0",
  contours: "",
  view: null,
  removals: [],
  removal: null,
  find: "",
  errors: false,
  sort: null,
};

/** Numbers in ascending order as text: 0-5.9 for 0, 1, 2, 3, 4, 5 and 9. */
export function ranges(numbers) {
  const parts = [];
  for (let i = 0, from = 0; i < numbers.length; i++) {
    if (numbers[i + 1] === numbers[i] + 1) continue;
    parts.push(from === i ? `${numbers[i]}` : `${numbers[from]}-${numbers[i]}`);
    from = i + 1;
  }
  return parts.join(".");
}

/** The numbers of such a text; null if it is none, or has one that is not below `end`. */
export function numbersIn(text, end) {
  const numbers = [];
  for (const part of text.split(".")) {
    const [, first, last = first] = /^(\d{1,9})(?:-(\d{1,9}))?$/.exec(part) ?? [];
    if (first === undefined || Number(last) < Number(first) || Number(last) >= end || numbers.length >= end) return null;
    for (let i = Number(first); i <= Number(last); i++) numbers.push(i);
  }
  return numbers;
}

function removal(text) {
  const [, kept, instances, name] = /^(!?)([\d.-]+):(.{1,200})$/su.exec(text) ?? [];
  return name === undefined ? null : { kept: kept === "!", instances, name };
}

const whole = text => (/^\d{1,9}$/.test(text ?? "") ? Number(text) : null);

export function read(hash) {
  const words = new URLSearchParams(hash.replace(/^#/, ""));
  const opacity = words.has("opacity") ? Number(words.get("opacity")) : NaN;
  const view = (words.get("view") ?? "").split(",").map(Number);
  return {
    slide: words.get("slide"),
    run: words.get("run"),
    map: words.get("map"),
    class: whole(words.get("class")),
    split: words.get("split"),
    splitRun: words.get("split_run"),
    splitClass: whole(words.get("split_class")),
    scale: words.get("scale") === "rank" ? "rank" : "value",
    opacity: opacity >= 0 && opacity <= 1 ? opacity : fresh.opacity,
    grey: words.get("grey") === "1",
    smooth: /^\d{1,5}(\.\d{1,3})?(um)?$/.test(words.get("smooth") ?? "") ? words.get("smooth") : fresh.smooth,
    contours: levelsOf(words.get("contours") ?? "")?.join(",") ?? fresh.contours,
    view: view.length === 3 && view.every(Number.isFinite) && view[2] > 0 ? view : null,
    removals: words.getAll("removed").map(removal).filter(Boolean),
    removal: whole(words.get("removal")),
    find: words.get("find") ?? "",
    errors: words.get("errors") === "1",
    sort: words.get("sort"),
  };
}

export function write(state) {
  const words = new URLSearchParams();
  if (state.slide !== null) words.set("slide", state.slide);
  if (state.run !== null) words.set("run", state.run);
  if (state.map !== null) words.set("map", state.map);
  if (state.class !== null) words.set("class", state.class);
  if (state.split !== null) words.set("split", state.split);
  if (state.splitRun !== null) words.set("split_run", state.splitRun);
  if (state.split !== null && state.splitClass !== null) words.set("split_class", state.splitClass);
  if (state.scale !== fresh.scale) words.set("scale", state.scale);
  if (state.opacity !== fresh.opacity) words.set("opacity", state.opacity);
  if (state.grey) words.set("grey", "1");
  if (parseFloat(state.smooth) > 0) words.set("smooth", state.smooth);
  if (state.contours) words.set("contours", state.contours);
  if (state.view !== null) words.set("view", state.view.map(Math.round).join(","));
  for (const { kept, instances, name } of state.removals) words.append("removed", `${kept ? "!" : ""}${instances}:${name}`);
  if (state.removal !== null) words.set("removal", state.removal);
  if (state.find) words.set("find", state.find);
  if (state.errors) words.set("errors", "1");
  if (state.sort !== null) words.set("sort", state.sort);
  return `#${words}`.replaceAll("%2C", ",").replaceAll("%3A", ":");
}
