// Draws the charts of a comparison from the numbers in the page: axes, lines, dots, and the values under the pointer.
"use strict";
const { runs, charts } = JSON.parse(document.getElementById("numbers").textContent);
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 4", "12 4", "1 2"];
const EDGE = { left: 58, right: 12, top: 32, bottom: 40 };

function element(name, attributes, parent, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

// 1234567 -> 1.23 M
function short(value, digits = 3) {
  const size = Math.abs(value);
  if (size && size < 1e-3) return value.toExponential(1);
  for (const [unit, of] of [[" G", 1e9], [" M", 1e6], [" k", 1e3]])
    if (size >= of) return +(value / of).toPrecision(digits) + unit;
  return String(+value.toPrecision(digits));
}

// Round numbers between low and high, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high + step * 1e-9; n++) found.push(n * step);
  return found;
}

function range(values) {
  let low = Infinity, high = -Infinity;
  for (const each of values) { low = Math.min(low, each); high = Math.max(high, each); }
  const room = 0.04 * (high - low) || 0.04 * Math.abs(high) || 1e-6; // all are equal: as far around that value
  return [low - room, high + room];
}

function draw(figure, chart, whole) {
  figure.querySelector("svg")?.remove();
  const svg = element("svg", {}, figure);
  const { width, height } = svg.getBoundingClientRect();
  const from = whole || chart.from == null ? -Infinity : chart.from;
  const shown = chart.series.flatMap((s) => s.x.flatMap((x, i) => (x >= from ? [[x, s.y[i]]] : [])));
  const [x0, x1] = range(shown.map((p) => p[0]));
  let [y0, y1] = range(shown.map((p) => p[1]));
  if (chart.zero) y0 = 0;
  const across = (x) => EDGE.left + ((x - x0) / (x1 - x0)) * (width - EDGE.left - EDGE.right);
  const up = (y) => height - EDGE.bottom - ((y - y0) / (y1 - y0)) * (height - EDGE.top - EDGE.bottom);
  for (const y of ticks(y0, y1, 5)) {
    element("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: up(y), y2: up(y) }, svg);
    element("text", { x: EDGE.left - 7, y: up(y) + 4, "text-anchor": "end" }, svg, short(y));
  }
  for (const x of ticks(x0, x1, Math.max(2, Math.floor(width / 110))))
    element("text", { x: across(x), y: height - EDGE.bottom + 16, "text-anchor": "middle" }, svg, short(x));
  element("text", { x: width - EDGE.right, y: height - 5, "text-anchor": "end" }, svg, chart.x);
  element("text", { x: 2, y: 12 }, svg, chart.y);
  for (const s of chart.series) {
    const style = `--shade: ${runs[s.run].colour}`;
    const points = s.x.map((x, i) => [x, s.y[i]]).filter((p) => p[0] >= from);
    if (s.dots) {
      for (const [x, y] of points) element("circle", { cx: across(x), cy: up(y), r: 3.5, style }, svg);
    } else {
      const d = points.map(([x, y], i) => `${i ? "L" : "M"}${across(x).toFixed(1)} ${up(y).toFixed(1)}`).join("")
        + (points.length === 1 ? "m-5 0h10" : ""); // one point makes no line
      const dash = DASHES[runs[s.run].pattern % DASHES.length];
      element("path", { d, style, "stroke-width": s.run ? 1.5 : 2.6, "stroke-dasharray": dash }, svg);
    }
  }
  svg.onpointermove = (event) => point(figure, svg, chart, event, { across, up, x0, x1, width, height, from });
  svg.onpointerleave = () => { figure.querySelector(".tip")?.remove(); svg.querySelector(".cursor")?.remove(); };
}

// The values at the logged x nearest to the pointer.
function point(figure, svg, chart, event, { across, up, x0, x1, width, height, from }) {
  const left = event.clientX - svg.getBoundingClientRect().left;
  const at = x0 + ((left - EDGE.left) / (width - EDGE.left - EDGE.right)) * (x1 - x0);
  const rows = [];
  let nearest = null;
  for (const s of chart.series) {
    let best = 0;
    for (let i = 1; i < s.x.length; i++) if (Math.abs(s.x[i] - at) < Math.abs(s.x[best] - at)) best = i;
    if (s.x[best] < from) continue;
    if (!s.dots || s.x[best] === nearest) rows.push([s, best]);
    if (nearest === null || Math.abs(s.x[best] - at) < Math.abs(nearest - at)) nearest = s.x[best];
  }
  if (nearest === null) return;
  // With many curves, the ten nearest to the pointer, the highest first.
  const top = event.clientY - svg.getBoundingClientRect().top;
  const away = ([s, i]) => Math.abs(up(s.y[i]) - top);
  const told = rows.sort((a, b) => away(a) - away(b)).slice(0, 10).sort(([s, i], [t, j]) => t.y[j] - s.y[i]);
  figure.querySelector(".tip")?.remove();
  svg.querySelector(".cursor")?.remove();
  const x = across(nearest);
  element("line", { class: "cursor", x1: x, x2: x, y1: EDGE.top, y2: height - EDGE.bottom }, svg);
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.append(`${short(nearest, 5)} ${chart.x.split(",")[0]}`);
  for (const [s, i] of told) {
    const line = document.createElement("div"), dot = document.createElement("i");
    dot.className = "dot";
    dot.style.setProperty("--shade", runs[s.run].colour);
    const where = s.x[i] === nearest ? "" : ` at ${short(s.x[i], 5)}`;
    line.append(dot, `${runs[s.run].label}${s.dots ? ", validation" : ""}: ${+s.y[i].toPrecision(6)}${where}`);
    tip.append(line);
  }
  figure.append(tip);
  const room = figure.clientWidth - tip.offsetWidth - 6;
  tip.style.left = Math.max(6, Math.min(room, x < width / 2 ? x + 26 : x - tip.offsetWidth - 6)) + "px";
  tip.style.top = "44px";
}

function legend() {
  for (const run of runs) {
    const entry = document.createElement("span");
    const svg = element("svg", { viewBox: "0 0 26 9" }, entry);
    const dash = DASHES[run.pattern % DASHES.length];
    element("path", { d: "M0 5H26", style: `--shade: ${run.colour}`, "stroke-dasharray": dash }, svg);
    entry.append(run.label);
    document.querySelector(".legend").append(entry);
  }
}

const figures = [...document.querySelectorAll("figure[data-chart]")];
const whole = new Set();
const drawOne = (figure) => draw(figure, charts[figure.dataset.chart], whole.has(figure));
if (figures.length) legend();
for (const figure of figures) {
  const button = figure.querySelector("button");
  if (button) button.onclick = () => {
    if (!whole.delete(figure)) whole.add(figure);
    button.textContent = whole.has(figure) ? "from where they part" : "whole curves";
    drawOne(figure);
  };
  drawOne(figure);
}
addEventListener("resize", () => figures.forEach(drawOne));
