// Puts the page together: the cohort first, then a case, then what is asked of it.
//
// `change` is the only way anything about what is looked at changes: it writes the URL's hash, and `apply` does what follows.
import { LINGER, link, move, reread, state } from "./address.js";
import { Annotations, tilesWithin } from "./annotations.js";
import { refused, showAnswer, showDeletion, showGone, showTiles, wait } from "./answer.js";
import { ask } from "./ask.js";
import { bindings } from "./bindings.js";
import { facts, fetchCase, fetchMap } from "./cases.js";
import { Cohort } from "./cohort.js";
import { wireColumns } from "./columns.js";
import { keys } from "./keys.js";
import { Preparing } from "./preparing.js";
import { inWords, Runs } from "./runs.js";
import { Scene } from "./scene.js";
import { wireSharing } from "./sharing.js";
import { showToolbar, splitChosen, wireToolbar } from "./toolbar.js";
import { WhatIf } from "./whatif.js";
import { $, capital, many, say, shown } from "./words.js";
import { showMagnification, showRuler, wireZooms } from "./zooms.js";

const TILES = 8; // on each side, for and against
const AGAIN = 700; // milliseconds between two questions how far a preparation is

let runs = null; // all that are open
let run = null; // of these, the one of the first pane and of the right column: what /api/cohort says
let rows = []; // of the list: the slides of all runs
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
    [...$("annotations").querySelectorAll(".naming")].at(-1).scrollIntoView({ block: "nearest" });
  },
  view: view => change({ view }, { push: false }),
  drawing: on => {
    whatif.drawing(on);
    $("drawing").hidden = !on;
  },
  magnified: showMagnification,
  measuring: showRuler,
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
  const other = ["slide", "run"].some(name => name in changes && changes[name] !== state[name]),
    before = move({ ...(other ? { removals: [], removal: null } : {}), ...changes }, push && !held);
  if (before) apply(before, held);
}

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
  $("facts").textContent = facts(mine, row);
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

// The case of the second pane: the same, or that of the slide in another run.
async function secondCase(mine) {
  const other = splitRun();
  if (other === run) return mine;
  if (!mine.beside.has(other))
    mine.beside.set(other, await fetchCase(splitRow().number, mine.signal));
  return mine.beside.get(other);
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

async function showMaps() {
  const mine = current,
    wanted = [[run, mapShown(), classShown()]];
  if (splitShown()) wanted.push([splitRun(), splitShown(), splitClass()]);
  const key = (mine.wanted = wanted.map(([from, map, c]) => `${from.run}/${map.name}/${c}`).join());
  scene.wait();
  try {
    const cases = [mine, ...(wanted.length > 1 ? [await secondCase(mine)] : [])];
    const maps = await Promise.all(wanted.map(([, map, c], i) => fetchMap(cases[i], map.name, c)));
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

// What a picture of the view has: the panes, and lines about the answer and what is removed.
async function view() {
  const { info } = current;
  const lines = [
    `Run ${run.run}. Answer: ${inWords(info, run.target)}. Label: ${info.label ?? "unknown"}.`,
    `Decision rule: ${info.rule}.`,
  ];
  if (whatif.now) lines.push(whatif.inWords);
  return { title: info.slide, lines, panes: await scene.pictures() };
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
  const map = mapShown();
  whatif.of(classShown(), map);
  showToolbar({
    runs,
    first: { run, map, c: classShown() },
    second: { run: splitRun(), map: splitShown(), c: splitShown() && splitClass() },
    info: current.info,
    flat: !current.places,
    mpp: scene.mpp,
  });
}

function hideMap(hidden) {
  if (scene.flat) return;
  scene.set({ look: { hidden } });
  $("hide-map").setAttribute("aria-pressed", hidden);
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
  if (splitShown()) return change(splitChosen("", runs));
  if (runs.several && splitRun() !== run && splitRow()) return change({ split: null, splitClass: null });
  const other = (mapShown().name === "evidence" ? mapNamed("factual") : mapNamed("evidence")) ?? run.maps[0];
  return change({ split: other.name });
}

const actions = {
  isOpen: () => Boolean(run && current?.info),
  outputs: () => run.target.outputs.length,
  change,
  step,
  otherMap,
  toggleSplit,
  swap,
  hideMap,
  scene,
  whatif,
  annotations,
};

function wire() {
  keys(bindings(actions), { dialog: $("keys"), list: $("key-list"), on: $("keys-on"), open: $("help") });
  $("previous").addEventListener("click", () => step(-1));
  $("next").addEventListener("click", () => step(1));
  $("swap").addEventListener("click", swap);
  $("hide-map").addEventListener("click", () => hideMap(!scene.look.hidden));
  wireToolbar({ change, runs: () => runs });
  wireZooms(scene);
  wireSharing({ view, link });
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
    const before = reread();
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
