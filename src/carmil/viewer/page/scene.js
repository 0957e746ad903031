// The middle of the page: one pane, or two side by side that move together, each with a map and its legend.
import { gradient, meanings, paint } from "./colours.js";
import { openSeadragon, Plane } from "./plane.js";
import { Bars, Pictures } from "./strip.js";
import { capital, element, notice, number as plain, say, signed } from "./words.js";

const NEAR = 10; // pixels: a click this close to the first corner closes the region

export class Scene {
  constructor(panes, on) {
    Object.assign(this, { panes, on });
    this.stages = [];
    this.layers = [];
    this.look = { opacity: 1, byRank: false };
    this.sets = { marked: new Set(), removed: new Set() };
    this.region = null;
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
    this.drawing = false;
  }

  // layers: one or two of {name, title, className, map}. The same case keeps its place; another starts whole, or at `view`.
  async show(current, layers, view) {
    const Library = current.places ? await openSeadragon() : null;
    if (current.stale?.()) return;
    const same = this.case === current && this.stages.length === layers.length;
    this.layers = layers;
    this.hovered = -1;
    if (!same) {
      const kept = this.case === current && !this.flat && this.leader?.ready ? this.leader.view : view;
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
    const { info, number, places } = this.case;
    const on = {
      hover: at => this.hover(at),
      mark: at => this.on.mark(at),
      marks: several => this.on.marks(several),
      move: plane => {
        if (plane === this.leader) this.stages.forEach(other => other !== plane && other.follow(plane));
      },
      rest: plane => {
        if (plane === this.leader) this.on.view(isWhole(plane) ? null : plane.view);
      },
      open: plane => {
        if (!places) return;
        if (plane !== this.leader) plane.follow(this.leader);
        else if (view) plane.look(view, true);
      },
      torn: () => this.torn(),
    };
    const label =
      info.picture || places
        ? `Slide ${info.slide} with its map. Arrow keys move, plus and minus zoom, 0 shows all of it.`
        : `Every instance of ${info.slide} as a bar, the largest value first.`;
    this.stages[i] = places
      ? new Plane(Library, { stage, number, picture: info.picture, places, extent: info.extent, label, on })
      : info.images
        ? new Pictures({ stage, number, on })
        : new Bars({ stage, on, label });
    if (places) this.listen(this.stages[i]);
    this.redraw();
  }

  set({ look, sets }) {
    if (look) Object.assign(this.look, look);
    if (sets) {
      this.sets = sets;
      if (!sets.marked.size) this.region = null;
    }
    if (look && "byRank" in look)
      this.layers.forEach(layer => {
        layer.painted = null;
      });
    this.redraw();
  }

  theme() {
    this.layers.forEach(layer => {
      layer.painted = null;
    });
    this.redraw();
  }

  redraw() {
    this.layers.forEach((layer, i) => {
      layer.painted ??= paint(layer.map, { byRank: this.look.byRank, dark: this.dark });
      const figure = this.panes.children[i];
      this.stages[i]?.set({
        painted: layer.painted,
        opacity: this.look.opacity,
        region: this.region,
        drawing: this.drawing,
        ...this.sets,
      });
      if (figure && layer.told !== layer.painted) {
        layer.told = layer.painted;
        figure.querySelector("figcaption").replaceChildren(...legend(layer));
      }
    });
  }

  hover(at) {
    if (at === this.hovered) return;
    this.hovered = at;
    this.stages.forEach((stage, i) => {
      stage.set({ hovered: at });
      const { painted, map } = this.layers[i],
        caption = this.panes.children[i].querySelector("figcaption");
      const value = at >= 0 ? map.values[at] : NaN,
        tick = caption.querySelector(".tick");
      caption.querySelector("output").textContent =
        at < 0
          ? ""
          : `${this.flat ? "instance" : "tile"} ${at}: ${(painted.diverging ? signed : plain)(value)}${this.sets.removed.has(at) ? ", removed" : ""}`;
      tick.hidden = at < 0;
      if (at >= 0)
        tick.style.left = `${100 * (painted.diverging ? (painted.strength[at] + 1) / 2 : painted.strength[at])}%`;
    });
  }

  fly(i) {
    this.stages.length &&
      (this.flat
        ? this.stages.forEach(stage => stage.fly(i))
        : (this.stages.forEach(stage => stage.set({ found: i })), this.leader.fly(i)));
  }
  zoom(factor) {
    if (!this.flat && this.leader?.ready) this.leader.zoom(factor);
  }
  whole() {
    if (!this.flat && this.leader?.ready) this.leader.whole();
  }
  see(view) {
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
    this.drawing = on;
    this.corners = [];
    this.region = null;
    this.panes.classList.toggle("drawing", on);
    this.on.drawing(on);
    this.redraw();
  }

  // Corners are kept in level-0 pixels: who zooms while drawing draws on.
  listen(plane) {
    const { canvas } = plane;
    let pressed = null,
      dragged = false;
    const at = event => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
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
    if (!this.drawing || this.corners.length < 3) return;
    const region = this.corners,
      inside = this.case.places.within(region);
    this.draw(false);
    this.region = inside.length ? region : null;
    if (inside.length) this.on.marks(inside);
    else say("No tile has its middle in that region.");
    this.redraw();
  }
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

function legend({ name, title, className, ofClass, painted }) {
  const [left, middle, right] = meanings(name, className, painted);
  const bound = Math.max(Math.abs(painted.low), Math.abs(painted.high));
  const ends = painted.byRank
    ? ["", "", ""]
    : painted.diverging
      ? [plain(-bound), "0", signed(bound)]
      : [plain(painted.low), "", plain(painted.high)];
  const bar = element("div", { class: "scale", children: [element("i", { class: "tick", hidden: true })] });
  bar.style.backgroundImage = gradient(painted);
  const end = (words, value) =>
    element("span", { children: [value ? element("b", { text: `${value} ` }) : null, words ?? ""] });
  return [
    element("div", {
      class: "pane-title",
      children: [
        element("strong", { text: capital(ofClass ? `${title}: ${className}` : title) }),
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
    element("p", {
      class: "soft of",
      text: capital(
        painted.byRank
          ? `${painted.of} (coloured by rank${painted.diverging ? " on each side of 0" : ""}, not by size)`
          : painted.of,
      ),
    }),
    painted.negligible
      ? element("p", { class: "of negligible", text: `Negligible, drawn as 0: ${painted.negligible}.` })
      : "",
  ];
}
