// The selections above the slide: which map of which run and class, what is beside it, and how they are drawn.
import { state } from "./address.js";
import { levelsOf } from "./contours.js";
import { $, options, percent } from "./words.js";
import { UNKNOWN_SIZE } from "./zooms.js";

// change(changes, how) changes what is looked at; runs(): those that are open.
export function wireToolbar({ change, runs }) {
  const quietly = changes => change(changes, { push: false }),
    chosen = (id, changes) => $(id).addEventListener("change", () => change(changes($(id).value)));
  chosen("map", map => ({ map }));
  chosen("class", c => ({ class: c === "" ? null : Number(c) }));
  chosen("split", value => splitChosen(value, runs()));
  chosen("lead", run => ({ run, splitRun: null, split: null, splitClass: null, map: null, class: null }));
  chosen("split-class", c => ({ splitClass: Number(c) }));
  chosen("scale", scale => ({ scale }));
  $("grey").addEventListener("change", () => quietly({ grey: $("grey").checked }));
  $("opacity").addEventListener("input", () => quietly({ opacity: Number($("opacity").value) }));
  const smooth = () => {
    const radius = Number($("smooth").value);
    if (radius >= 0 && radius < 1e5) quietly({ smooth: `${Number(radius.toFixed(3))}${$("smooth-unit").value}` });
  };
  $("smooth").addEventListener("input", smooth);
  $("smooth-unit").addEventListener("change", smooth);
  $("contours").addEventListener("input", () => {
    const levels = levelsOf($("contours").value);
    $("contours").setCustomValidity(levels ? "" : "expected up to six numbers from 1 to 99, such as 25, 50, 75");
    if (levels) quietly({ contours: levels.join(",") });
    else $("contours").reportValidity();
  });
  document.addEventListener("pointerdown", event => {
    if (!$("more").contains(event.target) && !matchMedia("(max-width: 860px)").matches) $("more").open = false;
  });
}

// first: {run, map, c} of the first pane; second: {run, map, c} of the second, whose map is null if there is none; mpp: of the
// slide, null if it is unknown.
export function showToolbar({ runs, first, second, info, flat, mpp }) {
  const { outputs, output_word: word, leading } = first.run.target;
  fill("map", first.run.maps.map(({ name, title }) => [name, title]), first.map.name);
  fill(
    "class",
    [["", `${leading} (${outputs[info.class].name})`], ...numbered(outputs)],
    state.class === null ? "" : String(first.c),
  );
  const beside = runs.several ? runs.all.filter(one => runs.row(one, info.slide)) : [first.run];
  fill("lead", beside.map(one => [one.run, one.run]), first.run.run);
  $("run-of").hidden = !runs.several;
  fill(
    "split",
    [
      ["", "nothing"],
      ...beside.flatMap(one =>
        one.maps.map(({ name, title }) => [splitKey(one, name, runs), runs.several ? `${one.run}: ${title}` : title]),
      ),
    ],
    second.map ? splitKey(second.run, second.map.name, runs) : "",
  );
  if (second.map) fill("split-class", numbered(second.run.target.outputs), String(second.c));
  $("class-word").textContent = word;
  $("split-class-word").textContent = second.run.target.output_word;
  $("class-of").hidden = outputs.length < 2;
  $("split-class-of").hidden = !second.map?.of_class || second.run.target.outputs.length < 2;
  $("scale").value = state.scale;
  $("opacity").value = state.opacity;
  $("opacity").setAttribute("aria-valuetext", percent(state.opacity));
  $("opacity-of").hidden = !info.picture;
  if (document.activeElement !== $("smooth")) $("smooth").value = parseFloat(state.smooth);
  $("smooth-unit").value = state.smooth.endsWith("um") ? "um" : "";
  const [, micrometres] = $("smooth-unit").options;
  micrometres.disabled = !mpp;
  micrometres.title = mpp ? "" : UNKNOWN_SIZE;
  if (document.activeElement !== $("contours")) $("contours").value = state.contours.replaceAll(",", ", ");
  for (const id of ["smooth-of", "contours-of"]) $(id).hidden = flat;
  $("grey").checked = state.grey;
  $("grey-of").hidden = !info.picture;
  $("panes").classList.toggle("grey", state.grey);
  for (const id of ["zooms", "hide-map"]) $(id).hidden = flat;
}

// A map in the selection of the second pane: its name, and of several runs the number of its run.
const splitKey = (one, name, runs) => (runs.several ? `${name}/${runs.all.indexOf(one)}` : name);

/** What changes when such a key is chosen; empty for no second pane. */
export function splitChosen(key, runs) {
  const [name, at] = key.split("/");
  if (!key) return { split: runs.several ? "none" : null, splitClass: null };
  return { split: name, splitRun: at === undefined ? null : runs.all[at].run, splitClass: null };
}

const numbered = outputs => outputs.map(({ name }, c) => [String(c), name]);

function fill(id, pairs, value) {
  const box = $(id),
    text = JSON.stringify(pairs);
  if (box.dataset.pairs !== text) {
    box.dataset.pairs = text;
    box.replaceChildren(...options(pairs));
  }
  box.value = value;
}
