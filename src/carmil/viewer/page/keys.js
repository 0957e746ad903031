// Keys for everything, and the list of them. They can be switched off: people who speak to their computer type by accident.
import { element } from "./words.js";

export function keys(bindings, { dialog, list, on, open }) {
  const remembered = () => {
    try {
      return localStorage.getItem("carmil.keys") !== "off";
    } catch {
      return true;
    }
  };
  on.checked = remembered();
  on.addEventListener("change", () => {
    try {
      localStorage.setItem("carmil.keys", on.checked ? "on" : "off");
    } catch {
      /* a private window forgets */
    }
  });
  list.replaceChildren(
    ...bindings
      .filter(({ says }) => says)
      .flatMap(({ shown, says }) => [
        element("dt", { children: shown.flatMap((key, i) => [i ? " " : "", element("kbd", { text: key })]) }),
        element("dd", { text: says }),
      ]),
  );
  const show = () => {
    if (!dialog.open) dialog.showModal();
  };
  open.addEventListener("click", show);

  let held = null; // the binding whose key is down, if it ends with the key
  document.addEventListener("keydown", event => {
    if (event.defaultPrevented || dialog.open || event.altKey || event.metaKey) return;
    const typing = event.target.matches("input:not([type=checkbox]):not([type=range]), textarea");
    if (event.key === "?" && !typing) return show();
    const name = (event.ctrlKey ? "Ctrl+" : "") + event.key;
    const binding = bindings.find(({ keys: names }) => names.includes(name));
    if (!binding) return;
    if (name.length === 1 && (typing || !on.checked || (event.target.matches("select") && /[a-z]/i.test(name)))) return;
    if (typing && name !== "Escape") return;
    if (name === "Enter" && event.target.matches("button, a, summary, select, [role=grid]")) return;
    if (name === " " && event.target.matches("button, a, summary, select, [type=checkbox]")) return;
    if (binding.does(event) === false) return;
    event.preventDefault();
    if (binding.ends) held = binding;
  });
  const release = () => {
    held?.ends();
    held = null;
  };
  document.addEventListener("keyup", event => held?.keys.includes(event.key) && release());
  addEventListener("blur", release);
}
