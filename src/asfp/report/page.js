"use strict";
(() => {
  const root = document.documentElement;
  const read = () => JSON.parse(document.getElementById("data").textContent);
  let data = read();
  const hidden = new Set();
  const chosen = { layer: "", order: "norm" };

  const style = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const dark = () => root.dataset.theme === "dark";
  const colour = (index) => {
    if (index < 0) return style("--soft");
    const palette = data.palettes[dark() ? "dark" : "light"];
    return palette[index < palette.length ? index : 4 + ((index - 4) % (palette.length - 4))];
  };
  const faint = (hex, alpha) => {
    const n = parseInt(hex.slice(1), 16);
    return `rgba(${n >> 16},${(n >> 8) & 255},${n & 255},${alpha})`;
  };
  const escape = (text) =>
    String(text).replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
  const narrow = () => window.innerWidth < 600;
  const config = {
    responsive: true, displaylogo: false, displayModeBar: "hover",
    modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"],
  };
  const layout = (more) => {
    const axis = (given) => ({
      gridcolor: style("--grid"), zerolinecolor: style("--line"), linecolor: style("--line"), automargin: true, ...given,
      title: { text: given.title || "", standoff: 6, font: { size: 12, color: style("--soft") } },
    });
    const { xaxis, yaxis, ...rest } = more;
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: style("--text") },
      margin: { l: 48, r: 12, t: 8, b: 40 }, dragmode: narrow() ? false : "zoom",
      hoverlabel: { bgcolor: style("--surface"), bordercolor: style("--line"), font: { color: style("--text") }, align: "left" },
      xaxis: axis(xaxis), yaxis: axis(yaxis), ...rest,
    };
  };

  const lineTraces = (s) => {
    const c = colour(s.colour), traces = [];
    if (s.low && s.high) {
      const none = { mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
      traces.push({ x: s.x, y: s.low, ...none });
      traces.push({ x: s.x, y: s.high, ...none, fill: "tonexty", fillcolor: faint(c, 0.18) });
    }
    traces.push({
      x: s.x, y: s.y, mode: "lines", connectgaps: false,
      line: { color: c, width: s.style === "dot" ? 1 : 1.8, dash: s.style },
      fill: s.fill ? "tozeroy" : "none", fillcolor: s.fill ? "rgba(128,128,128,.25)" : undefined,
      hovertemplate: s.name ? `${escape(s.name)}<br>%{x}: %{y:.4~g}<extra></extra>` : undefined,
      hoverinfo: s.name ? undefined : "skip",
    });
    return traces;
  };
  const dotTraces = (s) => {
    const c = colour(s.colour);
    return [{
      x: s.x, y: s.y, mode: "markers", text: s.words.map(escape), hovertemplate: "%{text}<extra></extra>",
      marker: { color: s.hollow ? "rgba(0,0,0,0)" : c, size: s.hollow ? 10 : 11,
        symbol: s.hollow && s.name.includes("trained") ? "diamond" : "circle",
        line: { color: c, width: s.hollow ? 1.8 : 0 } },
      error_y: s.error ? { type: "data", array: s.error, color: c, thickness: 1.3, width: 4 } : undefined,
    }];
  };

  const whole = (panel) => {
    if (panel.x_title !== "epoch") return {};
    const ends = panel.series.flatMap((s) => [s.x[0], s.x[s.x.length - 1]]);
    return Math.max(...ends) - Math.min(...ends) < 10 ? { dtick: 1 } : {};
  };
  const drawPanel = (div) => {
    const chart = data.charts[div.dataset.chart];
    const panel = chart && chart.panels[Number(div.dataset.panel)];
    if (!panel) return;
    const traces = panel.series.filter((s) => !hidden.has(s.colour))
      .flatMap((s) => (s.kind === "line" ? lineTraces(s) : dotTraces(s)));
    const names = panel.categories.length
      ? { tickvals: panel.categories.map((_, i) => i), ticktext: panel.categories.map(escape) } : {};
    return Plotly.react(div, traces, layout({
      xaxis: { title: panel.x_title, ...names, ...whole(panel) },
      yaxis: { title: panel.y_title, type: panel.log_y ? "log" : "linear", dtick: panel.log_y ? 1 : undefined },
    }), config);
  };

  const bytes = (part) => {
    if (!part.bytes) part.bytes = Uint8Array.from(atob(part.cells), (c) => c.charCodeAt(0));
    return part.bytes;
  };
  const rowsOf = (part, order) => {
    const all = bytes(part), rows = [];
    for (let i = 0; i < part.rows; i++) rows.push({ part, index: i, cells: all.subarray(i * part.columns, (i + 1) * part.columns) });
    if (order === "norm") {
      const last = part.columns - 1;
      rows.sort((a, b) => b.cells[last] - a.cells[last] || a.index - b.index);
    }
    return rows;
  };
  const scales = {
    filters: () => [
      [0, style("--dead")], [0.5 / 199, style("--dead")], [0.5 / 199, style("--zero0")], [99.5 / 199, style("--zero1")],
      [99.5 / 199, style("--back")], [100.5 / 199, style("--back")], [100.5 / 199, style("--kept0")], [1, style("--kept1")],
    ],
    streams: () => [[0, style("--dead")], [0.5, style("--dead")], [0.5, style("--accent")], [1, style("--accent")]],
  };
  const say = (kind, heat, row, x, code) => {
    const who = row.part.labels.length ? row.part.labels[row.index] : `${row.part.name}, filter ${row.index}`;
    if (kind === "streams") return `${who} ${code ? "writes" : "does not write"} channel ${x}`;
    const norm = (start) => `${(100 * 10 ** (2 * ((code - start) / 98 - 1))).toPrecision(2)} % of the layer's largest norm`;
    const what = code === 0 ? "zero, and zeroed again" : code < 100 ? `zeroed, from ${norm(1)}`
      : code === 100 ? "back: zeroed before, kept now" : `kept, at ${norm(101)}`;
    return `${who}, epoch ${x}: ${what}`;
  };
  const drawHeat = (div) => {
    const heat = data.heats[div.dataset.heat];
    if (!heat) return;
    const only = heat.kind === "filters" ? chosen.layer : div.dataset.part;
    const parts = heat.parts.filter((p, i) => (heat.kind === "streams" ? String(i) === only : !only || p.name === only));
    const rows = parts.flatMap((p) => rowsOf(p, heat.kind === "filters" ? chosen.order : "index"));
    const x = heat.x.length ? heat.x : Array.from({ length: parts.length ? parts[0].columns : 0 }, (_, i) => i);
    const ticks = { tickvals: [], ticktext: [] };
    if (heat.kind === "streams") {
      rows.forEach((row, i) => { ticks.tickvals.push(i); ticks.ticktext.push(escape(row.part.labels[row.index])); });
    } else if (!only) {
      const step = Math.ceil(parts.length / 14);
      let at = 0;
      parts.forEach((p, i) => {
        if (i % step === 0) { ticks.tickvals.push(at); ticks.ticktext.push(escape(p.name)); }
        at += p.rows;
      });
    }
    const streams = heat.kind === "streams";
    const trace = {
      type: "heatmap", x, y: rows.map((_, i) => i), z: rows.map((r) => r.cells), zmin: 0, zmax: streams ? 1 : 199,
      colorscale: scales[heat.kind](), showscale: false, hoverinfo: "none", xgap: streams ? 1 : 0, ygap: streams ? 2 : 0,
    };
    if (streams) div.style.height = `${Math.min(900, 70 + 24 * rows.length)}px`;
    const title = streams || !only ? "" : chosen.order === "norm" ? "filters, by the last norm" : "filter";
    const drawn = Plotly.react(div, [trace], layout({
      xaxis: { title: heat.x_title, showgrid: false },
      yaxis: { title, autorange: "reversed", showgrid: false, ...(ticks.tickvals.length ? ticks : {}), tickfont: { size: 10 } },
    }), config);
    const readout = div.parentElement.querySelector(".readout");
    if (readout && !div.dataset.listening) {
      div.dataset.listening = "yes";
      div.on("plotly_hover", (e) => {
        const point = e.points[0];
        const row = div.rows[point.y];
        if (row) readout.textContent = say(heat.kind, heat, row, point.x, point.z);
      });
    }
    div.rows = rows;
    return drawn;
  };

  const draw = () => Promise.all([
    ...Array.from(document.querySelectorAll(".plot[data-chart]"), drawPanel),
    ...Array.from(document.querySelectorAll(".plot[data-heat]"), drawHeat),
  ]).then(() => { root.dataset.drawn = "yes"; });

  const paint = () => {
    for (const item of document.querySelectorAll("[data-colour]")) item.style.setProperty("--c", colour(Number(item.dataset.colour)));
    for (const chip of document.querySelectorAll(".chip")) chip.setAttribute("aria-pressed", String(!hidden.has(Number(chip.dataset.group))));
    for (const name of ["layer", "order"]) {
      const select = document.getElementById(name);
      if (select && Array.from(select.options, (o) => o.value).includes(chosen[name])) select.value = chosen[name];
    }
    const button = document.getElementById("theme");
    if (button) button.textContent = dark() ? "Light" : "Dark";
  };
  const show = () => { paint(); return draw(); };

  document.addEventListener("click", (event) => {
    const chip = event.target.closest(".chip");
    if (chip) {
      const group = Number(chip.dataset.group);
      if (!hidden.delete(group)) hidden.add(group);
      show();
    } else if (event.target.closest("#theme")) {
      root.dataset.theme = dark() ? "light" : "dark";
      root.dataset.chosen = "yes";
      show();
    }
  });
  document.addEventListener("change", (event) => {
    if (event.target.id in chosen) { chosen[event.target.id] = event.target.value; show(); }
  });
  document.addEventListener("toggle", (event) => {
    if (event.target.open) for (const div of event.target.querySelectorAll(".plot")) Plotly.Plots.resize(div);
  }, true);
  const wish = window.matchMedia("(prefers-color-scheme: dark)");
  const follow = () => { if (!root.dataset.chosen) root.dataset.theme = wish.matches ? "dark" : "light"; };
  wish.addEventListener("change", () => { follow(); show(); });
  let before = "";
  window.addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    root.dataset.theme = "light";
    for (const d of document.querySelectorAll("details")) d.open = true;
    show();
  });
  window.addEventListener("afterprint", () => { root.dataset.theme = before; show(); });

  const poll = async () => {
    const tell = (text) => { document.getElementById("live").textContent = text; };
    try {
      const answer = await fetch("data", { cache: "no-store", headers: { "If-None-Match": root.dataset.version || "" } });
      if (answer.status === 200) {
        const fresh = await answer.json();
        root.dataset.version = fresh.version;
        const open = Array.from(document.querySelectorAll("details"), (d) => [d.id, d.open]);
        document.getElementById("content").innerHTML = fresh.html;
        document.title = fresh.title;
        for (const [id, was] of open) { const d = id && document.getElementById(id); if (d) d.open = was; }
        data = fresh.data;
        await show();
      }
      tell(`live, updated ${new Date().toLocaleTimeString()}`);
    } catch (error) {
      tell("the server has stopped; what is shown is the last it said");
    }
    setTimeout(poll, Number(root.dataset.every) * 1000);
  };
  follow();
  show();
  if (root.dataset.every) setTimeout(poll, Number(root.dataset.every) * 1000);
})();
