/* Marks the differences from another model on the nodes. */

import { D, HEAD_H, end, isOpenable, scene, state } from "./outline.js";
import { widthOf } from "./numbers.js";
import { html, label, make } from "./elements.js";

const marks = new Map(D.marks || []);  // by part: {look, text, tag, colour, follows}
const LOOKS = [["added", "only here"], ["removed", "only here"], ["changed", "does something else"], ["values", "other shape or values"], ["name", "other name"], ["inside", "differences inside"], ["found", "something was found"]];
const counted = new Map();
export function setMarks(list) {
  marks.clear();
  counted.clear();
  for (const [part, mark] of list) marks.set(part, mark);
}
/* The mark of a part; a closed box shows the marks inside it. */
export function markOf(i) {
  const own = marks.get(i);
  if (own || !marks.size || !isOpenable(i) || state.open[i]) return own || null;
  let found = counted.get(i);
  if (found === undefined) {
    let causes = 0, followers = 0, noun = "difference";
    for (let u = i + 1; u < end[i]; u++) if (marks.has(u)) { const mark = marks.get(u); if (mark.noun) noun = mark.noun; if (mark.follows) followers++; else if (mark.isListed) causes++; }
    const tag = causes ? causes + " " + noun + (causes === 1 ? "" : "s") : followers ? "follows" : "";
    found = tag ? { look: "inside", tag, text: causes ? tag + " inside" : followers + " inside differ as a consequence", follows: !causes, colour: "" } : null;
    counted.set(i, found);
  }
  return found;
}
export function drawMark(g, node) {
  const mark = markOf(node.id);
  if (!mark) return;
  const el = make("g", { class: "mark m-" + mark.look + (mark.follows ? " follows" : "") }, g), h = node.isBox ? HEAD_H : node.h, w = widthOf(mark.tag) + 14;
  const strip = make("rect", { class: "strip", x: -5, y: 0, width: 5, height: node.h, rx: 2.5 }, el);
  if (!mark.tag) { if (mark.colour) strip.style.fill = mark.colour; return; }
  // The tag of an open box is above it, on the left.
  const tag = make("g", { class: "tag", transform: node.isBox ? "translate(0 -9)" : `translate(-5 ${h - 3})` }, el);
  const back = make("rect", { width: w, height: 16, rx: 4 }, tag);
  label(tag, mark.tag, w / 2, 12, "", "middle");
  make("title", {}, tag).textContent = mark.text;
  if (mark.colour) { strip.style.fill = mark.colour; back.style.fill = mark.colour; }
}
/* The marks that are shown, for the legend. */
export function markRows() {
  const used = new Set([...scene.nodes.keys()].map(i => markOf(i)).filter(Boolean).map(mark => mark.look));
  return LOOKS.filter(([look]) => used.has(look)).map(([look, text]) => html("div", { class: "row" }, html("i", { class: "m-" + look }), text));
}
