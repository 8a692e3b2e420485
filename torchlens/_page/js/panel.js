/* The panel: details of the selection. */

import { $, D, E, LEFT, NUM, P, PART, Q, S, T, VALUELESS, children, end, failedUnit, isOpenable, isUnit, leftIn, leftOut, panel, passOfEntry, state, tell, unitOf, within } from "./outline.js";
import { links } from "./links.js";
import { bytesText, many, numberText, short, timeText } from "./numbers.js";
import { countUnits, entriesNow, paramCount, paramsIn, readOf, shapeOf, typeOf } from "./names.js";
import { overlayText, overlayValue, overlays } from "./overlays.js";
import { html } from "./elements.js";
import { idleIn } from "./idle.js";
import { draw } from "./draw.js";
import { entriesIn } from "./light.js";
import { select, toggle } from "./actions.js";
import { remember } from "./address.js";
import { levelsIn, openTo } from "./levels.js";
import { showEdge } from "./edges.js";
import { histogram, statBlock } from "./statistics.js";
import { attentionBlock } from "./attention.js";
import { editBlock } from "./edits.js";

export function linkTo(e) {
  const i = unitOf[e], text = e === NUM - 1 && D.failure ? S[P.title[i]] : S[E.label[e]];
  return html("button", { type: "button", title: S[P.path[i]] + "  " + S[E.shape[e]], onclick: () => { if (P.entries[i].length > 1 && !P.buffers[i].includes(e)) state.pass.set(i, passOfEntry[e]); select(i, { isCentred: false }); } }, text);
}
function linkList(heading, list, absent) {
  const out = document.createDocumentFragment();
  if (!list.length && !absent) return out;
  const row = html("div", { class: "links" }, ...list.slice(0, 40).map(linkTo));
  if (list.length > 40) row.append("and " + many(list.length - 40) + " more");
  if (absent) row.append(html("span", { class: "sub" }, (list.length ? "and " : "") + many(absent) + " that this page does not carry"));
  out.append(html("h3", {}, heading), row);
  return out;
}
function facts(rows) {
  const list = html("dl");
  for (const [name, value] of rows) if (value !== "" && value !== null) list.append(html("dt", {}, name), html("dd", {}, value));
  return list;
}
/* The source line of the call, then those of the modules around it, innermost first. */
function placesOf(i) {
  const found = [];
  if (isUnit(i)) { const own = entriesNow(i)[0]; if (own !== undefined) found.push(E.place[own]); }
  for (let u = i; u > 0; u = P.parent[u]) found.push(P.place[u]);
  return [...new Set(found)].filter(place => place >= 0);
}
function placeBlock(places) {
  const out = document.createDocumentFragment();
  places.forEach((place, k) => {
    const [where, text] = D.places[place];
    if (k < 2) out.append(html("h3", {}, k ? "Called from" : "Source"));
    out.append(html("div", { class: "sub" }, S[where]));
    if (S[text]) out.append(html("code", {}, S[text]));
  });
  return out;
}
/* The number of passes that the page carries (the first and the last ones), and the number of one of them. */
function carriedPasses(i) {
  if (isUnit(i)) return P.entries[i].length;
  if (!LEFT) return P.passes[i];
  let most = 0;
  for (let u = i; u < end[i]; u++) if (isUnit(u)) most = Math.max(most, P.entries[u].length);
  return Math.min(most, P.passes[i]);
}
function passNumber(i, at) {
  const carried = carriedPasses(i);
  return at < Math.ceil(carried / 2) ? at + 1 : at + 1 + P.passes[i] - carried;
}
/* Shows one pass of a part and of everything in it. */
export function setPass(i, to) {
  const most = carriedPasses(i), at = Math.max(0, Math.min(most - 1, to));
  state.pass.set(i, at);
  for (let u = i + 1; u < end[i]; u++) {
    const own = carriedPasses(u);
    if (own > 1) state.pass.set(u, own === most ? at : Math.floor(at * own / most));
  }
}
function passBlock(i) {
  const most = carriedPasses(i);
  if (most < 2 || !isUnit(i) && !["loop", "module"].includes(PART[P.part[i]])) return null;
  const now = Math.min(state.pass.get(i) || 0, most - 1);
  const shown = html("span", {}, many(passNumber(i, now)) + " / " + many(P.passes[i]));
  const change = to => { setPass(i, to); draw(); showPanel(); remember(); tell("passed", i, state.pass.get(i)); };
  const slider = html("input", { type: "range", min: 1, max: most, value: now + 1, "aria-label": "Pass", id: "pass" });
  slider.addEventListener("change", () => { change(slider.value - 1); $("pass").focus(); });
  return html("div", { class: "passes" }, html("span", {}, "Pass"), html("button", { type: "button", "aria-label": "Previous pass", id: "pass-back", onclick: () => { change(now - 1); $("pass-back").focus(); } }, "‹"),
    slider, html("button", { type: "button", "aria-label": "Next pass", id: "pass-next", onclick: () => { change(now + 1); $("pass-next").focus(); } }, "›"), shown);
}
function idleBlock(i) {
  const out = document.createDocumentFragment(), idle = idleIn.get(i) || [];
  if (!idle.length) return out;
  const list = html("div", { class: "idle" }, ...idle.slice(0, 60).map(({ name }) => html("span", {}, name)));
  if (idle.length > 60) list.append("and " + many(idle.length - 60) + " more");
  out.append(html("h3", {}, "Did not run"), list);
  return out;
}
export function showPanel() {
  const i = state.selected;
  panel.replaceChildren();
  requestAnimationFrame(() => { panel.scrollTop = 0; });  // at once, the browser would lay out the graph for it, and then again
  if (state.edge) { showEdge(); return; }
  if (i <= 0) { showModel(); return; }
  const kind = PART[P.part[i]];
  panel.append(html("h2", {}, S[P.title[i]]));
  const sub = kind === "operation" ? typeOf(i) : kind === "module" ? S[P.type[i]] : ({ loop: "loop", repeat: "identical parts, folded", step: "one of identical parts", span: "operations in a row", range: "parts in a row", constants: "no input leads to them" })[kind] + " · " + S[P.type[i]];
  panel.append(html("div", { class: "sub" }, sub + (S[P.path[i]] && S[P.path[i]] !== S[P.title[i]] ? " in " + S[P.path[i]] : "")));
  if (i === failedUnit) {
    panel.append(html("h3", {}, "Failed"), html("div", { class: "error" }, D.failure.message));
    if (D.failure.arguments) panel.append(html("h3", {}, "Arguments"), html("code", {}, D.failure.arguments));
  }
  const passes = passBlock(i);
  if (passes) panel.append(passes);
  if (leftOut.has(i)) {
    const gone = many(LEFT.passes[leftOut.get(i)]);
    panel.append(html("div", { class: "sub", id: "left-out" }, isUnit(i)
      ? "The page carries the first and the last passes of it; the other " + gone + " are in the history."
      : "This page does not carry what is inside: " + gone + " operations. They are in the history."));
  }
  const all = entriesIn(i), buffers = isUnit(i) ? P.buffers[i] : [];
  const params = paramsIn(i), time = all.reduce((sum, e) => sum + E.micros[e], leftIn(i, "micros")), flops = all.reduce((sum, e) => sum + E.flops[e], leftIn(i, "flops"));
  const absent = (own, side) => LEFT ? own.reduce((sum, e) => sum + (LEFT[side][e] || 0), 0) : 0;
  if (isUnit(i)) {
    const own = entriesNow(i), e = own[0];
    const isFailed = i === failedUnit;
    panel.append(facts([
      ["Label", isFailed ? "" : own.map(k => S[E.label[k]]).join(", ")], ["Operation", isFailed ? D.failure.operation : typeOf(i) !== S[P.type[i]] || S[P.path[i]] === S[P.title[i]] ? S[E.label[e]].split("_")[0] : ""],
      ["Shape", isFailed ? "" : own.map(k => S[E.shape[k]]).join("; ")], ["Input shapes", E.parents[e].filter(p => !buffers.includes(p)).map(p => S[E.shape[p]]).join("; ")],
      ["Type", isFailed ? "" : S[E.dtype[e]]], ["Size", isFailed ? "" : bytesText(own.reduce((sum, k) => sum + E.bytes[k], 0))],
      ["Time", isFailed ? "" : timeText(own.reduce((sum, k) => sum + E.micros[k], 0))], ["All passes", P.passes[i] > 1 ? timeText(time) : ""],
      ["FLOPs", E.flops[e] ? short(E.flops[e]) : ""], ["Condition", readOf(i).replace("is", "an if read it:")], ["Arguments", S[E.args[e]]],
      ["Values", !isFailed && own.some(k => E.stat[k] === VALUELESS) ? "none: the tensor is " + D.valueless : ""],
      [state.overlay, state.overlay && overlays.get(state.overlay).isOwn && overlayValue(i) !== null ? overlayText(overlayValue(i)) : ""],
      ["Backward", isFailed || E.backward[e] === null ? "" : timeText(own.reduce((sum, k) => sum + (E.backward[k] || 0), 0))],
    ]));
    own.forEach(k => { if (E.stat[k] >= 0) panel.append(statBlock(E.stat[k], own.length > 1 ? "Values of " + S[E.label[k]] : "Values")); });
    own.forEach(k => panel.append(attentionBlock(k)));
    own.forEach(k => { if (E.grad[k] >= 0) panel.append(statBlock(E.grad[k], "Gradient")); });
    panel.append(linkList("Parents", [...new Set(own.flatMap(k => E.parents[k]))].filter(p => !buffers.includes(p)), absent(own, "parents")));
    panel.append(linkList("Children", [...new Set(own.flatMap(k => children[k]))], absent(own, "children")));
  } else {
    const units = new Set(), ins = new Set(), outs = new Set();
    for (const e of all) units.add(unitOf[e]);
    for (const e of all) { for (const p of E.parents[e]) if (!within(unitOf[p], i)) ins.add(p); for (const c of children[e]) if (!within(unitOf[c], i)) outs.add(c); }
    panel.append(facts([
      ["Operations", many(countUnits(i))], ["Output shape", shapeOf(i)], ["Input shapes", [...new Set([...ins].map(e => S[E.shape[e]]))].slice(0, 4).join("; ")],
      ["Parameters", params.length ? many(paramCount(i)) : ""], ["Their size", params.length ? bytesText(params.reduce((sum, p) => sum + Q.bytes[p], 0)) : ""],
      ["Tensors", bytesText(all.reduce((sum, e) => sum + E.bytes[e], leftIn(i, "bytes")))], ["Time", timeText(time)], ["FLOPs", flops ? short(flops) : ""],
      ["Backward", all.some(e => E.backward[e] !== null) ? timeText(all.reduce((sum, e) => sum + (E.backward[e] || 0), leftIn(i, "backward"))) : ""],
      [state.overlay, state.overlay && overlays.get(state.overlay).isOwn && overlayValue(i) !== null ? overlayText(overlayValue(i)) : ""],
    ]));
    if (isOpenable(i)) panel.append(html("div", { class: "passes" }, html("button", { type: "button", onclick: () => toggle(i) }, state.open[i] ? "Collapse" : "Expand"), html("button", { type: "button", onclick: () => openTo(levelsIn(i), i) }, "Expand all inside")));
    const out = links.outOf[i], shown = out > 0 ? entriesNow(out) : [];
    if (shown.length && E.stat[shown[0]] >= 0) panel.append(statBlock(E.stat[shown[0]], "Values of its output, " + S[E.label[shown[0]]]));
    panel.append(linkList("Parents", [...ins]), linkList("Children", [...outs]));
  }
  panel.append(editBlock(editedKey(i)));
  if (params.length) {
    const list = html("div", { class: "params" });
    for (const p of params.slice(0, isUnit(i) ? 20 : 12)) {
      const item = html("div", {}, html("b", {}, S[Q.address[p]]), " " + S[Q.shape[p]] + " ", html("span", { class: "sub" }, S[Q.dtype[p]] + ", " + bytesText(Q.bytes[p]) + (Q.trained[p] ? "" : ", frozen")));
      if (Q.stat[p] >= 0 && isUnit(i)) item.append(histogram(Q.stat[p]), html("div", { class: "pair" }, html("span", {}, numberText(T.low[Q.stat[p]])), html("span", {}, "std " + numberText(T.std[Q.stat[p]])), html("span", {}, numberText(T.high[Q.stat[p]]))));
      if (Q.grad[p] >= 0) item.append(html("div", { class: "sub" }, "gradient std " + numberText(T.std[Q.grad[p]]) + ", largest " + numberText(Math.max(Math.abs(T.min[Q.grad[p]]), Math.abs(T.max[Q.grad[p]])))));
      list.append(item);
    }
    panel.append(html("h3", {}, "Parameters"), list);
    if (params.length > list.children.length) list.append(html("div", {}, "and " + many(params.length - list.children.length) + " more"));
  }
  if (buffers.length) {
    const list = html("div", { class: "params" });
    for (const e of buffers) list.append(html("div", {}, html("b", {}, S[E.args[e]]), " " + S[E.shape[e]]));
    panel.append(html("h3", {}, "Buffers"), list);
  }
  panel.append(idleBlock(i));
  panel.append(placeBlock(placesOf(i)));
}
/* The key that an edit of a part names; null if it cannot be edited. */
function editedKey(i) {
  if (i === failedUnit) return null;
  if (PART[P.part[i]] === "module" && S[P.path[i]]) {
    return S[P.path[i]] + (P.passes[i] > 1 ? ":" + passNumber(i, Math.min(state.pass.get(i) || 0, carriedPasses(i) - 1)) : "");
  }
  const own = isUnit(i) ? entriesNow(i)[0] : undefined, label = own === undefined ? "" : S[E.label[own]];
  return label && !/^(output|buffer)_/.test(label) ? label : null;
}
function showModel() {
  panel.append(html("h2", {}, D.title), html("div", { class: "sub" }, D.failure ? "The forward pass failed." : "One forward pass."));
  if (D.valueless) panel.append(html("div", { class: "sub", id: "valueless" }, "Tensors without values are " + D.valueless + ": shapes, sizes and FLOPs are there, statistics are not, and times are those of working out shapes."));
  if (LEFT) panel.append(html("div", { class: "sub", id: "carried" }, "A long log: this page carries " + many(LEFT.carried) + " of its " + many(D.tensors) + " tensors, the first and the last passes of what repeats. Counts, sizes and times are those of all; the history has the rest, such as history[\"" + S[E.label[NUM - 1]] + "\"]. Search finds what is here."));
  if (D.note) panel.append(html("div", { class: "sub", id: "note" }, D.note));
  panel.append(facts([
    ["Tensors", many(D.tensors)], ["Their size", bytesText(D.bytes)], ["Parameters", many(D.params)], ["Their size", bytesText(D.paramBytes)],
    ["Forward pass", timeText(D.seconds * 1e6)], ["FLOPs", E.flops.some(Boolean) ? short(E.flops.reduce((a, b) => a + b, leftIn(0, "flops"))) : ""],
  ]));
  panel.append(idleBlock(0));
  panel.append(html("h3", {}, "How to"), html("div", { class: "sub" }, "Click a box to open it, again to close it. Shift-click a second one to see the paths between the two. Press ? for the keys."));
}
