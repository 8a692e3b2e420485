/* The visible part of the scene: pan and zoom. */

import { $, NODE_H, SMALLEST_TEXT, scene, stage, state, tell } from "./outline.js";
import { TEXT } from "./numbers.js";
import { drawSeen, world } from "./draw.js";
import { drawMap } from "./map.js";
import { remember } from "./address.js";

export function applyView() {
  const { x, y, k } = state.view;
  world.setAttribute("transform", `translate(${x} ${y}) scale(${k})`);
  drawSeen();
  drawMap();
  remember();
}
/* Called after the user moved the view. */
export function moved(before) {
  applyView();
  tell("moved", before, state.view);
}
/* Sizes are measured only when they may have changed: measuring forces the browser to lay out the page. */
let sizes = null;
export function measureAnew() {
  const here = stage.getBoundingClientRect(), side = $("side").getBoundingClientRect();
  const covered = side.height && side.left <= here.left ? Math.max(0, here.bottom - side.top) : 0;
  sizes = { stage: [stage.clientWidth, stage.clientHeight], seen: [here.width, Math.max(120, here.height - covered)] };
  return sizes;
}
const resized = new ResizeObserver(() => { measureAnew(); drawSeen(); });
for (const el of [stage, $("side")]) resized.observe(el);
export const stageSize = () => (sizes || measureAnew()).stage;
/* The visible height of the stage: on a phone, the panel may cover its lower part. */
const seenSize = () => (sizes || measureAnew()).seen;
export function fit(isOpening) {
  measureAnew();  // who asks for it may have just changed the place that there is
  aimAtAll(isOpening);
  applyView();
}
/* Sets the view for the next drawing. */
export function aimAtAll(isOpening) {
  const [w, h] = seenSize(), margin = Math.min(24, stageSize()[0] / 40);
  let k = Math.min((w - 2 * margin) / scene.width, (h - 2 * margin) / scene.height, 1.35);
  let y = (h - scene.height * k) / 2, x = (w - scene.width * k) / 2;
  if (isOpening && k * TEXT < SMALLEST_TEXT) {
    k = Math.min(1, SMALLEST_TEXT / TEXT + 0.001);
    y = margin;
    // The topmost node; of several, the one nearest to the centre.
    const away = n => Math.abs(n.x + n.w / 2 - scene.width / 2);
    const first = [...scene.nodes.values()].reduce((a, b) => b.y < a.y || b.y === a.y && away(b) < away(a) ? b : a);
    x = scene.width * k <= w - 2 * margin ? (w - scene.width * k) / 2 : w / 2 - (first.x + first.w / 2) * k;
  }
  state.view = { x, y, k };
}
export function zoom(factor, cx, cy) {
  const v = state.view, k = Math.max(0.05, Math.min(4, v.k * factor));
  state.view = { k, x: cx - (cx - v.x) * k / v.k, y: cy - (cy - v.y) * k / v.k };
  moved(v);
}
export function bringIntoView(i, isCentred) {
  aimAt(i, isCentred);
  applyView();
}
export function aimAt(i, isCentred) {
  const node = scene.nodes.get(i);
  if (!node) return;
  const [w, h] = seenSize(), v = state.view, m = 50;
  if (v.k * TEXT < 9) v.k = 1;
  const height = Math.min(node.h, NODE_H) * v.k;
  const x = v.x + (node.x + node.w / 2) * v.k, y = v.y + node.y * v.k;
  if (isCentred || x < m || x > w - m || y < m || y + height > h - m) {
    v.x += w / 2 - x;
    v.y += h * 0.42 - y;
  }
}
