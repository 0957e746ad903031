// The middle of the page: one pane, or two side by side that move together, each with a map and its legend.
import { gradient, paint } from "./colours.js";
import { contours, levelsOf } from "./contours.js";
import { openSeadragon, Plane } from "./plane.js";
import { lengthText, listenForRuler } from "./ruler.js";
import { reachOf, smoothMap } from "./smoothing.js";
import { Bars, Pictures } from "./strip.js";
import { capital, element, many, meanings, notice, number as plain, pointOn, say, signed } from "./words.js";

const NO_SETS = { marked: new Set(), removed: new Set() };
const NEAR = 10; // pixels: a click this close to the first corner closes the region

export class Scene {
  constructor(panes, on) {
    Object.assign(this, { panes, on });
    this.stages = [];
    this.layers = [];
    this.look = { opacity: 1, byRank: false, hidden: false, smooth: "0", contours: "" };
    this.sets = { marked: new Set(), removed: new Set() };
    this.region = null;
    this.regions = [];
  }

  get flat() {
    return !this.case?.places;
  }
  get leader() {
    return this.stages[this.lead] ?? this.stages[0];
  }
  get dark() {
    return !this.case?.info.picture && window.carmilTheme.dark;
  }

  wait() {
    this.panes.setAttribute("aria-busy", "true");
    this.panes.querySelector(".notice")?.remove();
    if (!this.panes.children.length)
      this.panes.append(element("div", { class: "pane", children: [element("div", { class: "stage" })] }));
  }

  fail(text, again) {
    this.close();
    this.panes.setAttribute("aria-busy", "false");
    this.panes.replaceChildren(notice(text, again));
  }

  close() {
    this.stages.forEach(stage => stage.destroy());
    this.stages = [];
    this.layers = [];
    this.region = null;
    this.measure(false);
    if (this.drawing) this.on.drawing((this.drawing = false));
  }

  // layers: one or two of {case, name, title, ofClass, output, map, run}. The case `current` keeps its place; another starts
  // whole, or at `view`. A second layer may be of another run's case of the slide; what is marked and removed is of `current`.
  async show(current, layers, view) {
    const Library = layers.some(layer => layer.case.places) ? await openSeadragon() : null;
    if (current.stale?.()) return;
    const same =
      this.case === current &&
      this.stages.length === layers.length &&
      layers.every((layer, i) => layer.case === this.layers[i].case);
    this.layers = layers;
    this.hovered = -1;
    if (!same) {
      const kept = this.case === current && !this.flat && this.leader?.ready && !this.leader.apart ? this.leader.view : view;
      const region = this.case === current ? this.region : null;
      this.close();
      Object.assign(this, { case: current, layers, lead: 0, region });
      this.panes.replaceChildren(...layers.map((layer, i) => this.pane(Library, i, kept)));
      this.panes.classList.toggle("two", layers.length === 2);
    }
    this.panes.setAttribute("aria-busy", "false");
    this.redraw();
  }

  pane(Library, i, view) {
    const stage = element("div", { class: "stage" }),
      caption = element("figcaption");
    const figure = element("figure", { class: "pane", children: [stage, caption] });
    // OpenSeadragon measures its element, so it is built once the figure is in the page.
    queueMicrotask(() => this.raise(Library, stage, i, view));
    stage.addEventListener("pointerenter", () => {
      this.lead = i;
    });
    stage.addEventListener("focusin", () => {
      this.lead = i;
    });
    return figure;
  }

  raise(Library, stage, i, view) {
    const own = this.layers[i].case,
      { info, number, places } = own,
      apart = !comparable(own, this.case);
    const on = {
      hover: at => this.hover(at, own),
      mark: at => {
        const here = beneath(at, own, this.case);
        if (here >= 0) this.on.mark(here);
      },
      marks: several => this.on.marks(several),
      move: plane => {
        this.lineUp();
        if (plane === this.leader) this.on.magnified(plane.magnification);
      },
      rest: plane => {
        if (plane === this.leader && !apart) this.on.view(isWhole(plane) ? null : plane.view);
      },
      open: plane => {
        if (!places) return;
        if (plane !== this.leader) {
          if (!apart && !this.leader.apart) plane.follow(this.leader);
        } else {
          if (view && !apart) plane.look(view, true);
          this.on.magnified(plane.magnification);
        }
      },
      torn: () => this.torn(),
    };
    const label =
      info.picture || places
        ? `Slide ${info.slide} with its map. Arrow keys move, plus and minus zoom, 0 shows all of it.`
        : `Every instance of ${info.slide} as a bar, the largest value first.`;
    this.stages[i] = places
      ? new Plane(Library, { stage, picture: info.picture, places, extent: info.extent, mpp: pixelSize(info), label, on })
      : info.images
        ? new Pictures({ stage, number, on })
        : new Bars({ stage, on, label });
    this.stages[i].apart = apart;
    if (places && !apart) {
      this.listen(this.stages[i]);
      listenForRuler(this.stages[i], {
        active: () => this.measuring,
        show: line => this.showLine(line),
        done: () => this.measure(false, this.line),
      });
    }
    this.redraw();
  }

  // The other pane looks at the same place as the one that moves both.
  lineUp() {
    const { leader } = this;
    if (leader && !leader.apart) this.stages.forEach(other => other !== leader && !other.apart && other.follow?.(leader));
  }

  set({ look, sets, regions }) {
    if (regions) this.regions = regions;
    const stale = look && ["byRank", "smooth", "contours"].some(name => name in look && look[name] !== this.look[name]);
    if (look) Object.assign(this.look, look);
    if (stale) this.repaint();
    if (sets) {
      this.sets = sets;
      if (!sets.marked.size) this.region = null;
    }
    this.redraw();
  }

  theme() {
    this.repaint();
    this.redraw();
  }

  repaint() {
    this.layers.forEach(layer => {
      layer.painted = null;
    });
  }

  // The map of a layer in colours, and its contours.
  paintLayer(layer) {
    const { places, info } = layer.case,
      { byRank, smooth } = this.look;
    const map = places ? smoothMap(layer.map, places, reachOf(smooth, places.size, pixelSize(info))) : layer.map;
    layer.painted = paint(map, { byRank, dark: this.dark });
    layer.outlines = places && !map.negligible ? contours(layer.painted, places, levelsOf(this.look.contours)) : [];
  }

  redraw() {
    this.layers.forEach((layer, i) => {
      if (!layer.painted) this.paintLayer(layer);
      const figure = this.panes.children[i];
      const sets = layer.case === this.case ? this.sets : NO_SETS,
        apart = this.stages[i]?.apart;
      this.stages[i]?.set({
        painted: layer.painted,
        opacity: this.look.opacity,
        hidden: this.look.hidden,
        outlines: layer.outlines,
        line: apart ? null : this.line,
        region: apart ? null : this.region,
        drawing: this.drawing,
        regions: apart ? [] : this.regions,
        ...sets,
      });
      if (figure && layer.told !== layer.painted) {
        layer.told = layer.painted;
        figure.querySelector("figcaption").replaceChildren(...legend(layer));
      }
      if (figure) this.tellRemoved(figure.querySelector(".of.gone"), sets);
    });
  }

  // A map stays that of the whole slide when tiles are removed.
  tellRemoved(line, { removed: { size } }) {
    line.hidden = !size;
    line.textContent = `Map of the whole slide, before the removal: the ${many(size, `removed ${this.flat ? "instance" : "tile"}`)} ${size === 1 ? "is" : "are"} ${this.flat ? "faded" : "hatched"}.`;
  }

  // at: an instance of the case `own`; another run's case shows its own instance at that place.
  hover(over, own) {
    if (over === this.hovered && own === this.hoveredIn) return;
    this.hovered = over;
    this.hoveredIn = own;
    this.stages.forEach((stage, i) => {
      const at = beneath(over, own, this.layers[i].case);
      stage.set({ hovered: at });
      const { painted } = this.layers[i],
        caption = this.panes.children[i].querySelector("figcaption");
      const value = at >= 0 ? painted.values[at] : NaN,
        tick = caption.querySelector(".tick");
      caption.querySelector("output").textContent =
        at < 0
          ? ""
          : `${this.flat ? "instance" : "tile"} ${at}: ${(painted.diverging ? signed : plain)(value)}${this.layers[i].case === this.case && this.sets.removed.has(at) ? ", removed" : ""}`;
      tick.hidden = at < 0;
      if (at >= 0)
        tick.style.left = `${100 * (painted.diverging ? (painted.strength[at] + 1) / 2 : painted.strength[at])}%`;
    });
  }

  // What each pane shows, with the words and colours of its legend.
  pictures() {
    return Promise.all(
      this.stages.map(async (stage, i) => {
        const caption = this.panes.children[i].querySelector("figcaption"),
          text = from => [...caption.querySelectorAll(from)].filter(one => !one.hidden).map(one => one.textContent);
        return {
          ...(await stage.picture()),
          title: [...text(".of-run"), text(".pane-title strong, .pane-title .unit").join("")].join("; "),
          ends: text(".ends span"),
          colours: this.look.hidden ? null : this.layers[i].painted.colours,
          notes: this.look.hidden ? ["The map is hidden."] : text(".of"),
        };
      }),
    );
  }

  fly(i) {
    if (!this.stages.length) return;
    this.stages.forEach((stage, at) => {
      const here = beneath(i, this.case, this.layers[at].case);
      if (!this.layers[at].case.places) here >= 0 && stage.fly(here);
      else stage.set({ found: here });
    });
    this.lead = 0; // the pane of the case whose instance it is
    if (!this.flat) this.leader.fly(i);
    this.reveal();
  }

  // On a phone the slide may have been scrolled out of the window.
  reveal() {
    this.panes.children[this.lead]?.scrollIntoView({ block: "nearest" });
  }
  zoom(factor) {
    if (!this.flat && this.leader?.ready) this.leader.zoom(factor);
  }
  whole() {
    if (!this.flat && this.leader?.ready) this.leader.whole();
  }
  fit() {
    if (!this.flat && this.leader?.ready) this.leader.fit();
  }
  get mpp() {
    return this.case?.places ? pixelSize(this.case.info) : null;
  }
  focus() {
    this.leader?.focus?.();
  }
  magnify(times) {
    if (!this.flat && this.leader?.ready && this.leader.mpp) this.leader.magnify(times);
  }
  see(view) {
    this.lead = 0; // views are in the coordinates of its case
    if (!this.flat && this.leader?.ready) view ? this.leader.look(view) : this.leader.whole();
  }

  torn() {
    if (this.panes.querySelector(".torn")) return;
    this.panes.append(
      element("p", {
        class: "torn",
        role: "status",
        text: "Parts of the slide could not be read; the map is complete.",
      }),
    );
  }

  // A region is drawn by dragging around it, or corner by corner: click, click, then double-click, Enter or the first corner again.
  draw(on) {
    if (this.flat) return;
    if (on) this.measure(false);
    this.drawing = on;
    this.corners = [];
    this.region = null;
    this.panes.classList.toggle("drawing", on);
    this.on.drawing(on);
    if (on) this.reveal();
    this.redraw();
  }

  // Measure a length, or stop; the line that was measured last stays until it is cleared.
  measure(on, line = null) {
    if (on && (this.flat || !this.leader?.ready)) return;
    if (on) this.draw(false);
    this.measuring = on;
    this.panes.classList.toggle("measuring", on);
    this.showLine(line);
    if (line) say(`length ${this.length}`);
  }

  showLine(line) {
    this.line = line;
    this.on.measuring(this.measuring, line && this.length);
    this.redraw();
  }

  get length() {
    const [[x, y], [u, v]] = this.line;
    return lengthText(Math.hypot(u - x, v - y), this.leader.mpp);
  }

  // Corners are kept in level-0 pixels: who zooms while drawing draws on.
  listen(plane) {
    const { canvas } = plane;
    let pressed = null,
      dragged = false;
    const at = event => pointOn(canvas, event);
    const far = (corner, [x, y]) => {
      const [u, v] = plane.toStage(corner);
      return Math.hypot(x - u, y - v);
    };
    const add = here => this.corners.push(plane.toSlide(...here));
    const show = (...more) => {
      this.region = [...this.corners, ...more.map(here => plane.toSlide(...here))];
      this.redraw();
    };
    canvas.addEventListener("pointerdown", event => {
      if (!this.drawing || event.button > 0) return;
      event.preventDefault();
      canvas.setPointerCapture(event.pointerId);
      pressed = at(event);
      dragged = false;
    });
    canvas.addEventListener("pointermove", event => {
      if (!this.drawing) return;
      const here = at(event);
      if (pressed && !dragged && Math.hypot(here[0] - pressed[0], here[1] - pressed[1]) > 4) {
        dragged = true;
        add(pressed);
      }
      if (dragged && pressed && far(this.corners.at(-1), here) > 4) add(here);
      if (this.corners.length) show(...(pressed ? [] : [here]));
    });
    canvas.addEventListener("pointerup", event => {
      if (!this.drawing || !pressed) return;
      const here = at(event),
        closes = this.corners.length > 2 && far(this.corners[0], here) < NEAR;
      pressed = null;
      if (dragged || closes) return this.finish();
      add(here);
      show();
    });
    canvas.addEventListener("pointercancel", () => {
      pressed = null;
    });
    canvas.addEventListener("dblclick", event => {
      event.preventDefault();
      this.finish();
    });
  }

  finish() {
    if (!this.drawing || this.corners.length < 3) return false;
    const region = this.corners,
      inside = this.case.places.within(region);
    this.draw(false);
    if (!inside.length) say("No tile has its middle in that region.");
    this.on.region(inside, region);
    this.redraw();
    return true;
  }
}

// Whether positions of two cases of a slide mean the same place: they have one unit, and slide files of one size, or none.
function comparable(own, other) {
  if (own === other) return true;
  const [a, b] = [own.info, other.info];
  return Boolean(
    own.places && other.places && a.unit === b.unit && a.picture?.width === b.picture?.width && a.picture?.height === b.picture?.height,
  );
}

// Instance `at` of a case, or the tile of another case of the slide that lies beneath its middle; -1 if there is none.
function beneath(at, own, other) {
  if (own === other || at < 0) return at;
  if (!comparable(own, other)) return -1;
  const { x, y, size } = own.places;
  return other.places.at(x[at] + size / 2, y[at] + size / 2);
}

// Micrometres per level-0 pixel: of the slide file or, without one, of the tiles where their size in both is known.
function pixelSize({ picture, tile_size: side, tile_pixels: pixels, tile_mpp: mpp }) {
  return picture?.mpp ?? (side && pixels && mpp ? (pixels * mpp) / side : null);
}

function isWhole(plane) {
  const { viewport } = plane.viewer,
    seen = viewport.getBounds(false),
    home = viewport.getHomeBounds();
  const near = (a, b) => Math.abs(a - b) < 0.01 * home.width;
  return (
    near(seen.width, Math.max(home.width, (home.height * seen.width) / seen.height)) &&
    near(seen.getCenter().x, home.getCenter().x) &&
    near(seen.getCenter().y, home.getCenter().y)
  );
}

function contourText(outlines) {
  const levels = [...new Set(outlines.map(({ level }) => level))];
  return levels.length ? ` Lines around tiles that reach ${levels.join(", ")} % of the scale.` : "";
}

function legend({ name, title, output, ofClass, painted, outlines, run }) {
  const [left, middle, right] = meanings(name, output, painted);
  const bound = Math.max(Math.abs(painted.low), Math.abs(painted.high));
  const ends = painted.byRank
    ? ["", "", ""]
    : painted.diverging
      ? [plain(-bound), "0", signed(bound)]
      : [plain(painted.low), "", plain(painted.high)];
  const bar = element("div", { class: "scale", children: [element("i", { class: "tick", hidden: true })] });
  bar.style.backgroundImage = gradient(painted);
  for (const { level, colour } of outlines) {
    const mark = element("i", { class: "level" }),
      share = level / 100;
    mark.style.left = `${painted.diverging ? 50 + (colour === painted.colours[0] ? -50 : 50) * share : 100 * share}%`;
    bar.append(mark);
  }
  const end = (words, value) =>
    element("span", { children: [value ? element("b", { text: `${value} ` }) : null, words ?? ""] });
  const meaning = painted.byRank
    ? `${painted.of} (coloured by rank${painted.diverging ? " on each side of 0" : ""}, not by size)`
    : painted.of;
  return [
    run ? element("p", { class: "of-run", children: [element("strong", { text: run.name }), `: ${run.answer}`] }) : "",
    element("div", {
      class: "pane-title",
      children: [
        element("span", {
          children: [
            element("strong", { text: capital(ofClass ? `${title}: ${output.name}` : title) }),
            painted.unit && !painted.of.includes(painted.unit) ? element("span", { class: "soft unit", text: ` (${painted.unit})` }) : null,
            element("span", { class: "soft of", text: ` ${capital(meaning)}.${contourText(outlines)}` }),
          ],
        }),
        element("output", { class: "soft" }),
      ],
    }),
    element("div", {
      class: "legend",
      children: [
        bar,
        element("div", { class: "ends", children: [end(left, ends[0]), end(middle, ends[1]), end(right, ends[2])] }),
      ],
    }),
    painted.negligible
      ? element("p", { class: "of negligible", text: `Negligible, drawn as 0: ${painted.negligible}.` })
      : "",
    painted.faint ? element("p", { class: "of negligible", text: `Drawn faint: ${painted.faint}.` }) : "",
    painted.caution ? element("p", { class: "of caution", text: `${capital(painted.caution)}.` }) : "",
    element("p", { class: "of gone", hidden: true }),
  ];
}
