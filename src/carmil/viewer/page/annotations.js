// Regions on the slide: those that people draw, with their names, which the server saves, and the truth, which is only shown.
import { element, many, say } from "./words.js";

const LONGEST = 100; // characters of a name, as the server has it
const INK = [28, 35, 48];
const AROUND = 1.5; // how much of the slide is shown beside a region, in its own size

export class Annotations {
  // ask(body) changes the saved regions, or reads them without a body; changed() draws them; mark(region) marks its tiles;
  // look(view) goes there; renamed(before, after): a region has another name.
  constructor(box, { ask, changed, mark, look, renamed }) {
    Object.assign(this, { box, ask, changed, mark, look, renamed, visible: true, ...nothing() });
  }

  close() {
    Object.assign(this, nothing());
    this.box.replaceChildren();
    this.changed();
  }

  // Another case: its regions are read, and nothing is drawn yet. classes: names that regions may have as their class.
  async open(current, classes) {
    this.close();
    Object.assign(this, { current, classes });
    if (!current.places) return this.show();
    try {
      const found = await this.ask();
      if (this.current === current) this.take(found);
    } catch (error) {
      if (error.name === "AbortError" || this.current !== current) return;
      this.trouble = error.message;
      this.show();
    }
  }

  take(found) {
    Object.assign(this, found, { deleting: null, trouble: "" });
    this.show();
    this.changed();
  }

  get shown() {
    const fresh = this.unsaved.map(({ outline }) => ({ name: "not saved", colour: INK, rings: [outline], dashed: true }));
    return [...(this.visible ? [...this.truth, ...this.drawn] : []), ...fresh];
  }

  // A region was drawn: it can be saved, under this name or another.
  offer(outline, name) {
    this.unsaved.push({ outline, name, typed: ["", ""] });
    this.show();
    this.changed();
  }

  // Discard these regions, by default all that are not saved.
  discard(regions = this.unsaved) {
    this.unsaved = this.unsaved.filter(one => !regions.includes(one));
    this.show();
    this.changed();
  }

  // saved: the region that the server adds.
  async change(body, done, saved) {
    const { current } = this,
      before = this.drawn.find(({ id }) => id === body.rename?.region)?.name;
    try {
      const found = await this.ask(body);
      if (this.current !== current) return;
      this.unsaved = this.unsaved.filter(one => one !== saved);
      this.take(found);
      if (saved) this.renamed(saved.name, body.add.name);
      if (body.rename) this.renamed(before, body.rename.name);
      say(done);
    } catch (error) {
      if (error.name === "AbortError" || this.current !== current) return;
      this.trouble = error.message;
      this.show();
    }
  }

  save(region, name, classification) {
    const outline = region.outline.map(corner => corner.map(value => Math.round(value * 100) / 100));
    return this.change({ add: { name: plain(name) || region.name, outline, class: classification } }, "region saved", region);
  }

  // A name that no region has, and none of `taken`.
  nextName(taken) {
    const names = new Set([...taken, ...this.drawn.map(({ name }) => name), ...this.unsaved.map(({ name }) => name)]);
    let i = this.drawn.length + this.unsaved.length + 1;
    while (names.has(`region ${i}`)) i++;
    return `region ${i}`;
  }

  show() {
    const { current, drawn, truth, unsaved, refusal, trouble, problem, file } = this;
    if (!current?.places)
      return this.box.replaceChildren(note("The positions of the instances are unknown, so there are no regions."));
    this.box.replaceChildren(
      this.choices(),
      ...unsaved.map(region => this.form(region)),
      ...(drawn.length || truth.length ? [this.switch()] : []),
      ...(drawn.length
        ? [element("ul", { class: "regions", children: drawn.map(region => this.row(region)) })]
        : refusal || unsaved.length
          ? []
          : [note("Draw a region above, then give it a name to save it.")]),
      ...(truth.length
        ? [
            element("h3", { text: "Truth" }),
            element("ul", { class: "regions", children: this.named().map(([name, some]) => this.truthRow(name, some)) }),
          ]
        : []),
      ...[trouble, problem].filter(Boolean).map(text => element("p", { class: "trouble", role: "alert", text })),
      refusal ? note(`Regions cannot be drawn: ${refusal}.`) : "",
      drawn.length ? this.where(file) : "",
    );
  }

  // Classes to choose from while typing one: those of the regions, of the truth and of the run.
  choices() {
    const names = [...this.drawn.map(one => one.class), ...this.truth.map(({ name }) => name), ...this.classes];
    return element("datalist", {
      id: "region-classes",
      children: [...new Set(names)].filter(Boolean).map(value => element("option", { value })),
    });
  }

  form(region) {
    const field = text(`Name of the drawn region: ${region.name}`, { placeholder: region.name }),
      kind = text(`Class of the drawn region: ${region.name}`, { placeholder: "class: its name", list: "region-classes" }),
      saves = () => this.save(region, field.value, kind.value);
    [field.value, kind.value] = region.typed; // kept while another region is drawn
    for (const one of [field, kind]) {
      one.addEventListener("input", () => (region.typed = [field.value, kind.value]));
      one.addEventListener("keydown", event => event.key === "Enter" && saves());
    }
    const save = element("button", { type: "button", class: "strong", text: "Save region", on: { click: saves } });
    const discard = button("Discard", region.name, () => this.discard([region]));
    return element("div", {
      class: "line naming",
      children: [...(this.refusal ? [] : [field, kind, save]), discard],
    });
  }

  switch() {
    const box = element("input", { type: "checkbox", checked: this.visible });
    box.addEventListener("change", () => {
      this.visible = box.checked;
      this.changed();
    });
    return element("label", { class: "check", children: [box, " show on the slide"] });
  }

  row(region) {
    const { id, name } = region,
      field = text(`Name of ${name}`, { value: name }),
      kind = text(`Class of ${name}`, { value: region.class, placeholder: "class: its name", list: "region-classes" });
    field.addEventListener("change", () =>
      plain(field.value) && plain(field.value) !== name
        ? this.change({ rename: { region: id, name: plain(field.value) } }, "name saved")
        : (field.value = name),
    );
    kind.addEventListener("change", () => this.change({ classify: { region: id, class: kind.value } }, "class saved"));
    for (const [one, value] of [[field, name], [kind, region.class]])
      one.addEventListener("keydown", event => {
        if (event.key === "Enter") one.blur();
        if (event.key === "Escape") one.value = value;
      });
    const sure = this.deleting === id;
    return element("li", {
      children: [
        swatch(region),
        field,
        element("div", {
          class: "line",
          children: [
            kind,
            button("Go there", name, () => this.look(around([region]))),
            button("Mark its tiles", name, () => this.mark([region], name)),
            button(sure ? "Really delete?" : "Delete", name, () => {
              if (sure) return this.change({ delete: { region: id } }, `${name} deleted`);
              this.deleting = id;
              this.show();
              this.box.querySelector(".sure")?.focus();
            }, sure ? "quiet sure" : "quiet"),
          ],
        }),
      ],
    });
  }

  // All parts of the truth with one name.
  named() {
    const of = new Map();
    for (const region of this.truth) of.set(region.name, [...(of.get(region.name) ?? []), region]);
    return [...of];
  }

  truthRow(name, some) {
    return element("li", {
      children: [
        swatch(some[0]),
        element("span", { class: "name", text: some.length > 1 ? `${name} (${some.length})` : name }),
        element("div", {
          class: "line",
          children: [
            button("Go there", name, () => this.look(around(some))),
            button("Mark its tiles", name, () => this.mark(some, name)),
          ],
        }),
      ],
    });
  }

  where(file) {
    return element("p", {
      class: "soft note",
      children: [
        `${many(this.drawn.length, "region")} in ${file}. `,
        element("a", {
          href: `api/case/${this.current.number}/annotations.geojson`,
          download: "",
          text: "Download GeoJSON for QuPath",
        }),
      ],
    });
  }
}

const nothing = () => ({
  current: null,
  classes: [],
  drawn: [],
  truth: [],
  unsaved: [],
  deleting: null,
  trouble: "",
});
const text = (label, more) =>
  element("input", { type: "text", maxlength: LONGEST, "aria-label": label, autocomplete: "off", ...more });
const plain = name => name.split(/\s+/).filter(Boolean).join(" "); // as the server has it
const note = text => element("p", { class: "soft note", text });
const button = (text, of, click, names = "quiet") =>
  element("button", { type: "button", class: names, text, "aria-label": `${text}: ${of}`, on: { click } });

function swatch({ colour }) {
  const made = element("i", { class: "swatch" });
  made.style.borderColor = `rgb(${colour.join(" ")})`;
  return made;
}

// The view of some regions: centre and width in level-0 pixels.
function around(regions) {
  const corners = regions.flatMap(({ rings }) => rings.flat()),
    [left, right] = ends(corners.map(([x]) => x)),
    [top, bottom] = ends(corners.map(([, y]) => y));
  return [(left + right) / 2, (top + bottom) / 2, AROUND * Math.max(right - left, bottom - top)];
}

const ends = values => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

// The tiles whose middle is in an odd number of rings: inside an outline, and not in its holes.
export function tilesWithin(places, regions) {
  const inside = new Set();
  for (const { rings } of regions) {
    const odd = new Set();
    for (const ring of rings) for (const i of places.within(ring)) if (!odd.delete(i)) odd.add(i);
    for (const i of odd) inside.add(i);
  }
  return [...inside].sort((a, b) => a - b);
}

// Outlines over the map, with their names where there is room. s, dx, dy: from level-0 pixels to those of the canvas.
export function drawRegions(pen, regions, { s, dx, dy }, sharp) {
  pen.save();
  pen.lineJoin = "round";
  pen.font = `${12 * sharp}px system-ui, sans-serif`;
  pen.textBaseline = "middle";
  for (const { rings, colour, name, dashed } of regions) {
    const ink = `rgb(${colour.join(" ")})`;
    pen.beginPath();
    let [left, right, top] = [Infinity, -Infinity, Infinity];
    for (const ring of rings) {
      ring.forEach(([x, y], i) => {
        const [u, v] = [x * s + dx, y * s + dy];
        i ? pen.lineTo(u, v) : pen.moveTo(u, v);
        [left, right, top] = [Math.min(left, u), Math.max(right, u), Math.min(top, v)];
      });
      pen.closePath();
    }
    for (const [stroke, width] of [
      ["#fff", 5 * sharp],
      [ink, 2.5 * sharp],
    ]) {
      pen.setLineDash(dashed && stroke === ink ? [6 * sharp, 4 * sharp] : []);
      Object.assign(pen, { strokeStyle: stroke, lineWidth: width });
      pen.stroke();
    }
    if (right - left < 40 * sharp) continue;
    const wide = pen.measureText(name).width + 8 * sharp,
      x = Math.max(0, left),
      y = Math.max(9 * sharp, top - 11 * sharp);
    pen.fillStyle = ink;
    pen.fillRect(x, y - 9 * sharp, wide, 18 * sharp);
    pen.fillStyle = colour[0] * 0.3 + colour[1] * 0.59 + colour[2] * 0.11 > 140 ? "#000" : "#fff";
    pen.fillText(name, x + 4 * sharp, y);
  }
  pen.restore();
}
