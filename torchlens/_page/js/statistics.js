/* The values of a tensor: numbers, histogram, heat map. */

import { E, P, T, end } from "./outline.js";
import { many, numberText, percent } from "./numbers.js";
import { colourAt } from "./scale.js";
import { html, make } from "./elements.js";

export function bytesOf(text) { const raw = atob(text), out = new Uint8Array(raw.length); for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i); return out; }
let histograms = null, heat = null, heatStart = null;
function unpack() {
  if (histograms) return;
  histograms = bytesOf(T.histograms);
  heat = bytesOf(T.heat);
  heatStart = [0];
  T.rows.forEach((r, i) => heatStart.push(heatStart[i] + r * T.cols[i]));
}
export function histogram(row) {
  unpack();
  const el = make("svg", { class: "hist", viewBox: `0 0 ${T.bins} 100`, preserveAspectRatio: "none", role: "img", "aria-label": "Histogram from " + numberText(T.low[row]) + " to " + numberText(T.high[row]) });
  for (let b = 0; b < T.bins; b++) {
    const v = histograms[row * T.bins + b] / 255 * 100;
    if (v) make("rect", { x: b + 0.06, y: 100 - v, width: 0.88, height: v }, el);
  }
  return el;
}
function heatMap(row) {
  unpack();
  return heatPicture(T.rows[row], T.cols[row], heat, heatStart[row], "Heat map");
}
/* A picture of bytes: 254 is the highest value, 255 no number. */
export function heatPicture(rows, cols, bytes, start, name) {
  const canvas = html("canvas", { width: cols, height: rows, role: "img", "aria-label": name + ", " + rows + " by " + cols });
  canvas.width = cols; canvas.height = rows;
  const ctx = canvas.getContext("2d"), img = ctx.createImageData(cols, rows);
  for (let i = 0; i < rows * cols; i++) {
    const v = bytes[start + i], c = v === 255 ? [230, 60, 50] : colourAt(v / 254);
    img.data.set([...c, 255], i * 4);
  }
  ctx.putImageData(img, 0, 0);
  canvas.style.height = Math.max(14, Math.min(200, 316 * rows / cols)) + "px";
  return canvas;
}
/* "nan" or "inf" if a part has such values, else "". */
const isAllFinite = !T.nonfinite.some(share => share > 0);
export function badIn(i) {
  let bad = "";
  if (isAllFinite) return bad;
  for (let u = i; u < end[i]; u++) for (const own of P.entries[u]) for (const e of own) {
    const row = E.stat[e];
    if (row < 0 || !T.nonfinite[row]) continue;
    if (T.nan[row]) return "nan";
    bad = "infinite";
  }
  return bad;
}
export function statBlock(row, heading) {
  const out = document.createDocumentFragment();
  out.append(html("h3", {}, heading));
  const cells = [["min", T.min[row]], ["mean", T.mean[row]], ["max", T.max[row]], ["std", T.std[row]]].map(([name, v]) => html("div", {}, html("span", {}, name), numberText(v)));
  cells.push(html("div", {}, html("span", {}, "zeros"), percent(T.zeros[row])));
  cells.push(html("div", T.nonfinite[row] > 0 ? { class: "bad" } : {}, html("span", {}, "non-finite"), percent(T.nonfinite[row])));
  out.append(html("div", { class: "nums" }, ...cells), histogram(row),
    html("div", { class: "pair" }, html("span", {}, numberText(T.low[row])), html("span", {}, numberText(T.high[row]))));
  if (T.rows[row] * T.cols[row] > 1) {
    out.append(heatMap(row), html("div", { class: "pair" }, html("span", {}, "one example, last two dimensions"), html("span", {}, numberText(T.heatlow[row]) + " … " + numberText(T.heathigh[row]))));
  }
  if (T.sample[row]) out.append(html("div", { class: "sub" }, "Mean, std and zeros from " + many(T.sample[row]) + " of the values."));
  return out;
}
