/* Modules that did not run. Numbered ones, such as experts, are grey nodes at the right of their box. */

import { D, NODE_H, P, S, scene } from "./outline.js";
import { clip, many, widthOf } from "./numbers.js";
import { label, make } from "./elements.js";

const MOST_SHOWN_IDLE = 24, FEWEST_IN_COLUMN = 3, GAP = 12;
export const idleIn = new Map(D.idle.map(([box, names, types]) => [box, names.map((name, k) => ({ name: S[name], type: S[types[k]] }))]));

/* Layout of the grey nodes of a box with content of the given height: {nodes, w, h}; null if there are none. */
export function placeIdle(box, height) {
  const idle = (idleIn.get(box) || []).filter(one => /(^|\.)\d+$/.test(one.name)), above = S[P.path[box]] ? S[P.path[box]].replace(/:\d+.*$/, "") + "." : "";
  if (!idle.length) return null;
  const nodes = idle.slice(0, MOST_SHOWN_IDLE).map(({ name, type }) => ({ title: name.startsWith(above) ? name.slice(above.length) : name, name, type }));
  if (idle.length > nodes.length) nodes.push({ title: "and " + many(idle.length - nodes.length) + " more", name: "", type: nodes[0].type });
  for (const node of nodes) node.w = Math.min(220, Math.max(104, widthOf(node.title, true) + 20, widthOf(node.type + " · did not run") + 20));
  const inColumn = Math.max(FEWEST_IN_COLUMN, Math.floor((height + GAP) / (NODE_H + GAP)));
  let x = 2 * GAP, widest = 0;
  nodes.forEach((node, k) => {
    if (k && k % inColumn === 0) { x += widest + GAP; widest = 0; }
    Object.assign(node, { x, y: k % inColumn * (NODE_H + GAP), h: NODE_H });
    widest = Math.max(widest, node.w);
  });
  return { nodes, w: x + widest, h: Math.min(nodes.length, inColumn) * (NODE_H + GAP) - GAP };
}
export function drawIdle(layer) {
  for (const { x, y, w, h, title, name, type } of scene.idle) {
    const g = make("g", { class: "ghost", transform: `translate(${x} ${y})` }, layer);
    make("rect", { width: w, height: h, rx: 6 }, g);
    label(g, clip(title, w - 18, true), 9, 16, "title");
    label(g, clip(type + " · did not run", w - 18), 9, 35, "type");
    if (name) make("title", {}, g).textContent = name + ", " + type + ", did not run";
  }
}
