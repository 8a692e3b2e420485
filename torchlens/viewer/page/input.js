/* Mouse, touch and keyboard. */

import { $, isOpenable, stage, state, svg, timings } from "./outline.js";
import { describe } from "./names.js";
import { html } from "./elements.js";
import { elements, focusable } from "./draw.js";
import { applyView, fit, stageSize, zoom } from "./camera.js";
import { drawMap, map, mapScale } from "./map.js";
import { follow, goUp, refresh, select, toggle } from "./actions.js";
import { search, walk } from "./search.js";
import { showPanel } from "./panel.js";
import { drawCrumbs } from "./bar.js";
import { restore, written } from "./address.js";

const KEYS = [["Click, Enter", "expand or collapse"], ["Arrows", "follow the edges"], ["Backspace", "to the box around"], ["Shift-click", "paths to a second node"], ["/", "search; Enter to the next hit, Shift-Enter back"],
  ["f", "fit to the window"], ["+  −", "zoom"], ["[  ]", "previous, next pass of a loop"], ["Escape", "clear the selection"], ["?", "this list"]];
function showKeys() {
  const dialog = $("keys"), table = html("table");
  for (const [key, text] of KEYS) table.append(html("tr", {}, html("td", {}, html("kbd", {}, key)), html("td", {}, text)));
  dialog.replaceChildren(html("h2", {}, "Keys"), table, html("form", { method: "dialog" }, html("button", { autofocus: "" }, "Close")));
  if (!dialog.open) dialog.showModal();
}

export function listen() {
  let drag = null;
  const local = event => { const r = stage.getBoundingClientRect(); return [event.clientX - r.left, event.clientY - r.top]; };
  svg.addEventListener("pointerdown", event => {
    if (event.button) return;
    const [x, y] = local(event);
    const target = event.target.closest("[data-id]");
    drag = { x, y, vx: state.view.x, vy: state.view.y, moved: false, id: target ? +target.dataset.id : -1, isShift: event.shiftKey };
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", event => {
    if (!drag) return;
    const [x, y] = local(event);
    if (!drag.moved && Math.hypot(x - drag.x, y - drag.y) < 4) return;
    drag.moved = true;
    svg.classList.add("drag");
    state.view.x = drag.vx + x - drag.x;
    state.view.y = drag.vy + y - drag.y;
    applyView();
  });
  svg.addEventListener("pointerup", event => {
    svg.classList.remove("drag");
    const now = drag;
    drag = null;
    if (!now || now.moved) return;
    if (now.id < 0) { if (state.selected > 0) select(-1); return; }
    if (now.isShift && state.selected > 0) { select(now.id, { second: true, isShown: false }); return; }
    const t = performance.now();
    state.selected = now.id;
    state.second = -1;
    if (!isOpenable(now.id)) select(now.id, { isShown: false, isFocused: true });
    else { toggle(now.id, local(event)); drawCrumbs(); const el = elements.get(now.id); if (el) el.focus({ preventScroll: true }); $("live").textContent = describe(now.id); }
    timings.click = performance.now() - t;
  });
  svg.addEventListener("pointercancel", () => { drag = null; svg.classList.remove("drag"); });
  svg.addEventListener("wheel", event => {
    event.preventDefault();
    const [x, y] = local(event);
    if (event.ctrlKey || event.metaKey || !event.shiftKey && Math.abs(event.deltaX) < 1 && event.deltaMode === 0 && Math.abs(event.deltaY) >= 50 || event.deltaMode) zoom(Math.exp(-Math.max(-120, Math.min(120, event.deltaMode ? event.deltaY * 30 : event.deltaY)) * 0.0018), x, y);
    else { state.view.x -= event.deltaX; state.view.y -= event.deltaY; applyView(); }
  }, { passive: false });
  svg.addEventListener("focusin", event => {
    const target = event.target.closest("[data-id]");
    if (target && +target.dataset.id !== state.selected && target.matches(":focus-visible") && !drag) select(+target.dataset.id, {});
  });
  const mapMove = event => {
    const r = map.getBoundingClientRect(), [w, h] = stageSize(), v = state.view;
    v.x = w / 2 - (event.clientX - r.left - map.offset[0]) / mapScale * v.k;
    v.y = h / 2 - (event.clientY - r.top - map.offset[1]) / mapScale * v.k;
    applyView();
  };
  map.addEventListener("pointerdown", event => { map.setPointerCapture(event.pointerId); mapMove(event); });
  map.addEventListener("pointermove", event => { if (event.buttons) mapMove(event); });
  $("fit").addEventListener("click", () => fit(false));
  $("help").addEventListener("click", showKeys);
  $("query").addEventListener("input", () => search($("query").value));
  $("query").addEventListener("keydown", event => {
    if (event.key === "Enter") { event.preventDefault(); walk(event.shiftKey ? -1 : 1); }
    if (event.key === "Escape") { $("query").value = ""; search(""); const el = elements.get(focusable()); if (el) el.focus({ preventScroll: true }); }
  });
  $("overlay").addEventListener("change", () => { state.overlay = $("overlay").value; refresh(); applyView(); showPanel(); });
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog, summary, #panel, #bar button")) return;
    const keys = {
      ArrowDown: () => follow("down"), ArrowUp: () => follow("up"), ArrowLeft: () => follow("left"), ArrowRight: () => follow("right"),
      Enter: () => { if (state.selected > 0) { toggle(state.selected); if (elements.get(state.selected)) elements.get(state.selected).focus({ preventScroll: true }); } },
      " ": () => keys.Enter(), Backspace: goUp, f: () => fit(false), "?": showKeys, "/": () => { $("query").focus(); $("query").select(); }, Escape: () => select(-1),
      "+": () => zoom(1.2, stageSize()[0] / 2, stageSize()[1] / 2), "=": () => keys["+"](), "-": () => zoom(1 / 1.2, stageSize()[0] / 2, stageSize()[1] / 2),
      "[": () => { const b = $("pass-back"); if (b) { b.click(); if (elements.get(state.selected)) elements.get(state.selected).focus({ preventScroll: true }); } },
      "]": () => { const b = $("pass-next"); if (b) { b.click(); if (elements.get(state.selected)) elements.get(state.selected).focus({ preventScroll: true }); } },
    };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  window.addEventListener("resize", drawMap);
  window.addEventListener("hashchange", () => { if (location.hash !== written) restore(location.hash); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMap);
}
