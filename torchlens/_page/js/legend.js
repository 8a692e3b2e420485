/* The legend: meaning of colours and lines. */

import { $, kindOf, scene, state } from "./outline.js";
import { colourValue, overlayText, overlays } from "./overlays.js";
import { SCALE, css } from "./scale.js";
import { html, make } from "./elements.js";
import { markRows } from "./marks.js";
import { readOf } from "./names.js";

const LEGEND = [["input", "input"], ["output", "output"], ["module", "module"], ["group", "folded"], ["weights", "with parameters"], ["norm", "normalisation"],
  ["activation", "activation"], ["compute", "other computation"], ["view", "view"], ["source", "buffer, constant"], ["read", "read by an if"]];
let range = null;  // of the values that are shown, while the nodes are coloured by them
export const shownRange = () => range;
export const legendTitle = () => (overlays.get(state.overlay).title || inWords()) + (range && range.isLog ? ", logarithmic" : "");
const inWords = () => state.overlay + (overlays.get(state.overlay).isSum ? state.scale.per === "operation" ? ", per operation" : ", sum of what is inside" : ", mean of what is inside");
/* True if a shown value is not finite, and therefore not on the scale. */
const hasBad = () => [...scene.nodes.keys()].some(id => { const value = colourValue(id); return value !== null && !Number.isFinite(value); });
function badRow() {
  const swatch = html("i");
  swatch.style.background = "var(--danger)";
  return html("div", { class: "row bad" }, swatch, "not finite");
}
export function drawLegend(now) {
  range = state.overlay && now.min <= now.max ? now : null;
  const legend = $("legend");
  legend.replaceChildren();
  legend.classList.toggle("is-scale", Boolean(range));
  if (range) {
    const stops = SCALE.slice().reverse().map((c, i) => css(c) + " " + (100 * i / (SCALE.length - 1)) + "%").join(",");
    const scale = html("div", { class: "scale" });
    scale.style.background = "linear-gradient(90deg," + stops + ")";
    legend.append(html("div", {}, legendTitle()), scale,
      html("div", { class: "ends" }, html("span", {}, overlayText(range.isLog ? range.least : range.min)), html("span", {}, overlayText(range.max))));
    if (hasBad()) legend.append(badRow());
    return;
  }
  const used = new Set([...scene.nodes.values()].map(node => readOf(node.id) ? "read" : kindOf(node.id)));
  for (const [kind, text] of LEGEND) {
    if (!used.has(kind)) continue;
    const swatch = html("i");
    swatch.style.background = `var(--k-${kind})`;
    legend.append(html("div", { class: "row kind" }, swatch, text));
  }
  legend.append(...markRows());
  for (const [kind, text] of [["skip", "residual"], ["loop", "loop"]]) {
    if (!scene.edges.some(e => e.kind === kind)) continue;
    const line = make("svg", { viewBox: "0 0 22 10" });
    make("path", { class: "edge " + kind, d: "M0 5H22" }, line);
    legend.append(html("div", { class: "row" }, line, text));
  }
}
