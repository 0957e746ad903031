// What is looked at, kept in the URL's hash: a link shows the same again, and the back button goes back.
//   #case=12&map=evidence&class=1&split=factual&opacity=0.6
// `class` absent: the class that is answered. `stain`: the slide in its colours; else it is grey below a map, so that hue
// means one thing. `view` is where one looks: centre and width in level-0 pixels.

export const fresh = {
  case: 0,
  map: null,
  class: null,
  split: null,
  splitClass: null,
  scale: "value",
  opacity: 0.6,
  stain: false,
  view: null,
};

const whole = text => (/^\d{1,9}$/.test(text ?? "") ? Number(text) : null);

export function read(hash) {
  const words = new URLSearchParams(hash.replace(/^#/, ""));
  const opacity = words.has("opacity") ? Number(words.get("opacity")) : NaN;
  const view = (words.get("view") ?? "").split(",").map(Number);
  return {
    case: whole(words.get("case")) ?? 0,
    map: words.get("map"),
    class: whole(words.get("class")),
    split: words.get("split"),
    splitClass: whole(words.get("split_class")),
    scale: words.get("scale") === "rank" ? "rank" : "value",
    opacity: opacity >= 0 && opacity <= 1 ? opacity : fresh.opacity,
    stain: words.get("stain") === "1",
    view: view.length === 3 && view.every(Number.isFinite) && view[2] > 0 ? view : null,
  };
}

export function write(state) {
  const words = new URLSearchParams();
  words.set("case", state.case);
  if (state.map !== null) words.set("map", state.map);
  if (state.class !== null) words.set("class", state.class);
  if (state.split !== null) words.set("split", state.split);
  if (state.split !== null && state.splitClass !== null) words.set("split_class", state.splitClass);
  if (state.scale !== fresh.scale) words.set("scale", state.scale);
  if (state.opacity !== fresh.opacity) words.set("opacity", state.opacity);
  if (state.stain) words.set("stain", "1");
  if (state.view !== null) words.set("view", state.view.map(Math.round).join(","));
  return `#${words}`.replaceAll("%2C", ",");
}
