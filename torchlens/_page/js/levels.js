/* Opens and closes everything down to a depth. */

import { P, depth, end, isOpenable, kids, scene, state, tell } from "./outline.js";
import { connect, links } from "./links.js";
import { many } from "./numbers.js";
import { aimAt, aimAtAll, applyView } from "./camera.js";
import { refresh } from "./actions.js";
import { showPanel } from "./panel.js";
import { drawCrumbs } from "./bar.js";
import { say } from "./word.js";

const MOST_SHOWN = 1500;  // more than these no screen shows, and no click finds

/* The nesting depth of the boxes inside a part; 0 for an operation. */
export function levelsIn(box) {
  let most = 0;
  for (let i = box; i < end[box]; i++) if (isOpenable(i)) most = Math.max(most, depth[i] - depth[box] + 1);
  return most;
}
/* The number of nodes that a part shows when opened down to a level. */
function shownAt(box, level) {
  let count = 0;
  (function look(i) {
    for (const k of kids[i]) if (!links.hidden[k]) { if (isOpenable(k) && depth[k] - depth[box] < level) look(k); else count++; }
  })(box);
  return count;
}
/* Opens a part so that `level` levels are shown, as far as they fit; 1 closes everything in it. */
export function openTo(level, box = 0) {
  if (!links) connect();
  const wanted = Math.max(1, Math.min(level, levelsIn(box)));
  let now = wanted;
  while (now > 1 && shownAt(box, now) > MOST_SHOWN) now--;
  const before = new Set(scene.nodes.keys());
  for (let i = Math.max(1, box); i < end[box]; i++) state.open[i] = isOpenable(i) && depth[i] - depth[box] < now ? 1 : 0;
  let shown = state.selected;
  while (shown > box && !isShown(shown)) shown = P.parent[shown];
  if (shown !== state.selected) state.selected = shown > 0 ? shown : -1;
  if (state.second > 0 && !isShown(state.second)) state.second = -1;
  refresh(before, () => { if (box > 0 || state.selected > 0) aimAt(box || state.selected); else aimAtAll(true); });
  applyView();
  showPanel();
  drawCrumbs();
  tell("levelled", level, box);
  say(now < wanted ? "Open to depth " + now + ": at depth " + wanted + " there would be " + many(shownAt(box, wanted)) + " nodes. Open single boxes to go deeper." : "");
}
function isShown(i) {
  for (let p = P.parent[i]; p > 0; p = P.parent[p]) if (!state.open[p]) return false;
  return true;
}
