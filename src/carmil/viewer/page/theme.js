// Light, dark or as the system says. Not a module: it runs before the first paint, so that nothing flashes.
(() => {
  const themes = ["system", "light", "dark"];
  const stored = () => {
    try {
      return localStorage.getItem("carmil.theme");
    } catch {
      return null;
    }
  };
  const apply = theme => {
    document.documentElement.dataset.theme = theme;
  };
  apply(themes.includes(stored()) ? stored() : "system");

  window.carmilTheme = {
    get now() {
      return document.documentElement.dataset.theme;
    },
    get dark() {
      return this.now === "dark" || (this.now === "system" && matchMedia("(prefers-color-scheme: dark)").matches);
    },
    next() {
      apply(themes[(themes.indexOf(this.now) + 1) % themes.length]);
      try {
        localStorage.setItem("carmil.theme", this.now);
      } catch {
        /* a private window forgets */
      }
      return this.now;
    },
  };
})();
