/* Edges between operations; what is hidden is bridged. */

import { E, N, NUM, P, SIDE, end, isUnit, kids, siblings, state, unitOf, within } from "./outline.js";

export let links = null;  // {pairs: [[a, b]], loops: [[a, b, owner]], outOf: last operation read outside of each part, hidden}

export function connect() {
  const hidden = new Uint8Array(N);
  for (let i = N - 1; i >= 0; i--) {
    if (isUnit(i)) hidden[i] = P.side[i] && state.sides[SIDE[P.side[i]]] === "hide" ? 1 : 0;
    else hidden[i] = kids[i].length && kids[i].every(k => hidden[k]) ? 1 : 0;
  }
  const real = new Array(NUM), seen = new Set(), pairs = [], loops = [];
  const order = Array.from({ length: NUM }, (_, e) => e);
  for (const e of order) {
    const found = new Set();
    for (const p of E.parents[e]) if (hidden[unitOf[p]]) (real[p] || []).forEach(q => found.add(q)); else found.add(p);
    real[e] = found;
    if (hidden[unitOf[e]]) continue;
    const b = unitOf[e];
    for (const p of found) {
      const a = unitOf[p], key = a * N + b;
      if (seen.has(key)) continue;
      seen.add(key);
      if (a === b) { if (P.passes[a] > 1 && !P.buffers[a].includes(p)) loops.push([a, b, a]); continue; }
      const [x, y] = siblings(a, b), box = P.parent[x];
      if (x < y) pairs.push([a, b]);
      else loops.push([x, y, P.passes[box] > 1 ? box : -1]);
    }
  }
  const outOf = new Int32Array(N).fill(-1);
  for (const [a, b] of pairs) {
    for (let i = a; i > 0 && !within(b, i); i = P.parent[i]) outOf[i] = Math.max(outOf[i], a);
  }
  for (let i = N - 1; i > 0; i--) {
    if (isUnit(i)) outOf[i] = i;
    else if (outOf[i] < 0) { let u = end[i] - 1; while (u > i && !isUnit(u)) u--; outOf[i] = u; }
  }
  links = { pairs, loops, outOf, hidden };
}

/* What is hidden has changed. */
export function forgetLinks() { links = null; }
