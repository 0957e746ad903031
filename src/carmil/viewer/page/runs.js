// The runs that are open: one, or several that are compared on the slides they share.
import { shown } from "./words.js";

export class Runs {
  // all: what /api/cohort says of each run.
  constructor(all) {
    this.all = all;
    this.slides = new Map(all.map(run => [run, new Map(run.cases.map(row => [row.slide, row]))]));
  }

  get several() {
    return this.all.length > 1;
  }

  /** The row of a slide in a run; undefined if the run does not have it. */
  row(run, slide) {
    return this.slides.get(run).get(slide);
  }

  named(name) {
    return this.all.find(({ run }) => run === name);
  }

  /** The run with this name; if there is none, or it does not have the slide, the first run that has it. */
  lead(name, slide) {
    const wanted = this.named(name) ?? this.all[0];
    return this.row(wanted, slide) ? wanted : (this.all.find(run => this.row(run, slide)) ?? wanted);
  }

  /** The run with this name; if there is none, the next after the given one. */
  beside(name, run) {
    return this.named(name) ?? this.all[(this.all.indexOf(run) + 1) % this.all.length];
  }

  /** One row per slide of any run: what `run` says of it, and the answer of the run beside it. */
  rows(run, beside) {
    if (!this.several) return run.cases;
    const slides = new Set(this.all.flatMap(({ cases }) => cases.map(({ slide }) => slide)));
    const missing = { prediction: `not in ${run.run}`, value: null, right: null, counterfactual: null };
    const comparable = outputs(run) === outputs(beside);
    return [...slides].map(slide => {
      const own = this.row(run, slide),
        second = this.row(beside, slide),
        any = own ?? second ?? this.all.map(one => this.row(one, slide)).find(Boolean);
      return {
        ...any,
        ...(own ? {} : missing),
        other: second ? answered(second, beside.target) : `not in ${beside.run}`,
        differs: Boolean(comparable && own && second && own.prediction !== second.prediction),
      };
    });
  }
}

const outputs = ({ target }) => JSON.stringify(target.outputs.map(({ name }) => name));
const quantity = ({ value }, target) => `${target.quantity} ${shown(value, target.format)}`;
const answered = (row, target) => (target.answers ? row.prediction : quantity(row, target));
export const inWords = (row, target) =>
  target.answers ? `${row.prediction}, ${quantity(row, target)}` : quantity(row, target);
