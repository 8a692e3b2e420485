/* Draws the visible part of the scene and its surroundings; the rest when it comes into view. */

import { BAR_H, D, HEAD_H, LINE_H, P, SIDE, failedUnit, isOpenable, isUnit, kindOf, scene, state, svg, within } from "./outline.js";
import { clip, many, widthOf } from "./numbers.js";
import { describe, extraLines, failedText, noteOf, readOf, shapeOf, titleOf, typeOf } from "./names.js";
import { colourValue, overlayColour, overlayRange, placeOn } from "./overlays.js";
import { css, inkOn } from "./scale.js";
import { label, make } from "./elements.js";
import { stageSize } from "./camera.js";
import { drawLegend } from "./legend.js";
import { light } from "./light.js";
import { drawIdle } from "./idle.js";
import { drawMark } from "./marks.js";
import { hitsIn } from "./search.js";
import { isCondition, shapesOn } from "./edges.js";
import { badIn } from "./statistics.js";

export const world = make("g", { id: "world" }, svg);
export const elements = new Map();  // of the parts that are drawn
const EVERYWHERE = [-Infinity, -Infinity, Infinity, Infinity], NEAR = 0.5;  // of a screen, on each side of it
let layers = null, numbersRange = null, drawn = null;  // the part of the scene that is drawn

/* Draws everything again. */
export function draw(before) {
  layers = { boxes: make("g", {}), edges: make("g", {}), nodes: make("g", {}), shapes: new Set() };
  elements.clear();
  painted.clear();
  badges.clear();
  for (const edge of scene.edges) edge.el = edge.arrow = null;
  numbersRange = overlayRange();
  drawn = null;
  drawIdle(layers.nodes);
  drawWithin(around(), before);
  world.replaceChildren(layers.boxes, layers.edges, layers.nodes);
  drawLegend(numbersRange);
}
/* Draws what came into view. */
export function drawSeen() {
  const seen = seenOf(0);
  if (layers && !(drawn && seen[0] >= drawn[0] && seen[1] >= drawn[1] && seen[2] <= drawn[2] && seen[3] <= drawn[3])) drawWithin(around());
}
export function drawAll() { drawWithin(EVERYWHERE); }

/* The visible rectangle, enlarged by a part of the screen. */
function seenOf(margin) {
  const { x, y, k } = state.view, [w, h] = stageSize();
  return [(-x - margin * w) / k, (-y - margin * h) / k, ((1 + margin) * w - x) / k, ((1 + margin) * h - y) / k];
}
const around = () => seenOf(NEAR);

function drawWithin(area, before) {
  const [left, top, right, bottom] = area;
  let isMore = !drawn;
  drawn = area;
  for (const node of scene.nodes.values()) {
    if (elements.has(node.id) || node.x > right || node.y > bottom || node.x + node.w < left || node.y + node.h < top) continue;
    if (node.isBox) drawBox(node); else drawNode(node, before);
    isMore = true;
  }
  scene.edges.forEach((edge, k) => {
    const [x0, y0, x1, y1] = edge.area;
    if (edge.el || x0 > right || y0 > bottom || x1 < left || y1 < top) return;
    drawEdge(edge, k);
    isMore = true;
  });
  if (!isMore) return;
  markFocusable();
  if (state.hits.length) markHits();
  light(true);
}
function drawEdge(edge, k) {
  make("path", { class: "edge-hit", d: edge.d, "data-edge": k }, layers.edges);
  edge.el = make("path", { class: "edge " + edge.kind, d: edge.d }, layers.edges);
  if (edge.tip) {
    const [x, y, dir] = edge.tip;
    edge.arrow = make("path", { class: "arrow " + edge.kind, d: dir ? `M${x} ${y}l7 -4v8z` : `M${x} ${y}l-4 -7h8z` }, layers.edges);
  }
  if (state.extras.shapes && edge.from) drawShape(edge);
  if (edge.tip && isCondition(edge)) {  // `IF` where the computation of a condition begins, as in the drawings
    edge.el.classList.add("if");
    label(layers.edges, "IF", edge.tip[0] + 7, edge.tip[1] - 8, "if");
  }
}

/* Marks the search results without drawing again. */
const badges = new Map();
export function markHits() {
  for (const [i, g] of elements) {
    const isHit = state.hitSet.has(i), node = scene.nodes.get(i), old = badges.get(i);
    g.classList.toggle("hit", isHit);
    const inside = node.isBox ? 0 : hitsIn(i) - (isHit ? 1 : 0);
    if (inside === (old ? old.inside : 0)) continue;
    if (old) { old.el.remove(); badges.delete(i); }
    if (!inside) continue;
    const text = many(inside) + (inside === 1 ? " hit" : " hits"), w = widthOf(text) + 12;
    const el = make("g", { class: "hit-badge", transform: `translate(${node.w - w + 6} ${-9})` }, g);
    make("rect", { width: w, height: 17, rx: 8 }, el);
    label(el, text, w / 2, 12.5, "", "middle");
    badges.set(i, { inside, el });
  }
}

/* The tensor shape at each point where edges leave a node. */
function drawShape(edge) {
  const [x, y] = edge.from, key = Math.round(x) + "/" + Math.round(y), text = shapesOn(edge);
  if (layers.shapes.has(key) || !text) return;
  layers.shapes.add(key);
  label(layers.edges, text, x + 6, y + 14, "edge-shape");
}

/* A badge on a node with NaN or infinite values. */
function drawBad(g, id) {
  const bad = badIn(id);
  if (!bad) return;
  const el = make("g", { class: "bad-badge " + bad, transform: "translate(-6 -9)" }, g), text = bad === "nan" ? "NaN" : "∞", w = widthOf(text, true) + 12;
  make("rect", { width: w, height: 17, rx: 8 }, el);
  label(el, text, w / 2, 12.5, "", "middle");
  make("title", {}, el).textContent = bad === "nan" ? "Values are not a number" : "Values are infinite";
}

function common(g, node) {
  const i = node.id;
  g.dataset.id = i;
  g.setAttribute("role", "button");
  g.setAttribute("aria-label", describe(i));
  if (isOpenable(i)) g.setAttribute("aria-expanded", String(Boolean(state.open[i])));
  elements.set(i, g);
}
/* The node that the Tab key focuses; arrow keys move on from it. */
let tabbed = null;
export function focusable() {
  if (elements.has(state.selected)) return state.selected;
  return elements.keys().next().value;
}
export function markFocusable() {
  const now = elements.get(focusable());
  if (tabbed && tabbed !== now) tabbed.setAttribute("tabindex", "-1");
  if (now) now.setAttribute("tabindex", "0");
  tabbed = now;
}

/* The colour of a value; none without a value, because colours do not show kinds now. */
const painted = new Map();
function paint(id, parts) {
  const value = colourValue(id), isBad = value !== null && !Number.isFinite(value), c = value === null ? null : isBad ? "var(--danger)" : css(overlayColour(placeOn(numbersRange, value)));
  if (parts.colour !== c) {
    const [body, bar] = parts.fills.length > 1 ? parts.fills : [null, parts.fills[0]];
    bar.style.fill = c || "var(--card)";
    if (body) body.style.fill = c || "";
    const ink = isBad ? "var(--card)" : c ? inkOn(overlayColour(placeOn(numbersRange, value))) : "";
    for (const text of parts.g.querySelectorAll(":scope > text")) text.style.fill = ink;
    parts.colour = c;
  }
  painted.set(id, parts);
}
/* Shows other values in the same layout: only colours and texts change. */
export function recolour() {
  numbersRange = overlayRange();
  for (const [id, parts] of painted) {
    if (parts.note) { const text = clip(noteOf(id), parts.room); if (parts.note.textContent !== text) parts.note.textContent = text; }
    paint(id, parts);
  }
  drawLegend(numbersRange);
}

function drawNode(node, before) {
  const { id, x, y, w, h } = node;
  const side = SIDE[P.side[id]], read = readOf(id), isDim = side && state.sides[side] === "dim" && !state.overlay && !read;
  const fresh = before && !before.has(id) ? " fresh" : "";
  const g = make("g", { class: "node k-" + kindOf(id) + (isDim ? " dim" : "") + (read ? " is-read" : "") + fresh + (failedUnit > 0 && id !== failedUnit && within(failedUnit, id) ? " has-failed" : ""), transform: `translate(${x} ${y})` }, layers.nodes);
  if (P.passes[id] > 1 && !isUnit(id)) {
    make("rect", { class: "frame", x: 5, y: 5, width: w, height: h, rx: 6 }, g);
    make("rect", { class: "body", x: 2.5, y: 2.5, width: w, height: h, rx: 6 }, g);
    make("rect", { class: "frame", x: 2.5, y: 2.5, width: w, height: h, rx: 6 }, g);
  }
  const body = make("rect", { class: "body", width: w, height: h, rx: 6 }, g);
  const bar = make("path", { class: "bar-fill", d: `M0 ${BAR_H}V6a6 6 0 0 1 6 -6H${w - 6}a6 6 0 0 1 6 6V${BAR_H}z` }, g);
  make("rect", { class: "frame", width: w, height: h, rx: 6 }, g);
  const note = noteOf(id), lead = isUnit(id) ? 9 : 22;
  let noteText = note;
  const title = clip(titleOf(id), w - lead - 9 - Math.min(note ? widthOf(note) + 10 : 0, note.startsWith("@") ? w * 0.42 : w * 0.6), true);
  if (note) noteText = clip(note, w - lead - 18 - widthOf(title, true));
  if (!isUnit(id)) label(g, isOpenable(id) ? "▸" : "▪", 9, 15, "title");
  label(g, title, lead, 15, "title");
  const noteLabel = noteText || state.overlay ? label(g, noteText, w - 9, 15, "note", "end") : null;
  const shape = shapeOf(id), type = id === failedUnit ? failedText() : typeOf(id) + (read ? " " + read : "");
  const shapeText = clip(shape, w * 0.66);
  label(g, clip(type, w - 26 - (shape ? widthOf(shapeText) : 0)), 9, 36, "type");
  if (id === failedUnit) label(g, clip(D.failure.message.split("\n")[0], w - 18), 9, 54, "error");
  if (shape) label(g, shapeText, w - 9, 36, "shape", "end");
  extraLines(id).forEach((line, k) => label(g, clip(line, w - 18), 9, 36 + LINE_H * (k + 1), "shape"));
  if (state.overlay) paint(id, { g, fills: [body, bar], note: noteLabel, room: w - lead - 18 - widthOf(title, true) });
  drawBad(g, id);
  drawMark(g, node);
  common(g, node);
}

/* Made when the pointer enters a node: its tooltip, and a button that selects a box without opening it. */
export function drawUnderPointer(i) {
  const g = elements.get(i), node = scene.nodes.get(i);
  if (!g || hovered.has(g)) return;
  hovered.add(g);
  if (!node.isBox) addTip(g, i);
  if (isOpenable(i)) drawPick(g, node.w + 2, node.isBox ? HEAD_H : node.h);
}
const hovered = new WeakSet();
export function addTip(g, i) { make("title", {}, g).textContent = describe(i); }
function drawPick(g, x, y) {
  const pick = make("g", { class: "pick", transform: `translate(${x} ${y})` }, g);
  make("circle", { r: 9 }, pick);
  label(pick, "i", 0, 4, "", "middle");
  make("title", {}, pick).textContent = "Select without opening or closing (Ctrl-click)";
}

function drawBox(node) {
  const { id, x, y, w, h } = node;
  const hasFailed = failedUnit > 0 && within(failedUnit, id) ? " has-failed" : "";
  const box = make("g", { class: "box", transform: `translate(${x} ${y})` }, layers.boxes);
  make("rect", { class: "back", width: w, height: h, rx: 8 }, box);
  const g = make("g", { class: "box-head k-" + kindOf(id) + hasFailed, transform: `translate(${x} ${y})` }, layers.nodes);
  const bar = make("path", { class: "bar-fill", d: `M0 ${HEAD_H}V8a8 8 0 0 1 8 -8H${w - 8}a8 8 0 0 1 8 8V${HEAD_H}z` }, g);
  make("rect", { class: "frame", width: w, height: h, rx: 8, "pointer-events": "none", fill: "none" }, g);
  const note = noteOf(id), title = clip(titleOf(id), w - 40 - widthOf(note), true);
  label(g, "▾", 9, 17.5, "title");
  label(g, title, 22, 17.5, "title");
  const room = w - 22 - widthOf(title, true) - widthOf(note) - 34;
  if (room > 40) label(g, clip(typeOf(id), room), 30 + widthOf(title, true), 17.5, "note");
  const noteLabel = note || state.overlay ? label(g, note, w - 10, 17.5, "note", "end") : null;
  if (state.overlay) paint(id, { g, fills: [bar], note: noteLabel, room: Math.max(60, widthOf(note) + 12) });
  drawMark(g, node);
  common(g, node);
}
