/* The interface through which the side-by-side page controls a pane. */

import { $, P, isOpenable, root, scene, state } from "./outline.js";
import { applyView, fit } from "./camera.js";
import { refresh, select } from "./actions.js";
import { factsOf } from "./facts.js";
import { describe } from "./names.js";
import { openTo } from "./levels.js";
import { setPass, showPanel } from "./panel.js";
import { draw, recolour } from "./draw.js";
import { setMarks } from "./marks.js";
import { overlays } from "./overlays.js";
import { search } from "./search.js";

export const drive = {
  facts: factsOf,
  describe,
  select: i => select(i, { isShown: false }),
  search: query => { $("query").value = query; search(query); return state.hits; },
  openTo,
  fit,
  opened: () => [...state.open.keys()].filter(i => i > 0 && state.open[i]),
  around(i) { const found = []; for (let p = P.parent[i]; p > 0; p = P.parent[p]) found.push(p); return found; },
  /* Opens or closes parts; opens the boxes around opened parts. */
  setOpen(list, isOpen) {
    const before = new Set(scene.nodes.keys());
    for (const i of list) if (isOpenable(i)) {
      state.open[i] = isOpen ? 1 : 0;
      for (let p = P.parent[i]; isOpen && p > 0; p = P.parent[p]) state.open[p] = 1;
    }
    refresh(before);
    applyView();
    showPanel();
  },
  setPass(i, at) { setPass(i, at); draw(); showPanel(); },
  colourBy(name) { $("overlay").value = name; $("overlay").dispatchEvent(new Event("change")); },
  colours: () => [...$("overlay").options].map(option => option.value),
  /* Colours parts by given values. A call with the same name only changes the values. `range` is the scale for all. */
  setNumbers(name, { parts, text, range, title }) {
    overlays.set(name, { parts, text, range, title, isSum: false, isOwn: true });
    const isNew = state.overlay !== name;
    state.overlay = name;
    if (isNew) draw(); else recolour();
  },
  setMarks(list) { setMarks(list); draw(); },
  view: () => state.view,
  moveTo(view) { state.view = view; applyView(); },
  /* The top of a node on the stage; for a hidden node, of the closed box around it. */
  placeOf(i) {
    while (i > 0 && !scene.nodes.has(i)) i = P.parent[i];
    const node = scene.nodes.get(i), v = state.view;
    return node ? [v.x + (node.x + node.w / 2) * v.k, v.y + node.y * v.k] : null;
  },
  focus() { const el = root.querySelector('[data-id][tabindex="0"]'); if (el) el.focus({ preventScroll: true }); },
};
