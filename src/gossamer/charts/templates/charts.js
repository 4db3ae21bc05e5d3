"use strict";
const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 640px)");

// In the reader's colour scheme, not that of the figure. A figure of fixed width shrinks a little to
// fit, or scrolls; a touch scrolls the page past it.
function show(plot, traces, layout) {
  const template = THEMES[dark.matches ? "dark" : "light"];
  const width = plot.clientWidth < 0.7 * layout.width ? layout.width : undefined;
  Plotly.react(plot, traces, { ...layout, width, template, dragmode: narrow.matches ? false : "zoom" },
    { responsive: true, displaylogo: false, displayModeBar: narrow.matches ? false : "hover", modeBarButtons: [["toImage", "resetScale2d"]] });
}

// Figures are drawn when they are near the viewport, so that a page of a thousand runs opens quickly.
function drawNear(draw) {
  if (drawNear.watcher) drawNear.watcher.disconnect();
  const watcher = drawNear.watcher = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) if (isIntersecting) { watcher.unobserve(target); draw(target); }
  }, { rootMargin: "800px" });
  for (const card of document.querySelectorAll("[data-figure]")) { delete card.dataset.drawn; watcher.observe(card); }
}

function follow(apply) {
  for (const screen of [dark, narrow]) screen.addEventListener("change", apply);
}
