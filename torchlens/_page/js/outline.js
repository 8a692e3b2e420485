/* The data of the page: the model as a tree of parts, with operations as leaves. */

export const started = performance.now();
/* `given` has `root` (the document or a shadow root with the elements of pane.html) and `data`; in a side-by-side page also
`address` (the initial state) and `tell` (called on user actions). The page sets `given.page`, its interface (drive.js). */
export const root = given.root, D = given.data;
export const tell = (what, ...facts) => { if (given.tell) given.tell(what, ...facts); };
export const S = D.strings, E = D.entries, P = D.parts, Q = D.parameters, T = D.statistics;
export const N = P.part.length, NUM = E.label.length;
export const KIND = D.kinds, PART = D.partKinds, SIDE = D.sides;
export const LINE_H = 17, NODE_H = 42, BAR_H = 21, HEAD_H = 26, PAD = 16, FOOT = 14, SMALLEST_TEXT = 11;
export const $ = id => root.getElementById(id);
export const svg = $("graph"), stage = $("stage"), panel = $("panel");

export const kids = Array.from({ length: N }, () => []), end = new Int32Array(N), depth = new Int32Array(N);
export const unitOf = new Int32Array(NUM), passOfEntry = new Int32Array(NUM);
for (let i = 1; i < N; i++) { kids[P.parent[i]].push(i); depth[i] = depth[P.parent[i]] + 1; }
for (let i = N - 1; i >= 0; i--) { end[i] = Math.max(end[i], i + 1); if (i) end[P.parent[i]] = Math.max(end[P.parent[i]], end[i]); }
for (let i = 0; i < N; i++) {
  P.entries[i].forEach((own, pass) => own.forEach(e => { unitOf[e] = i; passOfEntry[e] = pass; }));
  for (const e of P.buffers[i]) unitOf[e] = i;
}
export const children = Array.from({ length: NUM }, () => []);
E.parents.forEach((list, e) => list.forEach(p => children[p].push(e)));
export const isUnit = i => PART[P.part[i]] === "operation";
export const isOpenable = i => kids[i].length > 0;
export const kindOf = i => KIND[P.kind[i]];
export const within = (i, box) => i >= box && i < end[box];
export const VALUELESS = -2; // in place of a row of statistics
// Totals of what the page omits of a long log, by part: passes, bytes, ...
export const LEFT = D.leftOut, leftOut = new Map(LEFT ? LEFT.part.map((part, k) => [part, k]) : []);
export function leftIn(i, column) {
  let sum = 0;
  if (LEFT) for (let u = i; u < end[i]; u++) if (leftOut.has(u)) sum += LEFT[column][leftOut.get(u)];
  return sum;
}
export const failedUnit = D.failure ? unitOf[NUM - 1] : -1;

export const state = {
  open: new Uint8Array(N), selected: -1, second: -1, overlay: "", query: "", hits: [], hitAt: -1, pass: new Map(),
  sides: { buffer: "dim", constant: "dim", mask: "dim", view: "dim" }, view: { x: 0, y: 0, k: 1 },
  scale: { kind: "auto", per: "total" }, edge: null, extras: { args: false, params: false, shapes: false },  // what nodes and edges show if asked to
};
export const scene = { nodes: new Map(), edges: [], idle: [], orders: new Map(), width: 0, height: 0, fresh: new Set() };
export const timings = { open: 0, render: 0 };

export function siblings(a, b) {
  while (depth[a] > depth[b]) a = P.parent[a];
  while (depth[b] > depth[a]) b = P.parent[b];
  if (a === b) return null;
  while (P.parent[a] !== P.parent[b]) { a = P.parent[a]; b = P.parent[b]; }
  return [a, b];
}
