// Instances without a place: as pictures if there are any, else as bars; the strongest first.
import { colourOf, css } from "./colours.js";
import { pictureOf } from "./ask.js";
import { element, many, roving, signed, number as plain } from "./words.js";

const MOST = 400; // pictures; of more instances the first and the last are shown

const ranked = painted =>
  Array.from(painted.values, (_, i) => i).sort((a, b) => painted.values[b] - painted.values[a] || a - b);
const valueOf = (painted, i) => (painted.diverging ? signed : plain)(painted.values[i]);

export class Pictures {
  constructor({ stage, number, on }) {
    Object.assign(this, { stage, number, on });
    this.marked = this.removed = new Set();
    this.group = element("div", {
      class: "pictures",
      role: "group",
      "aria-label": "Instances, the largest value first. Click one to mark it.",
    });
    stage.classList.add("flat");
    stage.append(this.group);
    this.group.addEventListener("click", event => {
      const button = event.target.closest("[data-instance]");
      if (button) on.mark?.(Number(button.dataset.instance));
    });
    this.group.addEventListener("pointerover", event =>
      on.hover?.(Number(event.target.closest("[data-instance]")?.dataset.instance ?? -1)),
    );
    this.group.addEventListener("focusin", event => on.hover?.(Number(event.target.dataset.instance ?? -1)));
    this.group.addEventListener("pointerleave", () => on.hover?.(-1));
    roving(this.group);
    queueMicrotask(() => on.open?.(this));
  }

  set(changes) {
    const fresh = changes.painted && changes.painted !== this.painted;
    Object.assign(this, changes);
    if (!this.painted) return;
    if (fresh) this.lay();
    for (const button of this.group.querySelectorAll("[data-instance]")) {
      const i = Number(button.dataset.instance),
        gone = this.removed.has(i);
      button.classList.toggle("gone", gone);
      button.classList.toggle("hovered", i === this.hovered || i === this.found);
      button.setAttribute("aria-pressed", this.marked.has(i));
      button.setAttribute("aria-label", `instance ${i}, ${valueOf(this.painted, i)}${gone ? ", removed" : ""}`);
    }
  }

  lay() {
    const { painted } = this,
      order = ranked(painted);
    const skipped = Math.max(0, order.length - MOST),
      kept = skipped ? [...order.slice(0, MOST / 2), null, ...order.slice(-MOST / 2)] : order;
    const focused = this.group.contains(document.activeElement) ? document.activeElement.dataset.instance : null;
    this.group.replaceChildren(
      ...kept.map(i => {
        if (i === null)
          return element("p", {
            class: "soft between",
            text: `… ${many(skipped, "instance")} between them are not drawn …`,
          });
        const picture = element("img", {
          src: pictureOf(this.number, i),
          alt: "",
          loading: "lazy",
          decoding: "async",
          draggable: "false",
        });
        const button = element("button", {
          type: "button",
          class: "instance",
          "data-instance": i,
          tabindex: -1,
          children: [picture, element("span", { text: valueOf(painted, i) })],
        });
        button.style.setProperty("--c", css(colourOf(painted, i)));
        return button;
      }),
    );
    const first = this.group.querySelector(focused === null ? "[data-instance]" : `[data-instance="${focused}"]`);
    if (first) first.tabIndex = 0;
    if (focused !== null) first?.focus();
  }

  // All pictures that are shown, as a layer of a picture.
  async picture() {
    const { group } = this,
      canvas = element("canvas", { width: group.scrollWidth, height: group.scrollHeight }),
      pen = canvas.getContext("2d"),
      look = getComputedStyle(group),
      from = group.getBoundingClientRect();
    pen.fillStyle = getComputedStyle(this.stage).backgroundColor;
    pen.fillRect(0, 0, canvas.width, canvas.height);
    Object.assign(pen, { font: `11px ${look.fontFamily}`, textAlign: "center", textBaseline: "bottom" });
    const place = thing => {
      const { left, top, width, height } = thing.getBoundingClientRect();
      return [left - from.left, top - from.top, width, height];
    };
    for (const button of group.querySelectorAll("[data-instance]")) {
      const image = button.querySelector("img"),
        [x, y, width, height] = place(button),
        gone = button.classList.contains("gone");
      image.loading = "eager";
      await image.decode().catch(() => {});
      pen.strokeStyle = button.style.getPropertyValue("--c");
      pen.lineWidth = 4;
      pen.strokeRect(x + 2, y + 2, width - 4, height - 4);
      pen.globalAlpha = gone ? 0.25 : 1;
      if (image.naturalWidth) pen.drawImage(image, ...place(image));
      pen.globalAlpha = 1;
      pen.fillStyle = look.color;
      pen.fillText(gone ? "removed" : button.textContent, x + width / 2, y + height - 5);
    }
    return { width: canvas.width, height: canvas.height, layers: [canvas.toDataURL()], scaleBar: null };
  }

  fly(i) {
    this.set({ found: i });
    this.group.querySelector(`[data-instance="${i}"]`)?.scrollIntoView({ block: "nearest" });
  }

  destroy() {
    this.stage.classList.remove("flat");
    this.group.remove();
  }
}

export class Bars {
  constructor({ stage, on, label }) {
    Object.assign(this, { stage, on });
    this.marked = this.removed = new Set();
    this.hovered = this.found = -1;
    this.canvas = element("canvas", { class: "bars", role: "img", "aria-label": label });
    stage.append(this.canvas);
    this.resizing = new ResizeObserver(() => this.paint());
    this.resizing.observe(stage);
    this.canvas.addEventListener("pointermove", event => this.move(event));
    this.canvas.addEventListener("pointerleave", () => on.hover?.(-1));
    this.canvas.addEventListener("pointerdown", event => {
      this.from = this.rank(event);
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointerup", event => this.release(event));
    queueMicrotask(() => on.open?.(this));
  }

  rank(event) {
    const box = this.canvas.getBoundingClientRect(),
      at = (event.clientX - box.left) / box.width;
    return Math.max(0, Math.min(this.order.length - 1, Math.floor(at * this.order.length)));
  }

  move(event) {
    if (this.painted) this.on.hover?.(this.order[this.rank(event)]);
  }

  // A press marks one, a drag all it passes.
  release(event) {
    if (this.from === undefined) return;
    const [first, last] = [this.from, this.rank(event)].sort((a, b) => a - b);
    this.from = undefined;
    if (first === last) this.on.mark?.(this.order[first]);
    else this.on.marks?.(this.order.slice(first, last + 1));
  }

  set(changes) {
    const fresh = changes.painted && changes.painted !== this.painted;
    Object.assign(this, changes);
    if (fresh) this.order = ranked(this.painted);
    this.paint();
  }

  paint() {
    const { canvas, painted, order, stage } = this,
      sharp = window.devicePixelRatio || 1;
    if (!painted) return;
    const width = Math.round(stage.clientWidth * sharp),
      height = Math.round(stage.clientHeight * sharp);
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const pen = canvas.getContext("2d"),
      look = getComputedStyle(stage),
      edge = 14 * sharp;
    pen.clearRect(0, 0, width, height);
    const low = Math.min(0, painted.low),
      high = Math.max(0, painted.high),
      reach = high - low || 1;
    const y = value => edge + ((height - 2 * edge) * (high - Math.max(low, Math.min(high, value)))) / reach;
    const wide = width / order.length,
      gap = wide > 4 * sharp ? sharp : 0;
    pen.fillStyle = look.borderTopColor;
    pen.fillRect(0, Math.round(y(0)), width, sharp);
    order.forEach((i, at) => {
      const x = Math.floor(at * wide),
        w = Math.max(1, Math.floor((at + 1) * wide) - x - gap),
        top = Math.min(y(painted.values[i]), y(0)),
        tall = Math.max(sharp, Math.abs(y(painted.values[i]) - y(0)));
      const gone = this.removed.has(i);
      pen.globalAlpha = gone ? 0.35 : 1;
      pen.fillStyle = gone ? look.color : css(strong(painted, i));
      pen.fillRect(x, top, w, tall);
      pen.globalAlpha = 1;
      if (this.marked.has(i) || i === this.hovered || i === this.found) {
        pen.fillStyle = look.color;
        pen.fillRect(x, this.marked.has(i) ? height - 6 * sharp : 0, Math.max(w, 2 * sharp), 6 * sharp);
      }
    });
  }

  async picture() {
    const { clientWidth: width, clientHeight: height } = this.stage;
    this.paint();
    return { width, height, layers: [this.canvas.toDataURL()], scaleBar: null };
  }

  fly(i) {
    this.set({ found: i });
  }

  destroy() {
    this.resizing.disconnect();
    this.canvas.remove();
  }
}

// A bar says its size by its length; it must only never be as pale as the ground.
function strong(painted, i) {
  const middle = painted.diverging ? (painted.colours.length - 1) / 2 : 0,
    away = painted.place[i] - middle;
  const least = Math.round(painted.colours.length * (painted.diverging ? 0.2 : 0.4));
  return painted.colours[
    Math.abs(away) >= least ? painted.place[i] : middle + Math.sign(away || painted.values[i] || 1) * least
  ];
}
