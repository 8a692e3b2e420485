/* Keyboard, search field and buttons. */

import { $, root, state } from "./outline.js";
import { html } from "./elements.js";
import { draw, elements, focusable } from "./draw.js";
import { bringIntoView, fit, measureAnew, stageSize, zoom } from "./camera.js";
import { drawMap, forgetInks } from "./map.js";
import { follow, goUp, select, toggle } from "./actions.js";
import { search, walk } from "./search.js";
import { showPanel } from "./panel.js";
import { arrive, goStep, remember } from "./address.js";
import { levelsIn, openTo } from "./levels.js";
import { listenToGestures } from "./gestures.js";
import { listenToSheet } from "./sheet.js";

const KEYS = [["Click, Enter", "expand or collapse"], ["Ctrl-click, long press", "select without opening"], ["Arrows", "follow the edges"], ["Backspace", "to the box around"], ["Shift-click", "paths to a second node"],
  ["1 … 9", "open everything to that depth; 1 collapses all"], ["0", "expand all"], ["Alt-←, Alt-→", "back, forward"], ["/", "search; Enter to the next hit, Shift-Enter back"],
  ["f", "fit to the window"], ["Drag, scroll", "move"], ["Pinch, Ctrl-scroll, +  −", "zoom"], ["[  ]", "previous, next pass of a loop"], ["Escape", "clear the selection"], ["?", "this list"]];
function showKeys() {
  const dialog = $("keys"), table = html("table");
  for (const [key, text] of KEYS) table.append(html("tr", {}, html("td", {}, html("kbd", {}, key)), html("td", {}, text)));
  dialog.replaceChildren(html("h2", {}, "Keys"), table, html("form", { method: "dialog" }, html("button", { autofocus: "" }, "Close")));
  if (!dialog.open) dialog.showModal();
}
function focusSelected() {
  const el = elements.get(state.selected);
  if (el) el.focus({ preventScroll: true });
}
function pressButton(name) {
  const button = $(name);
  if (button) { button.click(); focusSelected(); }
}
const middle = () => stageSize().map(side => side / 2);
const keys = {
  ArrowDown: () => follow("down"), ArrowUp: () => follow("up"), ArrowLeft: () => follow("left"), ArrowRight: () => follow("right"),
  Enter: () => { if (state.selected > 0) { toggle(state.selected); focusSelected(); } },
  " ": () => keys.Enter(), Backspace: goUp, f: () => fit(false), "?": showKeys, "/": () => { $("query").focus(); $("query").select(); }, Escape: () => select(-1),
  "+": () => zoom(1.2, ...middle()), "=": () => keys["+"](), "-": () => zoom(1 / 1.2, ...middle()),
  "[": () => pressButton("pass-back"), "]": () => pressButton("pass-next"), 0: () => openTo(levelsIn(0)),
};
for (let level = 1; level < 10; level++) keys[level] = () => openTo(level);

export function listen() {
  listenToGestures();
  listenToSheet($("side"), $("grip"), () => { measureAnew(); if (state.selected > 0) bringIntoView(state.selected); });
  $("fit").addEventListener("click", () => fit(false));
  $("help").addEventListener("click", showKeys);
  $("back").addEventListener("click", () => goStep(-1));
  $("forward").addEventListener("click", () => goStep(1));
  $("query").addEventListener("input", () => search($("query").value));
  $("query").addEventListener("keydown", event => {
    if (event.key === "Enter") { event.preventDefault(); walk(event.shiftKey ? -1 : 1); }
    if (event.key === "Escape") { $("query").value = ""; search(""); const el = elements.get(focusable()); if (el) el.focus({ preventScroll: true }); }
  });
  $("overlay").addEventListener("change", () => { state.overlay = $("overlay").value; draw(); remember(); showPanel(); });
  document.addEventListener("keydown", event => {
    const path = event.composedPath();
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];  // not every browser has these keys, and none for a page in a page
    if (event.altKey && !event.ctrlKey && !event.metaKey && by && path.includes(root) && !path[0].closest("input, select, textarea")) {
      if (goStep(by)) event.preventDefault();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || !path.includes(root) || path[0].closest("input, select, textarea, dialog, summary, #panel, #bar button")) return;
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  document.addEventListener("pointerdown", event => { if (!event.composedPath().includes($("options"))) $("options").open = false; });
  window.addEventListener("resize", () => { measureAnew(); drawMap(); });
  if (given.tell) { delete keys["/"]; delete keys["?"]; }  // there is one search for both pages
  else window.addEventListener("popstate", event => arrive(event.state));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { forgetInks(); drawMap(); });
}
