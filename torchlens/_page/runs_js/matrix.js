/* All modules over all steps, by one statistic: a row for each module. */

import { html } from "../js/elements.js";
import { clip } from "../js/numbers.js";
import { colourAt } from "../js/scale.js";
import { paint, ticks, timed } from "./chart.js";
import { channels } from "./distributions.js";
import { STATISTICS, placeOn } from "./statistics.js";

const AXIS = 18, GAP = 8;
const LADDER = (() => { const out = new Uint8ClampedArray(256 * 3); for (let i = 0; i < 256; i++) out.set(colourAt(1 - i / 255), i * 3); return out; })();  // darkest is most, as in the graph

/* The colour (a pixel) of every number, by the upper half of its bits: more than that is not sent, nor seen. Looking it up takes a tenth of working it out. */
let ladder = { key: "" };
function coloursOf(range, bad) {
  const key = JSON.stringify([range, bad]);
  if (ladder.key !== key) ladder = { key, colours: computedColours(range, bad) };
  return ladder.colours;
}
function computedColours(range, bad) {
  const values = new Float32Array(1 << 16), bits = new Uint32Array(values.buffer), out = new Uint32Array(1 << 16), bytes = new Uint8Array(out.buffer);
  for (let i = 0; i < 1 << 16; i++) bits[i] = i << 16;
  const { isLog } = range, low = isLog ? Math.log(range.least) : range.min, size = isLog ? Math.log(range.max) - low : range.max - range.min;
  for (let i = 0; i < 1 << 16; i++) {
    const v = values[i];
    if (v !== v) continue;
    if (v === Infinity || v === -Infinity) { out[i] = bad; continue; }
    const t = isLog ? v > 0 ? (Math.log(v) - low) / size : 0 : size > 0 ? (v - low) / size : 1, k = (t <= 0 ? 0 : t >= 1 ? 255 : t * 255 | 0) * 3;
    bytes[4 * i] = LADDER[k]; bytes[4 * i + 1] = LADDER[k + 1]; bytes[4 * i + 2] = LADDER[k + 2]; bytes[4 * i + 3] = 255;
  }
  return out;
}

export class Matrix {
  constructor({ onPick }) {
    this.canvas = html("canvas", { role: "img", tabindex: "0", "aria-label": "All modules over all steps" });
    this.line = html("i", { class: "cursor" });
    this.row = html("i", { class: "row-mark", hidden: "" });
    this.tip = html("span", { class: "tip", hidden: "" });
    this.element = html("div", { class: "matrix" }, this.canvas, this.row, this.line, this.tip);
    this.canvas.addEventListener("click", event => { const at = this.at(event); if (at) onPick(at.name, at.step); });
    this.canvas.addEventListener("pointermove", event => {
      const at = this.at(event);
      this.tip.hidden = !at;
      if (at) this.tip.textContent = (at.name || "the model") + ", step " + at.step + ": " + (Number.isNaN(at.value) ? "–" : STATISTICS[this.statistic].text(at.value));
    });
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
  }
  /* `rows` are {name, values}, a value for `stride` steps of the run. */
  set({ rows, stride, steps, span, range, statistic, name }) {
    Object.assign(this, { rows, stride, steps, span, range, statistic, name });
    timed("matrix", () => this.draw());
  }
  draw() {
    const ratio = window.devicePixelRatio || 1, w = this.element.clientWidth, available = this.element.parentElement.clientHeight;
    const each = Math.max(1, Math.min(20, Math.floor((available - AXIS - 8) / Math.max(1, this.rows.length))));
    const h = Math.max(40, each * this.rows.length + AXIS);
    this.left = Math.min(210, w * 0.32);
    Object.assign(this, { each, w, h });
    this.canvas.width = Math.round(w * ratio);
    this.canvas.height = Math.round(h * ratio);
    this.canvas.style.height = h + "px";
    const ink = this.canvas.getContext("2d");
    ink.setTransform(ratio, 0, 0, ratio, 0, 0);
    ink.font = "12px " + getComputedStyle(document.body).fontFamily;
    if (!this.rows.length || !this.steps.length) { ink.fillStyle = paint("--quiet"); ink.fillText("Nothing was recorded of this kind.", 12, 24); return; }
    const picture = this.picture(), top = h - AXIS - each * this.rows.length;
    ink.imageSmoothingEnabled = false;
    this.pieces((from, count, x0, x1) => ink.drawImage(picture, from, 0, count, this.rows.length, x0, top, x1 - x0, each * this.rows.length));
    ink.fillStyle = paint("--ink");
    ink.textAlign = "right";
    ink.textBaseline = "middle";
    const every = Math.max(1, Math.ceil(13 / each));
    for (let k = 0; k < this.rows.length; k += every) ink.fillText(clip(this.rows[k].name || "the model", this.left - GAP - 4), this.left - GAP, Math.max(7, top + (k + 0.5) * each + (every > 1 ? 4 : 0)));
    ink.fillStyle = paint("--quiet");
    ink.textAlign = "center";
    for (const step of ticks(this.span[0], this.span[1], Math.max(2, Math.floor(w / 110)))) ink.fillText(step.toLocaleString("en-US"), Math.min(this.x(step), w - 20), h - AXIS / 2 + 2);
    this.top = top;
    this.line.style.height = h - AXIS + "px";
    this.setSelected(this.selected);
  }
  /* One pixel for each module and column. */
  picture() {
    const width = Math.max(...this.rows.map(row => row.values.length)), height = this.rows.length, canvas = new OffscreenCanvas(width, height), ink = canvas.getContext("2d"), image = ink.createImageData(width, height), pixels = new Uint32Array(image.data.buffer);
    const colours = coloursOf(this.range, new Uint32Array(channels(paint("--danger")).buffer)[0]);
    for (let r = 0; r < height; r++) {
      const { values } = this.rows[r], bits = new Uint32Array(values.buffer, values.byteOffset, values.length);
      for (let c = 0, at = r * width; c < bits.length; c++) pixels[at++] = colours[bits[c] >>> 16];
    }
    ink.putImageData(image, 0, 0);
    return canvas;
  }
  x(step) { const [a, b] = this.span; return this.left + (b > a ? (step - a) / (b - a) : 1) * (this.w - this.left - 10); }
  /* Columns in a row that are equally wide, with where they begin and end. */
  pieces(act) {
    const columns = Math.max(...this.rows.map(row => row.values.length)), stepOf = c => this.steps[Math.min(this.steps.length - 1, (c + 1) * this.stride - 1)];
    let last = this.steps[0] - (this.steps.length > 1 ? this.steps[1] - this.steps[0] : 1), begun = 0, start = last, width = 0;
    for (let c = 0; c <= columns; c++) {
      const end = c < columns ? stepOf(c) : NaN, own = end - last;
      if (c === columns || c > begun && own !== width) { act(begun, c - begun, Math.max(this.left, this.x(start)), Math.max(this.left + 1, this.x(last))); begun = c; start = last; }
      width = own;
      last = end;
    }
  }
  at(event) {
    if (!this.rows || !this.rows.length || !this.steps.length) return null;
    const box = this.canvas.getBoundingClientRect(), k = Math.floor((event.clientY - box.top - this.top) / this.each), row = this.rows[k];
    if (!row) return null;
    const [a, b] = this.span, wanted = a + Math.max(0, Math.min(1, (event.clientX - box.left - this.left) / (this.w - this.left - 10))) * (b - a);
    let place = this.steps.findIndex(step => step >= wanted);
    if (place < 0) place = this.steps.length - 1;
    return { name: row.name, step: this.steps[place], value: row.values[Math.min(row.values.length - 1, Math.floor(place / this.stride))] };
  }
  setStep(step) {
    if (!this.span || !this.w) return;
    this.line.hidden = step < this.span[0] || step > this.span[1];
    this.line.style.transform = `translateX(${this.x(step)}px)`;
  }
  setSelected(name) {
    this.selected = name;
    const at = this.rows ? this.rows.findIndex(row => row.name === name) : -1;
    this.row.hidden = at < 0;
    if (at >= 0) { this.row.style.top = this.top + at * this.each + "px"; this.row.style.height = Math.max(2, this.each) + "px"; }
  }
}
/* What colour a value has. */
export const colourOf = (range, v) => colourAt(1 - placeOn(range, v));
