// Draws every chart from its data. Wheel or + and - zoom, drag or arrows pan, double click or 0 shows all.
"use strict";
const COLOURS = ["#2f6fde", "#e8710a", "#12805c", "#8e44ad", "#0b9ac0", "#b7791f"];
const DOTTED = 30;  // series with at most this many points show each of them
const W = 460, H = 230, LEFT = 54, RIGHT = 8, TOP = 8, BOTTOM = 26;
const NS = "http://www.w3.org/2000/svg";

function element(name, attributes, text) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function shown(value, digits) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(digits - 2) : String(+value.toPrecision(digits));
}

function told(values) {
  // As few digits as tell them apart.
  for (const digits of [3, 4, 5, 6]) {
    const labels = values.map(v => shown(v, digits));
    if (new Set(labels).size === labels.length || digits === 6) return labels;
  }
}

function ticks(low, high, count) {
  const span = high - low || 1, raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(f => f * power).find(s => s >= raw);
  const found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-9; v += step) found.push(v);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let k = Math.floor(low); k <= high; k++) for (const f of [1, 2, 5]) {
    const v = k + Math.log10(f);
    if (v >= low && v <= high) found.push(v);
  }
  const step = Math.ceil(found.length / 5);
  return found.length > 2 ? found.filter((_, i) => i % step === 0) : ticks(10 ** low, 10 ** high, 4).map(Math.log10);
}

function dashed(s) {
  // Where colours begin anew, lines are dotted.
  return s.colour < COLOURS.length ? (s.dashed ? "5 3" : "") : (s.dashed ? "7 3 1.5 3" : "1.5 3");
}

function draw(svg, data, view) {
  const up = data.log ? Math.log10 : v => v, down = data.log ? v => 10 ** v : v => v;
  const usable = s => s.points.filter(p => !data.log || p[1] > 0);
  const all = data.series.flatMap(usable);
  const inside = all.filter(p => p[0] >= view.low && p[0] <= view.high);
  const heights = (inside.length ? inside : all).map(p => up(p[1]));
  let bottom = Math.min(...heights), top = Math.max(...heights);
  const air = (top - bottom || Math.abs(top) || 1) * 0.05;
  bottom -= air; top += air;
  const x = v => LEFT + (v - view.low) / (view.high - view.low || 1) * (W - LEFT - RIGHT);
  const y = v => H - BOTTOM - (up(v) - bottom) / (top - bottom) * (H - TOP - BOTTOM);
  svg.replaceChildren();
  const clip = "clip" + svg.dataset.number;
  const area = element("clipPath", {id: clip});
  area.append(element("rect", {x: LEFT, y: TOP, width: W - LEFT - RIGHT, height: H - TOP - BOTTOM}));
  svg.append(area);
  const marks = data.log ? logTicks(bottom, top) : ticks(bottom, top, 4);
  const labels = told(marks.map(down));
  for (const [k, v] of marks.entries()) {
    const at = H - BOTTOM - (v - bottom) / (top - bottom) * (H - TOP - BOTTOM);
    svg.append(element("line", {class: "grid", x1: LEFT, x2: W - RIGHT, y1: at, y2: at}));
    svg.append(element("text", {x: LEFT - 6, y: at + 4, "text-anchor": "end"}, labels[k]));
  }
  const steps = ticks(view.low, view.high, 5).filter(v => data.x !== "step" || Number.isInteger(v));
  for (const [k, label] of told(steps).entries()) {
    svg.append(element("text", {x: x(steps[k]), y: H - 10, "text-anchor": "middle"}, label));
  }
  const lines = element("g", {"clip-path": `url(#${clip})`});
  data.series.forEach(s => {
    const d = usable(s).map((p, k) => `${k ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
    const look = {class: "series", d, stroke: COLOURS[s.colour % COLOURS.length]};
    const dashes = dashed(s);
    if (dashes) look["stroke-dasharray"] = dashes;
    const path = element("path", look);
    path.append(element("title", {}, s.name || data.title));
    lines.append(path);
    const dots = usable(s).length <= DOTTED ? usable(s) : [];  // a line of one point would be invisible
    for (const p of dots) lines.append(element("circle", {cx: x(p[0]), cy: y(p[1]), r: dots.length === 1 ? 3.5 : 2.2, fill: look.stroke}));
  });
  for (const [step, what] of data.faults || []) {
    const mark = element("line", {class: "fault", x1: x(step), x2: x(step), y1: H - BOTTOM - 9, y2: H - BOTTOM});
    mark.append(element("title", {}, `${what} at step ${step}`));
    lines.append(mark);
  }
  svg.append(lines);
}

function start(figure, number) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const svg = figure.querySelector("svg");
  svg.dataset.number = number;
  const xs = data.series.flatMap(s => s.points.map(p => p[0]));
  const first = data.high === null ? Math.min(...xs) : 0, last = data.high ?? Math.max(...xs);
  const air = first === last ? 1 : 0;  // draw a single step in the middle
  const whole = {low: first - air, high: last + air + (last - first) * 0.02};  // the last point is not cut off
  let view = {...whole};
  const show = next => { view = next; draw(svg, data, view); };
  const zoom = (factor, centre) => {
    const low = centre - (centre - view.low) * factor, high = centre + (view.high - centre) * factor;
    show({low: Math.max(low, whole.low), high: Math.min(high, whole.high)});
  };
  const pan = by => {
    const room = Math.min(Math.max(by, whole.low - view.low), whole.high - view.high);
    show({low: view.low + room, high: view.high + room});
  };
  const at = event => {
    const box = svg.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width * W - LEFT) / (W - LEFT - RIGHT);
    return view.low + share * (view.high - view.low);
  };
  svg.addEventListener("wheel", event => { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, at(event)); }, {passive: false});
  svg.addEventListener("dblclick", () => show({...whole}));
  let from = null;
  svg.addEventListener("pointerdown", event => { from = at(event); svg.setPointerCapture(event.pointerId); });
  svg.addEventListener("pointermove", event => { if (from !== null) pan(from - at(event)); });
  svg.addEventListener("pointerup", () => { from = null; });
  svg.addEventListener("keydown", event => {
    const middle = (view.low + view.high) / 2, width = view.high - view.low;
    const act = {"+": () => zoom(0.7, middle), "=": () => zoom(0.7, middle), "-": () => zoom(1.4, middle),
      "ArrowLeft": () => pan(-width / 5), "ArrowRight": () => pan(width / 5), "0": () => show({...whole})}[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  const legend = figure.querySelector(".legend");
  data.series.forEach((s, i) => {
    if (!s.name || data.series.findIndex(other => other.name === s.name) < i) return;
    const item = document.createElement("span"), swatch = document.createElement("i");
    swatch.style.borderTopColor = COLOURS[s.colour % COLOURS.length];
    if (dashed(s)) swatch.style.borderTopStyle = s.colour < COLOURS.length ? "dashed" : "dotted";
    item.append(swatch, s.name);
    legend.append(item);
  });
  const kinds = (data.faults || []).map(f => f[1]);
  for (const kind of new Set(kinds)) {
    const item = document.createElement("span"), swatch = document.createElement("i");
    swatch.className = "fault";
    item.append(swatch, `${kind}: ${kinds.filter(k => k === kind).length}`);
    legend.append(item);
  }
  show(view);
}

document.querySelectorAll("figure.chart").forEach(start);
