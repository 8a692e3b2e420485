/* The panel: scalars, the numbers of the selected module, and findings. */

import { html } from "../js/elements.js";
import { numberText, percent } from "../js/numbers.js";
import { KINDS } from "./runs.js";
import { Curves } from "./curves.js";
import { Distributions } from "./distributions.js";
import { findingList, problemList } from "./findings.js";
import { STATISTICS, statisticTable, valueIn } from "./statistics.js";
import { turn } from "./turns.js";

const panel = document.getElementById("panel");
const NUMBERS = [["rms", "rms"], ["mean", "mean"], ["std", "std"], ["low", "smallest"], ["high", "largest"], ["zero", "zeros"], ["dead", "dead"], ["nonfinite", "not finite"]];
let charts = [], blocks = [], shownFor = "";

const spanOf = lists => {
  let first = Infinity, last = -Infinity;
  for (const steps of lists) if (steps.length) { first = Math.min(first, steps[0]); last = Math.max(last, steps[steps.length - 1]); }
  return first <= last ? [first, last] : [0, 1];
};
export const stepsSpan = runs => spanOf(runs.map(run => run.steps));

/* Shows a tab anew; what is there already is kept and only given new numbers. */
export async function showPanel(page) {
  const key = [page.tab, page.module, page.runs.map(run => run.id).join(), page.look.shape, page.look.axis, page.tab === "module" ? page.kindsKey() : "", page.tab === "scalars" ? page.scalarNames().join("\n") : ""].join("|");
  if (key !== shownFor) { shownFor = key; panel.replaceChildren(); panel.scrollTop = 0; charts = []; blocks = []; ({ scalars: buildScalars, module: buildModule, findings: () => {} })[page.tab](page); }
  if (page.tab === "findings") showFindings(page);
  await Promise.all(blocks.map(block => block(page)));
  await turn();
  setPanelStep(page);
}
export function setPanelStep(page) {
  for (const chart of charts) chart.setStep(page.step);
  for (const block of blocks) if (block.atStep) block.atStep(page);
}

function buildScalars(page) {
  const names = page.scalarNames();
  if (!names.length) panel.append(html("div", { class: "sub" }, page.isLive ? "No scalars yet. run.log(loss=loss) adds one." : "No scalars were logged. run.log(loss=loss) adds one."));
  for (const name of names) {
    const curves = new Curves({ label: name + " over steps", height: names.length < 3 ? 170 : 130, onStep: page.goToStep });
    const value = html("span", { class: "value" });
    panel.append(html("h3", { class: "line" }, name, value), curves.element);
    charts.push(curves.chart);
    const block = async () => {
      const own = page.runs.filter(run => name in run.scalars), all = await Promise.all(own.map(run => run.scalar(name)));
      await turn();
      curves.setLines(all.map((line, k) => ({ ...line, colour: own[k].colour, name: own[k].name })), spanOf(all.map(line => line.steps)));
      const active = own.indexOf(page.active);
      block.line = active >= 0 ? all[active] : null;
    };
    block.atStep = () => {
      const line = block.line;
      if (!line || !line.steps.length) { value.textContent = ""; return; }
      let at = line.steps.findIndex(step => step >= page.step);
      if (at < 0) at = line.steps.length - 1;
      value.textContent = numberText(line.values[at]);
    };
    blocks.push(block);
  }
  const watched = [...page.active.modules].filter(([, kinds]) => kinds.watched).map(([name]) => name);
  if (watched.length) panel.append(html("h3", {}, "Watched tensors"), html("div", { class: "links" }, ...watched.map(name => html("button", { type: "button", onclick: () => page.goToModule(name) }, name))));
}

function buildModule(page) {
  const name = page.module;
  if (name === null) { panel.append(html("h2", {}, "No module is selected"), html("div", { class: "sub" }, "Select one in the graph, in the table of all modules, or here."), moduleLinks(page)); return; }
  const holders = page.runs.filter(run => run.modules.has(name));
  panel.append(html("h2", {}, name || "The model"));
  const type = page.typeOf(name);
  if (type) panel.append(html("div", { class: "sub" }, type));
  if (!holders.length) {
    const inner = [...page.active.modules.keys()].filter(each => each.startsWith(name + "."));
    panel.append(html("div", { class: "sub" }, "Nothing was recorded of it" + (inner.length ? ", but of what is inside:" : ".")), html("div", { class: "links" }, ...inner.slice(0, 60).map(each => link(page, each))));
    return;
  }
  const choice = (label, key, options) => {
    const select = html("select", { "aria-label": label }, ...Object.entries(options).map(([value, text]) => html("option", page.look[key] === value ? { value, selected: "" } : { value }, text)));
    select.addEventListener("change", () => page.setLook(key, select.value));
    return select;
  };
  panel.append(html("div", { class: "look" }, choice("Histograms as", "shape", { heat: "heat map", ridge: "ridges" }), choice("Axis of values", "axis", { linear: "linear", log: "logarithmic" })));
  for (const kind of Object.keys(KINDS)) {
    const names = [...new Set(holders.flatMap(run => (run.modules.get(name)[kind] || []).map(own => own.name)))];
    for (const tensor of names) buildSeries(page, holders, name, kind, tensor);
  }
}
function buildSeries(page, holders, module, kind, tensor) {
  const own = holders.map(run => (run.modules.get(module)[kind] || []).find(series => series.name === tensor)), first = own.find(Boolean);
  const facts = html("span", { class: "value" }, [first.shape.join("×") || "scalar", first.dtype].join("  "));
  panel.append(html("h3", { class: "line" }, KINDS[kind] + (tensor ? " · " + tensor : ""), facts));
  const drawn = holders.map((run, k) => {
    if (!own[k]) return null;
    const chart = new Distributions({ label: KINDS[kind] + " of " + (module || "the model") + (tensor ? ", " + tensor : "") + " of run " + run.name + " over steps", onStep: page.goToStep, height: page.look.shape === "ridge" ? 170 : 118 });
    if (holders.length > 1) { const mark = html("div", { class: "whose" }, html("i", { class: "dot" }), run.name); mark.firstChild.style.background = run.colour; panel.append(mark); }
    panel.append(chart.element);
    charts.push(chart);
    return chart;
  });
  const curves = new Curves({ label: "A statistic over steps", height: 84, onStep: page.goToStep, text: v => STATISTICS[page.statisticFor(kind)].text(v) });
  const caption = html("div", { class: "caption" }), numbers = html("div", { class: "nums" });
  panel.append(caption, curves.element, numbers);
  charts.push(curves.chart);
  const wanted = NUMBERS.filter(([name]) => name !== "dead" || kind === "outputs");
  const block = async () => {
    const span = stepsSpan(page.runs), statistic = page.statisticFor(kind);
    caption.textContent = STATISTICS[statistic].label;
    await Promise.all(holders.map(async (run, k) => {
      if (!drawn[k]) return;
      const histograms = await run.histograms(own[k].number);
      await turn();
      drawn[k].set(histograms, { steps: run.steps, colour: run.colour, span, look: page.look });
    }));
    const tables = await Promise.all(holders.map(run => run.kinds.includes(kind) ? statisticTable(run, kind, statistic) : null));
    await turn();
    curves.setLines(tables.map((table, k) => table && own[k] && table.rows.get(own[k].number) ? { values: table.rows.get(own[k].number), steps: reduced(holders[k].steps, table.stride), colour: holders[k].colour, name: holders[k].name } : null).filter(Boolean), span);
    const active = Math.max(0, holders.indexOf(page.active));
    if (own[active]) block.tables = await Promise.all(wanted.map(([name]) => statisticTable(holders[active], kind, name)));
    block.run = holders[active];
    block.own = own[active];
  };
  block.atStep = () => {
    if (!block.tables || !block.own) { numbers.replaceChildren(); return; }
    const place = block.run.placeOf(page.step);
    numbers.replaceChildren(...wanted.map(([name, text], k) => {
      const v = valueIn(block.tables[k], [block.own], name, place), isShare = STATISTICS[name].text === percent;
      return Number.isNaN(v) && isShare ? "" : html("div", name === "nonfinite" && v > 0 ? { class: "bad" } : {}, html("span", {}, text), Number.isNaN(v) ? "NaN" : name === "low" && v === -Infinity ? "−∞" : name === "high" && v === Infinity ? "∞" : STATISTICS[name].text(v));
    }).filter(Boolean));
  };
  blocks.push(block);
}
function reduced(steps, stride) {
  if (stride === 1) return steps;
  const out = [];
  for (let k = 0; k < steps.length; k += stride) out.push(steps[Math.min(steps.length - 1, k + stride - 1)]);
  return out;
}
const link = (page, name) => html("button", { type: "button", onclick: () => page.goToModule(name) }, name || "the model");
function moduleLinks(page) {
  const names = [...page.active.modules.keys()];
  const list = html("div", { class: "links" }, ...names.slice(0, 200).map(name => link(page, name)));
  if (names.length > 200) list.append("and " + (names.length - 200).toLocaleString("en-US") + " more: select them in the graph or the table");
  return list;
}

function showFindings(page) {
  const { list } = findingList(page.runs, page.goToFinding), problems = problemList(page.runs);
  const parts = [html("h3", {}, "Findings"), list];
  if (problems.childElementCount) parts.push(html("h3", {}, "Problems and drops"), problems);
  panel.replaceChildren(...parts);
}
export function forgetPanel() { shownFor = ""; }
