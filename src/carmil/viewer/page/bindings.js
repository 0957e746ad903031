// What every key does, in the order of the list of keys.
import { state } from "./address.js";
import { toggleColumn } from "./columns.js";
import { $ } from "./words.js";
import { fullScreen } from "./zooms.js";

// `page` has the actions; `page.isOpen()`: whether a case is open. An action that returns false leaves the key to the browser.
export const bindings = page => {
  const { change, scene, whatif, annotations } = page,
    inScene = does => () => (page.isOpen() ? does() : false);
  return [
    { keys: ["j"], shown: ["j"], says: "next slide (in the list also ↓)", does: event => page.step(1, event) },
    { keys: ["k"], shown: ["k"], says: "previous slide (in the list also ↑)", does: event => page.step(-1, event) },
    { keys: ["/"], shown: ["/"], says: "find a slide", does: () => $("find").focus() },
    { keys: ["e"], shown: ["e"], says: "errors only, or all", does: () => $("errors").click() },
    { keys: ["m"], shown: ["m"], says: "next map", does: inScene(() => page.otherMap(1)) },
    { keys: ["M"], shown: ["M"], says: "previous map", does: inScene(() => page.otherMap(-1)) },
    ...Array.from({ length: 9 }, (_, c) => ({
      keys: [String(c + 1)],
      shown: c ? [] : ["1", "…", "9"],
      says: c ? null : "a class or label",
      does: inScene(() => c < page.outputs() && change({ class: c })),
    })),
    { keys: ["s"], shown: ["s"], says: "a second map beside it, or one", does: inScene(page.toggleSplit) },
    { keys: ["b"], shown: ["b"], says: "of two runs, the other first", does: inScene(page.swap) },
    {
      keys: ["r"],
      shown: ["r"],
      says: "colours by rank, or by value",
      does: inScene(() => change({ scale: state.scale === "rank" ? "value" : "rank" })),
    },
    { keys: ["+", "="], shown: ["+"], says: "zoom in", does: inScene(() => scene.zoom(1.5)) },
    { keys: ["-"], shown: ["−"], says: "zoom out", does: inScene(() => scene.zoom(1 / 1.5)) },
    { keys: ["0"], shown: ["0"], says: "the whole slide", does: inScene(() => scene.whole()) },
    { keys: ["f"], shown: ["f"], says: "fit: the tissue fills the window", does: inScene(() => scene.fit()) },
    {
      keys: [" "],
      shown: ["Space"],
      says: "hold to hide the map",
      does: inScene(() => page.hideMap(true)),
      ends: () => page.hideMap(false),
    },
    { keys: ["h"], shown: ["h"], says: "hide or show the map", does: inScene(() => page.hideMap(!scene.look.hidden)) },
    { keys: ["["], shown: ["["], says: "show or hide the list of slides", does: () => toggleColumn("cohort") },
    { keys: ["]"], shown: ["]"], says: "show or hide the answer", does: () => toggleColumn("why") },
    { keys: ["F"], shown: ["F"], says: "full screen", does: fullScreen },
    { keys: ["d"], shown: ["d"], says: "ruler: measure a distance", does: inScene(() => scene.measure(!scene.measuring)) },
    { keys: ["l"], shown: ["l"], says: "draw a region", does: inScene(() => scene.draw(!scene.drawing)) },
    { keys: ["Enter"], shown: ["Enter"], says: "close the region", does: () => (scene.drawing ? scene.finish() : false) },
    {
      keys: ["Escape"],
      shown: ["Esc"],
      says: "stop drawing, clear the marks",
      does: () => {
        $("more").open = false;
        if (scene.measuring || scene.line) return scene.measure(false);
        scene.draw(false);
        if (annotations.unsaved.length) annotations.discard();
        if (whatif.marked?.size) whatif.mark([], { only: true });
      },
    },
    {
      keys: ["x", "Delete"],
      shown: ["x"],
      says: "remove what is marked",
      does: inScene(() => {
        whatif.remove();
      }),
    },
    {
      keys: ["o"],
      shown: ["o"],
      says: "keep only what is marked",
      does: inScene(() => {
        whatif.keepOnly();
      }),
    },
    { keys: ["u", "Ctrl+z"], shown: ["u"], says: "undo the last removal", does: inScene(() => whatif.back()) },
    { keys: ["U", "Ctrl+y", "Ctrl+Z"], shown: ["U"], says: "redo it", does: inScene(() => whatif.forward()) },
    { keys: ["t"], shown: ["t"], says: "light, dark or as the system", does: () => $("theme").click() },
    { keys: [], shown: ["?"], says: "these keys", does: () => {} },
  ];
};
