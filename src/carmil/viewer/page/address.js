// What is looked at, and the address of the page that says it: `state` changes only here.
import { read, write } from "./state.js";

export const LINGER = 120; // milliseconds: who holds the key down passes a case by, and its address is not written

export let state = read(location.hash);
let later = null; // the write that waits

/** Change the state; returns the state before, or null if nothing changes. push: as a new entry of the history. */
export function move(changes, push) {
  const before = state,
    after = { ...state, ...changes };
  if (write(after) === write(before)) return null;
  state = after;
  remember(before, push);
  return before;
}

// A slider moves faster than browsers let a page write its address: only a new entry of the history is written at once.
function remember(before, push) {
  const waited = later !== null;
  forget();
  if (push && waited) history.replaceState(null, "", write(before));
  if (push) history.pushState(null, "", write(state));
  else
    later = setTimeout(() => {
      later = null;
      history.replaceState(null, "", write(state));
    }, LINGER);
}

function forget() {
  clearTimeout(later);
  later = null;
}

/** Read the state from the address, which another entry of the history has changed; returns the state before. */
export function reread() {
  const before = state;
  forget();
  state = read(location.hash);
  return before;
}

export const link = () => new URL(write(state), location.href).href;
