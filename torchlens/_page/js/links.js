/* Edges between operations; hidden operations are bridged. */

import { D, N, P, PART, SIDE, end, isOpenable, kids, state, within } from "./outline.js";
import { countUnits } from "./names.js";

export let links = null;  // {pairs: [[a, b, is residual]], loops: [[child a, child b, of what they go round, a, b]], outOf: last operation read outside of each part, hidden, columns: what was found of each box}

export function connect() {
  const hidden = new Uint8Array(N);
  for (let i = N - 1; i >= 0; i--) {
    if (isOpenable(i)) hidden[i] = kids[i].every(k => hidden[k]) ? 1 : 0;
    else hidden[i] = P.side[i] && state.sides[SIDE[P.side[i]]] === "hide" ? 1 : 0;
  }
  const into = new Map(), seen = new Set(), pairs = [], loops = [];
  D.links.to.forEach((b, k) => { const list = into.get(b); if (list) list.push(k); else into.set(b, [k]); });
  const below = (i, box) => { while (i !== box && P.parent[i] !== box) i = P.parent[i]; return i; };
  // The sources of a part. A hidden source is replaced by its own sources; its loop box is kept.
  const sources = (b, visited) => {
    const found = [];
    for (const k of into.get(b) || []) {
      const a = D.links.from[k], around = D.links.around[k];
      const isResidual = D.links.residual[k] === 1;
      if (!hidden[a]) found.push([a, around, isResidual]);
      else if (!visited.has(a)) for (const [x, other] of sources(a, new Set([...visited, a]))) found.push([x, around >= 0 ? around : other, isResidual]);
    }
    return found;
  };
  for (const b of into.keys()) {
    if (hidden[b]) continue;
    for (const [a, around, isResidual] of sources(b, new Set([b]))) {
      const key = a + "/" + b + "/" + around;
      if (seen.has(key) || a === b && around < 0) continue;
      seen.add(key);
      if (around < 0) pairs.push([a, b, isResidual]);
      else loops.push([below(a, around), below(b, around), around, a, b]);
    }
  }
  const outOf = new Int32Array(N).fill(-1);
  for (const [a, b] of pairs) {
    for (let i = a; i > 0 && !within(b, i); i = P.parent[i]) outOf[i] = Math.max(outOf[i], a);
  }
  for (let i = N - 1; i > 0; i--) {
    if (!isOpenable(i)) outOf[i] = i;
    else if (outOf[i] < 0) { let u = end[i] - 1; while (u > i && isOpenable(u)) u--; outOf[i] = u; }
  }
  links = { pairs, loops, outOf, hidden, columns: new Map() };
}

/* Two modules of a box that are drawn side by side, such as encoder and decoder: the second reads the first, but begins
with something that the first neither leads to nor reads. */
export function columnsIn(box) {
  if (!links.columns.has(box)) links.columns.set(box, findColumns(box));
  return links.columns.get(box);
}
function findColumns(box) {
  const reads = new Map(), total = countUnits(box);
  const large = kids[box].filter(k => isOpenable(k) && PART[P.part[k]] === "module" && countUnits(k) >= 0.2 * total);
  if (large.length < 2) return null;
  for (const [a, b] of links.pairs) {
    if (!within(b, box)) continue;
    const x = within(a, box) ? childOf(a, box) : a, y = childOf(b, box);
    if (x !== y) { if (!reads.has(y)) reads.set(y, new Set()); reads.get(y).add(x); }
  }
  const leadsTo = (x, y) => { const seen = new Set([y]), pending = [y]; while (pending.length) for (const p of reads.get(pending.pop()) || []) { if (p === x) return true; if (!seen.has(p)) { seen.add(p); pending.push(p); } } return false; };
  for (const a of large) {
    for (const b of large) {
      if (!(reads.get(b) || new Set()).has(a)) continue;
      if ([...reads.get(b)].some(c => c !== a && !leadsTo(a, c) && !(reads.get(a) || new Set()).has(c))) return [a, b];
    }
  }
  return null;
}
function childOf(i, box) { while (P.parent[i] !== box) i = P.parent[i]; return i; }

/* Called when hidden kinds change. */
export function forgetLinks() { links = null; }
