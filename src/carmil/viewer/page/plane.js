// A slide, or the empty plane its tiles lie on: OpenSeadragon moves and zooms, a canvas above it has the map.
// All coordinates are level-0 pixels; x, y of a tile is its upper left corner.
import { drawRegions } from "./annotations.js";
import { css } from "./colours.js";
import { lengthText } from "./ruler.js";
import { element, pointOn } from "./words.js";

const HATCH = 6; // pixels between the lines over what was removed
const SCALE_BAR = 120; // pixels that a scale bar may always have, so that its length fits below it
const OVERVIEW = 150; // pixels of the longer side of the overview
const FLOWN = 8; // tiles across the view after flying to one
const HIGHEST = 40; // magnification that can be reached on any slide
const AT_1X = 10; // micrometres per pixel of a screen at 1x, by which 0.25 um/px are 40x

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

  // The tile to the right of tile i, below it, to its left and above it, at 4 * i to 4 * i + 3; -1 where there is none.
  get neighbours() {
    const { size } = this;
    this.beside ??= Int32Array.from({ length: 4 * this.x.length }, (_, k) => {
      const i = k >> 2,
        [dx, dy] = [
          [1, 0],
          [0, 1],
          [-1, 0],
          [0, -1],
        ][k & 3];
      return this.at(this.x[i] + (0.5 + dx) * size, this.y[i] + (0.5 + dy) * size);
    });
    return this.beside;
  }

  get extent() {
    const { x, y, width, height } = this.tissue;
    return [x + width, y + height];
  }

  // The rectangle that the tiles fill.
  get tissue() {
    const ends = values => values.reduce(([low, high], at) => [Math.min(low, at), Math.max(high, at)], [Infinity, 0]);
    const [left, right] = ends(this.x),
      [top, bottom] = ends(this.y);
    return { x: left, y: top, width: right - left + this.size, height: bottom - top + this.size };
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
  constructor(Library, { stage, picture, places, extent, mpp, label, on }) {
    Object.assign(this, { Library, stage, places, mpp, on });
    const [width, height] = picture ? [picture.width, picture.height] : (extent ?? places.extent);
    Object.assign(this, { width, height, bare: !picture, tissue: places.tissue });
    this.marked = new Set();
    this.removed = new Set();
    this.opacity = 1;
    this.hovered = -1;
    this.found = -1;
    this.region = null;
    this.canvas = element("canvas", { class: "map" });
    this.scaleBar = element("div", { class: "scale-bar", hidden: !mpp });
    this.overview = element("div", { class: "overview" });
    this.overviewMap = element("canvas", { class: "overview-map" });
    for (const side of ["width", "height"])
      this.overview.style[side] = `${Math.max(24, (OVERVIEW * this[side]) / Math.max(width, height))}px`;
    stage.append(this.overview);
    this.viewer = new Library.Viewer({
      element: stage,
      showNavigator: true,
      navigatorElement: this.overview,
      navigatorDisplayRegionColor: "#1464c8",
      drawer: "canvas",
      showNavigationControl: false,
      animationTime: still.matches ? 0 : 0.6,
      gestureSettingsMouse: { clickToZoom: false, dblClickToZoom: true, flickEnabled: !still.matches },
      constrainDuringPan: true,
      minZoomImageRatio: 0.6,
      maxZoomPixelRatio: Math.max(4, ((mpp ?? 0) * HIGHEST) / AT_1X),
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
            getTileUrl: (level, x, y) => `api/case/${picture.case}/zoom/${level}/${x}_${y}.jpeg`,
          }
        : { width, height, tileSize: 512, minLevel: 0, getTileUrl: () => "", tileExists: () => false },
    });
    stage.append(this.canvas, this.scaleBar);
    if (picture) this.tellReading();
    this.overview.append(this.overviewMap);
    const { viewer } = this,
      focus = viewer.canvas;
    focus.setAttribute("role", "application");
    focus.setAttribute("aria-label", label);
    for (const event of ["update-viewport", "open", "resize", "animation"]) viewer.addHandler(event, () => this.draw());
    viewer.addHandler("pan", ({ immediately }) => this.keepTissue(immediately));
    viewer.addHandler("open", () => on.open?.(this));
    viewer.addHandler("animation", () => this.keepTissue());
    viewer.addHandler("animation-finish", () => on.rest?.(this));
    viewer.addHandler("viewport-change", () => on.move?.(this)); // also when the stage has another size
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

  // Without a word, tissue that is not read yet looks like a slide without tissue.
  tellReading() {
    const reading = element("p", { class: "reading", role: "status", text: "Reading the slide …" });
    this.stage.append(reading);
    for (const event of ["tile-loaded", "tile-load-failed"]) this.viewer.addHandler(event, () => reading.remove());
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
    if (this.drawing || this.stage.closest(".measuring") || event.pointerType === "touch") return;
    this.on.hover?.(this.tileAt(...pointOn(this.canvas, event)));
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
    const { canvas, stage } = this,
      sharp = window.devicePixelRatio || 1,
      width = Math.round(stage.clientWidth * sharp),
      height = Math.round(stage.clientHeight * sharp);
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const pen = canvas.getContext("2d");
    pen.clearRect(0, 0, width, height);
    if (!this.ready) return;
    const seen = this.scale,
      s = seen.s * sharp,
      dx = seen.dx * sharp,
      dy = seen.dy * sharp,
      box = this.boxes({ s, dx, dy }, this.places.size * s > 18 * sharp ? sharp : 0);
    const inSight = ([x, y, w, h]) => x + w > 0 && y + h > 0 && x < width && y < height;

    this.measure(seen.s);
    this.paintOverview();
    if (!this.hidden) {
      this.paintMap(pen, box, inSight);
      if (this.removed.size) {
        const { color, backgroundColor } = getComputedStyle(stage);
        pen.fillStyle = this.bare ? hatch(pen, color, backgroundColor, sharp) : hatch(pen, "#5b6474", "#fff", sharp);
        for (const i of this.removed) {
          const square = box(i, 0);
          if (inSight(square)) pen.fillRect(...square);
        }
      }
    }
    if (!this.hidden) this.paintOutlines(pen, { s, dx, dy }, sharp);
    if (this.line) this.paintLine(pen, { s, dx, dy }, sharp);
    if (this.regions?.length) drawRegions(pen, this.regions, { s, dx, dy }, sharp);
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

  // Squares of the tiles in pixels. Edges on whole pixels: neighbours neither overlap nor leave a hairline.
  boxes({ s, dx, dy }, gap) {
    const { places } = this,
      side = places.size * s;
    return (i, space = gap) => {
      const x = Math.round(places.x[i] * s + dx),
        y = Math.round(places.y[i] * s + dy);
      return [
        x,
        y,
        Math.max(1, Math.round(places.x[i] * s + dx + side) - x - space),
        Math.max(1, Math.round(places.y[i] * s + dy + side) - y - space),
      ];
    };
  }

  paintMap(pen, box, inSight = () => true) {
    const { painted } = this;
    if (!painted) return;
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

  paintOutlines(pen, { s, dx, dy }, sharp) {
    for (const { level, colour, edges } of this.outlines ?? []) {
      pen.beginPath();
      for (let i = 0; i < edges.length; i += 4) {
        pen.moveTo(edges[i] * s + dx, edges[i + 1] * s + dy);
        pen.lineTo(edges[i + 2] * s + dx, edges[i + 3] * s + dy);
      }
      outline(pen, () => pen.stroke(), (1 + level / 100) * sharp, sharp / 2, css(colour));
    }
  }

  // The line of the ruler with ticks at its ends and its length beside its middle.
  paintLine(pen, { s, dx, dy }, sharp) {
    const [[x, y], [u, v]] = this.line.map(([x, y]) => [x * s + dx, y * s + dy]),
      apart = Math.hypot(u - x, v - y) || 1,
      [across, down] = [((v - y) / apart) * 6 * sharp, (-(u - x) / apart) * 6 * sharp];
    pen.beginPath();
    for (const [from, to] of [
      [[x, y], [u, v]],
      [[x - across, y - down], [x + across, y + down]],
      [[u - across, v - down], [u + across, v + down]],
    ]) {
      pen.moveTo(...from);
      pen.lineTo(...to);
    }
    outline(pen, () => pen.stroke(), 2 * sharp, sharp);
    const text = lengthText(Math.hypot(this.line[1][0] - this.line[0][0], this.line[1][1] - this.line[0][1]), this.mpp);
    pen.font = `600 ${13 * sharp}px system-ui, sans-serif`;
    const wide = pen.measureText(text).width + 10 * sharp,
      [left, top] = [(x + u) / 2 + 8 * sharp, (y + v) / 2 + 8 * sharp];
    pen.fillStyle = "#fff";
    pen.fillRect(left, top, wide, 20 * sharp);
    pen.fillStyle = "#10151d";
    pen.fillText(text, left + 5 * sharp, top + 15 * sharp);
  }

  // The map over the overview, painted again only when it changes.
  paintOverview() {
    const { painted, opacity, hidden, removed, overviewMap: canvas, overview } = this,
      shows = [painted, opacity, hidden, removed];
    if (shows.every((one, i) => one === this.overviewShows?.[i])) return;
    this.overviewShows = shows;
    const sharp = window.devicePixelRatio || 1;
    Object.assign(canvas, { width: overview.clientWidth * sharp, height: overview.clientHeight * sharp });
    const pen = canvas.getContext("2d");
    if (!hidden) this.paintMap(pen, this.boxes({ s: canvas.width / this.width, dx: 0, dy: 0 }, 0));
  }

  // A scale bar of a round length, about a fifth of the stage; the overview is of use only where something is out of sight.
  measure(s) {
    const { x, y, width, height } = this.viewer.viewport.getBounds(true),
      tall = this.height / this.width;
    this.overview.classList.toggle("idle", x <= 0.001 && y <= 0.001 && x + width >= 0.999 && y + height >= tall - 0.001);
    if (!this.mpp) return;
    const about = (Math.max(this.stage.clientWidth / 5, SCALE_BAR) / s) * this.mpp,
      ten = 10 ** Math.floor(Math.log10(about));
    const length = ten * ([5, 2].find(step => step * ten <= about) ?? 1);
    this.scaleBar.textContent = length >= 1000 ? `${length / 1000} mm` : `${length} µm`;
    this.scaleBar.style.width = `${(length / this.mpp) * s}px`;
  }

  // What is in sight, as layers of a picture, in pixels of the stage.
  async picture() {
    const { stage, viewer, canvas, scaleBar } = this,
      width = stage.clientWidth,
      height = stage.clientHeight;
    this.paint();
    const tissue = viewer.drawer.canvas,
      ground = element("canvas", { width: canvas.width, height: canvas.height }),
      pen = ground.getContext("2d");
    pen.fillStyle = getComputedStyle(stage).backgroundColor;
    pen.fillRect(0, 0, ground.width, ground.height);
    pen.filter = getComputedStyle(tissue).filter;
    pen.drawImage(tissue, 0, 0, ground.width, ground.height);
    return {
      width,
      height,
      layers: [ground.toDataURL("image/jpeg", 0.92), canvas.toDataURL()],
      scaleBar: this.mpp ? { length: parseFloat(scaleBar.style.width), text: scaleBar.textContent } : null,
    };
  }

  // How large the screen shows the tissue; null where the pixel size is unknown.
  get magnification() {
    return this.mpp && this.ready ? (AT_1X * this.scale.s) / this.mpp : null;
  }

  magnify(times) {
    const { viewport } = this.viewer;
    viewport.zoomTo(viewport.imageToViewportZoom((times * this.mpp) / AT_1X), null, still.matches);
  }

  // Half of the view is tissue, or half of the tissue is in view: nobody gets lost on white glass.
  keepTissue(immediately = still.matches) {
    const { viewport } = this.viewer,
      centre = viewport.getCenter(false),
      seen = viewport.getBounds(false),
      kept = (at, reach, low, size) => {
        const spare = (reach - Math.min(reach, size)) / 2;
        return Math.min(Math.max(at, low - spare), low + size + spare);
      },
      { x, y, width, height } = this.tissue,
      inside = new this.Library.Point(
        kept(centre.x, seen.width, x / this.width, width / this.width),
        kept(centre.y, seen.height, y / this.width, height / this.width),
      );
    if (Math.hypot(inside.x - centre.x, inside.y - centre.y) > 1e-6 * seen.width) viewport.panTo(inside, immediately);
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

  // All tissue, as large as the window allows.
  fit() {
    const { x, y, width, height } = this.tissue,
      rim = this.places.size / 2;
    this.viewer.viewport.fitBounds(
      this.viewer.world
        .getItemAt(0)
        .imageToViewportRectangle(x - rim, y - rim, width + 2 * rim, height + 2 * rim),
      still.matches,
    );
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

  // The other half of a split view looks at the same place, also where another run's plane has another width.
  follow(other) {
    if (!this.ready || !other.ready) return;
    const from = other.viewer.viewport,
      to = this.viewer.viewport,
      wider = this.width / other.width;
    to.zoomTo(from.getZoom(true) * wider, null, true);
    to.panTo(from.getCenter(true).divide(wider), true);
  }

  fly(i) {
    const { x, y, size } = this.places;
    this.look([x[i] + size / 2, y[i] + size / 2, Math.min(size * FLOWN, this.width)]);
    this.set({ found: i });
  }

  focus() {
    this.viewer.canvas.focus({ preventScroll: true });
  }

  destroy() {
    this.resizing.disconnect();
    cancelAnimationFrame(this.frame);
    this.viewer.destroy();
    this.canvas.remove();
    this.scaleBar.remove();
    this.overview.remove();
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
function outline(pen, stroke, width, sharp, ink = "#10151d") {
  pen.strokeStyle = "#fff";
  pen.lineWidth = width + 2 * sharp;
  stroke();
  pen.strokeStyle = pen.fillStyle = ink;
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
