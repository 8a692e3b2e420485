/* Runs in a page: the graph, all modules over all steps, and what belongs to the step that is chosen. */

import { html } from "../js/elements.js";
import { many } from "../js/numbers.js";
import { SCALE, css } from "../js/scale.js";
import { listenToSheet } from "../js/sheet.js";
import { DATA, isLive, source } from "./source.js";
import { KINDS, Run } from "./runs.js";
import { Graph } from "./graph.js";
import { Matrix } from "./matrix.js";
import { paint, timed, timings } from "./chart.js";
import { STATISTICS, rangeOf, statisticTable, statisticsOf } from "./statistics.js";
import { findingsAt } from "./findings.js";
import { forgetPanel, setPanelStep, showPanel, stepsSpan } from "./panel.js";
import { afterFrame, turn } from "./turns.js";

const element = id => document.getElementById(id);
const COLOURS = 8;
const colourOfRun = k => paint("--run-" + k % COLOURS);
const isDark = matchMedia("(prefers-color-scheme: dark)");
const VIEWS = ["graph", "beside", "modules"];
const DEFAULTS = [["outputs", "rms"], ["parameters", "rms"]];

const page = {
  all: [], isLive, active: null, step: 0, isFollowing: true, tab: "scalars", module: null, view: "graph", kind: "outputs", statistic: "rms",
  look: { shape: "heat", axis: "linear" }, graphs: new Map(), timings,
  get runs() { return this.all.filter(run => run.isShown); },
  get isShowing() { return isShowing; },
  scalarNames() { return [...new Set(this.runs.flatMap(run => Object.keys(run.scalars)))]; },
  kindsKey() { return this.runs.map(run => Object.values(run.modules.get(this.module) || {}).map(list => list.length).join()).join("/"); },
  typeOf(name) { const graph = this.graphs.get(this.active); const data = graph && graph.data; if (!data) return ""; const at = (graph.partsOf && graph.partsOf.get(name) || [])[0]; return at ? data.strings[data.parts.type[at]] : ""; },
  /* The statistic that the curve of a series shows: the one that colours, if the kind has it. */
  statisticFor(kind) { return statisticsOf(kind).includes(this.statistic) ? this.statistic : kind === "updates" ? "ratio" : "rms"; },
  goToStep(step) { page.isFollowing = step >= lastStep(); setStep(step); },
  goToModule(name) { page.module = name; setTab("module"); },
  goToFinding(run, found) {
    if (run !== page.active) activate(run);
    page.isFollowing = false;
    setStep(found.step);
    page.goToModule(found.module);
  },
  setLook(key, value) { page.look[key] = value; show(); },
};
const lastStep = () => page.active && page.active.count ? page.active.steps[page.active.count - 1] : 0;

/* -- what is shown -- */

let isShowing = false, isStale = false;
/* Everything as it is now. Asked for while it is at it, it does it once more. */
async function show() {
  if (!page.active) { drawBar(); return; }
  if (isShowing) { isStale = true; return; }
  isShowing = true;
  try {
    do {
      isStale = false;
      drawBar();
      drawTime();
      if (turnStage() && page.isReady) await afterFrame();  // the browser lays out everything anew: that, and then ours
      await Promise.all([showStage(), showPanel(page)]);
      remember();
    } while (isStale);
    say("");
  } catch (error) {
    if (!(error instanceof TypeError && isLive) && !/server/.test(error.message)) throw error;
    say("The server does not answer: what is shown is what was there before.");
  } finally { isShowing = false; }
}
function say(text) { element("word").textContent = text; element("word").hidden = !text; }

const matrices = new Map();
let shownTables = new Map(), shownRange = null;
/* As many graphs as fit beside each other: that of the run that is looked at first, and of others that are shown. */
const MOST_BESIDE = 4;
const graphRuns = () => page.view === "beside" ? [page.active, ...page.runs.filter(run => run !== page.active)].slice(0, MOST_BESIDE) : [page.active];
/* Brings the view that is chosen to the front; says whether it was another one. */
function turnStage() {
  const isGraph = page.view !== "modules", isOther = element("panes").hidden === isGraph;
  element("panes").hidden = !isGraph;
  element("matrices").hidden = isGraph;
  return isOther;
}
async function showStage() {
  chooseStatistic();
  const runs = page.runs.filter(each => each.kinds.includes(page.kind)), shown = runs.length ? runs : [];
  const tables = await Promise.all(shown.map(each => statisticTable(each, page.kind, page.statistic)));
  shownRange = rangeOf(page.statistic, tables);
  shownTables = new Map(shown.map((each, k) => [each, tables[k]]));
  await turn();
  if (element("matrices").hidden) await showGraphs(); else showMatrices(shown, tables);  // what is in front: another view may be chosen by now
  await turn();
  drawLegend();
  colour();
}
function chooseStatistic() {
  const { kinds } = page.active;
  if (kinds.length && !kinds.includes(page.kind)) [page.kind, page.statistic] = DEFAULTS.find(([kind]) => kinds.includes(kind)) || [kinds[0], "rms"];
  const select = element("by"), key = kinds.join();
  if (select.dataset.kinds !== key) {
    select.dataset.kinds = key;
    select.replaceChildren(...kinds.map(kind => html("optgroup", { label: KINDS[kind] }, ...statisticsOf(kind).map(name => html("option", { value: kind + "/" + name }, KINDS[kind] + ": " + STATISTICS[name].label)))));
  }
  select.value = page.kind + "/" + page.statistic;
}
async function showGraphs() {
  const runs = graphRuns(), host = element("panes");
  await Promise.all(runs.map(async run => {
    const known = page.graphs.get(run);
    if (known && !(known.isMissing && run.count !== known.count)) return;
    const told = await source.graph(run.id);
    page.graphs.set(run, told.page ? new Graph(run, told.page, address => hearSelection(address)) : { isMissing: true, host: html("div", {}), note: told.note, count: run.count });
  }));
  const graphs = runs.map(run => page.graphs.get(run)), isAlone = runs.length < 2;
  for (const other of [...host.children]) if (!graphs.some(graph => graph.section === other)) other.remove();
  host.dataset.count = runs.length;
  graphs.forEach((graph, k) => {
    const run = runs[k];
    if (!graph.section) {
      graph.word = html("div", { class: "no-graph" });
      const dot = html("i", { class: "dot" });
      dot.style.background = run.colour;
      graph.title = html("div", { class: "whose" }, dot, run.name);
      graph.section = html("section", {}, graph.title, html("div", { class: "stand" }, graph.host, graph.word));
    }
    if (host.children[k] !== graph.section) host.insertBefore(graph.section, host.children[k] || null);
    graph.title.hidden = isAlone;
    graph.host.classList.toggle("narrow", !isAlone);
    if (!graph.isMissing && !graph.page && !graph.isBroken) {
      try { graph.open(); } catch (error) {
        if (!(error instanceof TypeError || error instanceof RangeError)) throw error;
        graph.isBroken = true;  // a graph that is damaged is no reason to show nothing
        graph.host.remove();
      }
    }
    graph.word.hidden = !graph.isMissing && !graph.isBroken;
    graph.word.textContent = graph.isBroken ? "The graph of this run cannot be shown: its file is damaged." : graph.note || (run.isFinished ? "The run has no graph." : "The graph comes with the first recorded step.");
    if (graph.page) graph.select(page.module === null ? undefined : page.module);
  });
  for (const graph of graphs) {  // with more or fewer beside it, a graph has another width
    if (graph.page && graph.among && graph.among !== runs.length) graph.page.fit(true);
    graph.among = runs.length;
  }
  element("no-graph").hidden = true;
}
function hearSelection(address) {
  if (address === null) return;
  page.module = address;
  if (page.tab !== "module") setTab("module"); else show();
}
function showMatrices(runs, tables) {
  const host = element("matrices"), span = stepsSpan(page.runs);
  for (const [run, own] of matrices) if (!runs.includes(run)) { own.box.remove(); matrices.delete(run); }
  runs.forEach((run, k) => {
    if (!matrices.has(run)) {
      const matrix = new Matrix({ onPick: (name, step) => { if (run !== page.active) activate(run); page.goToStep(step); page.goToModule(name); } }), title = html("div", { class: "whose" }, html("i", { class: "dot" }), run.name);
      title.firstChild.style.background = run.colour;
      matrices.set(run, { matrix, title, box: html("section", {}, title, matrix.element) });
    }
    const { title, box } = matrices.get(run);
    if (host.children[k] !== box) host.insertBefore(box, host.children[k] || null);
    title.hidden = runs.length < 2;
  });
  runs.forEach((run, k) => {  // each is drawn as wide as it is among all
    const { matrix } = matrices.get(run), list = [];
    for (const [name, kinds] of run.modules) for (const own of kinds[page.kind] || []) {
      const values = tables[k].rows.get(own.number);
      if (values) { list.push({ name, values }); break; }
    }
    matrix.set({ rows: list, stride: tables[k].stride, steps: run.steps, span, range: shownRange, statistic: page.statistic, name: run.name });
    matrix.setSelected(page.module);
  });
  element("no-graph").hidden = runs.length > 0;
  if (!runs.length) element("no-graph").textContent = "Nothing was recorded yet.";
}
/* What depends on the step alone. */
function colour() {
  if (page.view !== "modules") for (const run of graphRuns()) {
    const graph = page.graphs.get(run), table = shownTables.get(run);
    if (!graph || !graph.page || !table) continue;
    const place = run.placeOf(page.step), step = run.count ? run.steps[place] : 0, title = KINDS[page.kind] + ", " + STATISTICS[page.statistic].label + ", step " + many(step);
    timed("recolour", () => graph.colour(table, page.kind, page.statistic, place, shownRange, title));
    graph.mark(findingsAt(run, page.step).map(found => [found.module, found.severity, found.kind, found.text]));
  }
  for (const { matrix } of matrices.values()) matrix.setStep(page.step);
}
function drawLegend() {
  const legend = element("scale-legend");
  legend.hidden = page.view !== "modules" || !shownRange;
  if (legend.hidden) return;
  const scale = html("div", { class: "scale" }), { text } = STATISTICS[page.statistic];
  scale.style.background = "linear-gradient(90deg," + SCALE.slice().reverse().map((c, i) => css(c) + " " + 100 * i / (SCALE.length - 1) + "%").join(",") + ")";
  legend.replaceChildren(html("span", {}, text(shownRange.isLog ? shownRange.least : shownRange.min)), scale, html("span", {}, text(shownRange.max)), html("span", {}, STATISTICS[page.statistic].label + (shownRange.isLog ? ", logarithmic" : "")));
  if (shownRange.hasBad) legend.append(html("span", { class: "bad" }, "not finite"));
}

/* -- the bar, the tabs and time -- */

function drawBar() {
  element("name").textContent = DATA.title;
  const chips = element("runs");
  chips.replaceChildren(...page.all.map(run => {
    const box = html("input", { type: "checkbox", "aria-label": "Show run " + run.name, ...(run.isShown ? { checked: "" } : {}) });
    box.addEventListener("change", () => { run.isShown = box.checked; if (!page.runs.length) { run.isShown = true; } if (!page.active.isShown) activate(page.runs[0]); forgetPanel(); show(); });
    const dot = html("i", { class: "dot" }), name = html("button", { type: "button", title: "Graph and numbers of " + run.name + (run.model ? ", " + run.model : ""), "aria-pressed": String(run === page.active), onclick: () => activate(run) }, dot, run.name);
    dot.style.background = run.colour;
    return html("span", { class: "chip" + (run === page.active ? " on" : "") }, ...(page.all.length > 1 ? [box] : []), name);
  }));
  const run = page.active;
  if (!run) return;
  const [offered, recorded, dropped] = run.counts;
  element("state").textContent = run.isFinished ? "finished" : isLive ? "live" : "not finished";
  element("state").className = run.isFinished || !isLive ? "" : "live";
  element("tallies").textContent = many(run.count) + " steps · " + many(run.modules.size) + " modules" + (dropped ? " · " + many(dropped) + " of " + many(offered) + " dropped" : "");
  element("tallies").title = many(recorded) + " tensors recorded + " + many(dropped) + " dropped = " + many(offered) + " offered";
  const begun = page.runs.reduce((sum, each) => sum + each.findings.filter(found => !found.is_over).length, 0), bad = page.runs.some(each => each.problems.length || each.counts[2]);
  element("tab-findings").textContent = "Findings" + (begun ? " (" + many(begun) + ")" : "") + (bad ? " ⚠" : "");
  for (const name of ["scalars", "module", "findings"]) element("tab-" + name).setAttribute("aria-selected", String(page.tab === name));
  for (const name of VIEWS) element("view-" + name).setAttribute("aria-pressed", String(page.view === name));
  element("view-beside").hidden = page.all.length < 2;
}
function drawTime() {
  const run = page.active, slider = element("time");
  if (!run) return;
  if (page.isFollowing) page.step = lastStep();
  slider.max = Math.max(0, run.count - 1);
  slider.disabled = run.count < 2;
  slider.value = run.placeOf(page.step);
  writeStep();
}
function writeStep() {
  const run = page.active, place = run.placeOf(page.step), group = run.merged[place];
  element("step").textContent = run.count ? "step " + many(page.step) + (group > 1 ? " (" + group + " merged)" : "") : "no step yet";
  element("time").setAttribute("aria-valuetext", "step " + page.step);
  element("live-end").hidden = !isLive || page.isFollowing || run.isFinished;
}
/* Moves to a step of the active run; draws nothing but what depends on it. */
function setStep(step) {
  const run = page.active, place = run.placeOf(step);
  page.step = run.count ? run.steps[place] : 0;
  element("time").value = place;
  timed("step", () => { writeStep(); colour(); setPanelStep(page); });
  remember();
}
function setTab(name) {
  page.tab = name;
  if (matchMedia("(max-width: 700px)").matches && !element("side").dataset.size) element("side").dataset.size = "half";
  show();
}
function activate(run) {
  page.active = run;
  run.isShown = true;
  page.isFollowing = page.isFollowing || page.step >= lastStep();
  forgetPanel();
  show();
}
let player = 0;
function play() {
  if (player) { clearInterval(player); player = 0; element("play").textContent = "▶"; return; }
  element("play").textContent = "❚❚";
  if (page.step >= lastStep()) setStep(page.active.steps[0] || 0);
  page.isFollowing = false;
  const by = Math.max(1, Math.round(page.active.count / 200));
  player = setInterval(() => {
    const next = page.active.placeOf(page.step) + by;
    setStep(page.active.steps[Math.min(next, page.active.count - 1)]);
    if (next >= page.active.count - 1) { page.isFollowing = true; play(); }
  }, 50);
}

/* -- the address -- */

let hasAddress = true, timer = 0;
function remember() { if (!timer) timer = setTimeout(writeAddress, 200); }
function writeAddress() {
  timer = 0;
  if (!hasAddress || !page.active) return;
  const told = new URLSearchParams({ run: page.active.name, view: page.view, tab: page.tab, by: page.kind + "/" + page.statistic, shape: page.look.shape, axis: page.look.axis });
  if (!page.isFollowing) told.set("step", page.step);
  if (page.module !== null) told.set("module", page.module);
  try { history.replaceState(null, "", "#" + told); } catch (error) {
    if (error.name !== "SecurityError") throw error;  // a page inside a page has no address of its own
    hasAddress = false;
  }
}
function readAddress() {
  const told = new URLSearchParams(location.hash.slice(1)), [kind, statistic] = (told.get("by") || "").split("/");
  page.active = page.all.find(run => run.name === told.get("run")) || page.active;
  if (VIEWS.includes(told.get("view"))) page.view = told.get("view");
  if (["scalars", "module", "findings"].includes(told.get("tab"))) page.tab = told.get("tab");
  if (KINDS[kind] && statisticsOf(kind).includes(statistic)) { page.kind = kind; page.statistic = statistic; }
  if (["heat", "ridge"].includes(told.get("shape"))) page.look.shape = told.get("shape");
  if (["linear", "log"].includes(told.get("axis"))) page.look.axis = told.get("axis");
  if (told.has("module")) page.module = told.get("module");
  if (/^\d+$/.test(told.get("step") || "")) { page.step = +told.get("step"); page.isFollowing = false; }
}

/* -- opening, and what comes in -- */

async function hear(revisions) {
  const fresh = Object.keys(revisions).filter(id => !page.all.some(run => String(run.id) === id));
  if (fresh.length) for (const told of await source.runs()) addRun(told);
  const changed = page.all.filter(run => revisions[run.id] !== undefined && revisions[run.id] !== run.revision);
  await Promise.all(changed.map(run => run.refresh()));
  if (!page.active && page.all.length) page.active = page.all[0];
  element("empty").hidden = page.all.length > 0;
  await turn();
  await show();
}
function addRun(told) {
  if (page.all.some(run => run.id === told.run)) return;
  const run = new Run(told, colourOfRun(page.all.length));
  run.isShown = page.all.length < COLOURS;
  page.all.push(run);
}
function listen() {
  element("time").addEventListener("input", () => { const place = +element("time").value; page.isFollowing = place >= page.active.count - 1; setStep(page.active.steps[place]); });
  element("play").addEventListener("click", play);
  element("live-end").addEventListener("click", () => { page.isFollowing = true; show(); });
  for (const name of ["scalars", "module", "findings"]) element("tab-" + name).addEventListener("click", () => setTab(name));
  for (const name of VIEWS) element("view-" + name).addEventListener("click", () => { page.view = name; show(); });
  element("by").addEventListener("change", () => { [page.kind, page.statistic] = element("by").value.split("/"); show(); });
  window.addEventListener("resize", () => { forgetPanel(); show(); });
  isDark.addEventListener("change", () => { page.all.forEach((run, k) => { run.colour = colourOfRun(k); }); forgetPanel(); show(); });
  listenToSheet(element("side"), element("grip"), () => {});
}
async function start() {
  listen();
  for (const told of await source.runs()) addRun(told);
  await Promise.all(page.all.map(run => run.refresh()));
  page.active = page.all[0] || null;
  readAddress();
  element("empty").hidden = page.all.length > 0;
  if (page.active && !page.active.isShown) page.active.isShown = true;
  await show();
  let queue = Promise.resolve();
  source.listen(revisions => { queue = queue.then(() => hear(revisions)).catch(error => say("The page could not follow: " + error.message)); }, isLost => {
    element("lost").hidden = !isLost;
  });
  page.isReady = true;
}
window.torchlens = page;
start();
