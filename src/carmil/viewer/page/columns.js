// The side columns collapse, so that the slide gets the window; which of them are open is remembered.
import { $ } from "./words.js";

const KEPT = "carmil.columns";
const roomy = matchMedia("(min-width: 1101px)");

// Without a choice of the user's, the list of slides is open where there is room for it.
const open = { cohort: () => chosen.cohort ?? roomy.matches, why: () => chosen.why ?? true };
let chosen = remembered();

function remembered() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEPT)) ?? {};
    return Object.fromEntries(Object.entries(kept).filter(([name, on]) => name in open && typeof on === "boolean"));
  } catch {
    return {};
  }
}

function show() {
  for (const name of Object.keys(open)) {
    $(name).hidden = !open[name]();
    $(`show-${name}`).setAttribute("aria-expanded", open[name]());
  }
}

export function toggleColumn(name, on = !open[name]()) {
  chosen = { ...chosen, [name]: on };
  try {
    localStorage.setItem(KEPT, JSON.stringify(chosen));
  } catch {
    /* a private window forgets */
  }
  show();
}

export function wireColumns() {
  for (const name of Object.keys(open)) $(`show-${name}`).addEventListener("click", () => toggleColumn(name));
  roomy.addEventListener("change", show);
  show();
}
