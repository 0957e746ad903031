// The cohort as a table that can be sorted, filtered and stepped through. Only the rows in sight exist, so that
// thousands cost what thirty do; the chosen row always exists, because screen readers follow it.
import { loadPicture, thumbnailOf } from "./ask.js";
import { element, many, notice, shown } from "./words.js";

const ROW = 64; // pixels; the style sheet's --row says the same
const SPARE = 8; // rows drawn beyond either edge
const collator = new Intl.Collator(undefined, { numeric: true });

// runs: the names of two runs whose answers are compared, instead of the counterfactual answer.
const columns = (target, runs) => [
  { name: "slide", title: "slide", of: row => row.slide },
  {
    name: "value",
    title: target.quantity,
    of: row => row.value,
    numeric: true,
    long: target.note || null,
  },
  { name: "label", title: "label", of: row => row.label },
  { name: "answer", title: runs?.[0] ?? "answer", of: row => row.prediction, long: "by the run's rule: open a slide to read it" },
  runs
    ? { name: "counter", title: runs[1], of: row => row.other, long: `the answer of ${runs[1]}` }
    : {
        name: "counter",
        title: "counterfactual",
        of: row => row.counterfactual,
        long: "what is answered looking where the answer would change",
      },
];

export class Cohort {
  // choose(number) opens a case; filtered({find, errors, sort}) is told what the list shows.
  constructor({ grid, find, errors, count, choose, filtered }) {
    Object.assign(this, { grid, find, errors, count, choose, filtered });
    this.cases = [];
    this.shown = [];
    this.chosen = null;
    this.sorting = { column: null, down: false };
    this.head = element("div", { class: "row head", role: "row", "aria-rowindex": 1 });
    this.body = element("div", { class: "rows", role: "rowgroup" });
    this.empty = element("p", { class: "empty", hidden: true });
    grid.addEventListener("scroll", () => this.draw(), { passive: true });
    grid.addEventListener("keydown", event => this.press(event));
    this.body.addEventListener("click", event => {
      const row = event.target.closest("[data-number]");
      if (row) this.choose(Number(row.dataset.number));
    });
    for (const [field, event] of [
      [find, "input"],
      [errors, "change"],
    ])
      field.addEventListener(event, () => {
        this.filter();
        this.filtered(this.filters);
      });
    new ResizeObserver(() => this.draw()).observe(grid);
    this.skeleton();
  }

  skeleton() {
    this.grid.replaceChildren(
      ...Array.from({ length: 12 }, () =>
        element("div", { class: "row waiting", "aria-hidden": true, children: [element("span"), element("span")] }),
      ),
    );
  }

  fill(cases, target, runs = null) {
    this.target = target;
    this.runs = runs;
    this.cases = cases.map(row => ({
      ...row,
      text: [row.slide, row.patient, row.label, row.prediction, row.counterfactual, row.other]
        .filter(Boolean)
        .join(" ")
        .toLowerCase(),
    }));
    const given = { answer: target.answers, counter: runs || cases.some(row => row.counterfactual !== null) };
    this.columns = columns(target, runs).filter(({ name }) => given[name] ?? true);
    this.grid.classList.toggle("plain", !given.counter);
    this.grid.classList.toggle("unanswered", !given.answer);
    this.grid.classList.toggle("compared", Boolean(runs));
    this.grid.classList.toggle(
      "pictured",
      cases.some(row => row.thumbnail),
    );
    this.head.replaceChildren(
      ...this.columns.map((column, i) =>
        element("div", {
          role: "columnheader",
          class: column.name,
          "aria-colindex": i + 1,
          children: [
            element("button", {
              type: "button",
              text: column.title,
              title: column.long ?? null,
              on: { click: () => this.sort(i) },
            }),
          ],
        }),
      ),
    );
    const wrong = cases.filter(row => row.right === false).length;
    this.errors.parentElement.hidden = !target.judged;
    this.errors.disabled = cases.every(row => row.right === null);
    this.errors.parentElement.title = this.errors.disabled ? "no labels are known" : `${many(wrong, "wrong answer")}`;
    this.grid.replaceChildren(
      element("div", { role: "rowgroup", class: "headgroup", children: [this.head] }),
      this.body,
      this.empty,
    );
    this.grid.setAttribute("aria-busy", "false");
    this.grid.setAttribute("aria-colcount", this.columns.length);
    this.filter();
  }

  fail(text, again) {
    this.count.textContent = "";
    this.grid.setAttribute("aria-busy", "false");
    this.grid.replaceChildren(notice(text, again));
  }

  filter() {
    const words = this.find.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    this.shown = this.cases.filter(
      row => (!this.errors.checked || row.right === false) && words.every(word => row.text.includes(word)),
    );
    this.order();
    this.count.textContent =
      this.shown.length === this.cases.length
        ? `${this.cases.length.toLocaleString("en")}`
        : `${this.shown.length.toLocaleString("en")} of ${this.cases.length.toLocaleString("en")}`;
    this.empty.hidden = this.shown.length > 0;
    this.empty.textContent =
      this.cases.length === 0
        ? "This run has answered no slide."
        : this.errors.checked && !words.length
          ? "No wrong answers."
          : "No slide matches.";
    this.reveal();
    this.draw();
  }

  sort(column) {
    const { column: before, down } = this.sorting;
    this.sorting =
      before !== column ? { column, down: false } : down ? { column: null, down: false } : { column, down: true };
    this.order();
    this.grid.scrollTop = 0;
    this.draw();
    this.filtered(this.filters);
  }

  get filters() {
    const { column, down } = this.sorting,
      sort = column === null ? null : `${down ? "-" : ""}${this.columns[column].name}`;
    return { find: this.find.value.trim(), errors: this.errors.checked, sort };
  }

  restore({ find, errors, sort }) {
    this.find.value = find;
    this.errors.checked = errors && !this.errors.disabled && this.target.judged;
    const column = this.columns.findIndex(({ name }) => name === sort?.replace(/^-/, ""));
    this.sorting = column < 0 ? { column: null, down: false } : { column, down: sort.startsWith("-") };
    this.filter();
  }

  order() {
    const { column, down } = this.sorting;
    [...this.head.children].forEach((head, i) =>
      head.setAttribute("aria-sort", i !== column ? "none" : down ? "descending" : "ascending"),
    );
    if (column === null) {
      this.shown.sort((a, b) => a.number - b.number);
      return;
    }
    const { of, numeric } = this.columns[column];
    const compare = numeric ? (a, b) => a - b : collator.compare;
    this.shown.sort(
      (a, b) =>
        (of(a) === null) - (of(b) === null) ||
        (down ? -1 : 1) * compare(of(a) ?? "", of(b) ?? "") ||
        a.number - b.number,
    );
  }

  // The case `steps` rows further in what is shown; from a case that is filtered away, the nearest end.
  beside(steps) {
    if (!this.shown.length) return null;
    const at = this.shown.findIndex(row => row.number === this.chosen);
    const to =
      at < 0 ? (steps > 0 ? 0 : this.shown.length - 1) : Math.max(0, Math.min(this.shown.length - 1, at + steps));
    return this.shown[to].number;
  }

  select(number) {
    this.chosen = number;
    this.reveal();
    this.draw();
  }

  reveal() {
    const at = this.shown.findIndex(row => row.number === this.chosen);
    if (at < 0) return;
    const top = at * ROW,
      room = this.grid.clientHeight - ROW;
    if (top < this.grid.scrollTop) this.grid.scrollTop = top;
    else if (top + ROW > this.grid.scrollTop + room) this.grid.scrollTop = top + ROW - room;
  }

  press(event) {
    if (event.target !== this.grid || event.ctrlKey || event.altKey || event.metaKey) return;
    const page = Math.max(1, Math.floor(this.grid.clientHeight / ROW) - 2);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[
      event.key
    ];
    if (steps === undefined) return;
    event.preventDefault();
    const to = this.beside(steps);
    if (to !== null) this.choose(to, { held: event.repeat });
  }

  draw() {
    if (!this.columns) return;
    const first = Math.max(0, Math.floor(this.grid.scrollTop / ROW) - SPARE);
    const last = Math.min(this.shown.length, Math.ceil((this.grid.scrollTop + this.grid.clientHeight) / ROW) + SPARE);
    const numbers = Array.from({ length: Math.max(0, last - first) }, (_, i) => first + i);
    const at = this.shown.findIndex(row => row.number === this.chosen);
    if (at >= 0 && (at < first || at >= last)) numbers.push(at);
    this.body.style.height = `${this.shown.length * ROW}px`;
    // A row that stays where it is stays the same element: scrolling makes only what comes into sight.
    const kept = new Map([...this.body.children].map(row => [row.dataset.key, row]));
    const rows = numbers.map(i => kept.get(this.key(this.shown[i], i)) ?? this.row(this.shown[i], i));
    if (rows.some(row => !row.isConnected) || rows.length !== kept.size) this.body.replaceChildren(...rows);
    this.grid.setAttribute("aria-rowcount", this.shown.length + 1);
    if (at >= 0) this.grid.setAttribute("aria-activedescendant", `case-${this.chosen}`);
    else this.grid.removeAttribute("aria-activedescendant");
  }

  key(row, i) {
    return `${row.number}/${i}/${row.number === this.chosen}`;
  }

  turned(row) {
    if (this.runs) return row.differs;
    return this.target.answers && row.counterfactual !== null && row.counterfactual !== row.prediction;
  }

  row(row, i) {
    const wrong = row.right === false;
    const cells = this.columns.map((column, at) => {
      const value = column.of(row),
        text = value === null ? "–" : column.numeric ? shown(value, this.target.format) : String(value);
      const mark = wrong && column.name === "answer";
      return element("div", {
        role: "gridcell",
        "aria-colindex": at + 1,
        title: column.numeric ? null : text,
        class: [
          column.name,
          mark ? "wrong" : "",
          column.name === "counter" && this.turned(row) ? "turned" : "",
        ]
          .join(" ")
          .trim(),
        children: [
          ...(mark
            ? [element("span", { class: "cross", text: "✗ " }), element("span", { class: "unseen", text: "wrong: " })]
            : []),
          text,
        ],
      });
    });
    if (row.thumbnail) cells[0].append(thumbnail(row));
    const made = element("div", {
      class: row.number === this.chosen ? "row chosen" : "row",
      role: "row",
      id: `case-${row.number}`,
      "data-number": row.number,
      "data-key": this.key(row, i),
      "aria-rowindex": i + 2,
      "aria-selected": row.number === this.chosen ? "true" : "false",
      children: cells,
    });
    made.style.transform = `translateY(${i * ROW}px)`;
    return made;
  }
}

// The tissue of a slide; a slide that cannot be read has none.
function thumbnail({ number }) {
  const picture = element("img", { class: "thumbnail", alt: "", decoding: "async" });
  picture.addEventListener("error", () => picture.remove(), { once: true });
  return loadPicture(picture, thumbnailOf(number));
}
