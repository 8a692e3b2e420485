/* Titles and descriptions of parts. */

import { D, E, P, Q, S, end, failedUnit, isOpenable, isUnit, kids, kindOf, leftIn, state } from "./outline.js";
import { links } from "./links.js";
import { markOf } from "./marks.js";
import { many, short } from "./numbers.js";
import { colourValue, overlayText, overlayValue } from "./overlays.js";

export function entriesNow(unit) {
  const passes = P.entries[unit];
  return passes[Math.min(state.pass.get(unit) || 0, passes.length - 1)] || [];
}
export function shapeOf(i) {
  if (i === failedUnit) return "";
  const unit = isOpenable(i) ? links.outOf[i] : i;
  const own = unit > 0 ? entriesNow(unit) : [];
  if (!own.length) return "";
  return S[E.shape[own[0]]] + (own.length > 1 ? "  + " + (own.length - 1) : "");
}
export function typeOf(i) {
  const type = S[P.type[i]];
  // An operation's name without underscores; a class name is unchanged.
  return isUnit(i) && !P.isModule[i] ? type.replace(/^__(\w+)__$/, "$1").replace(/_$/, "") : type;
}
/* The value that an `if` read, in the pass that is shown: `is True`. */
const booleans = new Map(D.conditions.read);
export function readOf(i) {
  const read = isUnit(i) ? entriesNow(i).find(e => booleans.has(e)) : undefined;
  return read === undefined ? "" : "is " + (booleans.get(read) ? "True" : "False");
}
export function titleOf(i) {
  const full = S[P.title[i]];
  if (full.length <= 30 || isUnit(i) && S[P.path[i]] !== full) return full;
  let box = P.parent[i];
  while (box > 0 && !S[P.path[box]]) box = P.parent[box];
  const above = box > 0 ? S[P.path[box]].replace(/:\d+$/, "") + "." : "";
  return above && full.startsWith(above) ? "…" + full.slice(above.length) : full;
}
const ownParams = new Map();
export function paramsIn(i) {
  let found = ownParams.get(i);
  if (!found) {
    const set = new Set();
    for (let u = i; u < end[i]; u++) for (const p of P.params[u]) set.add(p);
    ownParams.set(i, found = [...set]);
  }
  return found;
}
export const paramCount = i => paramsIn(i).reduce((sum, p) => sum + Q.count[p], 0);
/* `× 6`; for a loop that runs three times in each of two passes of the box around it, `× 3 each`. */
const timesOf = i => P.each[i] > 1 ? "× " + many(P.each[i]) + " each" : "× " + many(P.passes[i]);
/* `isPlain`: the text without overlay values. The layout uses it, so that overlays do not move nodes. */
export function noteOf(i, isPlain) {
  const notes = [];
  if (P.passes[i] > 1) notes.push(timesOf(i));
  if (state.overlay && !isPlain) { const v = colourValue(i); if (v !== null) notes.push(overlayText(v) + (v === overlayValue(i) ? "" : " / op")); }
  else if (paramsIn(i).length) notes.push(short(paramCount(i)) + (paramCount(i) === 1 ? " param" : " params"));
  else if (isUnit(i) && S[P.path[i]] && S[P.path[i]] !== S[P.title[i]]) notes.push(pathNote(S[P.path[i]]));
  else if (!isUnit(i) && P.passes[i] < 2) notes.push(many(countUnits(i)) + " " + wordFor(i, "op") + (countUnits(i) === 1 ? "" : "s"));
  return notes.join(" · ");
}
/* The noun for what is counted in a node: operations, inputs or outputs. */
export function wordFor(i, operation) {
  while (kids[i].length) i = kids[i][0];
  return ["input", "output"].includes(kindOf(i)) ? kindOf(i) : operation;
}
function pathNote(path) {
  if (path.length <= 16) return "@" + path;
  const parts = path.split(".");
  let text = parts.pop();
  while (parts.length && text.length + parts[parts.length - 1].length < 14) text = parts.pop() + "." + text;
  return "@…" + text;
}
export const failedText = () => D.failure.operation ? D.failure.operation + "(" + D.failure.arguments + ")" : "raise";
export function describe(i) {
  const bits = [S[P.title[i]], typeOf(i), shapeOf(i).replace(/×/g, " by ")];
  if (P.passes[i] > 1) bits.push(P.passes[i] + " times");
  if (!isUnit(i)) bits.push(countUnits(i) + " " + wordFor(i, "operation") + "s");
  const mark = markOf(i);
  if (mark) bits.push(mark.text);
  return bits.filter(Boolean).join(", ");
}
/* Optional lines below the shape: arguments and parameters. */
export function extraLines(i) {
  const lines = [];
  if (!isUnit(i) || i === failedUnit) return lines;
  const e = entriesNow(i)[0];
  if (state.extras.args && e !== undefined && P.side[i] !== 1 && E.args[e] && !["input", "output"].includes(kindOf(i))) lines.push(S[E.args[e]]);
  if (state.extras.params) for (const p of P.params[i].slice(0, 4)) lines.push(S[Q.address[p]].split(".").pop() + "  " + S[Q.shape[p]]);
  return lines;
}
const counts = new Map();
export function countUnits(i) {
  let c = counts.get(i);
  if (c === undefined) { c = 0; for (let u = i; u < end[i]; u++) if (isUnit(u)) c += P.entries[u].length; counts.set(i, c += leftIn(i, "passes")); }
  return c;
}
