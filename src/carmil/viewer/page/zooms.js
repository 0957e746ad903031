// The buttons for the view of the slide: magnification, zoom, ruler, drawing, full screen.
import { $, element, say } from "./words.js";

export const UNKNOWN_SIZE = "the pixel size of this slide is not recorded: give it with --mpp, from the scanner's protocol";
const PRESETS = [5, 10, 20, 40]; // magnifications
const TOO_FEW = "A region needs three corners: drag around tissue, or click corner by corner.";

export function wireZooms(scene) {
  const click = (id, does) => $(id).addEventListener("click", does);
  click("zoom-in", () => scene.zoom(1.5));
  click("zoom-out", () => scene.zoom(1 / 1.5));
  click("zoom-all", () => scene.whole());
  click("fit", () => scene.fit());
  $("presets").replaceChildren(
    ...PRESETS.map(times =>
      element("button", { type: "button", text: `${times}×`, on: { click: () => scene.magnify(times) } }),
    ),
  );
  click("ruler", () => scene.measure(!scene.measuring));
  click("clear-ruler", () => scene.measure(false));
  click("done", () => scene.finish() || say(TOO_FEW));
  click("cancel", () => scene.draw(false));
  click("full", fullScreen);
  document.addEventListener("fullscreenchange", () => {
    $("full").textContent = document.fullscreenElement ? "Leave full screen" : "Full screen";
  });
  // After a click the keys belong to the slide again: a space bar that hides the map must not press the button once more.
  click("zooms", event => event.detail && scene.focus());
}

export function showMagnification(times) {
  $("magnification").textContent = times === null ? "magnification unknown" : `${Number(times.toPrecision(times < 10 ? 2 : 3))}×`;
  for (const button of $("presets").children) {
    button.disabled = times === null;
    button.title = times === null ? UNKNOWN_SIZE : `${button.textContent} as through a microscope`;
  }
}

export function showRuler(on, length) {
  $("ruler").setAttribute("aria-pressed", on);
  $("measuring").hidden = !on && !length;
  $("length").textContent = length ?? "Click two points, or drag.";
}

export function fullScreen() {
  const left = document.fullscreenElement ? document.exitFullscreen() : $("scene").requestFullscreen();
  left.catch(() => say("This browser does not show a part of a page in full screen."));
}
