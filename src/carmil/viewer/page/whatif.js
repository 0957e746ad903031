// What if tiles were removed? Mark instances, remove them or all others, see how every number of the answer moves, compare
// several removals, undo and redo.
import { numbersIn, ranges } from "./state.js";
import { changed, element, many, percent, say, shown } from "./words.js";

const COUNTERFACTUAL = "after the removal, with the counterfactual attention";
const MOST = 12, // removals in the table
  LONGEST = 200; // characters of a name in a link

export class WhatIf {
  // ask(body) asks the model again without some instances; changed(sets) draws what is marked and what is gone.
  constructor(box, { ask, changed, draw }) {
    Object.assign(this, { box, ask, changed, draw });
    this.share = 10;
    this.build();
    this.close();
  }

  build() {
    const button = (text, does, names = "") =>
      element("button", { type: "button", text, class: names, on: { click: does } });
    this.region = button("Draw a region", () => this.draw(this.region.getAttribute("aria-pressed") !== "true"));
    this.region.setAttribute("aria-pressed", "false");
    this.hint = element("p", { class: "soft note" });
    this.removeMarked = button("Remove", () => this.remove(), "strong");
    this.keepMarked = button("Keep only these", () => this.keepOnly());
    this.clear = button("Clear marks", () => this.mark([], { only: true }), "quiet");
    this.slider = element("input", {
      type: "range",
      min: 1,
      max: 90,
      value: this.share,
      "aria-label": "Share of the instances to take, in per cent",
    });
    this.slider.addEventListener("input", () => {
      this.share = Number(this.slider.value);
      this.refresh();
    });
    this.top = button("", () => this.removeTop());
    this.undo = button("Undo", () => this.back(), "quiet");
    this.redo = button("Redo", () => this.forward(), "quiet");
    this.all = button("Put all back", () => this.putBack(), "quiet");
    this.result = element("div", { class: "moved" });
    this.compared = element("div", { class: "compared" });
    this.trouble = element("p", { class: "trouble", role: "alert" });
    this.marking = element("div", { class: "line", children: [this.removeMarked, this.keepMarked, this.clear] });
    this.undoing = element("div", { class: "line", children: [this.undo, this.redo, this.all] });
    this.box.replaceChildren(
      element("div", { class: "line", children: [this.region] }),
      this.hint,
      this.marking,
      element("div", { class: "line", children: [this.slider, this.top] }),
      this.trouble,
      this.result,
      this.undoing,
      this.compared,
    );
  }

  // Another case: nothing is marked and nothing is removed.
  open({ info, target, flat }) {
    Object.assign(this, { info, target, flat, ...nothing() });
    this.box.hidden = false;
    this.trouble.textContent = "";
    this.drawing(false);
    this.refresh();
  }

  // Nothing is open: nothing can be taken away.
  close() {
    Object.assign(this, { info: null, ...nothing() });
    this.box.hidden = true;
  }

  get one() {
    return this.flat ? "instance" : "tile";
  }
  // The removal that is shown; null if every instance is there.
  get now() {
    return this.past[this.at];
  }
  get removed() {
    return this.now ? this.now.set : new Set();
  }

  // The number of the output, and the map, that are looked at.
  of(c, map) {
    Object.assign(this, { class: c, map });
    this.refresh();
  }

  // In words, which instances are the top of the map.
  get highest() {
    const { title, name, diverging, of_class } = this.map,
      output = this.target.outputs[this.class],
      whose = of_class ? ` for “${output.name}”` : "";
    return name === "evidence" && diverging ? output.top : `with the highest ${title}${whose}`;
  }

  drawing(on) {
    this.region.setAttribute("aria-pressed", on);
    this.region.textContent = on ? "Stop drawing" : "Draw a region";
    this.isDrawing = on;
    this.refresh();
  }

  // name: of the region that is marked; marks that are not all of a single region are named by their number.
  mark(instances, { only = false, name = null } = {}) {
    const there = instances.filter(i => !this.removed.has(i));
    if (only) this.marked = new Set();
    this.markName = this.marked.size || there.length < instances.length ? null : name;
    for (const i of there) this.marked.add(i);
    say(this.marked.size ? `${many(this.marked.size, this.one)} marked` : "no marks");
    this.refresh();
    this.changed();
  }

  toggle(i) {
    if (this.marked.delete(i)) this.mark([]);
    else this.mark([i]);
  }

  // The names of regions in the table, and of the marks.
  get names() {
    return [...this.trials.flatMap(({ parts }) => parts.map(({ of }) => of)), this.markName].filter(Boolean);
  }

  // A region has another name: so have the marks and the removals that are named after it.
  rename(before, after) {
    if (before === after) return;
    if (this.markName === before) this.markName = after;
    for (const { parts } of this.trials) for (const part of parts) if (part.of === before) part.of = after;
    this.refresh();
    this.changed();
  }

  get marksName() {
    return this.markName ?? many(this.marked.size, this.one);
  }

  async remove() {
    if (!this.marked.size) return;
    await this.without(this.body(new Set([...this.removed, ...this.marked])), this.joined({ of: this.marksName }));
  }

  async keepOnly() {
    if (!this.marked.size) return;
    const rest = Array.from({ length: this.info.instances }, (_, i) => i).filter(i => !this.marked.has(i));
    await this.without(this.body(new Set(rest)), [{ all: true, of: this.marksName }]);
  }

  // The parts of a removal's name: what was removed before, and `part`, a region or a number of tiles; `all`: all but it.
  joined(part) {
    return [...(this.now ? this.now.parts.map(one => ({ ...one })) : []), part];
  }

  // A request lists what is removed or what is kept, whichever is less.
  body(removed) {
    if (removed.size <= this.info.instances / 2) return { remove: [...removed].sort((a, b) => a - b) };
    return { keep: Array.from({ length: this.info.instances }, (_, i) => i).filter(i => !removed.has(i)) };
  }

  // The server knows the map's order. What is removed already stays removed.
  async removeTop() {
    const { title, of_class } = this.map,
      whose = of_class && this.target.outputs.length > 1 ? ` for ${this.target.outputs[this.class].name}` : "",
      parts = this.joined({ of: `top ${this.share} % of ${title}${whose}` }),
      body = { top: this.share / 100, map: this.map.name, class: this.class };
    if (!this.removed.size) return this.without(body, parts);
    return this.without(body, parts, first => this.body(new Set([...this.removed, ...first.removed])));
  }

  async without(body, parts, then = null) {
    const { info } = this;
    if (this.busy) return;
    this.busy = true;
    this.refresh();
    try {
      let answer = await this.ask(body);
      if (then) answer = await this.ask(then(answer));
      if (info !== this.info) return;
      this.trouble.textContent = "";
      const trial = this.kept(this.trial(answer, parts));
      if (!trial.set.size || (this.now && same(trial.set, this.removed))) return say(`no more ${this.one}s removed`);
      this.marked = new Set();
      this.show(trial);
    } catch (error) {
      if (error.name !== "AbortError" && info === this.info) this.trouble.textContent = error.message;
    } finally {
      this.busy = false;
      this.refresh();
      this.changed();
    }
  }

  // The removals of the table and the number of the one that is shown, as a link has them.
  get record() {
    return { removals: this.trials.map(trial => trial.linked), removal: this.now ? this.trials.indexOf(this.now) : null };
  }

  knows({ kept, instances }) {
    return this.trials.some(({ link }) => link.kept === kept && link.instances === instances);
  }

  // The removals of a link: the model is asked for each. Those that this slide cannot have are left out.
  async restore({ removals, removal }) {
    const { info } = this,
      n = info.instances;
    this.busy = true;
    this.refresh();
    try {
      for (const [i, { kept, instances, name }] of removals.slice(0, MOST).entries()) {
        const listed = numbersIn(instances, n);
        if (!listed) continue;
        const answer = await this.ask({ [kept ? "keep" : "remove"]: listed });
        if (info !== this.info) return;
        const trial = this.kept(this.trial(answer, [partNamed(name)]));
        if (i === removal) this.past = [null, trial];
      }
    } catch (error) {
      if (error.name !== "AbortError" && info === this.info) this.trouble.textContent = error.message;
    } finally {
      if (info === this.info) {
        this.busy = false;
        this.go(this.past.length - 1);
      }
    }
  }

  trial(answer, parts) {
    const n = this.info.instances,
      set = new Set(answer.removed),
      kept = set.size > n / 2,
      listed = kept ? Array.from({ length: n }, (_, i) => i).filter(i => !set.has(i)) : answer.removed;
    return new Trial(answer, parts, set, { kept, instances: ranges(listed) });
  }

  // The removal of these instances in the table: the one that is there already, or this one.
  kept(trial) {
    const known = this.trials.find(({ set }) => same(set, trial.set));
    if (known || !trial.set.size) return known ?? trial;
    this.trials = [...this.trials, trial].slice(-MOST);
    return trial;
  }

  // Show a removal, or with null everything; "Undo" returns to what was shown before.
  show(trial) {
    this.past = [...this.past.slice(0, this.at + 1), trial];
    this.go(this.past.length - 1);
  }

  go(at) {
    if (at < 0 || at >= this.past.length) return;
    this.at = at;
    this.trouble.textContent = "";
    for (const i of this.removed) if (this.marked.delete(i)) this.markName = null;
    if (this.now) this.tell();
    else say("nothing is removed");
    this.refresh();
    this.changed();
  }

  back() {
    this.go(this.at - 1);
  }

  forward() {
    this.go(this.at + 1);
  }

  putBack() {
    if (this.now) this.show(null);
  }

  // The removal that is shown, in one sentence.
  get inWords() {
    const { name, only, set, before, after, answer_before, answer_after } = this.now,
      count = many(set.size, this.one),
      share = `${name === count ? "" : `${count}, `}${percent(set.size / this.info.instances)}`,
      rows = this.target.rows,
      i = Math.max(0, rows.findIndex(({ output }) => output === this.class)),
      of = rows[i].name;
    const answer = answer_before === answer_after ? `the answer stays ${answer_after}` : `the answer changes to ${answer_after}`;
    return `${only ? `With only ${only} (removed: ${share})` : `Without ${name} (${share})`}: ${of} ${shown(before[i], rows[i].format)} → ${shown(after[i], rows[i].format)}${this.target.answers ? `; ${answer}` : ""}.`;
  }

  tell() {
    const { before, after, set, answer_after } = this.now;
    const moves = this.target.rows.map(
      ({ name, format }, i) => `${name}: ${shown(before[i], format)} to ${shown(after[i], format)}`,
    );
    say(`${many(set.size, this.one)} removed, answer ${answer_after}. ${moves.join("; ")}`);
  }

  refresh() {
    if (!this.info) return;
    const { marked, now } = this,
      one = this.one,
      focused = document.activeElement;
    this.region.parentElement.hidden = this.flat;
    this.hint.textContent = this.isDrawing
      ? "Drag around it, or click corner by corner and close with Enter. Escape stops."
      : this.flat
        ? this.info.images
          ? "Click pictures to mark them, or remove the top of the map."
          : "Click or drag over bars to mark them, or remove the top of the map."
        : marked.size || now
          ? ""
          : "Draw around tissue, click single tiles, or remove the top of the map.";
    this.hint.hidden = !this.hint.textContent;
    this.marking.hidden = !marked.size;
    this.removeMarked.textContent = `Remove ${many(marked.size, one)}`;
    if (this.map) {
      this.top.textContent = `Remove the top ${this.share} % of ${this.map.title}`;
      this.top.title = `the ${this.share} % of the ${one}s ${this.highest}`;
    }
    this.slider.setAttribute("aria-valuetext", `${this.share} per cent of the ${one}s`);
    for (const button of [this.removeMarked, this.keepMarked, this.top])
      button.setAttribute("aria-disabled", Boolean(this.busy));
    this.undoing.hidden = this.past.length < 2;
    this.undo.setAttribute("aria-disabled", this.at === 0);
    this.redo.setAttribute("aria-disabled", this.at === this.past.length - 1);
    this.all.hidden = !now;
    const trial = focused && this.compared.contains(focused) ? focused.dataset.trial : null;
    this.result.replaceChildren(...(now ? this.table() : []));
    this.compared.replaceChildren(...(this.trials.length > (now ? 1 : 0) ? this.comparison() : []));
    if (trial !== null) this.compared.querySelector(`[data-trial="${trial}"]`)?.focus();
    if (focused && focused !== document.body && focused.closest("[hidden]"))
      (this.undoing.hidden ? this.top : this.undo).focus();
  }

  table() {
    const { before, after, set, answer_before, answer_after, counterfactual_after: counter } = this.now,
      { rows, answers, predicted } = this.target,
      n = this.info.instances;
    const turned = answer_before !== answer_after,
      shares = rows.every(({ format }) => format.share);
    const row = ({ name, output, format }, i) => {
      const change = after[i] - before[i],
        low = Math.min(format.low, before[i], after[i]),
        reach = Math.max(format.high, before[i], after[i]) - low || 1,
        kind = Math.abs(change) < 0.0005 * reach ? "" : change > 0 ? "for" : "against",
        at = value => `${(100 * (value - low)) / reach}%`;
      const track = element("div", {
        class: "track",
        "aria-hidden": true,
        children: [
          element("span", { class: `span ${kind}` }),
          element("i", { class: "from" }),
          element("i", { class: `to ${kind}` }),
        ],
      });
      const [span, from, to] = track.children;
      span.style.left = at(Math.min(before[i], after[i]));
      span.style.width = `${(100 * Math.abs(change)) / reach}%`;
      from.style.left = at(before[i]);
      to.style.left = at(after[i]);
      return element("tr", {
        class: output === this.class ? "chosen" : "",
        children: [
          element("th", { scope: "row", children: [name, track] }),
          element("td", {
            class: "figure",
            children: [
              element("span", { text: shown(before[i], format) }),
              " ",
              element("span", { children: [element("span", { class: "soft", text: "→ " }), element("b", { text: shown(after[i], format) })] }),
            ],
          }),
          element("td", {
            class: `figure ${kind}`,
            text: `${changed(change, format)}${format.share && !shares ? " pt" : ""}`,
          }),
          counter ? element("td", { class: "figure soft", text: shown(counter[i], format) }) : null,
        ],
      });
    };
    return [
      element("p", {
        class: "verdict",
        children: [
          element("span", {
            children: [
              "without ",
              element("b", { text: `${many(set.size, this.one)}` }),
              element("span", { class: "soft", text: ` (${percent(set.size / n)} of ${n.toLocaleString("en")})` }),
            ],
          }),
          answers
            ? element("span", {
                class: turned ? "wrong" : "soft",
                text: `the answer ${turned ? "changes to" : "stays"} ${answer_after}`,
              })
            : null,
        ],
      }),
      element("table", {
        class: "moves",
        children: [
          element("thead", {
            children: [
              element("tr", {
                children: [
                  predicted,
                  "before → after",
                  shares ? "points" : "change",
                  ...(counter ? ["counterf."] : []),
                ].map(text => element("th", { scope: "col", text, title: text === "counterf." ? COUNTERFACTUAL : null })),
              }),
            ],
          }),
          element("tbody", { children: rows.map(row) }),
        ],
      }),
    ];
  }

  // The removals that were tried, each with a button that shows it again. The change is that of the output that is shown.
  comparison() {
    const { rows, outputs, answers } = this.target,
      n = this.info.instances,
      i = rows.findIndex(({ output }) => output === this.class),
      { format } = rows[i],
      of = outputs.length > 1 ? outputs[this.class].name : rows[i].name;
    const row = (trial, at) => {
      const turned = trial.answer_before !== trial.answer_after,
        shownNow = trial === this.now;
      return element("tr", {
        class: shownNow ? "chosen" : "",
        children: [
          element("th", {
            scope: "row",
            children: [
              element("button", {
                type: "button",
                class: "class-name",
                "aria-pressed": shownNow,
                "data-trial": at,
                title: "show this removal",
                text: trial.name,
                on: { click: () => shownNow || this.show(trial) },
              }),
            ],
          }),
          element("td", { class: "figure", text: `${trial.set.size.toLocaleString("en")} (${percent(trial.set.size / n)})` }),
          answers ? element("td", { class: turned ? "wrong" : "", text: trial.answer_after }) : null,
          element("td", { class: "figure", text: changed(trial.after[i] - trial.before[i], format) }),
        ],
      });
    };
    const heads = ["removed", `${this.one}s`, ...(answers ? ["answer"] : []), format.share ? "points" : "change"];
    return [
      element("h3", { text: "Removals compared" }),
      element("table", {
        class: "trials",
        children: [
          element("thead", {
            children: [element("tr", { children: heads.map(text => element("th", { scope: "col", text })) })],
          }),
          element("tbody", { children: this.trials.map(row) }),
        ],
      }),
      element("p", {
        class: "soft note",
        text: `${format.share ? "Points: change of the probability" : "Change"} of ${of}, against the whole slide. Select a removal to show it again.`,
      }),
    ];
  }
}

// A removal of the table: the answer without the instances `set`, its name in parts, and the instances as a link has them.
class Trial {
  constructor(answer, parts, set, link) {
    Object.assign(this, answer, { parts, set, link });
  }
  get name() {
    return this.parts.map(({ all, of }) => (all ? `all but ${of}` : of)).join(" + ");
  }
  // What is kept, if all the rest is removed.
  get only() {
    return this.parts.length === 1 && this.parts[0].all ? this.parts[0].of : null;
  }
  get linked() {
    return { ...this.link, name: this.name.slice(0, LONGEST) };
  }
}

// A part of a name that a link has.
const partNamed = name => (name.startsWith("all but ") ? { all: true, of: name.slice(8) } : { of: name });

// past: what was shown, in order, null for everything; trials: the removals of the table.
const nothing = () => ({ busy: false, marked: new Set(), markName: null, past: [null], at: 0, trials: [] });

const same = (a, b) => a.size === b.size && [...a].every(i => b.has(i));
