"use strict";
// Light or dark before anything is drawn: as the reader chose, else as the system says.
window.reportTheme = (() => {
  const KEY = "vla-async-report-theme";
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try {
    chosen = window.localStorage.getItem(KEY);
  } catch (error) {
    // a page that was opened as a file may have no storage: then nothing is remembered
  }
  const current = () => (chosen === "light" || chosen === "dark" ? chosen : dark.matches ? "dark" : "light");
  const apply = () => {
    document.documentElement.dataset.theme = current();
    document.dispatchEvent(new Event("reporttheme"));
  };
  const toggle = () => {
    chosen = current() === "dark" ? "light" : "dark";
    try {
      window.localStorage.setItem(KEY, chosen);
    } catch (error) {
      // as above
    }
    apply();
  };
  dark.addEventListener("change", apply);
  apply();
  return { toggle };
})();
