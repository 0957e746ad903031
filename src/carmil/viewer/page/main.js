// Puts the page together: the cohort first, then a case, then what is asked of it.
//
// `change` is the only way anything about what is looked at changes: it writes the URL's hash, and `apply` does what follows.
import { refused, showAnswer, showDeletion, showTiles, wait } from "./answer.js";
import { ask } from "./ask.js";
import { Cohort } from "./cohort.js";
import { keys } from "./keys.js";
import { Places } from "./plane.js";
import { Scene } from "./scene.js";
import { read, write } from "./state.js";
import { WhatIf } from "./whatif.js";
import { many, options, percent, say } from "./words.js";

const $ = id => document.getElementById(id);
const TILES = 8; // on each side of for and against
const LINGER = 120; // milliseconds: who holds the key down passes a case by, and its address is not written

let run = null; // what /api/cohort says
let state = read(location.hash);
let current = null; // the case that is open: {number, info, places, maps, signal}

const cohort = new Cohort({
  grid: $("grid"),
  find: $("find"),
  errors: $("errors"),
  count: $("count"),
  choose: (number, how) => change({ case: number, view: null }, how),
});
const whatif = new WhatIf($("whatif"), {
  ask: body => ask(`case/${current.number}/whatif`, { body, signal: current.signal }),
  changed: () => scene.set({ sets: { marked: whatif.marked, removed: whatif.removed } }),
  draw: on => scene.draw(on),
});
const scene = new Scene($("panes"), {
  mark: i => whatif.toggle(i),
  marks: several => whatif.mark(several),
  view: view => change({ view }, { push: false }),
  drawing: on => whatif.drawing(on),
});

function change(changes, { push = true, held = false } = {}) {
  const before = state,
    after = { ...state, ...changes };
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
  if (other("case")) {
    cohort.select(state.case);
    clearTimeout(apply.later);
    apply.later = setTimeout(openCase, held ? LINGER : 0);
    return;
  }
  if (!current?.info) return;
  if (["map", "class", "split", "splitClass"].some(other)) showMaps();
  if (other("class")) showClass();
  if (other("opacity") || other("scale"))
    scene.set({ look: { opacity: state.opacity, ...(other("scale") ? { byRank: state.scale === "rank" } : {}) } });
  controls();
}

// What the state means for this case: names and classes that do not exist become ones that do.
const mapNamed = name => run.maps.find(map => map.name === name);
const mapShown = () => mapNamed(state.map) ?? mapNamed("evidence") ?? run.maps[0];
const splitShown = () => (state.split === null ? null : (mapNamed(state.split) ?? null));
const classShown = () =>
  state.class !== null && state.class < run.classes.length
    ? state.class
    : current.info.class;
const splitClass = () =>
  state.splitClass !== null && state.splitClass < run.classes.length ? state.splitClass : classShown();

async function openCase() {
  current?.stop.abort();
  const stop = new AbortController(),
    row = run.cases.find(({ number }) => number === state.case);
  const mine = (current = {
    number: state.case,
    stop,
    signal: stop.signal,
    maps: new Map(),
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
        `There is no case ${state.case}: this run has ${many(run.cases.length, "slide")}, counted from 0.`,
      );
    mine.info = await ask(`case/${mine.number}`, { signal: mine.signal });
    if (mine.info.places)
      mine.places = new Places(await ask(`case/${mine.number}/places`, { signal: mine.signal }), mine.info.tile_size);
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
  remark($("remark"), info.remark ? [info.remark] : []);
  document.querySelector("main").classList.add("open");
  document.querySelector("main").classList.remove("failed");
  whatif.open({ info, classes: run.classes, flat: !mine.places });
  scene.set({
    look: { opacity: state.opacity, byRank: state.scale === "rank" },
    sets: { marked: whatif.marked, removed: whatif.removed },
  });
  say(
    `${info.slide}: answer ${info.prediction}, ${percent(info.confidence)}${info.label ? `, label ${info.label}` : ""}`,
  );
  controls();
  showMaps();
  showClass();
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
}

function remark(box, lines) {
  box.textContent = lines.join(" ");
  box.hidden = !lines.length;
}

function mapOf(name, c) {
  const key = `${name}/${c}`,
    mine = current;
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
    wanted = [[mapShown(), classShown()]];
  if (splitShown()) wanted.push([splitShown(), splitClass()]);
  const key = (mine.wanted = wanted.map(([map, c]) => `${map.name}/${c}`).join());
  scene.wait();
  try {
    const maps = await Promise.all(wanted.map(([map, c]) => mapOf(map.name, c)));
    if (mine.stale() || mine.wanted !== key) return;
    const layers = wanted.map(([map, c], i) => ({
      name: map.name,
      title: map.title,
      ofClass: map.of_class,
      className: run.classes[c],
      map: maps[i],
    }));
    await scene.show(mine, layers, state.view);
  } catch (error) {
    if (error.name !== "AbortError" && !mine.stale()) scene.fail(error.message, showMaps);
  }
}

function showClass() {
  const mine = current,
    c = classShown(),
    className = run.classes[c],
    { info } = mine,
    flat = !mine.places;
  showAnswer($("answer"), { info, classes: run.classes, chosen: c, choose: chosen => change({ class: chosen }) });
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
  fetched($("tiles"), `case/${mine.number}/top?class=${c}&count=${TILES}`, top =>
    showTiles($("tiles"), {
      top,
      info,
      className,
      explainer: run.explainer,
      isSigned: mapNamed("evidence")?.diverging ?? true,
      fly: i => scene.fly(i),
    }),
  );
  // The model is asked hundreds of times for the curve: only when somebody looks.
  $("deletion").replaceChildren();
  mine.watch?.disconnect();
  mine.watch = new IntersectionObserver(
    ([seen]) => {
      if (!seen.isIntersecting) return;
      mine.watch.disconnect();
      if (still())
        fetched($("deletion"), `case/${mine.number}/deletion?class=${c}`, curve =>
          showDeletion($("deletion"), { curve, className, flat }),
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
    flat = !current.places;
  whatif.of(classShown(), map);
  const numbered = run.classes.map((name, c) => [String(c), name]);
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
    [["", `the answer (${run.classes[info.class]})`], ...numbered],
    state.class === null ? "" : String(classShown()),
  );
  fill("split", [["", "nothing"], ...run.maps.map(({ name, title }) => [name, title])], split?.name ?? "");
  fill("split-class", numbered, String(splitClass()));
  $("split-class-of").hidden = !split?.of_class;
  $("scale").value = state.scale;
  $("opacity").value = state.opacity;
  $("opacity").setAttribute("aria-valuetext", percent(state.opacity));
  $("opacity-of").hidden = !info.picture;
  $("stain").checked = state.stain;
  $("stain-of").hidden = !info.picture;
  $("panes").classList.toggle("stained", state.stain || state.opacity === 0);
  $("zooms").hidden = flat;
}

function step(by, { repeat = false } = {}) {
  const to = cohort.beside(by);
  if (to !== null) change({ case: to, view: null }, { held: repeat });
}

function otherMap(by) {
  const at = run.maps.indexOf(mapShown());
  change({ map: run.maps[(at + by + run.maps.length) % run.maps.length].name });
}

// Beside the evidence the attention, beside anything else the evidence.
function toggleSplit() {
  if (splitShown()) return change({ split: null, splitClass: null });
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
    says: c ? null : "a class",
    does: inScene(() => c < run.classes.length && change({ class: c })),
  })),
  { keys: ["s"], shown: ["s"], says: "a second map beside it, or one", does: inScene(toggleSplit) },
  {
    keys: ["r"],
    shown: ["r"],
    says: "colours by rank, or by value",
    does: inScene(() => change({ scale: state.scale === "rank" ? "value" : "rank" })),
  },
  { keys: ["+", "="], shown: ["+"], says: "zoom in", does: inScene(() => scene.zoom(1.5)) },
  { keys: ["-"], shown: ["−"], says: "zoom out", does: inScene(() => scene.zoom(1 / 1.5)) },
  { keys: ["0"], shown: ["0"], says: "the whole slide", does: inScene(() => scene.whole()) },
  { keys: ["l"], shown: ["l"], says: "draw a region", does: inScene(() => scene.draw(!scene.drawing)) },
  { keys: ["Enter"], shown: ["Enter"], says: "close the region", does: () => (scene.drawing ? scene.finish() : false) },
  {
    keys: ["Escape"],
    shown: ["Esc"],
    says: "stop drawing, clear the marks",
    does: () => {
      scene.draw(false);
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
  { keys: ["u", "Ctrl+z"], shown: ["u"], says: "undo the last removal", does: inScene(() => whatif.back()) },
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
  $("split").addEventListener("change", () => change({ split: $("split").value || null, splitClass: null }));
  $("split-class").addEventListener("change", () => change({ splitClass: Number($("split-class").value) }));
  $("scale").addEventListener("change", () => change({ scale: $("scale").value }));
  $("stain").addEventListener("change", () => change({ stain: $("stain").checked }, { push: false }));
  $("opacity").addEventListener("input", () => change({ opacity: Number($("opacity").value) }, { push: false }));
  $("zoom-in").addEventListener("click", () => scene.zoom(1.5));
  $("zoom-out").addEventListener("click", () => scene.zoom(1 / 1.5));
  $("zoom-all").addEventListener("click", () => scene.whole());
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
    apply(before);
    if (before.case === state.case && String(before.view) !== String(state.view)) scene.see(state.view);
  });
}

async function start() {
  try {
    run = await ask("cohort");
  } catch (error) {
    nothing();
    cohort.fail(error.message, () => {
      cohort.skeleton();
      start();
    });
    return;
  }
  $("run").textContent = run.run;
  remark($("remarks"), run.remarks ?? []);
  cohort.fill(run.cases);
  if (run.cases.length) apply(null);
  else
    (nothing(), scene.fail("This run has answered no slide, so there is nothing to look at.", () => location.reload()));
}

wire();
start();
