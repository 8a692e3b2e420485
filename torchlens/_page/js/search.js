/* The search. */

import { $, E, N, P, PART, S, end, isUnit, state } from "./outline.js";
import { many } from "./numbers.js";
import { markHits } from "./draw.js";
import { select } from "./actions.js";
import { remember } from "./address.js";

state.hitSet = new Set();
let hitSums = null, haystack = null;
function texts() {
  if (haystack) return haystack;
  haystack = new Array(N);
  for (let i = 0; i < N; i++) {
    const own = P.entries[i].length ? P.entries[i][0] : [];
    haystack[i] = i === 0 || !isUnit(i) && PART[P.part[i]] !== "module" ? "" :
      [S[P.path[i]], S[P.title[i]], S[P.type[i]], ...own.flatMap(e => [S[E.label[e]], S[E.shape[e]], S[E.shape[e]].replace(/×/g, "x")])].join("\n");
  }
  return haystack;
}
export function search(query) {
  state.query = query;
  state.hits = [];
  state.hitAt = -1;
  const input = $("query");
  input.classList.remove("bad");
  if (query) {
    let pattern;
    try { pattern = new RegExp(query, "im"); } catch (error) {
      if (!(error instanceof SyntaxError)) throw error;
      input.classList.add("bad");
      pattern = new RegExp(query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "im");
    }
    const all = texts();
    for (let i = 1; i < N; i++) if (all[i] && pattern.test(all[i])) state.hits.push(i);
  }
  state.hitSet = new Set(state.hits);
  hitSums = new Int32Array(N + 1);
  for (let i = 0; i < N; i++) hitSums[i + 1] = hitSums[i] + (state.hitSet.has(i) ? 1 : 0);
  showHits();
  markHits();
  remember();
}
export const hitsIn = i => state.hits.length ? hitSums[end[i]] - hitSums[i] : 0;
function showHits() {
  const n = state.hits.length;
  $("hits").textContent = !state.query ? "" : state.hitAt >= 0 ? (state.hitAt + 1) + " of " + many(n) : many(n) + (n === 1 ? " hit" : " hits");
}
export function walk(step) {
  if (!state.hits.length) return;
  state.hitAt = (state.hitAt + step + state.hits.length) % state.hits.length;
  select(state.hits[state.hitAt], { isCentred: true });
  showHits();
}
