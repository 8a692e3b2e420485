/* What modules can be coloured and compared by. */

import { numberText, percent } from "../js/numbers.js";

const share = { text: percent, fixed: [0, 1], isWorst: true };
/* What has no finite number is sent as infinite: NaN says that nothing was recorded. */
const number = { text: v => Number.isFinite(v) ? numberText(v) : "not finite" };
/* By name: the statistic that is sent (`of`), and how a row of it is made into this one, if it is another. */
export const STATISTICS = {
  rms: { label: "rms", of: "rms", ...number },
  norm: { label: "norm (estimated)", of: "rms", make: (row, own) => { const size = Math.sqrt(own.shape.reduce((a, b) => a * b, 1)); return row.map(rms => rms * size); }, ...number },
  mean: { label: "mean", of: "mean", ...number },
  std: { label: "standard deviation", of: "std", ...number },
  low: { label: "smallest", of: "low", ...number },
  high: { label: "largest", of: "high", ...number },
  zero: { label: "share of zeros", of: "zero", ...share },
  dead: { label: "share of dead units", of: "dead", ...share },
  saturated: { label: "share saturated", of: "saturated", ...share },
  nonfinite: { label: "share not finite", of: "nonfinite", ...share },
  ratio: { label: "update-to-weight ratio", of: "rms", beside: "parameters", make: (row, own, beside) => row.map((rms, k) => !beside ? NaN : rms === Infinity || beside[k] === Infinity ? Infinity : beside[k] ? rms / beside[k] : NaN), ...number, isAlwaysLog: true },
};
const COMMON = ["rms", "mean", "std", "low", "high"];
const OF_KIND = {
  outputs: [...COMMON, "zero", "dead", "saturated", "nonfinite"], inputs: [...COMMON, "zero", "nonfinite"], watched: [...COMMON, "norm", "zero", "nonfinite"],
  gradients: ["norm", ...COMMON, "zero", "nonfinite"], parameters: ["norm", ...COMMON, "zero", "nonfinite"], parameter_gradients: ["norm", ...COMMON, "zero", "nonfinite"],
  updates: ["ratio", "norm", ...COMMON, "zero", "nonfinite"],
};
export const statisticsOf = kind => OF_KIND[kind];

/* What was made of tables that were sent, by these: one that has changed is another one. */
const made = new WeakMap();
/* A statistic of the series of a run: {stride, columns, rows: by number of the series}. */
export async function statisticTable(run, kind, name) {
  const { of, make, beside } = STATISTICS[name], table = await run.table(kind, of);
  if (!make) return table;
  const others = beside && run.kinds.includes(beside) ? await run.table(beside, "rms") : null, known = made.get(table) || {};
  made.set(table, known);
  if (known[name] && known[name].others === others) return known[name];
  const rows = new Map();
  for (const [at, row] of table.rows) {
    const own = run.series[at], partner = others ? (run.modules.get(own.module)[beside] || []).find(each => each.name === own.name) : null;
    rows.set(at, make(row, own, partner ? others.rows.get(partner.number) : null));
  }
  return known[name] = { stride: table.stride, columns: table.columns, rows, others };
}

/* The ends of each table, found once: a table that has changed is another one. Of its columns, only new ones are looked at. */
const endsFound = new WeakMap();
function endsOf(table) {
  if (endsFound.has(table)) return endsFound.get(table);
  const ends = table.ends || [], first = ends.length;  // [smallest, largest, smallest above zero, whether something is not finite]
  for (let c = first; c < table.columns; c++) ends.push([Infinity, -Infinity, Infinity, false]);
  for (const row of table.rows.values()) for (let c = first; c < row.length; c++) {
    const v = row[c], own = ends[c];
    if (v !== v) continue;
    if (v === Infinity || v === -Infinity) { own[3] = true; continue; }
    if (v < own[0]) own[0] = v;
    if (v > own[1]) own[1] = v;
    if (v > 0 && v < own[2]) own[2] = v;
  }
  let min = Infinity, max = -Infinity, least = Infinity, hasBad = false;
  for (const own of ends) { min = Math.min(min, own[0]); max = Math.max(max, own[1]); least = Math.min(least, own[2]); hasBad = hasBad || own[3]; }
  const all = { min, max, least, hasBad };
  endsFound.set(table, all);
  return all;
}
/* The ends of the scale, over all steps and modules, so that a colour means the same at each step. `hasBad` says whether there is anything that is not finite. */
export function rangeOf(statistic, tables) {
  const { fixed, isAlwaysLog } = STATISTICS[statistic], all = tables.map(endsOf), hasBad = all.some(each => each.hasBad);
  if (fixed) return { min: fixed[0], max: fixed[1], isLog: false, least: 0, hasBad };
  const min = Math.min(...all.map(each => each.min)), max = Math.max(...all.map(each => each.max)), least = Math.min(...all.map(each => each.least));
  if (min > max) return { min: 0, max: 0, isLog: false, least: 0, hasBad };
  const isLog = min >= 0 && max > 0 && (isAlwaysLog || max > 100 * least);
  return { min, max, isLog, least: Math.max(least, max / 1e8), hasBad };
}
/* Where a value is on the scale, from 0 to 1. */
export function placeOn(range, v) {
  if (range.isLog) return v <= range.least ? 0 : Math.min(1, Math.log(v / range.least) / Math.log(range.max / range.least));
  return range.max > range.min ? Math.max(0, Math.min(1, (v - range.min) / (range.max - range.min))) : 1;
}
/* A step may lack a series (only something else was recorded then): the value just before it stands for it. */
const LOOK_BACK = 3;
function before(row, column) {
  for (let k = column; k >= 0 && k > column - LOOK_BACK; k--) if (!Number.isNaN(row[k])) return row[k];
  return NaN;
}
/* The value of a module that has several tensors of a kind is that of the first; the worst, where it is a share of what is bad. */
export function valueIn(table, list, statistic, place) {
  const column = Math.min(Math.floor(place / table.stride), table.columns - 1);
  let found = NaN;
  for (const own of list) {
    const row = table.rows.get(own.number), v = row ? before(row, column) : NaN;
    if (Number.isNaN(v)) continue;
    if (!STATISTICS[statistic].isWorst) return v;
    if (!(found >= v)) found = v;
  }
  return found;
}
