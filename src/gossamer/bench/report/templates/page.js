(() => {
  const DASHES = { solid: "", dash: "6 4", dot: "2 3", dashdot: "6 3 2 3", longdash: "9 4" };
  const SHAPES = {
    circle: "M4 0A4 4 0 1 0-4 0A4 4 0 1 0 4 0Z", square: "M-4-4H4V4H-4Z", diamond: "M0-5L5 0L0 5L-5 0Z",
    "triangle-up": "M0-5L5 4H-5Z", "triangle-down": "M0 5L5-4H-5Z", cross: "M-1.7-5H1.7V-1.7H5V1.7H1.7V5H-1.7V1.7H-5V-1.7H-1.7Z",
    x: "M-5-3L-3-5L0-2L3-5L5-3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0Z", star: "M0-5.5L1.5-1.8L5.3-1.7L2.4.8L3.3 4.5L0 2.4L-3.3 4.5L-2.4.8L-5.3-1.7L-1.5-1.8Z",
    pentagon: "M0-5L4.8-1.5L2.9 4H-2.9L-4.8-1.5Z", hexagram: "M0-5L1.5-2.5H4.5L3 0L4.5 2.5H1.5L0 5L-1.5 2.5H-4.5L-3 0L-4.5-2.5H-1.5Z", bowtie: "M-5-4L0 0L5-4V4L0 0L-5 4Z",
  };
  let data = JSON.parse(document.getElementById("data").textContent);
  const state = { workload: "", scales: null, hidden: new Set(), choices: {}, open: !narrow.matches };

  // - The filter: stored in the address, so that it survives a reload and can be shared

  function readState() {
    const given = new URLSearchParams(location.hash.slice(1));
    state.workload = data.workloads.includes(given.get("workload")) ? given.get("workload") : data.workloads[0] || "";
    state.scales = given.has("workers") ? new Set(given.get("workers").split(",").map(Number)) : null;
    state.hidden = new Set(given.getAll("without"));
  }

  function writeState() {
    const kept = new URLSearchParams();
    if (data.workloads.length > 1) kept.set("workload", state.workload);
    if (state.scales) kept.set("workers", [...state.scales].join(","));
    for (const name of state.hidden) kept.append("without", name);
    history.replaceState(null, "", kept.size ? "#" + kept : location.pathname + location.search);
  }

  const scalesHere = () => data.scales[state.workload] || [];
  const hasScale = (workers) => !state.scales || state.scales.has(workers);
  const hasMethod = (name) => !state.hidden.has(name);

  function element(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function swatch(name) {
    const style = data.methods[name];
    if (!style) return "";
    const box = element("span", { "aria-hidden": "true", style: "display:inline-flex" });
    box.innerHTML = `<svg viewBox="-16 -8 32 16"><path d="M-16 0H16" stroke="${style.color}" stroke-width="2.5" stroke-dasharray="${DASHES[style.dash]}"/><path d="${SHAPES[style.symbol]}" fill="${style.color}"/></svg>`;
    return box;
  }

  function chip(label, role, on, act) {
    const made = element("button", { type: "button", class: "chip", [role]: String(on) }, ...label);
    if (role === "aria-checked") made.setAttribute("role", "radio");
    made.addEventListener("click", () => { act(); apply(); });
    return made;
  }

  function group(title, chips, role) {
    return element("fieldset", { role }, element("legend", {}, title), ...chips);
  }

  function toggleScale(workers) {
    const chosen = new Set(state.scales || scalesHere());
    if (!chosen.delete(workers)) chosen.add(workers);
    state.scales = chosen.size && chosen.size < scalesHere().length ? chosen : null;
  }

  function drawFilter() {
    const nav = document.getElementById("filter");
    if (!data.workloads.length) return nav.replaceChildren();
    const methods = Object.keys(data.methods);
    const shown = methods.filter(hasMethod).length;
    const scales = state.scales ? [...state.scales].sort((a, b) => a - b).join(", ") : "all";
    const summary = element("summary", {}, "Filter: ", element("b", {}, state.workload), ` · ${scales} workers · ${shown} of ${methods.length} methods`);
    const box = element("details", state.open ? { open: "" } : {}, summary);
    if (data.workloads.length > 1)
      box.append(group("workload", data.workloads.map((name) => chip([name], "aria-checked", name === state.workload, () => { state.workload = name; state.scales = null; })), "radiogroup"));
    box.append(group("workers", scalesHere().map((workers) => chip([String(workers)], "aria-pressed", hasScale(workers), () => toggleScale(workers))), "group"));
    const every = chip([state.hidden.size ? "all" : "none"], "aria-label", "all or none", () => { state.hidden = new Set(state.hidden.size ? [] : methods); });
    const toggle = (name) => () => { if (!state.hidden.delete(name)) state.hidden.add(name); };
    box.append(group("methods", [...methods.map((name) => chip([swatch(name), name], "aria-pressed", hasMethod(name), toggle(name))), every], "group"));
    box.addEventListener("toggle", () => { state.open = box.open; });
    nav.replaceChildren(box);
  }

  function filterElements() {
    for (const found of document.querySelectorAll("[data-workload], tr[data-method], .tile")) {
      const { workload, workers, method } = found.dataset;
      found.hidden = (workload && workload !== state.workload) || (workers && !hasScale(Number(workers))) || (method && !hasMethod(method)) || false;
    }
  }

  // - Figures

  function chosenTraces(figure) {
    const choice = state.choices[figure.name];
    return figure.traces.filter(({ meta }) => (meta.workload === null || meta.workload === state.workload) && (meta.workers === null || hasScale(meta.workers))
      && (meta.method === null || hasMethod(meta.method)) && Object.entries(meta.choice).every(([name, value]) => choice[name] === value));
  }

  function withScales(trace) {
    // A line over scales loses the points of scales that are filtered out.
    const scales = trace.meta.scales;
    if (!scales || !state.scales) return trace;
    const keep = (values) => values && values.filter((_, place) => hasScale(scales[place]));
    const bars = trace.error_y && { ...trace.error_y, array: keep(trace.error_y.array), arrayminus: keep(trace.error_y.arrayminus) };
    return { ...trace, x: keep(trace.x), y: keep(trace.y), ...(bars ? { error_y: bars } : {}) };
  }

  // Plotly labels every digit of a short logarithmic axis, overlapping, and 20 as "2".
  function ticks(figure, traces, letter) {
    const axis = figure.axes[letter + "axis"] || {};
    if (axis.type !== "log" || axis.tickvals) return {};
    const values = traces.flatMap((trace) => trace[letter]).filter((value) => value > 0);
    const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), 0);
    const decades = Math.log10(high / low);
    if (decades > 2) return { dtick: Math.ceil(decades / 6), exponentformat: "power" };
    const digits = decades > 0.8 ? [1, 2, 5] : decades > 0.4 ? [1, 1.5, 2, 3, 5, 7] : [1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9];
    const tickvals = [];
    for (let power = Math.floor(Math.log10(low)) - 1; power <= Math.log10(high) + 1; power++)
      for (const digit of digits) tickvals.push(Number((digit * 10 ** power).toPrecision(3)));
    const near = tickvals.filter((value) => value >= low / 1.3 && value <= high * 1.3);
    return { tickvals: near, ticktext: near.map((value) => (value < 1e-3 || value >= 1e5 ? value.toExponential().replace("+", "") : String(value))), tickangle: 0 };
  }

  // Facets are plotly's grid. Plotly's legend would be one per figure, and lose its state on reload:
  // the filter, whose chips have the methods' styles, is the legend of all figures.
  function layoutOf(figure, traces, width) {
    const facets = figure.faceted ? [...new Set(traces.map((trace) => trace.meta.workers))].sort((a, b) => a - b) : [null];
    const columns = narrow.matches ? 1 : Math.min(facets.length, width > 900 && facets.length !== 4 ? 3 : 2);
    const rows = Math.ceil(facets.length / columns);
    const height = rows === 1 && columns === 1 ? (narrow.matches ? 280 : 380) : rows * (narrow.matches ? 230 : 280) + 30;
    const layout = { height, margin: { l: 46, r: 8, t: 28, b: 44 }, showlegend: false, annotations: [], grid: { rows, columns, pattern: "independent", xgap: 0.12, ygap: 0.3 } };
    facets.forEach((workers, place) => {
      const suffix = place ? String(place + 1) : "", lowest = place + columns >= facets.length;
      layout["xaxis" + suffix] = { ...figure.axes.xaxis, ...ticks(figure, traces, "x"), ...(place ? { matches: "x" } : {}), title: { text: lowest && traces.length ? traces[0].meta.x : "" } };
      layout["yaxis" + suffix] = { ...figure.axes.yaxis, ...ticks(figure, traces, "y"), ...(place ? { matches: "y" } : {}), showticklabels: place % columns === 0 };
      if (workers !== null)
        layout.annotations.push({ text: `<b>${workers} workers</b>`, xref: `x${suffix} domain`, yref: `y${suffix} domain`, x: 0, y: 1, xanchor: "left", yanchor: "bottom", showarrow: false });
    });
    return [layout, facets];
  }

  function draw(card) {
    const figure = data.figures[card.dataset.figure];
    const plot = card.querySelector(".plot");
    const traces = chosenTraces(figure).map(withScales);
    plot.classList.toggle("empty", !traces.length);
    card.querySelector(".axis").textContent = traces.length ? "↑ " + traces[0].meta.y : "";
    card.dataset.drawn = String(traces.length);
    if (!traces.length) {
      Plotly.purge(plot);
      plot.replaceChildren(element("p", { class: "hint" }, "Nothing to show for this filter."));
      return;
    }
    if (!plot.classList.contains("js-plotly-plot")) plot.replaceChildren();
    const [layout, facets] = layoutOf(figure, traces, plot.clientWidth);
    const placed = traces.map((trace) => {
      const place = figure.faceted ? facets.indexOf(trace.meta.workers) : 0, suffix = place ? String(place + 1) : "";
      return { ...trace, xaxis: "x" + suffix, yaxis: "y" + suffix };
    });
    show(plot, placed, layout);
  }

  function drawChoices(card) {
    const figure = data.figures[card.dataset.figure];
    const chosen = (state.choices[figure.name] ||= {});
    const menus = Object.entries(figure.choices).map(([name, options]) => {
      if (!(chosen[name] in options)) chosen[name] = Object.keys(options)[0];
      const menu = element("select", { "aria-label": `${figure.title}: ${name}` }, ...Object.entries(options).map(([value, label]) => element("option", { value }, label)));
      menu.value = chosen[name];
      menu.addEventListener("change", () => { chosen[name] = menu.value; draw(card); });
      return menu;
    });
    card.querySelector(".choices").replaceChildren(...menus);
  }

  function apply() {
    writeState();
    drawFilter();
    filterElements();
    drawNear(draw);
  }

  function build() {
    for (const found of document.querySelectorAll(".method")) found.prepend(swatch(found.dataset.name));
    document.querySelectorAll("[data-figure]").forEach(drawChoices);
    apply();
  }

  // - A page that is open while runs are in progress

  async function refresh() {
    try {
      const answer = await fetch("content" + location.search, { headers: { "If-None-Match": refresh.tag || "" } });
      if (answer.status === 200) {
        refresh.tag = answer.headers.get("ETag");
        const fresh = await answer.json();
        const place = scrollY, opened = [...document.querySelectorAll("details.card[open] > summary")].map((found) => found.textContent);
        data = fresh.data;
        document.getElementById("content").innerHTML = fresh.html;
        build();
        for (const found of document.querySelectorAll("details.card > summary")) if (opened.includes(found.textContent)) found.parentElement.open = true;
        scrollTo(0, place);
      }
    } catch { /* the server has stopped; the page keeps its content */ }
    setTimeout(refresh, REFRESH_S * 1000);
  }

  follow(apply);
  addEventListener("hashchange", () => { readState(); apply(); });
  readState();
  build();
  document.documentElement.dataset.ready = "yes";
  if (REFRESH_S) setTimeout(refresh, REFRESH_S * 1000);
})();
