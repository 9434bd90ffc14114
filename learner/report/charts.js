// Draws the charts that charts.py describes: hover reads values, drag zooms, double click resets.
// Charts with the same unit of x share one cursor and one zoom.
"use strict";
const minus = (text) => text.replace("-", "−");
const FORMATS = {
  number: (v) => minus(v === 0 ? "0" : Math.abs(v) >= 1e4 ? `${+(v / 1e3).toPrecision(3)}k`
    : Math.abs(v) < 1e-3 ? v.toExponential(1) : String(+v.toPrecision(3))),
  percent: (v) => minus(Math.abs(v) < 5e-5 ? "0 %" : `${+(100 * v).toPrecision(Math.abs(v) < 0.1 ? 2 : 3)} %`),
  seconds: (v) => minus(v === 0 ? "0 s" : Math.abs(v) < 1 ? `${+(1e3 * v).toPrecision(3)} ms` : `${+v.toPrecision(3)} s`),
};
const drawCharts = (() => {
  const HEIGHT = 190, MAX_DOTS = 40, MIN_TO_CUT = 200, LEFT = 54;
  const cards = new Map();
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const make = (parent, tag, name, text = "") => {
    const made = parent.appendChild(document.createElement(tag));
    made.className = name;
    made.textContent = text;
    return made;
  };
  const widthOf = (card) => Math.max(card.plot.clientWidth, 100);
  const finite = (values) => values.filter((v) => v !== null && v !== undefined);

  // ---- one series becomes one or more layers of uPlot, each with its column of data
  function layersOf(series) {
    const { kind, x, y, mean, low, high } = series, shown = { series, x, dot: true };
    const stroke = () => css(series.color), none = { show: false };
    const bars = { stroke, fill: stroke, paths: uPlot.paths.bars({ size: [0.7, 70] }), points: none };
    if (kind === "bars") return [{ ...shown, y, style: bars }];
    if (kind === "area" && x.length === 1) return [{ ...shown, y, style: bars }];  // an area of one step has no width
    if (kind === "area") return [{ ...shown, dot: false, y, style: { stroke, width: 0, points: none } }];
    const dots = { show: true, size: 5, stroke, fill: stroke };
    if (kind === "points") {
      const end = { series, x, style: { width: 0, points: none } };
      const interval = low ? [{ ...end, y: high }, { ...end, y: low, hasBand: true }] : [];
      return [...interval, { ...shown, y, style: { stroke, width: 1.2, points: dots } }];
    }
    const pale = { stroke, alpha: 0.35, width: 1, points: none };
    const few = { stroke, alpha: 0.75, width: 0, points: { ...dots, size: 4 } };
    return [{ ...shown, y, style: y.length <= MAX_DOTS ? few : pale }, { series, x, y: mean, style: { stroke, width: 2, points: none } }];
  }
  function stack(series) {  // from the bottom; each layer is filled down to the one below it
    const sum = new Map();
    return series.flatMap((part, i) => {
      const top = part.x.map((x, j) => { sum.set(x, (sum.get(x) || 0) + part.mean[j]); return sum.get(x); });
      const band = { own: part.mean, filled: true, hasBand: i > 0 };
      return layersOf(part).map((layer) => ({ ...layer, ...band, y: top }));
    });
  }
  function plan(chart) {
    const layers = chart.series.some((s) => s.kind === "area") ? stack(chart.series) : chart.series.flatMap(layersOf);
    return { layers, data: uPlot.join(layers.map((layer) => [layer.x, layer.y])) };
  }

  // ---- scales and axes
  function limits(chart, u, layers) {  // of what is in view
    const [from, to] = u.series[0].idxs;
    const inView = (i) => finite(u.data[i + 1].slice(from, to + 1));
    const valuesOf = (has) => layers.flatMap((layer, i) => has(layer) ? inView(i) : []).sort((a, b) => a - b);
    const all = valuesOf(() => true);
    if (!all.length) return [chart.log ? 0.1 : 0, 1];
    const low = all[0], high = all[all.length - 1];
    const tops = [...new Set(layers.map((layer) => layer.series))].map((series) => usual(series.kind,
      valuesOf((layer) => layer.series === series && (layer.dot || layer.own)), valuesOf((layer) => layer.series === series)));
    const first = Math.floor(Math.log10(low));
    if (chart.log) return [10 ** first, 10 ** Math.max(Math.ceil(Math.log10(high)), first + 1)];
    const bottom = low >= 0 ? 0 : low - 0.06 * (high - low), top = Math.max(...tops);
    return top > bottom ? [bottom, top + 0.06 * (top - bottom)] : [bottom, bottom + 1];
  }
  function usual(kind, recorded, all) {  // lone outliers, such as the first weight sync, must not flatten the rest
    const high = all.length ? all[all.length - 1] : -Infinity;
    if (kind === "bars" || kind === "points" || recorded.length < MIN_TO_CUT) return high;
    const most = recorded[Math.ceil(0.99 * recorded.length) - 1];  // at most 1 % of the values are higher
    return most > 0 && high > 4 * most ? 1.2 * most : high;
  }
  function decades(low, high) {
    const first = Math.round(Math.log10(low)), count = Math.round(Math.log10(high)) - first;
    const by = Math.ceil(count / 4) || 1;
    return Array.from({ length: Math.floor(count / by) + 1 }, (_, i) => 10 ** (first + i * by));
  }
  function axesOf(chart, format) {
    const font = '11.5px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif';
    const base = { font, stroke: () => css("muted"), ticks: { show: false } };
    const isWhole = chart.x === "step" || chart.series.some((s) => s.kind === "bars");
    return [
      { ...base, grid: { show: false }, size: 26, gap: 4, space: 52,
        values: (_, xs) => xs.map((x) => Number.isInteger(x) || !isWhole ? x.toLocaleString("en") : "") },
      { ...base, grid: { stroke: () => css("grid"), width: 1 }, size: LEFT, gap: 6, space: 36,
        splits: chart.log ? (u, _, low, high) => decades(low, high) : undefined, filter: (_, splits) => splits,
        values: (_, ys) => ys.map((y) => chart.log ? minus(`1e${Math.round(Math.log10(y))}`) : format(y)) },
    ];
  }
  function range(chart, u, low, high) {
    if (low === null || low === undefined) return [0, 1];
    const margin = chart.series.some((s) => s.kind === "bars") ? 0.6 : low === high ? 1 : 0;
    return [low - margin, high + margin];
  }

  // ---- reading values
  function nearest(u, column, index) {  // series of one chart need not have the same x
    const xs = u.data[0], ys = u.data[column], has = (j) => ys[j] !== null && ys[j] !== undefined;
    let left = index, right = index;
    while (left >= 0 && !has(left)) left--;
    while (right < xs.length && !has(right)) right++;
    if (left < 0) return right < xs.length ? right : null;
    return right < xs.length && xs[right] - xs[index] < xs[index] - xs[left] ? right : left;
  }
  function readings(card, index) {  // [series, text] at an index of the data, or at rest
    const { u, layers, format } = card;
    return layers.filter((layer) => layer.dot || layer.own).map((layer) => {
      const { series } = layer, place = index === null ? null : nearest(u, layers.indexOf(layer) + 1, index);
      const at = place === null ? series.x.length - 1 : series.x.indexOf(u.data[0][place]);
      const values = layer.own || (index === null && series.mean) || series.y;
      const interval = series.low ? ` (${format(series.low[at])} to ${format(series.high[at])})` : "";
      const isElsewhere = place !== null && place !== index && series.kind === "points";
      const where = isElsewhere ? ` at ${series.x[at].toLocaleString("en")}` : "";
      return [series, index === null && series.rest !== undefined ? series.rest : format(values[at]) + interval + where];
    });
  }
  function legend(card, index) {
    const { chart, u } = card;
    card.legend.replaceChildren();
    for (const [series, value] of readings(card, index)) {
      const key = make(card.legend, "span", "key", series.name);
      key.style.setProperty("--key", `var(--${series.color})`);
      make(key, "b", "", value);
    }
    make(card.legend, "span", "at", index === null ? chart.x : `${chart.x} ${u.data[0][index].toLocaleString("en")}`);
  }
  function marks(chart, u) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.strokeStyle = css("amber");
    ctx.setLineDash([4, 4]);
    for (const x of (chart.marks || []).filter((x) => x >= u.scales.x.min && x <= u.scales.x.max)) {
      const place = u.valToPos(x, "x", true);
      ctx.beginPath();
      ctx.moveTo(place, bbox.top);
      ctx.lineTo(place, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  // ---- cards
  function build(card) {
    const { chart, layers, data } = card, opacity = chart.series.some((s) => s.kind === "area") ? "d1" : "2a";
    const fillOf = (layer) => () => css(layer.series.color) + opacity;
    const style = (layer, i) => ({ ...layer.style, fill: layer.filled && !i ? fillOf(layer) : layer.style.fill });
    const band = (layer, i) => ({ series: layer.filled ? [i + 1, i] : [i, i + 1], fill: fillOf(layer) });
    const options = {
      width: widthOf(card), height: HEIGHT, legend: { show: false }, padding: [8, 10, 0, 0],
      scales: { x: { time: false, range: (u, low, high) => range(card.chart, u, low, high) },
        y: { distr: chart.log ? 3 : 1, range: (u) => limits(card.chart, u, card.layers) } },
      series: [{}, ...layers.map(style)],
      bands: layers.flatMap((layer, i) => layer.hasBand ? [band(layer, i)] : []),
      axes: axesOf(chart, card.format),
      cursor: { sync: { key: chart.x, setSeries: false, scales: ["x", null] }, y: false,
        dataIdx: (u, column, index) => column && index !== null ? nearest(u, column, index) : index,
        points: { show: (u, column) => layers[column - 1].dot && document.createElement("div"), size: 7 } },
      hooks: { setCursor: [(u) => legend(card, u.cursor.idx ?? null)], draw: [(u) => marks(card.chart, u)] },
    };
    card.u = new uPlot(options, data, card.plot);
    card.u.over.addEventListener("pointermove", (event) => {  // uPlot listens to mice only
      if (event.pointerType === "touch") card.u.setCursor({ left: event.offsetX, top: event.offsetY }, true, true);
    });
  }
  function update(card, chart) {
    const looks = (c) => JSON.stringify([c?.x, c?.series.map((s) => [s.name, s.kind, s.y.length > 1, s.y.length <= MAX_DOTS, !s.low])]);
    const isSame = looks(card.chart) === looks(chart);
    Object.assign(card, { chart, ...plan(chart), format: FORMATS[chart.unit || "number"] });
    if (!isSame) {
      card.u?.destroy();
      build(card);
    } else {
      const { min, max } = card.u.scales.x, xs = card.u.data[0], isZoomed = min > xs[0] || max < xs[xs.length - 1];
      card.u.setData(card.data, !isZoomed);
      if (isZoomed) card.u.setScale("x", { min, max });
    }
    card.notes.textContent = (chart.notes || []).join(" · ");
    legend(card, card.u.cursor.idx ?? null);
    const summary = readings(card, null).map(([series, value]) => `${series.name} ${value}`).join(", ");
    card.plot.setAttribute("aria-label", `${chart.title}: ${summary}`);
  }
  function makeCard(chart) {
    const root = document.createElement("div"), card = { root };
    root.className = "card chart";
    make(root, "h3", "", chart.title);
    card.caption = make(root, "p", "", chart.caption);
    card.plot = make(root, "div", "plot");
    card.plot.setAttribute("role", "img");
    card.legend = make(root, "div", "legend");
    card.notes = make(root, "div", "notes");
    new ResizeObserver(() => card.u?.setSize({ width: widthOf(card), height: HEIGHT })).observe(card.plot);
    cards.set(chart.title, card);
    return card;
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => cards.forEach((card) => card.u.redraw()));

  return (section, charts) => {
    for (const [i, chart] of charts.entries()) {
      const card = cards.get(chart.title) || makeCard(chart);
      if (section.children[i] !== card.root) section.insertBefore(card.root, section.children[i] || null);
      update(card, chart);
    }
  };
})();
const described = document.getElementById("chart-data");
if (described) drawCharts(document.getElementById("charts"), JSON.parse(described.textContent));
