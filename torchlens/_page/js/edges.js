/* The tensors that an edge stands for. */

import { D, E, P, S, children, panel, scene, state, unitOf } from "./outline.js";
import { bytesText, many } from "./numbers.js";
import { entriesNow } from "./names.js";
import { html } from "./elements.js";
import { linkTo } from "./panel.js";

/* The tensors of an edge, each with its readers, in the passes that are shown. */
export function tensorsOn(edge) {
  const found = new Map();
  for (const { pairs } of edge.ends) {
    for (const [a, b] of pairs) {
      const own = [...entriesNow(a), ...P.buffers[a]];
      const read = own.filter(e => children[e].some(c => unitOf[c] === b));
      for (const e of read.length ? read : entriesNow(a)) {  // over something hidden: all that it made
        const readers = found.get(e) || found.set(e, new Set()).get(e);
        const here = children[e].filter(c => unitOf[c] === b);
        for (const c of here.length ? here : entriesNow(b).slice(0, 1)) readers.add(c);
      }
    }
  }
  return found;
}
export function shapesOn(edge) {
  const shapes = [...new Set([...tensorsOn(edge).keys()].map(e => S[E.shape[e]]))].filter(Boolean);
  return shapes.length > 1 ? shapes[0] + "  + " + (shapes.length - 1) : shapes[0] || "";
}
export function showEdge() {
  const edge = state.edge, names = side => [...new Set(edge.ends.map(end => S[P.title[end[side]]]))];
  const some = list => list.slice(0, 3).join(", ") + (list.length > 3 ? " and " + (list.length - 3) + " more" : "");
  panel.append(html("h2", {}, some(names("s")) + " → " + some(names("t"))));
  const found = [...tensorsOn(edge)];
  panel.append(html("div", { class: "sub" }, ({ skip: "residual edge", loop: "loop edge" }[edge.kind] || "edge") + ", " + many(found.length) + (found.length === 1 ? " tensor" : " tensors")));
  for (const [e, readers] of found.slice(0, 40)) {
    panel.append(html("h3", {}, S[E.shape[e]] + "  " + S[E.dtype[e]] + ", " + bytesText(E.bytes[e])));
    panel.append(html("div", { class: "links" }, "from ", linkTo(e), " to ", ...[...readers].slice(0, 20).map(linkTo)));
  }
  if (found.length > 40) panel.append(html("div", { class: "sub" }, "and " + many(found.length - 40) + " more"));
}
const conditions = new Set(D.conditions.edges.map(([p, c]) => unitOf[p] + ">" + unitOf[c]));
export const isCondition = edge => conditions.size > 0 && edge.ends.some(({ pairs }) => pairs.some(([a, b]) => conditions.has(a + ">" + b)));
/* Finds the selected edge by its ends: each drawing makes new edges. */
const keyOf = edge => edge.kind + edge.ends.map(({ s, t }) => s + ">" + t).join();
export function sameEdge(edge) { return scene.edges.find(own => own.d === edge.d && keyOf(own) === keyOf(edge)) || null; }
