/* Two pages side by side; actions in one are repeated in the other. */

import { html } from "./elements.js";
import { listenToSheet } from "./sheet.js";

const both = JSON.parse(document.getElementById("data").textContent);
const element = id => document.getElementById(id);
const LOOK_OF = { removed: "removed", added: "added", operation: "changed", passes: "changed", argument: "changed", parameters: "changed", weights: "changed", shape: "values", dtype: "values", values: "values", name: "name", note: "changed" };
const SAID = { removed: "removed", added: "added", operation: "another operation", passes: "runs another number of times", argument: "another argument", parameters: "parameters of another shape", weights: "other weights", shape: "another shape", dtype: "another dtype", values: "other values", name: "another name", note: "" };
const TAGS = { operation: "other op", passes: "other passes", argument: "other argument", parameters: "other params", weights: "other weights", shape: "other shape", dtype: "other dtype", values: "other values", name: "renamed", note: "note" };
const causes = both.differences.filter(found => found.listed && !found.follows), followers = both.differences.filter(found => found.listed && found.follows);
const listed = [...causes, ...followers];
const numberOf = x => typeof x === "number" ? x === 0 ? "0" : x.toPrecision(2).replace(/\.?0+(e|$)/, "$1") : x;

/* The strongest difference gives the colour and text of the mark; the list has all. */
function lookOf(found) {
  const kind = found.words.length ? both.kinds[found.words[0][0]] : "values";
  const text = found.words.map(([k, words]) => [SAID[both.kinds[k]], words].filter(Boolean).join(": ")).join("; ");
  const isOnlyError = kind === "values" && typeof found.error === "number";
  const tag = kind === "note" ? clipped(found.words[0][1]) : isOnlyError ? (found.words.length ? "error " : "") + numberOf(found.error) : TAGS[kind] || kind;
  return { look: LOOK_OF[kind], text: text || "relative error " + numberOf(found.error), tag, colour: found.colour, follows: Boolean(found.follows), isListed: Boolean(found.listed) };
}
const clipped = text => text.length > 24 ? text.slice(0, 23) + "…" : text;

const partners = [new Map(), new Map()];
both.pairs.a.forEach((a, k) => {
  const b = both.pairs.b[k];
  if (!partners[0].has(a)) partners[0].set(a, b);
  if (!partners[1].has(b)) partners[1].set(b, a);
});
const differenceOf = [new Map(), new Map()];
both.differences.forEach(found => [found.a, found.b].forEach((part, side) => { if (part >= 0 && !differenceOf[side].has(part)) differenceOf[side].set(part, found); }));

/* The selection: a part of each side, or of one. */
const now = { parts: [-1, -1], at: -1, isBusy: false, addresses: ["", ""] };
const panes = [];

function openBoth() {
  const saved = readAddress();
  for (const side of [0, 1]) {
    const host = element(side ? "pane-b" : "pane-a"), shadow = host.attachShadow({ mode: "open" }), data = both.sides[side];
    shadow.append(document.querySelector("style").cloneNode(true), element("pane").content.cloneNode(true));
    data.marks = both.differences.flatMap(found => { const part = side ? found.b : found.a; return part > 0 ? [[part, lookOf(found)]] : []; });
    const made = { root: shadow, data, address: saved[side], tell: (what, ...facts) => hear(side, what, facts) };
    now.isBusy = true;
    openPane(made);
    now.isBusy = false;
    panes.push(made.page);
    const more = html("button", { type: "button", class: "details", "aria-pressed": "false", title: "All details of the selection, here" }, "Details");
    more.addEventListener("click", () => { more.setAttribute("aria-pressed", String(host.classList.toggle("more"))); });
    shadow.getElementById("fit").before(more);
  }
  if (!saved[0] && !saved[1]) openAlike();
  else now.parts = panes.map(pane => pane.state.selected);
}
/* Opens in one side what is open in the other. */
function openAlike() {
  alone(() => {
    const wanted = panes.map((_, side) => panes[1 - side].drive.opened().map(i => partners[1 - side].get(i)).filter(i => i > 0));
    panes.forEach((pane, side) => { pane.drive.setOpen(wanted[side], true); pane.fit(true); });
    alignAtTop();
  });
}
function alignAtTop() {
  const k = Math.min(...panes.map(pane => pane.drive.view().k));
  for (const pane of panes) { const v = pane.drive.view(); if (v.k !== k) pane.fit(true); }
}
/* Runs an action without reporting it back. */
function alone(act) {
  now.isBusy = true;
  try { act(); } finally { now.isBusy = false; }
}
function hear(side, what, facts) {
  if (what === "remembered") { now.addresses[side] = facts[0]; writeAddress(); return; }
  if (now.isBusy || panes.length < 2) return;
  alone(() => ({ selected, toggled, levelled, moved: moveAlong, passed })[what](side, panes[1 - side], ...facts));
}
function selected(side, other, i) {
  const partner = i > 0 ? partners[side].get(i) : -1, j = partner === undefined ? -1 : partner;
  now.parts = side ? [j, i] : [i, j];
  other.drive.select(j > 0 ? j : -1);
  if (j > 0) align(side, i, j);
  else if (i > 0) other.drive.setOpen(panes[side].drive.around(i).map(p => partners[side].get(p)).filter(p => p > 0), true);
  now.at = listed.indexOf(differenceOf[side].get(i));
  showBoth();
}
function toggled(side, other, i, isOpen) {
  const j = partners[side].get(i);
  if (j > 0) { other.drive.setOpen([j], isOpen); align(side, i, j); }
}
function levelled(side, other, level, box) {
  const j = box ? partners[side].get(box) : 0;
  if (j !== undefined) other.drive.openTo(level, j);
}
function passed(side, other, i, at) {
  const j = partners[side].get(i);
  if (j > 0) other.drive.setPass(j, at);
}
function moveAlong(side, other, before, after) {
  const v = other.drive.view(), r = after.k / before.k;
  other.drive.moveTo({ k: v.k * r, x: r * v.x + after.x - r * before.x, y: r * v.y + after.y - r * before.y });
}
/* Aligns the counterpart with a node, at the same zoom. */
function align(side, i, j) {
  const mine = panes[side].drive, other = panes[1 - side].drive, here = mine.placeOf(i);
  const v = other.view();
  if (v.k !== mine.view().k) other.moveTo({ ...v, k: mine.view().k });
  const there = other.placeOf(j), w = other.view();
  if (here && there) other.moveTo({ ...w, x: w.x + here[0] - there[0], y: w.y + here[1] - there[1] });
}
/* Selects a difference in the side that has it, and scrolls to it. */
function goTo(at) {
  if (!listed.length) return;
  const k = (at + listed.length) % listed.length, found = listed[k], side = found.b >= 0 ? 1 : 0;
  const part = side ? found.b : found.a;
  alone(() => panes[side].select(part, { isCentred: true }));
  alone(() => selected(side, panes[1 - side], part));
  if (found.a < 0 || found.b < 0) alone(() => showNeighbour(side, part));
  now.at = k;
  showBoth();
}
/* For a part without a counterpart: the counterpart of what precedes it. */
function showNeighbour(side, part) {
  for (let i = part - 1; i > 0; i--) {
    const j = partners[side].get(i);
    if (j > 0 && panes[1 - side].drive.placeOf(j) && panes[side].drive.placeOf(i)) { align(side, i, j); return; }
  }
}

function namesOf(found) {
  const names = [found.a, found.b].map((part, side) => part > 0 ? panes[side].title(part) : part === 0 ? both.names[side] : "");
  return names[0] && names[1] && names[0] !== names[1] ? names[0] + "  ↔  " + names[1] : names[0] || names[1];
}
function listItem(found) {
  const k = listed.indexOf(found), look = lookOf(found);
  const button = html("button", { type: "button", class: "m-" + look.look, "aria-current": String(k === now.at), "data-at": k, onclick: () => goTo(k) },
    namesOf(found), html("span", { class: "what" }, look.text));
  if (found.colour) button.style.borderLeftColor = found.colour;
  return html("li", {}, button);
}
const MOST_LISTED = 400;
function differenceList() {
  const out = document.createDocumentFragment();
  if (!listed.length) { out.append(html("div", { class: "sub", id: "none" }, both.isGiven ? "No pair has a note." : "No difference was found.")); return out; }
  const list = html("ul", { id: "differences" }, ...causes.slice(0, MOST_LISTED).map(listItem));
  out.append(html("h3", {}, causes.length + (causes.length === 1 ? " difference" : " differences")), list);
  if (causes.length > MOST_LISTED) out.append(html("div", { class: "sub" }, "and " + (causes.length - MOST_LISTED) + " more; the arrows above reach them"));
  if (followers.length) {
    const more = html("details", followers.some(found => listed.indexOf(found) === now.at) ? { open: "" } : {}, html("summary", {}, followers.length + " that follow from what they read"));
    more.append(html("ul", { id: "differences", class: "followers" }, ...followers.slice(0, MOST_LISTED).map(listItem)));
    out.append(more);
  }
  return out;
}
function comparison() {
  const facts = now.parts.map((i, side) => new Map(i > 0 ? panes[side].drive.facts(i) : []));
  const table = html("table", { class: "compared" }, html("tr", {}, html("th", {}), ...both.names.map(name => html("th", {}, name))));
  for (const name of new Set([...facts[0].keys(), ...facts[1].keys()])) {
    const [mine, theirs] = facts.map(own => own.get(name) || "");
    if (name === "Operations" && mine === "1" && theirs === "1") continue;
    table.append(html("tr", mine !== theirs && !["Time", "Label"].includes(name) ? { class: "other" } : {}, html("td", {}, name), html("td", {}, mine), html("td", {}, theirs)));
  }
  return table;
}
function showBoth() {
  const panel = element("panel"), found = listed[now.at], part = now.parts.findIndex(i => i > 0);
  const any = part < 0 ? null : differenceOf[part].get(now.parts[part]);
  panel.replaceChildren();
  element("at").textContent = listed.length ? (now.at >= 0 ? now.at + 1 : "–") + " / " + listed.length : "no difference";
  for (const id of ["previous", "next"]) element(id).disabled = !listed.length;
  if (part >= 0) {
    panel.append(html("h2", {}, namesOf({ a: now.parts[0], b: now.parts[1] })));
    const text = any ? lookOf(any).text : now.parts.some(i => i < 0) ? "no counterpart" : "no difference of its own";
    panel.append(html("div", { class: "sub", id: "said" }, text));
    if (any && typeof any.error === "number" && !text.includes("error")) panel.append(html("div", { class: "sub" }, "relative error " + numberOf(any.error)));
    panel.append(comparison());
  } else {
    panel.append(html("h2", {}, both.title), html("div", { class: "sub" }, "Left: " + both.names[0] + ". Right: " + both.names[1] + ". A click in one is a click in the other."));
  }
  panel.append(differenceList());
  const current = panel.querySelector("[aria-current=true]");
  if (current && found) current.scrollIntoView({ block: "nearest" });
  if (part < 0) panel.scrollTop = 0;
}

let writing = 0;
function writeAddress() {
  clearTimeout(writing);
  writing = setTimeout(() => {
    try { history.replaceState(null, "", "#a=" + encodeURIComponent(now.addresses[0]) + "&b=" + encodeURIComponent(now.addresses[1])); } catch (error) {
      if (error.name !== "SecurityError") throw error;  // a page inside a page has no address of its own
    }
  }, 100);
}
function readAddress() {
  const found = location.hash.match(/^#a=([^&]*)&b=([^&]*)$/);
  try { return found ? [decodeURIComponent(found[1]), decodeURIComponent(found[2])] : ["", ""]; } catch (error) {
    if (!(error instanceof URIError)) throw error;
    return ["", ""];
  }
}
function listenToBar() {
  element("name").textContent = both.title;
  element("previous").addEventListener("click", () => goTo(now.at < 0 ? -1 : now.at - 1));
  element("next").addEventListener("click", () => goTo(now.at + 1));
  element("fit").addEventListener("click", () => alone(() => panes.forEach(pane => pane.fit(false))));
  const colours = panes[0].drive.colours().filter(name => panes[1].drive.colours().includes(name));
  element("overlay").append(...colours.map(name => html("option", { value: name }, name || "kind")));
  element("overlay").addEventListener("change", () => panes.forEach(pane => pane.drive.colourBy(element("overlay").value)));
  const query = element("query");
  let hits = [], at = -1;
  query.addEventListener("input", () => {
    hits = panes.flatMap((pane, side) => pane.drive.search(query.value).map(i => [side, i]));
    const seen = new Set();  // what both have is one hit
    hits = hits.filter(([side, i]) => { if (side && seen.has(partners[1].get(i))) return false; if (!side) seen.add(i); return true; });
    at = -1;
    element("hits").textContent = query.value ? hits.length + (hits.length === 1 ? " hit" : " hits") : "";
  });
  query.addEventListener("keydown", event => {
    if (event.key === "Escape") { query.value = ""; query.dispatchEvent(new Event("input")); }
    if (event.key !== "Enter" || !hits.length) return;
    at = (at + (event.shiftKey ? -1 : 1) + hits.length) % hits.length;
    const [side, i] = hits[at];
    panes[side].select(i, { isCentred: true });
    element("hits").textContent = at + 1 + " of " + hits.length;
  });
  document.addEventListener("keydown", event => {
    const target = event.composedPath()[0];
    if (event.ctrlKey || event.metaKey || event.altKey || target.closest("input, select, textarea, dialog")) return;
    if (event.key === "n") goTo(now.at + 1);
    else if (event.key === "p") goTo(now.at < 0 ? -1 : now.at - 1);
    else if (event.key === "/") { query.focus(); query.select(); }
    else if (event.key === "Escape") panes[0].select(-1);
    else return;
    event.preventDefault();
  });
  listenToSheet(element("side"), element("grip"), () => {});
}
openBoth();
listenToBar();
showBoth();
window.torchlens = { both, now, panes, partners, goTo, listed };
