// What if tiles were removed? Mark instances, take them away, see how every class moves, take it back.
import { element, many, percent, points, say } from "./words.js";

const COUNTERFACTUAL = "after, looking where the answer would change";

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
    this.all = button("Put all back", () => this.back(true), "quiet");
    this.result = element("div", { class: "moved" });
    this.trouble = element("p", { class: "trouble", role: "alert" });
    this.marking = element("div", { class: "line", children: [this.removeMarked, this.clear] });
    this.undoing = element("div", { class: "line", children: [this.undo, this.all] });
    this.box.replaceChildren(
      element("div", { class: "line", children: [this.region] }),
      this.hint,
      this.marking,
      element("div", { class: "line", children: [this.slider, this.top] }),
      this.trouble,
      this.result,
      this.undoing,
    );
  }

  // Another case: nothing is marked and nothing is gone.
  open({ info, classes, flat }) {
    Object.assign(this, { info, classes, flat, marked: new Set(), steps: [] });
    this.box.hidden = false;
    this.trouble.textContent = "";
    this.drawing(false);
    this.refresh();
  }

  // Nothing is open: nothing can be taken away.
  close() {
    Object.assign(this, { info: null, steps: [], marked: new Set() });
    this.box.hidden = true;
  }

  get one() {
    return this.flat ? "instance" : "tile";
  }
  get now() {
    return this.steps?.at(-1) ?? null;
  }
  get removed() {
    return this.now ? this.now.set : new Set();
  }

  // The class and the map that are looked at.
  of(c, map) {
    Object.assign(this, { class: c, map });
    this.refresh();
  }

  // In words, which instances are the top of the map.
  get highest() {
    const { title, name, diverging, of_class } = this.map,
      whose = of_class ? ` for “${this.classes[this.class]}”` : "";
    return name === "evidence" && diverging
      ? `that support “${this.classes[this.class]}” most`
      : `with the highest ${title}${whose}`;
  }

  drawing(on) {
    this.region.setAttribute("aria-pressed", on);
    this.region.textContent = on ? "Stop drawing" : "Draw a region";
    this.isDrawing = on;
    this.refresh();
  }

  mark(instances, { only = false } = {}) {
    if (only) this.marked = new Set();
    for (const i of instances) if (!this.removed.has(i)) this.marked.add(i);
    say(this.marked.size ? `${many(this.marked.size, this.one)} marked` : "no marks");
    this.refresh();
    this.changed();
  }

  toggle(i) {
    if (this.marked.delete(i)) this.mark([]);
    else this.mark([i]);
  }

  async remove() {
    if (this.marked.size) await this.without({ remove: [...this.removed, ...this.marked].sort((a, b) => a - b) });
  }

  // The server knows the map's order. What is gone already stays gone beside it.
  async removeTop() {
    const body = { top: this.share / 100, map: this.map.name, class: this.class };
    if (!this.removed.size) return this.without(body);
    return this.without(body, first => ({
      remove: [...new Set([...this.removed, ...first.removed])].sort((a, b) => a - b),
    }));
  }

  async without(body, then = null) {
    const { info } = this;
    if (this.busy) return;
    this.busy = true;
    this.refresh();
    try {
      let answer = await this.ask(body);
      if (then) answer = await this.ask(then(answer));
      if (info !== this.info) return;
      this.trouble.textContent = "";
      if (answer.removed.every(i => this.removed.has(i))) return say(`no more ${this.one}s removed`);
      this.steps.push({ ...answer, set: new Set(answer.removed) });
      this.marked = new Set();
      this.tell();
    } catch (error) {
      if (error.name !== "AbortError" && info === this.info) this.trouble.textContent = error.message;
    } finally {
      this.busy = false;
      this.refresh();
      this.changed();
    }
  }

  back(all = false) {
    if (!this.now) return;
    this.steps.splice(all ? 0 : -1);
    this.trouble.textContent = "";
    if (this.now) this.tell();
    else say("everything is back");
    this.refresh();
    this.changed();
  }

  tell() {
    const { before, after, set, answer_after } = this.now;
    say(
      `${many(set.size, this.one)} removed, answer ${answer_after}. ${this.classes.map((name, c) => `${name}: ${percent(before[c])} to ${percent(after[c])}`).join("; ")}`,
    );
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
    for (const button of [this.removeMarked, this.top]) button.setAttribute("aria-disabled", Boolean(this.busy));
    this.undoing.hidden = !now;
    this.all.hidden = (this.steps?.length ?? 0) < 2;
    this.result.replaceChildren(...(now ? this.table() : []));
    if (focused && focused !== document.body && focused.closest("[hidden]"))
      (this.undoing.hidden ? this.top : this.undo).focus();
  }

  table() {
    const { before, after, set, answer_before, answer_after, counterfactual_after: counter } = this.now,
      n = this.info.instances;
    const turned = answer_before !== answer_after;
    const row = (name, c) => {
      const change = after[c] - before[c],
        kind = Math.abs(change) < 0.0005 ? "" : change > 0 ? "for" : "against";
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
      span.style.left = `${100 * Math.min(before[c], after[c])}%`;
      span.style.width = `${100 * Math.abs(change)}%`;
      from.style.left = `${100 * before[c]}%`;
      to.style.left = `${100 * after[c]}%`;
      return element("tr", {
        class: c === this.class ? "chosen" : "",
        children: [
          element("th", { scope: "row", children: [name, track] }),
          element("td", {
            class: "figure",
            children: [
              percent(before[c]),
              element("span", { class: "soft", text: " → " }),
              element("b", { text: percent(after[c]) }),
            ],
          }),
          element("td", { class: `figure ${kind}`, text: points(change) }),
          counter ? element("td", { class: "figure soft", text: percent(counter[c]) }) : null,
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
          element("span", {
            class: turned ? "wrong" : "soft",
            text: `the answer ${turned ? "changes to" : "stays"} ${answer_after}`,
          }),
        ],
      }),
      element("table", {
        class: "moves",
        children: [
          element("thead", {
            children: [
              element("tr", {
                children: ["class", "before → after", "points", ...(counter ? ["counterf."] : [])].map(text =>
                  element("th", { scope: "col", text, title: text === "counterf." ? COUNTERFACTUAL : null }),
                ),
              }),
            ],
          }),
          element("tbody", { children: this.classes.map(row) }),
        ],
      }),
    ];
  }
}
