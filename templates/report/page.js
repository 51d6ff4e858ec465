/* A page of charts: draws the data in the page, and lets the reader choose light or dark. */
(function () {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const charts = document.getElementById("charts"); // a sweep that is a single job has no curves
  if (charts) CloudtrainCharts.draw(charts, data, {x: "step"});
  const root = document.documentElement, button = document.getElementById("theme");
  const isDark = () => root.dataset.theme === "dark" || (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  const say = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; say(); });
  say();
  // A reader of paper cannot open a section: open all folded sections before the print, close them after.
  const folded = [];
  addEventListener("beforeprint", () => document.querySelectorAll("details.printed:not([open])").forEach((each) => { each.open = true; folded.push(each); }));
  addEventListener("afterprint", () => folded.splice(0).forEach((each) => { each.open = false; }));
})();
