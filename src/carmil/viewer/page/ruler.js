// A ruler: a line between two points of the slide, drawn by a drag or two clicks, and its length.
import { pointOn } from "./words.js";

const NEAR = 4; // pixels: a press that moves less is a click

/** A length in level-0 pixels, in µm or mm where the pixel size is known. */
export function lengthText(pixels, mpp) {
  if (!mpp) return `${Math.round(pixels).toLocaleString("en")} px`;
  const um = pixels * mpp;
  return um >= 1000 ? `${(um / 1000).toPrecision(3)} mm` : `${um >= 10 ? Math.round(um) : um.toPrecision(2)} µm`;
}

/** Measures on a plane while `active()`; `show` is given the line [from, to] in level-0 pixels, `done` when it is complete. */
export function listenForRuler(plane, { active, show, done }) {
  const { canvas } = plane;
  let from = null,
    pressed = null;
  const at = event => pointOn(canvas, event);
  const apart = (a, b) => Math.hypot(a[0] - b[0], a[1] - b[1]);
  canvas.addEventListener("pointerdown", event => {
    if (!active() || event.button > 0) return;
    event.preventDefault();
    canvas.setPointerCapture(event.pointerId);
    pressed = at(event);
    from ??= plane.toSlide(...pressed);
  });
  canvas.addEventListener("pointermove", event => {
    if (!active()) from = null;
    else if (from) show([from, plane.toSlide(...at(event))]);
  });
  canvas.addEventListener("pointerup", event => {
    if (!active() || !pressed) return;
    const here = at(event),
      first = apart(plane.toStage(from), here) <= NEAR;
    pressed = null;
    if (first) return;
    show([from, plane.toSlide(...here)]);
    from = null;
    done();
  });
  canvas.addEventListener("pointercancel", () => {
    pressed = null;
  });
}
