/* The actions of a user: open, close, select, follow an edge. */

import { $, HEAD_H, NODE_H, P, SIDE, isOpenable, kids, scene, state, tell, timings, within } from "./outline.js";
import { forgetLinks, links } from "./links.js";
import { describe } from "./names.js";
import { arrange } from "./arrange.js";
import { draw, elements, markFocusable } from "./draw.js";
import { light } from "./light.js";
import { applyView, bringIntoView } from "./camera.js";
import { showPanel } from "./panel.js";
import { drawCrumbs, drawSides } from "./bar.js";

/* Draws again after a change; `aim` moves the view. */
export function refresh(before, aim) {
  const t = performance.now();
  arrange();
  if (aim) aim();
  draw(before);
  timings.render = performance.now() - t;
}
export function toggle(i, pointer) {
  if (!isOpenable(i) || i === 0) return;
  const t = performance.now();
  state.edge = null;
  const old = scene.nodes.get(i), v = state.view, before = new Set(scene.nodes.keys());
  state.open[i] = state.open[i] ? 0 : 1;
  if (!state.open[i] && state.selected > i && within(state.selected, i)) state.selected = i;
  refresh(before, () => {
    if (!old) return;
    const ox = v.x + (old.x + old.w / 2) * v.k, oy = v.y + old.y * v.k, now = scene.nodes.get(i);
    v.x = ox - (now.x + now.w / 2) * v.k;
    v.y = oy - now.y * v.k;
    if (pointer) {  // The title stays under the pointer.
      const [px, py] = pointer, half = now.w / 2 * v.k - 10;
      if (Math.abs(px - ox) > half) v.x += px - ox - Math.sign(px - ox) * half;
      const low = (now.isBox ? HEAD_H : NODE_H) * v.k - 3;
      if (py - oy > low) v.y += py - oy - low / 2;
    }
  });
  applyView();
  showPanel();
  timings.toggle = performance.now() - t;
  tell("toggled", i, state.open[i]);
}
function reveal(i) {
  let changed = false;
  for (let p = P.parent[i]; p >= 0; p = P.parent[p]) if (!state.open[p]) { state.open[p] = 1; changed = true; }
  if (links.hidden[i]) { const side = SIDE[P.side[i]]; if (side) { state.sides[side] = "dim"; drawSides(); forgetLinks(); changed = true; } }
  if (changed) refresh(new Set(scene.nodes.keys()));
}
export function select(i, options) {
  const o = options || {};
  state.edge = null;
  if (o.second) { state.second = i === state.selected ? -1 : i; } else { state.selected = i; state.second = -1; }
  if (i > 0) reveal(i);
  light();
  if (i > 0 && o.isShown !== false) bringIntoView(i, o.isCentred); else applyView();
  markFocusable();
  if (o.isFocused && elements.get(i)) elements.get(i).focus({ preventScroll: true });
  showPanel();
  drawCrumbs();
  if (i > 0) $("live").textContent = describe(i);
  if (!o.second) tell("selected", i);
}
export function selectEdge(edge) {
  state.selected = state.second = -1;
  state.edge = edge;
  light();
  showPanel();
  drawCrumbs();
  tell("selected", -1);
}
export function goUp() {
  if (state.selected <= 0) return;
  const p = P.parent[state.selected];
  select(p > 0 ? p : -1, { isFocused: true });
}
export function follow(direction) {
  if (state.selected <= 0) { select(scene.nodes.keys().next().value, { isFocused: true }); return; }
  const i = state.selected, here = scene.nodes.get(i);
  if (!here) return;
  if (direction === "down" || direction === "up") {
    if (direction === "down" && here.isBox) { select(kids[i].find(k => scene.nodes.has(k)), { isFocused: true }); return; }
    const found = [];
    for (const { s, t } of scene.links) {
      if (direction === "down" && within(s, i) && !within(t, i)) found.push(t);
      if (direction === "up" && within(t, i) && !within(s, i)) found.push(s);
    }
    // The nearest node, first by row, then by column: the main path before its side branches.
    const far = k => { const n = scene.nodes.get(k); return Math.abs(n.y - here.y) + 0.5 * Math.abs(n.x + n.w / 2 - here.x - here.w / 2) + (SIDE[P.side[k]] && SIDE[P.side[k]] !== "view" ? 5000 : 0); };
    found.sort((a, b) => far(a) - far(b));
    if (found.length) select(found[0], { isFocused: true });
    else if (direction === "up" && P.parent[i] > 0) select(P.parent[i], { isFocused: true });
    return;
  }
  let best = -1, least = Infinity;
  for (const node of scene.nodes.values()) {
    if (node.id === i || node.isBox) continue;
    const dx = (node.x + node.w / 2 - here.x - here.w / 2) * (direction === "right" ? 1 : -1), dy = Math.abs(node.y - here.y);
    if (dx > 8 && dy < 90) { const far = dx + 4 * dy; if (far < least) { least = far; best = node.id; } }
  }
  if (best > 0) select(best, { isFocused: true });
}
