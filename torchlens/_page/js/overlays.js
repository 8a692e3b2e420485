/* Overlays: values that colour the model. */

import { D, E, LEFT, N, P, end, isUnit, leftIn, scene, state } from "./outline.js";
import { countUnits } from "./names.js";
import { bytesText, numberText, short, timeText } from "./numbers.js";
import { colourAt } from "./scale.js";

export const overlays = new Map();
overlays.set("time", { values: E.micros, left: "micros", isSum: true, text: timeText });
overlays.set("memory", { values: E.bytes, left: "bytes", isSum: true, text: bytesText });
if (E.flops.some(v => v > 0)) overlays.set("FLOPs", { values: E.flops.map(v => v || null), left: "flops", isSum: true, text: v => short(v) });
if (E.backward.some(v => v !== null)) overlays.set("backward time", { values: E.backward, left: "backward", isSum: true, text: timeText });
if (E.gradnorm.some(v => v !== null)) overlays.set("gradient norm", { values: E.gradnorm, isSum: false, text: numberText });
const UNITS = { seconds: v => timeText(v * 1e6), bytes: v => v < 0 ? "-" + bytesText(-v) : bytesText(v), FLOPs: v => short(v) };
for (const own of D.overlays) {
  overlays.set(own.name, { parts: new Map(own.parts.map((p, k) => [p, own.values[k]])), isSum: own.isSum, isOwn: true, text: UNITS[own.unit] || numberText });
}
export function overlayValue(i) {
  const o = overlays.get(state.overlay);
  if (!o) return null;
  if (o.parts) return o.parts.has(i) ? o.parts.get(i) : null;
  let sum = 0, count = 0;
  for (let u = i; u < end[i]; u++) for (const own of P.entries[u]) for (const e of own) if (o.values[e] !== null) { sum += o.values[e]; count++; }
  if (LEFT && o.left) { sum += leftIn(i, o.left); count += leftIn(i, "passes"); }
  return count ? (o.isSum ? sum : sum / count) : null;
}
export const overlayText = v => overlays.get(state.overlay).text(v);

/* The value that colours a part: its total, or the mean of its operations. */
export function colourValue(i) {
  const v = overlayValue(i), o = overlays.get(state.overlay);
  return v !== null && o.isSum && state.scale.per === "operation" ? v / Math.max(1, countUnits(i)) : v;
}
/* The ends of the scale, and whether it is logarithmic. For means they do not depend on what is open. */
export function overlayRange() {
  if (!state.overlay) return null;
  const given = overlays.get(state.overlay).range;
  if (given) return given;
  let min = Infinity, max = -Infinity, least = Infinity;
  const look = i => {
    const v = colourValue(i);
    if (v === null) return;
    min = Math.min(min, v);
    max = Math.max(max, v);
    if (v > 0) least = Math.min(least, v);
  };
  if (state.scale.per === "operation") { for (let i = 1; i < N; i++) if (isUnit(i)) look(i); }
  else for (const node of scene.nodes.values()) if (!node.isBox) look(node.id);
  const canLog = min >= 0 && max > 0;
  const isLog = canLog && (state.scale.kind === "log" || state.scale.kind === "auto" && max > 100 * least);
  return { min, max, isLog, least: Math.max(least, max / 1e6) };
}
/* The position of a value on the scale, from 0 to 1. */
export function placeOn(range, v) {
  if (!(range.max > range.min)) return 1;
  if (range.isLog) return v <= 0 ? 0 : Math.max(0, Math.min(1, Math.log(v / range.least) / Math.log(range.max / range.least) || 0));
  return Math.max(0, Math.min(1, (v - range.min) / (range.max - range.min)));
}
/* The darkest colour is the largest value. */
export const overlayColour = t => colourAt(1 - t);
