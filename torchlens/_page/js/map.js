/* The small map in the corner. */

import { $, scene, state } from "./outline.js";
import { stageSize } from "./camera.js";

export const map = $("map"), mapInk = map.getContext("2d");
export const MAP_SIZE = [180, 140];
export let mapScale = 1;
let inks = null;  // asked for once: the browser would work out the style of everything each time
function readInks() { const style = getComputedStyle(document.documentElement); return Object.fromEntries(["line", "accent", "edge"].map(name => [name, style.getPropertyValue("--" + name)])); }
export function forgetInks() { inks = null; }
export function drawMap() {
  const ratio = window.devicePixelRatio || 1, [mw, mh] = MAP_SIZE;
  if (map.width !== mw * ratio) { map.width = mw * ratio; map.height = mh * ratio; map.style.width = mw + "px"; map.style.height = mh + "px"; }
  inks ||= readInks();
  mapInk.setTransform(ratio, 0, 0, ratio, 0, 0);
  mapInk.clearRect(0, 0, mw, mh);
  mapScale = Math.min((mw - 12) / scene.width, (mh - 12) / scene.height);
  const ox = (mw - scene.width * mapScale) / 2, oy = (mh - scene.height * mapScale) / 2;
  map.offset = [ox, oy];
  for (const node of scene.nodes.values()) {
    const [x, y, w, h] = [node.x, node.y, node.w, node.h].map(v => v * mapScale);
    if (node.isBox) { mapInk.strokeStyle = inks.line; mapInk.strokeRect(ox + x, oy + y, w, h); }
    else { mapInk.fillStyle = node.id === state.selected ? inks.accent : inks.edge; mapInk.fillRect(ox + x, oy + y, Math.max(2, w), Math.max(1.5, h)); }
  }
  const [w, h] = stageSize(), v = state.view, slack = 2;
  // No map if everything is visible.
  const isAllSeen = v.x >= -slack && v.y >= -slack && v.x + scene.width * v.k <= w + slack && v.y + scene.height * v.k <= h + slack;
  map.style.visibility = isAllSeen ? "hidden" : "";
  mapInk.strokeStyle = inks.accent;
  mapInk.lineWidth = 1.5;
  mapInk.strokeRect(ox - v.x / v.k * mapScale, oy - v.y / v.k * mapScale, w / v.k * mapScale, h / v.k * mapScale);
  mapInk.lineWidth = 1;
}
