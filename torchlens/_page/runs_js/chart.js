/* What charts over steps share: a canvas, the axis of steps, and the line at the chosen step, which moves without drawing. */

import { html } from "../js/elements.js";

export const paint = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const timings = {};
export function timed(name, act) {
  const begun = performance.now(), found = act();
  timings[name] = performance.now() - begun;
  return found;
}

/* How wide what stands in an element is. The browser works that out anew after every change: it is asked once for all charts of a frame. */
let widths = null;
function widthIn(element) {
  if (!widths) { widths = new Map(); requestAnimationFrame(() => { widths = null; }); }
  const host = element.parentElement;
  if (!widths.has(host)) widths.set(host, element.clientWidth);
  return widths.get(host);
}

/* `span` is [first step, last step]; `act.onStep` hears of clicks. `left` is the room for numbers at the left. */
export class Chart {
  constructor({ height, left = 46, right = 6, label, onStep }) {
    this.height = height; this.left = left; this.right = right;
    this.canvas = html("canvas", { role: "img", "aria-label": label });
    this.line = html("i", { class: "cursor" });
    this.tip = html("span", { class: "tip", hidden: "" });
    this.element = html("div", { class: "chart" }, this.canvas, this.line, this.tip);
    this.element.style.height = height + "px";
    this.span = [0, 1];
    const stepAt = event => {
      const box = this.canvas.getBoundingClientRect(), share = (event.clientX - box.left - this.left) / (box.width - this.left - this.right);
      return this.span[0] + Math.max(0, Math.min(1, share)) * (this.span[1] - this.span[0]);
    };
    if (onStep) {
      this.canvas.addEventListener("click", event => onStep(stepAt(event)));
      this.canvas.addEventListener("pointermove", event => { const text = this.tipAt ? this.tipAt(stepAt(event), event) : ""; this.tip.hidden = !text; this.tip.textContent = text; });
      this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    }
  }
  /* The canvas, cleared, at the size that it has now. */
  ink() {
    const ratio = window.devicePixelRatio || 1;
    this.width = widthIn(this.element) || 300;
    const width = Math.round(this.width * ratio), height = Math.round(this.height * ratio), ink = this.canvas.getContext("2d");
    if (this.canvas.width === width && this.canvas.height === height && ink.reset) ink.reset();
    else { this.canvas.width = width; this.canvas.height = height; }
    ink.setTransform(ratio, 0, 0, ratio, 0, 0);
    ink.font = "11px " + getComputedStyle(document.body).fontFamily;
    return ink;
  }
  x(step) { const [a, b] = this.span; return this.left + (b > a ? (step - a) / (b - a) : 1) * (this.width - this.left - this.right); }
  setStep(step) {
    const isIn = step >= this.span[0] && step <= this.span[1];
    this.line.hidden = !isIn;
    if (isIn) this.line.style.transform = `translateX(${this.x(step)}px)`;
  }
}
/* Round numbers between two. */
export function ticks(low, high, most = 4) {
  const rough = (high - low) / most;
  if (!(rough > 0) || !Number.isFinite(rough)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough)), size = [1, 2, 5, 10].find(s => s * power >= rough) * power, out = [];
  for (let v = Math.ceil(low / size) * size; v <= high + size * 1e-9; v += size) out.push(Math.abs(v) < size * 1e-9 ? 0 : v);
  return out;
}
export function tickText(v) {
  const size = Math.abs(v);
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? v.toExponential(0).replace("e+", "e") : String(+v.toPrecision(3));
}
