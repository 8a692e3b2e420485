/* The bar at the top: path of the selection, filters, depth. */

import { $, P, S, scene, state } from "./outline.js";
import { forgetLinks } from "./links.js";
import { html } from "./elements.js";
import { applyView } from "./camera.js";
import { draw } from "./draw.js";
import { remember } from "./address.js";
import { refresh, select } from "./actions.js";
import { levelsIn, openTo } from "./levels.js";
import { savePng, saveSvg } from "./picture.js";

export function drawCrumbs() {
  const nav = $("crumbs"), chain = [];
  for (let i = state.selected; i > 0; i = P.parent[i]) chain.unshift(i);
  nav.replaceChildren();
  if (!chain.length) return;
  for (const i of chain) {
    let above = P.parent[i];
    while (above > 0 && !S[P.path[above]]) above = P.parent[above];
    const head = above > 0 ? S[P.path[above]] + "." : "", full = S[P.title[i]];
    const text = head && full.startsWith(head) ? full.slice(head.length) : full;
    nav.append("› ", html("button", { type: "button", title: full, onclick: () => select(i, {}) }, text.length > 28 ? text.slice(0, 26) + "…" : text));
  }
}
export function drawSides() {
  const names = { buffer: "Buffers", constant: "Constants", mask: "Masks", view: "Views" };
  $("sides").replaceChildren(...Object.keys(names).map(side => {
    const choice = html("select", { "aria-label": names[side] }, ...["show", "dim", "hide"].map(v => html("option", v === state.sides[side] ? { value: v, selected: "" } : { value: v }, v)));
    choice.addEventListener("change", () => { state.sides[side] = choice.value; forgetLinks(); scene.orders.clear(); refresh(); applyView(); });
    return html("label", {}, names[side], choice);
  }));
}
export function drawExtras() {
  const names = { args: "Arguments on nodes", params: "Parameters on nodes", shapes: "Shapes on edges" };
  $("extras").replaceChildren(...Object.keys(names).map(key => {
    const box = html("input", { type: "checkbox", ...(state.extras[key] ? { checked: "" } : {}) });
    box.addEventListener("change", () => { state.extras[key] = box.checked; refresh(); applyView(); });
    return html("label", {}, names[key], box);
  }));
}
export function drawScaleChoice() {
  const choices = { kind: ["Scale", { auto: "automatic", linear: "linear", log: "logarithmic" }], per: ["Modules by", { total: "their total", operation: "mean per operation" }] };
  $("scale").replaceChildren(...Object.entries(choices).map(([key, [name, values]]) => {
    const choice = html("select", { "aria-label": name }, ...Object.entries(values).map(([v, text]) => html("option", v === state.scale[key] ? { value: v, selected: "" } : { value: v }, text)));
    choice.addEventListener("change", () => { state.scale[key] = choice.value; draw(); remember(); });
    return html("label", {}, name, choice);
  }));
}
export function drawSteps(hasBack, hasForward) {
  $("back").disabled = !hasBack;
  $("forward").disabled = !hasForward;
}
/* The other entries of the menu. */
export function drawMenu() {
  const most = levelsIn(0), button = (text, title, onclick) => html("button", { type: "button", title, onclick }, text);
  const numbers = [];
  for (let level = 2; level < Math.min(most, 9); level++) numbers.push(button(String(level), "Open to depth " + level + " (" + level + ")", () => openTo(level)));
  $("levels").replaceChildren(button("Collapse all", "Close every box (1)", () => openTo(1)), ...numbers, button("Expand all", "Open every box (0)", () => openTo(most)));
  $("save").replaceChildren(button("SVG", "Save the graph as it is opened now, as SVG", saveSvg), button("PNG", "Save the graph as it is opened now, as PNG", savePng));
}
