/* Mouse, touch and wheel on the graph, as on a map: drag or scroll to move, pinch or Ctrl+wheel to zoom. */

import { $, isOpenable, scene, stage, state, svg, tell, timings } from "./outline.js";
import { describe } from "./names.js";
import { drawUnderPointer, elements } from "./draw.js";
import { moved, stageSize, zoom } from "./camera.js";
import { MAP_SIZE, map, mapScale } from "./map.js";
import { select, selectEdge, toggle } from "./actions.js";
import { drawCrumbs } from "./bar.js";

const MOVED = 4, LONG_PRESS = 500, LINE = 16;
const pointers = new Map();  // where each finger, or the mouse, is
let drag = null, pinch = null;
const local = event => { const r = stage.getBoundingClientRect(); return [event.clientX - r.left, event.clientY - r.top]; };

function press(event) {
  if (event.button) return;
  pointers.set(event.pointerId, local(event));
  svg.setPointerCapture(event.pointerId);
  letGo();
  if (pointers.size > 1) { startPinch(); return; }
  const [x, y] = local(event), target = event.target.closest("[data-id]"), line = event.target.closest("[data-edge]");
  drag = {
    x, y, vx: state.view.x, vy: state.view.y, moved: false, id: target ? +target.dataset.id : -1, edge: line ? scene.edges[+line.dataset.edge] : null,
    isShift: event.shiftKey, isPick: event.ctrlKey || event.metaKey || Boolean(event.target.closest(".pick")),
  };
  const held = drag;
  if (event.pointerType === "touch" && held.id > 0) {
    held.timer = setTimeout(() => { if (drag === held && !held.moved) { held.isDone = true; select(held.id, { isShown: false }); } }, LONG_PRESS);
  }
}
function letGo() {
  if (drag) clearTimeout(drag.timer);
  drag = null;
  svg.classList.remove("drag");
}
function fingers() {
  const [[ax, ay], [bx, by]] = [...pointers.values()];
  return { x: (ax + bx) / 2, y: (ay + by) / 2, apart: Math.max(1, Math.hypot(ax - bx, ay - by)) };
}
function startPinch() { pinch = fingers(); }
function move(event) {
  if (!pointers.has(event.pointerId)) return;
  const [x, y] = local(event);
  pointers.set(event.pointerId, [x, y]);
  if (pointers.size > 1) {
    const now = fingers(), before = { ...state.view };
    state.view.x += now.x - pinch.x;
    state.view.y += now.y - pinch.y;
    moved(before);
    zoom(now.apart / pinch.apart, now.x, now.y);
    pinch = now;
    return;
  }
  if (!drag || drag.isDone || !drag.moved && Math.hypot(x - drag.x, y - drag.y) < MOVED) return;
  drag.moved = true;
  svg.classList.add("drag");
  moveTo(drag.vx + x - drag.x, drag.vy + y - drag.y);
}
function release(event) {
  if (!pointers.delete(event.pointerId)) return;
  const now = drag;
  letGo();
  if (pointers.size > 1) { startPinch(); return; }
  if (pointers.size) {  // The finger that is left goes on moving.
    const [x, y] = pointers.values().next().value;
    drag = { x, y, vx: state.view.x, vy: state.view.y, moved: true, id: -1 };
    return;
  }
  if (event.type === "pointerup" && now && !now.moved && !now.isDone) click(now, local(event));
}
function click({ id, edge, isShift, isPick }, pointer) {
  if (edge) { selectEdge(edge); return; }
  if (id < 0) { if (state.selected > 0 || state.edge) select(-1); return; }
  if (isShift && state.selected > 0) { select(id, { second: true, isShown: false }); return; }
  const t = performance.now();
  if (isPick || !isOpenable(id)) select(id, { isShown: false, isFocused: true });
  else {
    state.selected = id;
    state.second = -1;
    toggle(id, pointer);
    drawCrumbs();
    const el = elements.get(id);
    if (el) el.focus({ preventScroll: true });
    $("live").textContent = describe(id);
    tell("selected", id);
  }
  timings.click = performance.now() - t;
}
function scroll(event) {
  event.preventDefault();
  const unit = event.deltaMode === 1 ? LINE : event.deltaMode === 2 ? stageSize()[1] : 1;
  let dx = event.deltaX * unit, dy = event.deltaY * unit;
  if (event.ctrlKey || event.metaKey) { zoom(Math.exp(-Math.max(-30, Math.min(30, dy)) * 0.01), ...local(event)); return; }
  if (event.shiftKey && !dx) [dx, dy] = [dy, 0];
  moveTo(state.view.x - dx, state.view.y - dy);
}
function moveTo(x, y) {
  const before = state.view;
  state.view = { ...before, x, y };
  moved(before);
}
function moveByMap(event) {
  const r = map.getBoundingClientRect(), [w, h] = stageSize(), v = state.view, shown = MAP_SIZE[0] / r.width;
  moveTo(w / 2 - ((event.clientX - r.left) * shown - map.offset[0]) / mapScale * v.k, h / 2 - ((event.clientY - r.top) * shown - map.offset[1]) / mapScale * v.k);
}
export function listenToGestures() {
  svg.addEventListener("pointerdown", press);
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerup", release);
  svg.addEventListener("pointercancel", release);
  svg.addEventListener("wheel", scroll, { passive: false });
  svg.addEventListener("contextmenu", event => { if (event.pointerType === "touch") event.preventDefault(); });
  // Safari reports a trackpad pinch by its own events.
  let before = 1;
  svg.addEventListener("gesturestart", event => { event.preventDefault(); before = 1; });
  svg.addEventListener("gesturechange", event => { event.preventDefault(); if (pointers.size < 2) zoom(event.scale / before, ...local(event)); before = event.scale; });
  svg.addEventListener("pointerover", event => { const target = event.target.closest("[data-id]"); if (target) drawUnderPointer(+target.dataset.id); });
  svg.addEventListener("focusin", event => {
    const target = event.target.closest("[data-id]");
    if (target && +target.dataset.id !== state.selected && target.matches(":focus-visible") && !drag) select(+target.dataset.id, {});
  });
  map.addEventListener("pointerdown", event => { map.setPointerCapture(event.pointerId); moveByMap(event); });
  map.addEventListener("pointermove", event => { if (event.buttons) moveByMap(event); });
}
