// Puts the page together: the cohort first, then a case, then what is asked of it.
//
// `change` is the only way anything about what is looked at changes: it writes the URL's hash, and `apply` does what follows.
import { Annotations, tilesWithin } from "./annotations.js";
import { refused, showAnswer, showDeletion, showGone, showTiles, wait } from "./answer.js";
import { ask } from "./ask.js";
import { Cohort } from "./cohort.js";
import { toggleColumn, wireColumns } from "./columns.js";
import { levelsOf } from "./contours.js";
import { drawView, fileName, pngFile, save, svgFile } from "./export.js";
import { keys } from "./keys.js";
import { Places } from "./plane.js";
import { Preparing } from "./preparing.js";
import { inWords, Runs } from "./runs.js";
import { Scene } from "./scene.js";
import { read, write } from "./state.js";
import { WhatIf } from "./whatif.js";
import { $, capital, element, many, options, percent, say, shown } from "./words.js";

const TILES = 8; // on each side, for and against
const PRESETS = [5, 10, 20, 40]; // magnifications
const UNKNOWN_SIZE = "the pixel size of this slide is not recorded: give it with --mpp, from the scanner's protocol";
const TOO_FEW = "A region needs three corners: drag around tissue, or click corner by corner.";
const AGAIN = 700; // milliseconds between two questions how far a preparation is
const LINGER = 120; // milliseconds: who holds the key down passes a case by, and its address is not written

let runs = null; // all that are open
let run = null; // of these, the one of the first pane and of the right column: what /api/cohort says
let rows = []; // of the list: the slides of all runs
let state = read(location.hash);
let current = null; // the case that is open: {number, info, places, maps, signal}

const cohort = new Cohort({
  grid: $("grid"),
  find: $("find"),
  errors: $("errors"),
  count: $("count"),
  choose: (number, how) => change({ slide: nameOf(number), view: null }, how),
  filtered: filters => change(filters, { push: false }),
});
const whatif = new WhatIf($("whatif"), {
  ask: body => ask(`case/${current.number}/whatif`, { body, signal: current.signal }),
  changed: () => {
    scene.set({ sets: { marked: whatif.marked, removed: whatif.removed } });
    showGone($("tiles"), whatif.removed, whatif.one);
    if (!whatif.busy) change(whatif.record, { push: false });
  },
  draw: on => scene.draw(on),
});
const scene = new Scene($("panes"), {
  mark: i => whatif.toggle(i),
  marks: several => whatif.mark(several),
  region: (several, outline) => {
    const name = annotations.nextName(whatif.names);
    if (several.length) whatif.mark(several, { name });
    annotations.offer(outline, name);
    $("annotations").querySelector(".naming").scrollIntoView({ block: "nearest" });
  },
  view: view => change({ view }, { push: false }),
  drawing: on => {
    whatif.drawing(on);
    $("drawing").hidden = !on;
  },
  magnified: times => showMagnification(times),
  measuring: (on, length) => {
    $("ruler").setAttribute("aria-pressed", on);
    $("measuring").hidden = !on && !length;
    $("length").textContent = length ?? "Click two points, or drag.";
  },
});

const preparing = new Preparing($("panes"));

const annotations = new Annotations($("annotations"), {
  ask: body => ask(`case/${current.number}/annotations`, { body, signal: current.signal }),
  changed: () => scene.set({ regions: annotations.shown }),
  mark: (regions, name) => whatif.mark(tilesWithin(current.places, regions), { only: true, name }),
  look: view => {
    scene.see(view);
    scene.reveal();
  },
  renamed: (before, after) => whatif.rename(before, after),
});

function change(changes, { push = true, held = false } = {}) {
  const before = state,
    other = ["slide", "run"].some(name => name in changes && changes[name] !== state[name]),
    after = { ...state, ...(other ? { removals: [], removal: null } : {}), ...changes };
  if (write(after) === write(before)) return;
  state = after;
  remember(before, push && !held);
  apply(before, held);
}

// A slider moves faster than browsers let a page write its address: only a new entry of the history is written at once.
function remember(before, push) {
  const waited = remember.later !== null;
  clearTimeout(remember.later);
  remember.later = null;
  if (push && waited) history.replaceState(null, "", write(before));
  if (push) history.pushState(null, "", write(state));
  else
    remember.later = setTimeout(() => {
      remember.later = null;
      history.replaceState(null, "", write(state));
    }, LINGER);
}
remember.later = null;

function apply(before, held = false) {
  const other = name => before === null || before[name] !== state[name];
  if (before && (other("run") || other("splitRun"))) list();
  if (other("slide") || other("run")) {
    cohort.select(rowShown()?.number ?? null);
    clearTimeout(apply.later);
    apply.later = setTimeout(openCase, held ? LINGER : 0);
    return;
  }
  if (!current?.info) return;
  if (["map", "class", "split", "splitClass", "splitRun"].some(other)) showMaps();
  if (other("class")) showClass();
  scene.set({ look: look() });
  controls();
}

const look = () => ({
  opacity: state.opacity,
  byRank: state.scale === "rank",
  smooth: state.smooth,
  contours: state.contours,
});

const rowShown = () => (state.slide === null ? rows[0] : rows.find(({ slide }) => slide === state.slide));
const nameOf = number => rows.find(row => row.number === number).slide;

// The list shows the answers of the chosen run and, of several, those of the run beside it.
function list() {
  const lead = runs.named(state.run) ?? runs.all[0],
    beside = runs.beside(state.splitRun, lead);
  rows = runs.rows(lead, beside);
  cohort.fill(rows, lead.target, runs.several ? [lead.run, beside.run] : null);
}

// The run of the second pane, and its row of the slide: of several runs another one, if it has the slide.
const splitRun = () => (runs.several ? runs.beside(state.splitRun, run) : run);
const splitRow = () => runs.row(splitRun(), rowShown()?.slide);

// What the state means for this case: names and classes (or other outputs) that do not exist become ones that do.
const mapNamed = name => run.maps.find(map => map.name === name);
const mapShown = () => mapNamed(state.map) ?? mapNamed("evidence") ?? run.maps[0];
const splitShown = () => {
  const { maps } = splitRun(),
    wanted = state.split ?? (runs.several && splitRun() !== run ? mapShown().name : null);
  if (wanted === null || wanted === "none" || !splitRow()) return null;
  return maps.find(({ name }) => name === wanted) ?? (state.split === null ? maps.at(-1) : null);
};
const classShown = () =>
  state.class !== null && state.class < run.target.outputs.length ? state.class : current.info.class;
const splitClass = () => {
  const { outputs } = splitRun().target;
  if (state.splitClass !== null && state.splitClass < outputs.length) return state.splitClass;
  const same = outputs.findIndex(({ name }) => name === run.target.outputs[classShown()].name);
  return same >= 0 ? same : splitRow().class;
};

async function openCase() {
  current?.stop.abort();
  run = runs.lead(state.run, rowShown()?.slide);
  const stop = new AbortController(),
    row = runs.row(run, rowShown()?.slide);
  const mine = (current = {
    number: row?.number,
    stop,
    signal: stop.signal,
    maps: new Map(),
    beside: new Map(), // the case of the slide in other runs
    stale: () => current !== mine,
  });
  $("slide").textContent = row?.slide ?? "";
  $("facts").textContent = "loading …";
  document.title = `${row ? `${row.slide} · ` : ""}${run.run} · carmil view (research use only)`;
  remark($("remark"), []);
  scene.wait();
  for (const name of ["answer", "tiles", "deletion"]) wait($(name), "loading …");
  try {
    if (!row)
      throw new Error(
        `There is no slide “${state.slide}” in ${runs.several ? "these runs, which have" : "this run, which has"} ${many(rows.length, "slide")}. Choose one from the list.`,
      );
    Object.assign(mine, await fetchCase(mine.number, mine.signal));
  } catch (error) {
    if (error.name === "AbortError" || mine.stale()) return;
    mine.info = null;
    $("facts").textContent = "";
    nothing();
    scene.fail(error.message, openCase);
    return;
  }
  if (mine.stale()) return;
  const { info } = mine;
  $("facts").textContent = [
    many(info.instances, mine.places ? "tile" : "instance") + geometry(info),
    info.picture?.mpp ? `slide ${Number(info.picture.mpp.toPrecision(3))} µm/px` : null,
    mine.places && !info.picture ? "no slide file" : null,
    row.patient && row.patient !== row.slide ? `patient ${row.patient}` : null,
    row.fold !== null && row.fold !== undefined ? `fold ${row.fold}` : null,
  ]
    .filter(Boolean)
    .join(" · ");
  const without = runs.all.filter(one => !runs.row(one, info.slide)).map(one => one.run);
  remark(
    $("remark"),
    [info.remark, without.length ? `This slide is not in ${without.join(" and ")}.` : null].filter(Boolean),
  );
  document.querySelector("main").classList.add("open");
  document.querySelector("main").classList.remove("failed");
  whatif.open({ info, target: run.target, flat: !mine.places });
  const linked = { removals: state.removals, removal: state.removal };
  scene.set({
    look: look(),
    sets: { marked: whatif.marked, removed: whatif.removed },
  });
  say(
    `${info.slide}: answer ${info.prediction}, ${run.target.quantity} ${shown(info.value, run.target.format)}${info.label ? `, label ${info.label}` : ""}`,
  );
  controls();
  showMaps();
  showClass();
  annotations.open(mine, run.target.outputs.map(({ name }) => name));
  if (linked.removals.length) whatif.restore(linked);
  $("save-tiles").href = `api/case/${mine.number}/tiles.csv`;
}

async function fetchCase(number, signal) {
  const info = await ask(`case/${number}`, { signal });
  const places = info.places ? new Places(await ask(`case/${number}/places`, { signal }), info.tile_size) : null;
  return { number, info, places };
}

// The case of the second pane: the same, or that of the slide in another run.
async function secondCase(mine) {
  const other = splitRun();
  if (other === run) return mine;
  if (!mine.beside.has(other))
    mine.beside.set(other, { ...(await fetchCase(splitRow().number, mine.signal)), signal: mine.signal, maps: new Map() });
  return mine.beside.get(other);
}

// What the encoder got of a tile, where the features say it.
function geometry({ tile_pixels: pixels, tile_mpp: mpp }) {
  const known = [pixels ? `${pixels} px` : null, mpp ? `${Number(mpp.toPrecision(3))} µm/px` : null].filter(Boolean);
  return known.length ? ` of ${known.join(" at ")}` : "";
}

function nothing() {
  document.querySelector("main").classList.remove("open");
  document.querySelector("main").classList.add("failed");
  $("zooms").hidden = true;
  for (const name of ["answer", "tiles", "deletion"]) $(name).replaceChildren();
  whatif.close();
  annotations.close();
}

function remark(box, lines) {
  box.textContent = lines.join(" ");
  box.hidden = !lines.length;
}

function mapOf(mine, name, c) {
  const key = `${name}/${c}`;
  if (!mine.maps.has(key))
    mine.maps.set(
      key,
      ask(`case/${mine.number}/map/${name}?class=${c}`, { signal: mine.signal }).catch(error => {
        mine.maps.delete(key);
        throw error;
      }),
    );
  return mine.maps.get(key);
}

async function showMaps() {
  const mine = current,
    wanted = [[run, mapShown(), classShown()]];
  if (splitShown()) wanted.push([splitRun(), splitShown(), splitClass()]);
  const key = (mine.wanted = wanted.map(([from, map, c]) => `${from.run}/${map.name}/${c}`).join());
  scene.wait();
  try {
    const cases = [mine, ...(wanted.length > 1 ? [await secondCase(mine)] : [])];
    const maps = await Promise.all(wanted.map(([, map, c], i) => mapOf(cases[i], map.name, c)));
    if (mine.stale() || mine.wanted !== key) return;
    const layers = wanted.map(([from, map, c], i) => ({
      case: cases[i],
      name: map.name,
      title: map.title,
      ofClass: map.of_class,
      output: from.target.outputs[c],
      map: maps[i],
      run: runs.several ? { name: from.run, answer: inWords(cases[i].info, from.target) } : null,
    }));
    showOther(cases[1]);
    await scene.show(mine, layers, state.view);
  } catch (error) {
    if (error.name !== "AbortError" && !mine.stale()) scene.fail(error.message, showMaps);
  }
}

// The answer of the other run, if there is one in the second pane.
function showOther(second) {
  const other = splitRun(),
    shows = Boolean(second) && other !== run;
  $("other").hidden = !shows;
  $("answer-title").textContent = runs.several ? `Answer of ${run.run}` : "Answer";
  $("whatif-title").textContent = `What if tiles were removed?${runs.several ? ` (${run.run})` : ""}`;
  if (!shows) return;
  $("other-title").textContent = `Answer of ${other.run}`;
  $("swap").textContent = `Explain ${other.run}`;
  showAnswer($("other-answer"), {
    info: second.info,
    target: other.target,
    chosen: splitClass(),
    choose: chosen => change({ splitClass: chosen }),
  });
}

function swap() {
  if (!runs.several || !splitRow()) return false;
  return change({ run: splitRun().run, splitRun: run.run, map: null, class: null, split: null, splitClass: null });
}

// What the picture says about the slide: its answer, and what is removed.
function answerLines() {
  const { info } = current,
    { now } = whatif,
    { target } = run;
  const lines = [
    `Run ${run.run}. Answer: ${inWords(info, target)}. Label: ${info.label ?? "unknown"}.`,
    `Decision rule: ${info.rule}.`,
  ];
  if (now) lines.push(whatif.inWords);
  return lines;
}

async function exportView(kind) {
  const { info } = current,
    trouble = $("export-trouble");
  trouble.textContent = "";
  try {
    const drawing = drawView({ panes: await scene.pictures(), title: info.slide, lines: answerLines() });
    save(kind === "svg" ? svgFile(drawing) : await pngFile(drawing), fileName(info.slide, `.${kind}`));
    say("picture saved");
  } catch (error) {
    trouble.textContent = `The picture could not be made: ${error.message}`;
  }
}

async function copyLink() {
  const link = $("link");
  link.value = new URL(write(state), location.href).href;
  try {
    await navigator.clipboard.writeText(link.value);
    link.hidden = true;
    say("link copied");
    $("copy-link").textContent = "Link copied";
    setTimeout(() => {
      $("copy-link").textContent = "Copy link";
    }, 2000);
  } catch {
    link.hidden = false; // browsers allow copying on secure pages only
    link.select();
    say("copy the link from the field");
  }
}

function showClass() {
  const mine = current,
    c = classShown(),
    { target } = run,
    output = target.outputs[c],
    { info } = mine,
    flat = !mine.places;
  $("tiles-title").textContent = output.sides;
  remark($("caution"), []);
  showAnswer($("answer"), { info, target, chosen: c, choose: chosen => change({ class: chosen }) });
  const still = () => !mine.stale() && classShown() === c;
  const fetched = async (box, path, show) => {
    wait(box, "loading …");
    try {
      const said = await ask(path, { signal: mine.signal });
      if (still()) show(said);
    } catch (error) {
      if (error.name !== "AbortError" && still()) refused(box, error.message, () => fetched(box, path, show));
    }
  };
  fetched($("tiles"), `case/${mine.number}/top?class=${c}&count=${TILES}`, top => {
    showTiles($("tiles"), {
      top,
      info,
      target,
      output,
      explainer: run.explainer,
      isSigned: mapNamed("evidence")?.diverging ?? true,
      fly: i => scene.fly(i),
    });
    showGone($("tiles"), whatif.removed, whatif.one);
    remark($("caution"), top.attention ? [`${capital(top.attention)}.`] : []);
  });
  // The model is asked hundreds of times for the curve: only when somebody looks.
  $("deletion").replaceChildren();
  mine.watch?.disconnect();
  mine.watch = new IntersectionObserver(
    ([seen]) => {
      if (!seen.isIntersecting) return;
      mine.watch.disconnect();
      if (still())
        fetched($("deletion"), `case/${mine.number}/deletion?class=${c}`, curve =>
          showDeletion($("deletion"), { curve, target, output, flat }),
        );
    },
    { rootMargin: "200px" },
  );
  mine.watch.observe($("deletion"));
}

function controls() {
  const map = mapShown(),
    split = splitShown(),
    { info } = current,
    { outputs, output_word: word, leading } = run.target,
    flat = !current.places;
  whatif.of(classShown(), map);
  const numbered = outputs.map(({ name }, c) => [String(c), name]);
  const fill = (id, pairs, value) => {
    const box = $(id),
      text = JSON.stringify(pairs);
    if (box.dataset.pairs !== text) {
      box.dataset.pairs = text;
      box.replaceChildren(...options(pairs));
    }
    box.value = value;
  };
  fill(
    "map",
    run.maps.map(({ name, title }) => [name, title]),
    map.name,
  );
  fill(
    "class",
    [["", `${leading} (${outputs[info.class].name})`], ...numbered],
    state.class === null ? "" : String(classShown()),
  );
  const beside = runs.several ? runs.all.filter(one => runs.row(one, info.slide)) : [run];
  fill(
    "lead",
    beside.map(one => [one.run, one.run]),
    run.run,
  );
  $("run-of").hidden = !runs.several;
  fill(
    "split",
    [
      ["", "nothing"],
      ...beside.flatMap(one =>
        one.maps.map(({ name, title }) => [splitKey(one, name), runs.several ? `${one.run}: ${title}` : title]),
      ),
    ],
    split ? splitKey(splitRun(), split.name) : "",
  );
  if (split)
    fill(
      "split-class",
      splitRun().target.outputs.map(({ name }, c) => [String(c), name]),
      String(splitClass()),
    );
  $("class-word").textContent = word;
  $("split-class-word").textContent = splitRun().target.output_word;
  $("class-of").hidden = outputs.length < 2;
  $("split-class-of").hidden = !split?.of_class || splitRun().target.outputs.length < 2;
  $("scale").value = state.scale;
  $("opacity").value = state.opacity;
  $("opacity").setAttribute("aria-valuetext", percent(state.opacity));
  $("opacity-of").hidden = !info.picture;
  if (document.activeElement !== $("smooth")) $("smooth").value = parseFloat(state.smooth);
  $("smooth-unit").value = state.smooth.endsWith("um") ? "um" : "";
  const [, micrometres] = $("smooth-unit").options;
  micrometres.disabled = !scene.mpp;
  micrometres.title = scene.mpp ? "" : UNKNOWN_SIZE;
  if (document.activeElement !== $("contours")) $("contours").value = state.contours.replaceAll(",", ", ");
  for (const id of ["smooth-of", "contours-of"]) $(id).hidden = flat;
  $("grey").checked = state.grey;
  $("grey-of").hidden = !info.picture;
  $("panes").classList.toggle("grey", state.grey);
  for (const id of ["zooms", "hide-map"]) $(id).hidden = flat;
}

// A map in the selection of the second pane: its name, and of several runs the number of its run.
const splitKey = (one, name) => (runs.several ? `${name}/${runs.all.indexOf(one)}` : name);

function chooseSplit(value) {
  const [name, at] = value.split("/");
  if (!value) return change({ split: runs.several ? "none" : null, splitClass: null });
  return change({ split: name, splitRun: at === undefined ? null : runs.all[at].run, splitClass: null });
}

function hideMap(hidden) {
  if (scene.flat) return;
  scene.set({ look: { hidden } });
  $("hide-map").setAttribute("aria-pressed", hidden);
}

function showMagnification(times) {
  $("magnification").textContent = times === null ? "magnification unknown" : `${Number(times.toPrecision(times < 10 ? 2 : 3))}×`;
  for (const button of $("presets").children) {
    button.disabled = times === null;
    button.title = times === null ? UNKNOWN_SIZE : `${button.textContent} as through a microscope`;
  }
}

function fullScreen() {
  const left = document.fullscreenElement ? document.exitFullscreen() : $("scene").requestFullscreen();
  left.catch(() => say("This browser does not show a part of a page in full screen."));
}

function step(by, { repeat = false } = {}) {
  const to = cohort.beside(by);
  if (to !== null) change({ slide: nameOf(to), view: null }, { held: repeat });
}

function otherMap(by) {
  const at = run.maps.indexOf(mapShown());
  change({ map: run.maps[(at + by + run.maps.length) % run.maps.length].name });
}

// Beside the evidence the attention, beside anything else the evidence.
function toggleSplit() {
  if (splitShown()) return chooseSplit("");
  if (runs.several && splitRun() !== run && splitRow()) return change({ split: null, splitClass: null });
  const other = (mapShown().name === "evidence" ? mapNamed("factual") : mapNamed("evidence")) ?? run.maps[0];
  return change({ split: other.name });
}

const inScene = does => () => (run && current?.info ? does() : false);
const BINDINGS = [
  { keys: ["j"], shown: ["j"], says: "next slide (in the list also ↓)", does: event => step(1, event) },
  { keys: ["k"], shown: ["k"], says: "previous slide (in the list also ↑)", does: event => step(-1, event) },
  { keys: ["/"], shown: ["/"], says: "find a slide", does: () => $("find").focus() },
  { keys: ["e"], shown: ["e"], says: "errors only, or all", does: () => $("errors").click() },
  { keys: ["m"], shown: ["m"], says: "next map", does: inScene(() => otherMap(1)) },
  { keys: ["M"], shown: ["M"], says: "previous map", does: inScene(() => otherMap(-1)) },
  ...Array.from({ length: 9 }, (_, c) => ({
    keys: [String(c + 1)],
    shown: c ? [] : ["1", "…", "9"],
    says: c ? null : "a class or label",
    does: inScene(() => c < run.target.outputs.length && change({ class: c })),
  })),
  { keys: ["s"], shown: ["s"], says: "a second map beside it, or one", does: inScene(toggleSplit) },
  { keys: ["b"], shown: ["b"], says: "of two runs, the other first", does: inScene(swap) },
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
    does: inScene(() => hideMap(true)),
    ends: () => hideMap(false),
  },
  { keys: ["h"], shown: ["h"], says: "hide or show the map", does: inScene(() => hideMap(!scene.look.hidden)) },
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
      if (annotations.outline) annotations.offer(null);
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

function wire() {
  keys(BINDINGS, { dialog: $("keys"), list: $("key-list"), on: $("keys-on"), open: $("help") });
  $("previous").addEventListener("click", () => step(-1));
  $("next").addEventListener("click", () => step(1));
  $("map").addEventListener("change", () => change({ map: $("map").value }));
  $("class").addEventListener("change", () =>
    change({ class: $("class").value === "" ? null : Number($("class").value) }),
  );
  $("split").addEventListener("change", () => chooseSplit($("split").value));
  $("lead").addEventListener("change", () =>
    change({ run: $("lead").value, splitRun: null, split: null, splitClass: null, map: null, class: null }),
  );
  $("swap").addEventListener("click", swap);
  $("split-class").addEventListener("change", () => change({ splitClass: Number($("split-class").value) }));
  $("scale").addEventListener("change", () => change({ scale: $("scale").value }));
  $("grey").addEventListener("change", () => change({ grey: $("grey").checked }, { push: false }));
  const smooth = () => {
    const radius = Number($("smooth").value);
    if (radius >= 0 && radius < 1e5) change({ smooth: `${Number(radius.toFixed(3))}${$("smooth-unit").value}` }, { push: false });
  };
  $("smooth").addEventListener("input", smooth);
  $("smooth-unit").addEventListener("change", smooth);
  $("contours").addEventListener("input", () => {
    const levels = levelsOf($("contours").value);
    $("contours").setCustomValidity(levels ? "" : "expected up to six numbers from 1 to 99, such as 25, 50, 75");
    if (levels) change({ contours: levels.join(",") }, { push: false });
    else $("contours").reportValidity();
  });
  $("ruler").addEventListener("click", () => scene.measure(!scene.measuring));
  $("clear-ruler").addEventListener("click", () => scene.measure(false));
  $("hide-map").addEventListener("click", () => hideMap(!scene.look.hidden));
  $("opacity").addEventListener("input", () => change({ opacity: Number($("opacity").value) }, { push: false }));
  $("zoom-in").addEventListener("click", () => scene.zoom(1.5));
  $("zoom-out").addEventListener("click", () => scene.zoom(1 / 1.5));
  $("zoom-all").addEventListener("click", () => scene.whole());
  $("fit").addEventListener("click", () => scene.fit());
  $("presets").replaceChildren(
    ...PRESETS.map(times =>
      element("button", { type: "button", text: `${times}×`, on: { click: () => scene.magnify(times) } }),
    ),
  );
  document.addEventListener("pointerdown", event => {
    if (!$("more").contains(event.target) && !matchMedia("(max-width: 860px)").matches) $("more").open = false;
  });
  $("full").addEventListener("click", fullScreen);
  document.addEventListener("fullscreenchange", () => {
    $("full").textContent = document.fullscreenElement ? "Leave full screen" : "Full screen";
  });
  // After a click the keys belong to the slide again: a space bar that hides the map must not press the button once more.
  $("zooms").addEventListener("click", event => event.detail && scene.focus());
  $("done").addEventListener("click", () => scene.finish() || say(TOO_FEW));
  $("cancel").addEventListener("click", () => scene.draw(false));
  for (const kind of ["png", "svg"]) $(`save-${kind}`).addEventListener("click", () => exportView(kind));
  $("copy-link").addEventListener("click", copyLink);
  $("skip").addEventListener("click", event => {
    event.preventDefault();
    $("scene").focus();
  });
  const named = () => {
    $("theme").textContent = `Theme: ${window.carmilTheme.now}`;
  };
  $("theme").addEventListener("click", () => {
    say(`theme: ${window.carmilTheme.next()}`);
    named();
    scene.theme();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => scene.theme());
  named();
  addEventListener("popstate", () => {
    const before = state;
    clearTimeout(remember.later);
    remember.later = null;
    state = read(location.hash);
    if (!run) return;
    const linked = { removals: state.removals, removal: state.removal };
    if (before.slide === state.slide && before.run === state.run) {
      Object.assign(state, whatif.record); // "Undo" goes back in these
      if (current?.info && linked.removals.some(one => !whatif.knows(one))) whatif.restore(linked);
    }
    const { find, errors, sort } = before;
    Object.assign(state, { find, errors, sort });
    apply(before);
    if (before.slide === state.slide && String(before.view) !== String(state.view)) scene.see(state.view);
  });
}

// What is to be shown is not ready: say how far it is, or why there is nothing to show.
function prepared(progress) {
  nothing();
  $("slide").textContent = state.slide ?? "New slides";
  if (progress.failed) {
    cohort.fail("There is no slide to show.", () => location.reload());
    scene.fail(progress.failed, () => location.reload());
    return;
  }
  $("count").textContent = "";
  $("panes").setAttribute("aria-busy", "false");
  preparing.show(progress);
  setTimeout(start, AGAIN);
}

async function start() {
  try {
    run = await ask("cohort");
    if (run.preparing) return prepared(run.preparing);
    const others = run.runs.slice(1).map((_, i) => ask(`cohort?run=${i + 1}`));
    runs = new Runs([run, ...(await Promise.all(others))]);
  } catch (error) {
    nothing();
    cohort.fail(error.message, () => {
      cohort.skeleton();
      start();
    });
    return;
  }
  $("run").textContent = run.runs.join(" and ");
  remark($("remarks"), run.remarks ?? []);
  list();
  cohort.restore(state);
  if (rows.length) apply(null);
  else
    (nothing(), scene.fail("This run has answered no slide, so there is nothing to look at.", () => location.reload()));
}

wireColumns();
wire();
start();
