"use strict";
// Draws the charts of the page from the columns in #model, and draws them again for another theme, axis or choice of runs.
(() => {
  const model = JSON.parse(document.getElementById("model").textContent);
  const root = document.documentElement;
  const plots = [...document.querySelectorAll(".plot")];
  const hidden = new Set(); // runs that the reader has switched off
  const AXES = { env_steps: "env steps", elapsed_s: "training time", step: "updates" };
  const FEW = 40; // points; of more a running mean is drawn
  const LONELY = 5; // points, which a line alone would hardly show
  let axis = model.x;
  let turn = 0; // of drawing: a newer one stops an older one

  // ------------------------------------------------------------ small things

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const run_colour = (place) => colour(`--c${place % 8}`);
  const faded = (hex, alpha) => `rgba(${[1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join(",")},${alpha})`;
  // Plotly takes some HTML in texts; what comes from a run is shown as it is
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  const longest = Math.max(0, ...model.runs.flatMap((run) => [...run.updates.x.elapsed_s, ...run.evaluations.x.elapsed_s]));
  const clock = longest > 2 * 3600 ? ["h", 3600] : longest > 180 ? ["min", 60] : ["s", 1];

  function horizontal(run, source, name) {
    const values = model.runs[run][source].x[name];
    return name === "elapsed_s" ? values.map((value) => (value === null ? null : value / clock[1])) : values;
  }
  const column = (run, source, key) => model.runs[run][source].columns[key];

  function running_mean(values) {
    const half = Math.max(2, Math.round(values.length / 40));
    return values.map((value, at) => {
      if (value === null) return null;
      const near = values.slice(Math.max(0, at - half), at + half + 1).filter((other) => other !== null);
      return near.reduce((sum, other) => sum + other, 0) / near.length;
    });
  }

  // a name in lines of so many letters, cut between words where there are some
  function wrapped(text, letters) {
    const lines = [""];
    for (const word of text.match(new RegExp(`[^ _]{1,${letters - 1}}[ _]?|[ _]`, "g")) || []) {
      if (lines[lines.length - 1].length + word.length > letters) lines.push("");
      lines[lines.length - 1] += word;
    }
    return lines.length > 5 ? [...lines.slice(0, 4), "…"] : lines;
  }

  // ------------------------------------------------------------ traces

  const UNITS = {
    share: { axis: { tickformat: ".0%" }, hover: ".1%" },
    seconds: { axis: { tickformat: "~s", ticksuffix: "s" }, hover: ".3~s", suffix: "s" },
    rate: { axis: { tickformat: "~s" }, hover: ",.4~g" },
    mib: { axis: { tickformat: ",.0f", ticksuffix: " MiB" }, hover: ",.0f", suffix: " MiB" },
    updates: { axis: {}, hover: ".3~g" },
    number: { axis: { exponentformat: "power" }, hover: ".4~g" },
  };

  function hover(label, unit) {
    return `${plain(label)} %{y:${unit.hover}}${unit.suffix || ""}<extra></extra>`;
  }

  function line_label(series) {
    return model.runs.length > 1 ? `${model.runs[series.run].label}, ${series.label}` : series.label;
  }

  function band(series, x, tone) {
    const [low, high] = series.band.map((key) => column(series.run, series.source, key));
    const kept = x.map((_, at) => at).filter((at) => x[at] !== null && low[at] !== null && high[at] !== null);
    const back = [...kept].reverse();
    return {
      type: "scatter", mode: "lines", fill: "toself", fillcolor: faded(tone, 0.16), line: { width: 0 }, hoverinfo: "skip",
      x: [...kept.map((at) => x[at]), ...back.map((at) => x[at])],
      y: [...kept.map((at) => low[at]), ...back.map((at) => high[at])],
    };
  }

  function line_traces(chart) {
    const unit = UNITS[chart.unit];
    const traces = [];
    for (const series of chart.series.filter((one) => !hidden.has(one.run))) {
      const x = horizontal(series.run, series.source, chart.x || axis);
      const y = column(series.run, series.source, series.y);
      const tone = run_colour(series.colour);
      const evaluated = series.source === "evaluations";
      const is_smooth = chart.smooth && !evaluated && y.length > FEW;
      if (series.band.length) traces.push(band(series, x, tone));
      const base = { type: "scatter", x, y, name: plain(series.label), connectgaps: evaluated || chart.smooth };
      const line = { color: tone, width: evaluated ? 2.6 : 2, dash: series.dash };
      if (is_smooth) traces.push({ ...base, mode: "lines", line: { color: faded(tone, 0.28), width: 1 }, hoverinfo: "skip" });
      traces.push({
        ...base,
        y: is_smooth ? running_mean(y) : y,
        mode: (evaluated && y.length <= FEW) || y.length <= LONELY ? "lines+markers" : "lines",
        marker: { size: evaluated ? 7 : 4, color: tone },
        line,
        hovertemplate: hover(line_label(series), unit),
        ...(chart.stacked ? { stackgroup: "all", fillcolor: faded(tone, 0.45) } : {}),
      });
    }
    return traces;
  }

  function heat_traces(chart) {
    if (hidden.has(chart.run)) return [];
    const x = horizontal(chart.run, chart.source, axis);
    const rows = chart.rows.map((row) => (row.z === null ? x.map(() => null) : column(chart.run, chart.source, row.z)));
    const z = rows.map((row) => row.map((value, at) => value ?? (rows.some((other) => other[at] !== null) ? chart.gaps : null)));
    const what = { age: "%{customdata} updates old", rows: "up to %{customdata} rows", task: "%{customdata}" }[chart.unit];
    const map = {
      type: "heatmap", x, y: chart.rows.map((row) => row.at), z, zmin: 0, zmax: 1, showscale: false, ygap: 1,
      colorscale: [[0, colour("--shade")], [1, colour("--c0")]], hoverongaps: false,
      customdata: chart.rows.map((row) => x.map(() => plain(row.label))),
      hovertemplate: `${what}: %{z:.0%}<extra></extra>`,
    };
    const lines = chart.overlay.map((series) => {
      const values = column(series.run, series.source, series.y);
      return {
        type: "scatter", mode: "lines", x, y: chart.unit === "rows" ? values.map((value) => value && Math.log2(value)) : values,
        customdata: values, line: { color: colour("--text"), width: 2, dash: series.dash },
        hovertemplate: `${plain(series.label)} %{customdata:.3~g}<extra></extra>`,
      };
    });
    return [map, ...lines];
  }

  function gantt_traces(chart) {
    return chart.traces.map((group) => ({
      type: "bar", orientation: "h", base: group.start, x: group.seconds, y: group.lane, customdata: group.text.map(plain),
      width: group.depth.map((depth) => (group.is_whole ? 0.92 : depth > 1 ? 0.36 : 0.62)),
      marker: {
        color: group.is_whole ? colour("--shade") : group.colour === null ? colour("--pale") : run_colour(group.colour),
        line: { width: group.is_whole ? 1 : 0, color: colour("--line") },
      },
      hovertemplate: "%{customdata}<extra></extra>",
    }));
  }

  // ------------------------------------------------------------ layout

  function layout(chart, width) {
    const font = { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("--muted") };
    const touch = window.matchMedia("(pointer: coarse)").matches;
    const name = chart.x || axis;
    const lines = { gridcolor: colour("--grid"), linecolor: colour("--line"), zerolinecolor: colour("--line"), automargin: true };
    const title = name === "elapsed_s" ? `${AXES[name]} (${clock[0]})` : AXES[name];
    const whole = {
      height: 236, margin: { l: 46, r: 10, t: 8, b: 38 }, autosize: true, font, showlegend: false, hovermode: "x unified",
      paper_bgcolor: colour("--card"), plot_bgcolor: colour("--card"), barmode: "overlay",
      dragmode: touch ? false : "zoom",
      hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { ...font, color: colour("--text") }, namelength: -1 },
      xaxis: { ...lines, title: { text: title, standoff: 6 }, tickformat: name === "elapsed_s" ? "" : "~s", fixedrange: touch, nticks: width < 420 ? 5 : 8, showgrid: false, zeroline: false,
        hoverformat: name === "elapsed_s" ? ",.2f" : ",.0f", showspikes: chart.kind === "lines", spikethickness: 1, spikecolor: colour("--faint"), spikedash: "solid" },
      yaxis: { ...lines, fixedrange: true, nticks: 6 },
    };
    if (chart.kind === "lines") Object.assign(whole.yaxis, UNITS[chart.unit].axis, chart.whole ? { range: [-0.02, 1.03] } : {});
    if (chart.kind === "lines" && ["rate", "mib", "updates"].includes(chart.unit)) whole.yaxis.rangemode = "tozero";
    if (chart.kind === "lines" && !chart.whole) {
      const values = chart.series.flatMap((series) => column(series.run, series.source, series.y)).filter((value) => value !== null);
      const [least, largest] = [Math.min(...values), Math.max(...values)];
      // of a constant Plotly would show the next whole numbers
      if (least === largest && least !== 0) whole.yaxis.range = least > 0 ? [0, 2 * least] : [2 * least, 0];
      if (chart.unit === "updates" && largest <= 6) Object.assign(whole.yaxis, { dtick: 1, nticks: 0, range: [0, Math.max(1, largest) * 1.04] });
    }
    if (chart.kind === "heat") {
      whole.hovermode = "closest";
      const apart = chart.unit === "task" ? 1 : Math.max(1, Math.ceil(chart.rows.length / 10));
      const named = chart.rows.filter((_, at) => at % apart === 0);
      const ticks = named.map((row) => wrapped(row.label, width < 420 ? 18 : 30).map(plain));
      Object.assign(whole.yaxis, { tickvals: named.map((row) => row.at), ticktext: ticks.map((parts) => parts.join("<br>")), showgrid: false, zeroline: false });
      if (chart.unit !== "task") whole.yaxis.title = { text: chart.unit === "age" ? "updates old" : "rows, up to", standoff: 4 };
      if (chart.unit === "task") whole.height = Math.max(236, 60 + chart.rows.length * (8 + 15 * Math.max(...ticks.map((parts) => parts.length))));
    }
    if (chart.kind === "gantt") {
      whole.hovermode = "closest";
      whole.height = 74 + 26 * chart.lanes.length;
      whole.xaxis = { ...whole.xaxis, title: { text: "time since the update began" }, tickformat: "~s", ticksuffix: "s", showgrid: true, range: [0, chart.seconds] };
      Object.assign(whole.yaxis, { type: "category", categoryorder: "array", categoryarray: chart.lanes.map(plain), autorange: "reversed", showgrid: false, nticks: 0, dtick: 1 });
    }
    return whole;
  }

  // ------------------------------------------------------------ drawing

  const CONFIG = { displayModeBar: false, responsive: true, scrollZoom: false };
  const KINDS = { lines: line_traces, heat: heat_traces, gantt: gantt_traces };

  function draw(plot) {
    const chart = model.charts[Number(plot.dataset.chart)];
    Plotly.react(plot, KINDS[chart.kind](chart), layout(chart, plot.clientWidth), CONFIG);
    plot.dataset.drawn = root.dataset.theme;
  }

  function draw_all() {
    const mine = ++turn;
    const left = [...plots];
    delete root.dataset.drawn;
    const some = () => {
      if (mine !== turn) return;
      const until = performance.now() + 40; // then the page may answer to the reader
      while (left.length && performance.now() < until) draw(left.shift());
      if (left.length) setTimeout(some, 0);
      else root.dataset.drawn = root.dataset.theme;
    };
    some();
  }

  function press(buttons, is_pressed) {
    for (const button of buttons) button.setAttribute("aria-pressed", String(is_pressed(button)));
  }

  const axis_buttons = [...document.querySelectorAll("[data-axis]")];
  function choose_axis(name) {
    axis = name;
    press(axis_buttons, (button) => button.dataset.axis === axis);
    draw_all();
  }
  for (const button of axis_buttons) button.addEventListener("click", () => choose_axis(button.dataset.axis));

  const run_buttons = [...document.querySelectorAll("[data-run]")];
  for (const button of run_buttons) {
    button.addEventListener("click", () => {
      const run = Number(button.dataset.run);
      if (!hidden.delete(run)) hidden.add(run);
      press(run_buttons, (other) => !hidden.has(Number(other.dataset.run)));
      draw_all();
    });
  }

  for (const video of document.querySelectorAll("video")) {
    // else some browsers show nothing before it is played
    video.addEventListener("loadedmetadata", () => (video.currentTime = Math.min(0.1, video.duration / 2)), { once: true });
    if (video.readyState > 0) video.currentTime = Math.min(0.1, video.duration / 2);
  }
  document.getElementById("theme").addEventListener("click", () => window.reportTheme.toggle());
  document.addEventListener("reporttheme", draw_all);
  choose_axis(axis);
})();
