/* What looked wrong, as it came up. */

import { html } from "../js/elements.js";

/* Findings that hold at a step: those that had begun and were not over. */
export function findingsAt(run, step) {
  const now = new Map();
  for (const found of run.findings) {
    if (found.step > step) break;
    const key = found.kind + "\n" + found.where;
    if (found.is_over) now.delete(key); else now.set(key, found);
  }
  return [...now.values()];
}
/* The list, newest first; a click goes to the step and the module. */
export function findingList(runs, onGo) {
  const all = runs.flatMap(run => run.findings.map(found => ({ run, found })));
  all.sort((a, b) => b.found.step - a.found.step);
  const begun = all.filter(({ found }) => !found.is_over).length;
  const list = html("ul", { id: "findings" });
  for (const { run, found } of all.slice(0, 300)) {
    const head = html("span", { class: "head" }, html("b", {}, (found.is_over ? "over: " : "") + found.kind), html("span", { class: "when" }, "step " + found.step.toLocaleString("en-US")));
    const item = html("button", { type: "button", class: "found s-" + found.severity + (found.is_over ? " over" : ""), onclick: () => onGo(run, found) }, head, html("span", { class: "where" }, found.where || "the model"));
    if (runs.length > 1) { const chip = html("i", { class: "dot", title: run.name }); chip.style.background = run.colour; head.prepend(chip); }
    if (!found.is_over) item.append(html("span", { class: "what" }, found.text + (found.advice ? " " + found.advice : "")));
    list.append(html("li", {}, item));
  }
  if (all.length > 300) list.append(html("li", { class: "sub" }, "and " + (all.length - 300).toLocaleString("en-US") + " older ones"));
  if (!all.length) list.append(html("li", { class: "sub" }, "Nothing looked wrong so far: no dead or saturated units, no vanishing or exploding gradients, no NaN, and updates of a sensible size."));
  return { list, begun };
}
/* What could not be recorded, or read. */
export function problemList(runs) {
  const list = html("ul", { id: "problems" });
  for (const run of runs) {
    const [offered, recorded, dropped] = run.counts;
    if (dropped) list.append(html("li", { class: "s-warning" }, named(runs, run) + dropped.toLocaleString("en-US") + " of " + offered.toLocaleString("en-US") + " tensors came too fast and were dropped, first at step " + (run.drops[0] ? run.drops[0][0] : "?") + "; " + recorded.toLocaleString("en-US") + " were recorded."));
    for (const text of run.problems) list.append(html("li", { class: "s-warning" }, named(runs, run) + text));
  }
  return list;
}
const named = (runs, run) => runs.length > 1 ? run.name + ": " : "";
