/* Highlights what the selection depends on and what depends on it. */

import { D, E, LEFT, N, NUM, P, children, end, isOpenable, isUnit, scene, state, unitOf, within } from "./outline.js";
import { elements, world } from "./draw.js";
import { sameEdge } from "./edges.js";

// Along entries; if the page carries only a selection of a long log, along the edges between parts.
const NUM_ENDS = LEFT ? N : NUM, partOfEnd = LEFT ? (i => i) : (e => unitOf[e]);
const upwards = LEFT ? Array.from({ length: N }, () => []) : E.parents, downwards = LEFT ? Array.from({ length: N }, () => []) : children;
if (LEFT) D.links.from.forEach((a, k) => { upwards[D.links.to[k]].push(a); downwards[a].push(D.links.to[k]); });
function reach(from, next) {
  const seen = new Uint8Array(NUM_ENDS), pending = from.slice();
  for (const e of pending) seen[e] = 1;
  while (pending.length) for (const f of next[pending.pop()]) if (!seen[f]) { seen[f] = 1; pending.push(f); }
  return seen;
}
export function entriesIn(i) {
  const found = [];
  for (let u = i; u < end[i]; u++) if (isUnit(u)) { for (const own of P.entries[u]) found.push(...own); found.push(...P.buffers[u]); }
  return found;
}
function endsIn(i) {
  if (!LEFT) return entriesIn(i);
  const found = [];
  for (let u = i; u < end[i]; u++) if (!isOpenable(u)) found.push(u);
  return found;
}
function repsOf(seen) {
  const reps = new Set();
  for (let e = 0; e < NUM_ENDS; e++) if (seen[e]) reps.add(scene.rep[partOfEnd(e)]);
  return reps;
}
/* `isNew`: everything was just drawn, so nothing is highlighted yet. */
export function light(isNew) {
  const chosen = state.selected > 0 && (!state.open[0] || state.selected !== 0);
  world.classList.toggle("lit", chosen || Boolean(state.edge));
  if (isNew && !chosen && !state.edge) return;
  for (const [i, el] of elements) { el.classList.toggle("sel", i === state.selected); el.classList.toggle("second", i === state.second); el.classList.remove("off"); }
  const tint = (edge, cls) => { for (const el of [edge.el, edge.arrow]) if (el) { el.classList.remove("off", "anc", "desc", "way"); if (cls) el.classList.add(cls); } };
  if (state.edge) state.edge = sameEdge(state.edge);
  if (!chosen) { for (const edge of scene.edges) tint(edge, edge === state.edge ? "way" : ""); return; }
  const own = endsIn(state.selected);
  const above = reach(own, upwards), below = reach(own, downwards);
  if (state.second > 0) {
    const other = endsIn(state.second);
    const up = reach(other, upwards), down = reach(other, downwards);
    const way = new Uint8Array(NUM_ENDS);
    for (let e = 0; e < NUM_ENDS; e++) way[e] = (below[e] && up[e]) || (above[e] && down[e]) ? 1 : 0;
    const on = repsOf(way);
    for (const [i, el] of elements) el.classList.toggle("off", !on.has(i) && i !== state.selected && i !== state.second);
    for (const edge of scene.edges) tint(edge, edge.ends.some(({ s, t }) => on.has(s) && on.has(t)) ? "way" : "off");
    state.way = [...on];
    return;
  }
  const anc = repsOf(above), desc = repsOf(below);
  for (const [i, el] of elements) el.classList.toggle("off", !anc.has(i) && !desc.has(i) && i !== state.selected);
  const self = new Set(repsOf(Object.assign(new Uint8Array(NUM_ENDS), Object.fromEntries(own.map(e => [e, 1])))));
  for (const edge of scene.edges) {
    let cls = "off";
    for (const { s, t } of edge.ends) {
      if (s === t && within(state.selected, s)) { cls = "desc"; break; }
      if (anc.has(s) && anc.has(t) && !(self.has(s) && !self.has(t))) { cls = "anc"; break; }
      if (desc.has(s) && desc.has(t)) { cls = "desc"; break; }
    }
    tint(edge, cls);
  }
}
