/* Histograms over steps: as a heat map, or as ridges. */

import { Chart, paint, tickText, ticks, timed } from "./chart.js";
import { drawSteps } from "./curves.js";

const ZERO = 1023;
const bits = new DataView(new ArrayBuffer(4));
const valueOf = upper => { bits.setUint32(0, upper << 22 >>> 0); return bits.getFloat32(0); };
/* Where a bin begins and ends: its number is the sign, the exponent and the first bit of the mantissa (see monitoring/bins.py). */
export function edgesOf(code) {
  if (code === ZERO) return [0, 0];
  const size = code & 511, near = valueOf(size), far = size === 509 ? 2 ** 128 : valueOf(size + 1);
  return code >= 512 ? [-far, -near] : [near, far];
}
const orderOf = code => code === ZERO ? 0 : code >= 512 ? 511 - code : code + 1;

/* Bins of equal width out of those that there are. What lies outside is left out; each column is scaled to its largest. */
function linear(histograms, numBins) {
  const { rows, columns, levels } = histograms;
  const shares = new Map(), most = new Float64Array(columns);
  for (const [code, row] of rows) { const own = new Float64Array(columns); for (let c = 0; c < columns; c++) { own[c] = (row[c] / levels) ** 2; most[c] += own[c]; } shares.set(code, own); }
  // From the first to the last bin that ever holds half a hundredth.
  let low = Infinity, high = -Infinity;
  for (const [code, own] of shares) for (let c = 0; c < columns; c++) if (own[c] > 0.005 * most[c]) { const [a, b] = edgesOf(code); low = Math.min(low, a); high = Math.max(high, b); break; }
  if (!(low <= high)) return null;
  if (low === high) { const by = Math.abs(low) * 0.05 || 1; low -= by; high += by; }
  const out = Array.from({ length: columns }, () => new Float32Array(numBins)), size = (high - low) / numBins;
  for (const [code, own] of shares) {
    let [a, b] = edgesOf(code);
    if (b < low || a > high) continue;
    if (b - a < size) { const middle = (a + b) / 2, at = Math.max(0, Math.min(numBins - 1, Math.floor((middle - low) / size))); for (let c = 0; c < columns; c++) out[c][at] += own[c]; continue; }
    const first = Math.max(0, Math.floor((a - low) / size)), last = Math.min(numBins - 1, Math.floor((b - low) / size));
    for (let k = first; k <= last; k++) {
      const inside = (Math.min(b, low + (k + 1) * size) - Math.max(a, low + k * size)) / (b - a);
      if (inside > 0) for (let c = 0; c < columns; c++) out[c][k] += own[c] * inside;
    }
  }
  // Zeros are often most of all: their bar is cut, so that the others can be seen.
  scaled(out, shares.has(ZERO) ? Math.max(0, Math.min(numBins - 1, Math.floor(-low / size))) : -1);
  return { columns: out, low, high };
}
/* The bins as they are: two an octave on either side of zero. */
function logarithmic(histograms) {
  const codes = [...histograms.rows.keys()].sort((a, b) => orderOf(a) - orderOf(b));
  if (!codes.length) return null;
  const out = Array.from({ length: histograms.columns }, () => new Float32Array(codes.length));
  codes.forEach((code, k) => { const row = histograms.rows.get(code); for (let c = 0; c < row.length; c++) out[c][k] = (row[c] / histograms.levels) ** 2; });
  return { columns: out, codes };
}
function scaled(columns, zeros) {
  for (const column of columns) {
    let most = 0;
    for (let k = 0; k < column.length; k++) if (k !== zeros && column[k] > most) most = column[k];
    if (!most) most = column[zeros] || 0;
    if (most) for (let k = 0; k < column.length; k++) column[k] = Math.min(1, column[k] / most);
  }
}

export class Distributions {
  constructor({ label, onStep, height = 118 }) {
    this.chart = new Chart({ height, label, onStep });
    this.element = this.chart.element;
    this.step = 0;
  }
  /* `steps` are those of the run, `look` is {shape: "heat" or "ridge", axis: "linear" or "log"}. */
  set(histograms, { steps, colour, span, look }) {
    Object.assign(this, { histograms, steps, colour, look });
    this.chart.span = look.shape === "heat" ? span : [0, -1];
    this.binned = histograms && histograms.columns ? look.axis === "log" ? logarithmic(histograms) : linear(histograms, look.shape === "ridge" ? 90 : 64) : null;
    this.draw();
  }
  draw() { timed(this.look.shape, () => this.look.shape === "ridge" ? this.drawRidge() : this.drawHeat()); }
  setStep(step) {
    const isOther = this.step !== step;
    this.step = step;
    if (this.look && this.look.shape === "ridge") { if (isOther) this.draw(); this.chart.line.hidden = true; } else this.chart.setStep(step);
  }
  stepOf(column) { return this.steps[Math.min(this.steps.length - 1, (column + 1) * this.histograms.stride - 1)]; }
  empty(ink) { ink.fillStyle = paint("--quiet"); ink.fillText("nothing finite yet", this.chart.left, this.chart.height / 2); }
  drawHeat() {
    const { chart } = this, ink = chart.ink(), bottom = chart.height - 16, top = 4;
    if (!this.binned) { this.empty(ink); return; }
    const { columns } = this.binned, height = columns[0].length, picture = heatPicture(columns, height, this.colour);
    ink.imageSmoothingEnabled = false;
    // A column reaches to the step before it. Columns in a row that are equally wide are drawn at once.
    let last = this.steps[0] - (this.steps.length > 1 ? this.steps[1] - this.steps[0] : 1);
    let begun = 0, start = last, width = 0;
    for (let c = 0; c <= columns.length; c++) {
      const end = c < columns.length ? this.stepOf(c) : NaN, own = end - last;
      if (c === columns.length || c > begun && own !== width) {
        const x0 = chart.x(start), x1 = chart.x(last);
        ink.drawImage(picture, begun, 0, c - begun, height, Math.max(chart.left, x0), top, Math.max(1, x1 - Math.max(chart.left, x0)), bottom - top);
        begun = c;
        start = last;
      }
      width = own;
      last = end;
    }
    ink.strokeStyle = paint("--line");
    ink.strokeRect(chart.left + 0.5, top + 0.5, chart.width - chart.left - chart.right - 1, bottom - top - 1);
    ink.fillStyle = paint("--quiet");
    ink.textAlign = "right";
    for (const [share, text] of this.valueTicks()) ink.fillText(text, chart.left - 5, bottom - share * (bottom - top) + 3.5);
    drawSteps(ink, chart, bottom);
    ink.textAlign = "left";
  }
  /* [where on the axis, from 0 to 1; text] */
  valueTicks() {
    const { codes, low, high } = this.binned;
    if (!codes) return ticks(low, high, 4).map(v => [(v - low) / (high - low), tickText(v)]);
    const wanted = Math.min(5, codes.length), out = [];
    for (let k = 0; k < wanted; k++) { const at = wanted > 1 ? Math.round(k * (codes.length - 1) / (wanted - 1)) : 0, [a, b] = edgesOf(codes[at]); out.push([(at + 0.5) / codes.length, tickText(Math.abs(a) < Math.abs(b) ? a : b)]); }
    const zero = codes.indexOf(ZERO);
    if (zero >= 0) return [...out.filter(([share]) => Math.abs(share - (zero + 0.5) / codes.length) > 0.12), [(zero + 0.5) / codes.length, "0"]];
    return out;
  }
  drawRidge() {
    const { chart } = this, ink = chart.ink(), bottom = chart.height - 16;
    if (!this.binned) { this.empty(ink); return; }
    const { columns } = this.binned, most = 16, count = Math.min(most, columns.length), rise = Math.min(46, chart.height * 0.34), room = bottom - rise - 4;
    const x = share => chart.left + share * (chart.width - chart.left - chart.right), now = this.columnAt(this.step);
    const shown = Array.from({ length: count }, (_, k) => count > 1 ? Math.round(k * (columns.length - 1) / (count - 1)) : 0);
    if (!shown.includes(now)) shown.push(now);
    shown.sort((a, b) => a - b);
    ink.textAlign = "right";
    for (const c of shown) {
      const at = columns.length > 1 ? c / (columns.length - 1) : 1, base = rise + 4 + at * room, own = columns[c], isNow = c === now;
      ink.beginPath();
      ink.moveTo(x(0), base);
      for (let k = 0; k < own.length; k++) ink.lineTo(x((k + 0.5) / own.length), base - own[k] * rise);
      ink.lineTo(x(1), base);
      ink.fillStyle = paint("--card");
      ink.globalAlpha = 0.8;
      ink.fill();
      ink.fillStyle = this.colour;
      ink.globalAlpha = isNow ? 0.75 : 0.12 + 0.25 * at;
      ink.fill();
      ink.globalAlpha = 1;
      ink.strokeStyle = isNow ? paint("--ink") : this.colour;
      ink.lineWidth = isNow ? 1.6 : 0.9;
      ink.stroke();
      if (isNow || c === shown[0] || c === shown[shown.length - 1]) { ink.fillStyle = paint(isNow ? "--ink" : "--quiet"); if (isNow || Math.abs(c - now) > columns.length / 8) ink.fillText(this.stepOf(c).toLocaleString("en-US"), chart.left - 5, base + 3); }
    }
    ink.textAlign = "center";
    ink.fillStyle = paint("--quiet");
    for (const [share, text] of this.valueTicks()) ink.fillText(text, Math.min(x(share), chart.width - ink.measureText(text).width / 2 - 1), bottom + 13);
    ink.textAlign = "left";
  }
  columnAt(step) {
    const { columns } = this.binned;
    let low = 0, high = columns.length - 1;
    while (low < high) { const mid = (low + high) >> 1; if (this.stepOf(mid) < step) low = mid + 1; else high = mid; }
    return low;
  }
}
/* One pixel for each bin and column, the largest values at the top. */
function heatPicture(columns, height, colour) {
  const canvas = new OffscreenCanvas(columns.length, height), ink = canvas.getContext("2d"), picture = ink.createImageData(columns.length, height), [r, g, b] = channels(colour);
  for (let c = 0; c < columns.length; c++) for (let k = 0; k < height; k++) {
    const v = columns[c][k];
    if (!v) continue;
    const at = ((height - 1 - k) * columns.length + c) * 4;
    picture.data[at] = r; picture.data[at + 1] = g; picture.data[at + 2] = b; picture.data[at + 3] = 20 + 235 * Math.sqrt(v);
  }
  ink.putImageData(picture, 0, 0);
  return canvas;
}
const known = new Map();
export function channels(colour) {
  if (!known.has(colour)) {
    const ink = new OffscreenCanvas(1, 1).getContext("2d");
    ink.fillStyle = colour;
    ink.fillRect(0, 0, 1, 1);
    known.set(colour, ink.getImageData(0, 0, 1, 1).data);
  }
  return known.get(colour);
}
