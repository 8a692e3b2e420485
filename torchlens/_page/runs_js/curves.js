/* Curves over steps, of several runs on top of each other. */

import { numberText } from "../js/numbers.js";
import { Chart, paint, tickText, ticks, timed } from "./chart.js";

/* `lines` are {steps, values, low, high, colour, name}; `setLines` draws them. */
export class Curves {
  constructor({ label, height = 120, onStep, text = numberText }) {
    this.chart = new Chart({ height, label, onStep });
    this.element = this.chart.element;
    this.lines = [];
    this.text = text;
    this.chart.tipAt = step => this.lines.map(line => {
      const at = nearest(line.steps, step);
      return at < 0 ? "" : (this.lines.length > 1 ? line.name + ": " : "step " + line.steps[at] + ": ") + text(line.values[at]);
    }).filter(Boolean).join("   ");
  }
  setLines(lines, span) { this.lines = lines; this.chart.span = span; timed("curves", () => this.draw()); }
  draw() {
    const { chart } = this, ink = chart.ink(), bottom = chart.height - 16, top = 6;
    let min = Infinity, max = -Infinity, least = Infinity, hasBad = false;
    for (const { values } of this.lines) for (const v of values) {
      if (!Number.isFinite(v)) { hasBad = hasBad || !Number.isNaN(v); continue; }
      if (v < min) min = v;
      if (v > max) max = v;
      if (v > 0 && v < least) least = v;
    }
    ink.fillStyle = paint("--quiet");
    if (min > max) { ink.fillText(hasBad ? "not finite" : "nothing yet", chart.left, chart.height / 2); return; }
    const isLog = min >= 0 && max > 200 * least;
    if (isLog) min = Math.max(least, max / 1e8);
    if (max === min) { const by = Math.abs(max) * 0.1 || 1; max += by; min -= by; }
    const y = v => isLog ? bottom - Math.log(Math.max(v, min) / min) / Math.log(max / min) * (bottom - top) : bottom - (v - min) / (max - min) * (bottom - top);
    ink.strokeStyle = paint("--line");
    ink.textAlign = "right";
    ink.lineWidth = 1;
    const marks = isLog ? powers(min, max) : ticks(min, max, 3);
    for (const v of marks) {
      const at = Math.round(y(v)) + 0.5;
      ink.beginPath(); ink.moveTo(chart.left, at); ink.lineTo(chart.width - chart.right, at); ink.stroke();
      ink.fillText(tickText(v), chart.left - 5, at + 3.5);
    }
    drawSteps(ink, chart, bottom);
    for (const line of this.lines) this.drawLine(ink, line, y);
    ink.textAlign = "left";
  }
  drawLine(ink, { steps, values, low, high, colour }, y) {
    const { chart } = this;
    ink.fillStyle = ink.strokeStyle = colour;
    if (low) {
      ink.globalAlpha = 0.18;
      ink.beginPath();
      for (let k = 0; k < steps.length; k++) if (Number.isFinite(high[k])) ink.lineTo(chart.x(steps[k]), y(high[k]));
      for (let k = steps.length - 1; k >= 0; k--) if (Number.isFinite(low[k])) ink.lineTo(chart.x(steps[k]), y(low[k]));
      ink.fill();
      ink.globalAlpha = 1;
    }
    ink.lineWidth = 1.6;
    ink.lineJoin = "round";
    ink.beginPath();
    let isOn = false, last = -1;
    for (let k = 0; k < steps.length; k++) {
      const v = values[k];
      if (!Number.isFinite(v)) { isOn = false; continue; }
      const x = chart.x(steps[k]);
      if (isOn) ink.lineTo(x, y(v)); else ink.moveTo(x, y(v));
      isOn = true;
      last = k;
    }
    ink.stroke();
    if (last >= 0 && steps.length === 1) { ink.beginPath(); ink.arc(chart.x(steps[last]), y(values[last]), 2.5, 0, 7); ink.fill(); }
  }
}
export function drawSteps(ink, chart, bottom) {
  ink.textAlign = "center";
  ink.fillStyle = paint("--quiet");
  for (const step of ticks(chart.span[0], chart.span[1], Math.max(2, Math.floor(chart.width / 90)))) {
    const text = step.toLocaleString("en-US"), half = ink.measureText(text).width / 2;
    ink.fillText(text, Math.min(chart.x(step), chart.width - half - 1), bottom + 13);
  }
  ink.textAlign = "right";
}
function powers(min, max) {
  const first = Math.ceil(Math.log10(min)), last = Math.floor(Math.log10(max)), by = Math.max(1, Math.ceil((last - first + 1) / 4)), out = [];
  for (let p = first; p <= last; p += by) out.push(10 ** p);
  return out.length ? out : [min, max];
}
export function nearest(steps, step) {
  if (!steps.length) return -1;
  let low = 0, high = steps.length - 1;
  while (low < high) { const mid = (low + high) >> 1; if (steps[mid] < step) low = mid + 1; else high = mid; }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}
