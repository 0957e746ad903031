// A slide, or the empty plane its tiles lie on: OpenSeadragon moves and zooms, a canvas above it has the map.
// All coordinates are level-0 pixels; x, y of a tile is its upper left corner.
import { css } from "./colours.js";

const HATCH = 6; // pixels between the lines over what was removed

let library = null;
export function openSeadragon() {
  library ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "page/openseadragon.min.js";
    script.onload = () => {
      // It warns of every tile that comes after we have gone on.
      window.OpenSeadragon.console = Object.assign(Object.create(console), { warn() {} });
      resolve(window.OpenSeadragon);
    };
    script.onerror = () => {
      library = null;
      reject(new Error("OpenSeadragon is missing: run “make setup” to fetch it."));
    };
    // It would add a style element of its own, which our security policy forbids, unless it finds one: this one is none.
    const none = document.createElementNS("urn:none", "style");
    none.setAttribute("data-openseadragon-mobile-css", "");
    document.head.append(none, script);
  });
  return library;
}

const still = matchMedia("(prefers-reduced-motion: reduce)");

// Where tiles lie, and which tile is under a point.
export class Places {
  constructor({ x, y }, size) {
    this.x = x;
    this.y = y;
    this.size = size ?? spacing(x) ?? spacing(y) ?? 256;
    this.cells = new Map();
    x.forEach((_, i) => {
      const key = this.cell(x[i], y[i]);
      if (!this.cells.has(key)) this.cells.set(key, []);
      this.cells.get(key).push(i);
    });
  }

  cell(x, y) {
    return `${Math.floor(x / this.size)},${Math.floor(y / this.size)}`;
  }

  at(x, y) {
    let found = -1;
    for (const dx of [this.size, 0])
      for (const dy of [this.size, 0]) {
        for (const i of this.cells.get(this.cell(x - dx, y - dy)) ?? []) {
          if (x >= this.x[i] && x < this.x[i] + this.size && y >= this.y[i] && y < this.y[i] + this.size) found = i;
        }
      }
    return found;
  }

  // Tiles whose middle is in the polygon, by the even-odd rule.
  within(polygon) {
    const inside = [],
      half = this.size / 2;
    for (let i = 0; i < this.x.length; i++) {
      const x = this.x[i] + half,
        y = this.y[i] + half;
      let odd = false;
      for (let a = 0, b = polygon.length - 1; a < polygon.length; b = a++) {
        const [xa, ya] = polygon[a],
          [xb, yb] = polygon[b];
        if (ya > y !== yb > y && x < ((xb - xa) * (y - ya)) / (yb - ya) + xa) odd = !odd;
      }
      if (odd) inside.push(i);
    }
    return inside;
  }

  get extent() {
    const reach = values => values.reduce((most, value) => Math.max(most, value), 0) + this.size;
    return [reach(this.x), reach(this.y)];
  }
}

// The side of a tile where nobody wrote it down: the smallest step between columns.
function spacing(values) {
  const sorted = [...new Set(values)].sort((a, b) => a - b);
  let least = Infinity;
  for (let i = 1; i < sorted.length; i++) least = Math.min(least, sorted[i] - sorted[i - 1]);
  return Number.isFinite(least) ? least : null;
}

export class Plane {
  constructor(Library, { stage, number, picture, places, extent, label, on }) {
    Object.assign(this, { Library, stage, places, on });
    const [width, height] = picture ? [picture.width, picture.height] : (extent ?? places.extent);
    Object.assign(this, { width, height, bare: !picture });
    this.marked = new Set();
    this.removed = new Set();
    this.opacity = 1;
    this.hovered = -1;
    this.found = -1;
    this.region = null;
    this.viewer = new Library.Viewer({
      element: stage,
      drawer: "canvas",
      showNavigationControl: false,
      animationTime: still.matches ? 0 : 0.6,
      gestureSettingsMouse: { clickToZoom: false, dblClickToZoom: true, flickEnabled: !still.matches },
      visibilityRatio: 0.4,
      minZoomImageRatio: 0.6,
      maxZoomPixelRatio: 4,
      immediateRender: still.matches,
      imageLoaderLimit: 6,
      maxImageCacheCount: 300,
      tileRetryMax: 2,
      tileRetryDelay: 700,
      tileSources: picture
        ? {
            width,
            height,
            tileSize: picture.tile,
            tileOverlap: picture.overlap,
            minLevel: picture.coarsest ?? 0,
            maxLevel: picture.levels - 1,
            getTileUrl: (level, x, y) => `api/case/${number}/zoom/${level}/${x}_${y}.jpeg`,
          }
        : { width, height, tileSize: 512, minLevel: 0, getTileUrl: () => "", tileExists: () => false },
    });
    this.canvas = document.createElement("canvas");
    this.canvas.className = "map";
    this.ruler = document.createElement("div");
    this.ruler.className = "ruler";
    this.mpp = picture?.mpp ?? null;
    this.ruler.hidden = !this.mpp;
    stage.append(this.canvas, this.ruler);
    const { viewer } = this,
      focus = viewer.canvas;
    focus.setAttribute("role", "application");
    focus.setAttribute("aria-label", label);
    for (const event of ["update-viewport", "open", "resize", "animation"]) viewer.addHandler(event, () => this.draw());
    viewer.addHandler("open", () => on.open?.(this));
    viewer.addHandler("animation", () => on.move?.(this));
    viewer.addHandler("animation-finish", () => on.rest?.(this));
    viewer.addHandler("tile-load-failed", ({ maxReached }) => maxReached && on.torn?.());
    viewer.addHandler("canvas-click", event => {
      if (!event.quick) return;
      const i = this.tileAt(event.position.x, event.position.y);
      if (i >= 0) on.mark?.(i);
    });
    viewer.addHandler("canvas-key", event => {
      event.preventDefaultAction = !/^(Arrow|Equal|Minus|NumpadAdd|NumpadSubtract|Digit0)/.test(
        event.originalEvent.code,
      );
    });
    stage.addEventListener("pointermove", event => this.hover(event));
    stage.addEventListener("pointerleave", () => on.hover?.(-1));
    this.resizing = new ResizeObserver(() => this.draw());
    this.resizing.observe(stage);
  }

  get ready() {
    return this.viewer.world?.getItemCount() > 0;
  }

  // Level-0 pixels to pixels of the stage: s * x + dx.
  get scale() {
    const image = this.viewer.world.getItemAt(0),
      { Point } = this.Library;
    const from = image.imageToViewerElementCoordinates(new Point(0, 0)),
      to = image.imageToViewerElementCoordinates(new Point(this.width, 0));
    return { s: (to.x - from.x) / this.width, dx: from.x, dy: from.y };
  }

  toSlide(x, y) {
    const { s, dx, dy } = this.scale;
    return [(x - dx) / s, (y - dy) / s];
  }

  tileAt(x, y) {
    return this.ready ? this.places.at(...this.toSlide(x, y)) : -1;
  }

  hover(event) {
    if (this.drawing || event.pointerType === "touch") return;
    const box = this.canvas.getBoundingClientRect();
    this.on.hover?.(this.tileAt(event.clientX - box.left, event.clientY - box.top));
  }

  set(changes) {
    Object.assign(this, changes);
    this.draw();
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.paint());
  }

  paint() {
    const { canvas, stage, painted, places } = this,
      sharp = window.devicePixelRatio || 1;
    const width = Math.round(stage.clientWidth * sharp),
      height = Math.round(stage.clientHeight * sharp);
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const pen = canvas.getContext("2d");
    pen.clearRect(0, 0, width, height);
    if (!this.ready) return;
    const seen = this.scale,
      s = seen.s * sharp,
      dx = seen.dx * sharp,
      dy = seen.dy * sharp,
      side = places.size * s;
    const gap = side > 18 * sharp ? sharp : 0;
    // Edges on whole pixels: neighbours neither overlap nor leave a hairline.
    const box = (i, space = gap) => {
      const x = Math.round(places.x[i] * s + dx),
        y = Math.round(places.y[i] * s + dy);
      return [
        x,
        y,
        Math.max(1, Math.round(places.x[i] * s + dx + side) - x - space),
        Math.max(1, Math.round(places.y[i] * s + dy + side) - y - space),
      ];
    };
    const inSight = ([x, y, w, h]) => x + w > 0 && y + h > 0 && x < width && y < height;

    this.measure(seen.s);
    if (painted) {
      let last = -1;
      for (const i of painted.order) {
        const square = box(i);
        if (!inSight(square) || this.removed.has(i)) continue;
        if (painted.place[i] !== last) {
          last = painted.place[i];
          const colour = painted.colours[last];
          pen.fillStyle = css(colour, this.bare ? 1 : this.opacity * (0.08 + 0.92 * colour[3] ** 0.8));
        }
        pen.fillRect(...square);
      }
    }
    const ink = getComputedStyle(stage);
    if (this.removed.size) {
      pen.fillStyle = hatch(pen, ink.color, ink.backgroundColor, sharp);
      for (const i of this.removed) {
        const square = box(i, 0);
        if (inSight(square)) pen.fillRect(...square);
      }
    }
    for (const i of this.marked) if (inSight(box(i))) frame(pen, box(i), sharp, sharp);
    if (this.found >= 0) frame(pen, grown(box(this.found), 2 * sharp), 2 * sharp, sharp);
    if (this.hovered >= 0) frame(pen, box(this.hovered), sharp, sharp);
    if (this.region?.length) {
      pen.beginPath();
      this.region.forEach(([x, y]) => pen.lineTo(x * s + dx, y * s + dy));
      if (!this.drawing) pen.closePath();
      outline(pen, () => pen.stroke(), 1.5 * sharp, sharp);
      if (this.drawing)
        for (const [x, y] of this.region)
          if (this.region.length < 40)
            pen.fillRect(x * s + dx - 3 * sharp, y * s + dy - 3 * sharp, 6 * sharp, 6 * sharp);
    }
  }

  // A ruler of a round length, about a fifth of the stage.
  measure(s) {
    if (!this.mpp) return;
    const about = (this.stage.clientWidth / 5 / s) * this.mpp,
      ten = 10 ** Math.floor(Math.log10(about));
    const length = ten * ([5, 2].find(step => step * ten <= about) ?? 1);
    this.ruler.textContent = length >= 1000 ? `${length / 1000} mm` : `${length} µm`;
    this.ruler.style.width = `${(length / this.mpp) * s}px`;
  }

  toStage([x, y]) {
    const { s, dx, dy } = this.scale;
    return [x * s + dx, y * s + dy];
  }

  zoom(factor) {
    this.viewer.viewport.zoomBy(factor, null, still.matches);
    this.viewer.viewport.applyConstraints(still.matches);
  }

  whole() {
    this.viewer.viewport.goHome(still.matches);
  }

  get view() {
    const seen = this.viewer.viewport.getBounds(false),
      image = this.viewer.world.getItemAt(0),
      box = image.viewportToImageRectangle(seen);
    return [box.x + box.width / 2, box.y + box.height / 2, box.width];
  }

  look([x, y, width], at_once = still.matches) {
    const { viewport, world } = this.viewer,
      seen = this.viewer.viewport.getBounds(false);
    const height = (width * seen.height) / seen.width;
    viewport.fitBounds(
      world.getItemAt(0).imageToViewportRectangle(x - width / 2, y - height / 2, width, height),
      at_once,
    );
  }

  // The other half of a split view looks at the same place.
  follow(other) {
    if (!this.ready || !other.ready) return;
    const from = other.viewer.viewport,
      to = this.viewer.viewport;
    to.zoomTo(from.getZoom(true), null, true);
    to.panTo(from.getCenter(true), true);
  }

  fly(i) {
    const { x, y, size } = this.places;
    this.look([x[i] + size / 2, y[i] + size / 2, Math.min(size * 14, this.width)]);
    this.set({ found: i });
  }

  destroy() {
    this.resizing.disconnect();
    cancelAnimationFrame(this.frame);
    this.viewer.destroy();
    this.canvas.remove();
    this.ruler.remove();
  }
}

function hatch(pen, ink, ground, sharp) {
  const side = HATCH * sharp,
    tile = new OffscreenCanvas(side, side),
    draw = tile.getContext("2d");
  draw.globalAlpha = 0.8;
  draw.fillStyle = ground;
  draw.fillRect(0, 0, side, side);
  draw.globalAlpha = 0.85;
  draw.strokeStyle = ink;
  draw.lineWidth = sharp;
  for (const shift of [-side, 0, side]) {
    draw.beginPath();
    draw.moveTo(shift, side);
    draw.lineTo(shift + side, 0);
    draw.stroke();
  }
  return pen.createPattern(tile, "repeat");
}

const grown = ([x, y, w, h], by) => [x - by, y - by, w + 2 * by, h + 2 * by];

// A dark line within a light one: seen on any tissue and any colour.
function outline(pen, stroke, width, sharp) {
  pen.strokeStyle = "#fff";
  pen.lineWidth = width + 2 * sharp;
  stroke();
  pen.strokeStyle = pen.fillStyle = "#10151d";
  pen.lineWidth = width;
  stroke();
}

function frame(pen, [x, y, w, h], width, sharp) {
  outline(
    pen,
    () => pen.strokeRect(x + width / 2, y + width / 2, Math.max(w - width, 1), Math.max(h - width, 1)),
    width,
    sharp,
  );
}
