/* Starts the page. */

import { $, D, N, P, PART, S, SIDE, depth, failedUnit, isOpenable, kids, root, scene, stage, started, state, timings } from "./outline.js";
import { columnsIn, connect, links } from "./links.js";
import { countUnits, wordFor } from "./names.js";
import { overlayRange, overlays } from "./overlays.js";
import { arrange } from "./arrange.js";
import { html } from "./elements.js";
import { drawLegend } from "./legend.js";
import { draw } from "./draw.js";
import { aimAtAll, applyView, fit } from "./camera.js";
import { select, toggle } from "./actions.js";
import { search, walk } from "./search.js";
import { showPanel } from "./panel.js";
import { drawExtras, drawMenu, drawScaleChoice, drawSides } from "./bar.js";
import { openTo } from "./levels.js";
import { svgText } from "./picture.js";
import { restore } from "./address.js";
import { listen } from "./input.js";
import { drive } from "./drive.js";

/* Expands boxes, the largest first, until 10 to 40 nodes are shown. At most two inputs and two outputs are counted, and folded
ones stay closed. Dimmed nodes may exceed the limit. */
function openReadable() {
  state.open[0] = 1;
  if (failedUnit > 0) for (let p = P.parent[failedUnit]; p > 0; p = P.parent[p]) state.open[p] = 1;
  connect();
  const endKind = i => wordFor(i, "");
  const isBright = i => !links.hidden[i] && PART[P.part[i]] !== "constants" && !(SIDE[P.side[i]] && state.sides[SIDE[P.side[i]]] === "dim");
  const isShown = i => !links.hidden[i];
  const shown = (i, counts) => kids[i].filter(counts).length;
  const visible = counts => { let n = 0; (function count(i) { for (const k of kids[i]) if (counts(k)) { if (state.open[k]) count(k); else n++; } })(0); return n; };
  const telling = () => {
    const count = kind => Math.min(2, kids[0].filter(k => isShown(k) && endKind(k) === kind).length);
    return visible(k => isShown(k) && !(P.parent[k] === 0 && endKind(k))) + count("input") + count("output");
  };
  const openColumns = box => {
    const pair = columnsIn(box);
    if (!pair || pair.some(k => state.open[k]) || visible(isShown) - 2 + shown(pair[0], isShown) + shown(pair[1], isShown) > 40) return false;
    for (const k of pair) state.open[k] = 1;
    return true;
  };
  // A module that contains nearly everything is treated as the model.
  const isCore = k => isOpenable(k) && PART[P.part[k]] === "module" && P.passes[k] < 2 && countUnits(k) >= 0.7 * countUnits(0);
  for (let box = 0; box !== undefined; ) {
    if (openColumns(box)) break;
    box = kids[box].find(k => isCore(k) && visible(isShown) - 1 + shown(k, isShown) <= 40);
    if (box !== undefined) state.open[box] = 1;
  }
  while (telling() < 10) {
    const candidates = [];
    (function look(i) { for (const k of kids[i]) if (isOpenable(k) && !(i === 0 && endKind(k))) { if (state.open[k]) look(k); else if (PART[P.part[k]] !== "constants") candidates.push(k); } })(0);
    // Small loops stay closed. Large boxes first, modules before folded parts.
    const worth = k => countUnits(k) * (PART[P.part[k]] === "module" ? 4 : 1) / (1 + depth[k]);
    const isSmallLoop = k => (PART[P.part[k]] === "loop" || P.passes[k] > 1 && PART[P.part[k]] === "module") && countUnits(k) < 500;
    const boxes = [...new Set(candidates.map(k => P.parent[k]))];
    if (boxes.some(openColumns)) continue;
    const fitting = counts => candidates.filter(k => visible(counts) - 1 + shown(k, counts) <= 40 && !isSmallLoop(k));
    let fits = fitting(isShown);
    if (!fits.length) fits = fitting(isBright);
    if (!fits.length) break;
    fits.sort((a, b) => worth(b) - worth(a) || a - b);
    state.open[fits[0]] = 1;
  }
}

function start() {
  $("name").textContent = D.title;
  $("name").title = D.receipt || "";
  $("overlay").append(html("option", { value: "" }, "kind"), ...[...overlays.keys()].map(name => html("option", { value: name }, name)));
  drawSides();
  drawExtras();
  drawScaleChoice();
  drawMenu();
  if (D.failure) {
    const where = D.failure.module ? " in " + D.failure.module : "";
    $("failure").append("The forward pass failed" + where + (D.failure.operation ? ", in " + D.failure.operation + "(" + D.failure.arguments + ")" : "") + ": " + D.failure.message,
      html("button", { type: "button", onclick: () => select(failedUnit, { isCentred: true }) }, "Show"));
    $("failure").hidden = false;
  }
  listen();
  if (!restore(given.address === undefined ? location.hash : given.address)) {
    openReadable();
    arrange();
    drawLegend(overlayRange());  // first, for it takes room
    aimAtAll(true);
    draw();
    applyView();
    showPanel();
    if (failedUnit > 0) select(failedUnit, {});
  }
  timings.open = performance.now() - started;
  timings.sinceNavigation = performance.now();
}
start();

given.page = {
  timings, state, scene, D, openTo, svgText, toggle, select, search, walk, fit, shown: () => [...scene.nodes.values()].filter(n => !n.isBox).length,
  title: i => S[P.title[i]], count: countUnits,
  find: text => { for (let i = 1; i < N; i++) if (S[P.title[i]] === text) return i; return -1; },
  screen: i => { const n = scene.nodes.get(i), v = state.view, r = stage.getBoundingClientRect(); return n ? { x: r.left + v.x + n.x * v.k, y: r.top + v.y + n.y * v.k, w: n.w * v.k, h: n.h * v.k } : null; },
  drive,
};
if (root === document) window.torchlens = given.page;
