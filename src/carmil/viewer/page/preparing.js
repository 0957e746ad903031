// Slides are tiled, encoded and explained before there is anything to show: the stage, how far it is, and the time left.
import { element, say } from "./words.js";

const TITLES = {
  starting: "Starting",
  cutting: "Finding tissue and cutting tiles",
  encoding: "Encoding tiles",
};

export class Preparing {
  constructor(box) {
    this.box = box;
  }

  show({ stage, done, total, things, seconds_left: left }) {
    const title = TITLES[stage] ?? (stage.startsWith("explaining") ? "Explaining the answers" : stage);
    if (!this.bar?.isConnected) this.build();
    if (this.stage.textContent !== title) say(title);
    this.stage.textContent = title;
    this.bar.max = total || 1;
    if (total) this.bar.value = done;
    else this.bar.removeAttribute("value");
    this.bar.setAttribute("aria-label", title);
    const count = total ? `${done.toLocaleString("en")} of ${total.toLocaleString("en")} ${things}` : "";
    this.facts.textContent = [count, left === null || done >= total ? null : `about ${time(left)} left`].filter(Boolean).join(", ");
  }

  build() {
    this.stage = element("p", { class: "stage-name" });
    this.bar = element("progress");
    this.facts = element("p", { class: "soft" });
    const note = element("p", {
      class: "soft note",
      text: "The results are kept: if this is interrupted, the same command resumes it.",
    });
    this.box.replaceChildren(
      element("div", { class: "notice preparing", children: [this.stage, this.bar, this.facts, note] }),
    );
  }
}

function time(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
