/* The state of the page in its URL: a link opens the same view. */

import { $, N, P, isOpenable, state, tell } from "./outline.js";
import { forgetLinks } from "./links.js";
import { overlays } from "./overlays.js";
import { arrange } from "./arrange.js";
import { draw } from "./draw.js";
import { aimAtAll, applyView, stageSize } from "./camera.js";
import { search } from "./search.js";
import { setPass, showPanel } from "./panel.js";
import { drawCrumbs, drawExtras, drawScaleChoice, drawSides, drawSteps } from "./bar.js";
import { say } from "./word.js";

let timer = 0, at = -1;
const steps = [];  // each place that the reader was at, as the address says it, and which of them is shown
let hasAddress = !given.tell;  // a page beside another shares its address
function hashText() {
  const opened = [];
  for (let i = 1; i < N; i++) if (state.open[i]) opened.push(i.toString(36));
  const [w, h] = stageSize(), v = state.view;
  const passes = [...state.pass].filter(([i, at]) => at > 0 && state.pass.get(P.parent[i]) !== at).slice(0, 50);
  const bits = ["n=" + N.toString(36), "e=" + opened.join("."), "v=" + [(w / 2 - v.x) / v.k, (h / 2 - v.y) / v.k].map(Math.round).join(",") + "," + v.k.toFixed(3)];
  if (state.selected > 0) bits.push("s=" + state.selected.toString(36));
  if (state.second > 0) bits.push("t=" + state.second.toString(36));
  if (passes.length) bits.push("p=" + passes.map(([i, at]) => i.toString(36) + ":" + at.toString(36)).join("."));
  if (state.overlay) bits.push("o=" + encodeURIComponent(state.overlay));
  if (state.query) bits.push("q=" + encodeURIComponent(state.query));
  const sides = Object.entries(state.sides).filter(([, v]) => v !== "dim").map(([k, v]) => k + ":" + v);
  if (sides.length) bits.push("h=" + sides.join(","));
  const extras = Object.keys(state.extras).filter(key => state.extras[key]);
  if (state.scale.kind !== "auto" || state.scale.per !== "total") bits.push("c=" + state.scale.kind + "," + state.scale.per);
  if (extras.length) bits.push("x=" + extras.join(","));
  return "#" + bits.join("&");
}
export function remember() {
  if (!timer) timer = setTimeout(writeDown, 150);
}
/* Opening and selecting add a step to the browser history; panning and typing do not. */
const stepOf = text => text.replace(/&[vq]=[^&]*/g, "");
function writeDown() {
  clearTimeout(timer);
  timer = 0;
  tell("remembered", hashText());
  const text = hashText(), isStep = at < 0 || stepOf(text) !== stepOf(steps[at]);
  if (isStep) steps.length = ++at;
  steps[at] = text;
  if (hasAddress) try { history[isStep && at ? "pushState" : "replaceState"]({ at }, "", text); } catch (error) {
    if (error.name !== "SecurityError") throw error;  // A page inside a page has no address of its own.
    hasAddress = false;
  }
  drawSteps(at > 0, at < steps.length - 1);
}
/* Returns false if there is no such step. */
export function goStep(by) {
  if (timer) writeDown();
  if (!steps[at + by]) return false;
  if (hasAddress) { history.go(by); return true; }
  at += by;
  restore(steps[at]);
  drawSteps(at > 0, at < steps.length - 1);
  return true;
}
/* Called when the URL changes: by the back button, or by a typed URL. */
export function arrive(known) {
  clearTimeout(timer);
  timer = 0;
  const text = location.hash;
  if (known && steps[known.at] === text) at = known.at;
  restore(text);
  drawSteps(at > 0, at < steps.length - 1);
}
/* Restores the state in a URL. Returns false if there is none; shows a message if it does not fit this model. */
export function restore(text) {
  if (text.replace(/^#/, "") === "") return false;
  let isBroken = false;
  const decoded = bit => { try { return decodeURIComponent(bit); } catch (error) { if (!(error instanceof URIError)) throw error; isBroken = true; return ""; } };
  const found = Object.fromEntries(text.replace(/^#/, "").split("&").map(bit => { const at = bit.indexOf("="); return [bit.slice(0, at), bit.slice(at + 1)]; }));
  if (found.e === undefined || !found.v || found.n !== undefined && parseInt(found.n, 36) !== N) { sayBroken(); return false; }
  const valid = t => { const i = parseInt(t, 36); if (i > 0 && i < N) return i; isBroken = true; return -1; };
  state.open.fill(0);
  state.open[0] = 1;
  for (const bit of found.e.split(".")) if (bit) { const i = valid(bit); if (i > 0 && isOpenable(i)) state.open[i] = 1; }
  state.selected = found.s ? valid(found.s) : -1;
  state.second = found.t ? valid(found.t) : -1;
  const overlay = found.o ? decoded(found.o) : "";
  state.overlay = overlays.has(overlay) ? overlay : "";
  if (overlay !== state.overlay) isBroken = true;
  state.pass.clear();
  for (const bit of (found.p || "").split(".")) if (bit) { const [i, at] = bit.split(":"), part = valid(i), pass = parseInt(at, 36); if (part > 0 && pass > 0) setPass(part, pass); else isBroken = true; }
  for (const bit of (found.h || "").split(",")) { const [k, v] = bit.split(":"); if (Object.hasOwn(state.sides, k) && ["show", "dim", "hide"].includes(v)) state.sides[k] = v; }
  const [kind, per] = (found.c || "").split(",");
  state.scale = { kind: ["linear", "log"].includes(kind) ? kind : "auto", per: per === "operation" ? per : "total" };
  for (const key in state.extras) state.extras[key] = (found.x || "").split(",").includes(key);
  forgetLinks();
  arrange();
  const [x, y, k] = found.v.split(",").map(Number), [w, h] = stageSize();
  if ([x, y, k].every(Number.isFinite) && k > 0) state.view = { k, x: w / 2 - x * k, y: h / 2 - y * k };
  else { isBroken = true; aimAtAll(true); }
  draw();
  const query = found.q ? decoded(found.q) : "";
  $("query").value = query;
  search(query);
  $("overlay").value = state.overlay;
  drawSides();
  drawExtras();
  drawScaleChoice();
  applyView();
  showPanel();
  drawCrumbs();
  if (isBroken) sayBroken();
  return true;
}
const sayBroken = () => say("The address could not be followed in full: it is damaged, or belongs to another page.", true);
