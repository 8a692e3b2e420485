/* What modules can be coloured and compared by. */

import { numberText, percent } from "../page/numbers.js";

const share = { text: percent, fixed: [0, 1], isWorst: true };
/* What has no finite number is sent as infinite: NaN says that nothing was recorded. */
const number = { text: v => Number.isFinite(v) ? numberText(v) : "not finite" };
/* By name: what it needs of the numbers that are sent, and how it is made of them. */
export const STATISTICS = {
  rms: { label: "rms", needs: ["rms"], make: ([rms]) => rms, ...number },
  norm: { label: "norm (estimated)", needs: ["rms"], make: ([rms], own) => rms * Math.sqrt(own.shape.reduce((a, b) => a * b, 1)), ...number },
  mean: { label: "mean", needs: ["mean"], make: ([mean]) => mean, ...number },
  std: { label: "standard deviation", needs: ["std"], make: ([std]) => std, ...number },
  low: { label: "smallest", needs: ["low"], make: ([low]) => low, ...number },
  high: { label: "largest", needs: ["high"], make: ([high]) => high, ...number },
  zero: { label: "share of zeros", needs: ["zero"], make: ([zero]) => zero, ...share },
  dead: { label: "share of dead units", needs: ["dead"], make: ([dead]) => dead, ...share },
  saturated: { label: "share saturated", needs: ["saturated"], make: ([saturated]) => saturated, ...share },
  nonfinite: { label: "share not finite", needs: ["nonfinite"], make: ([bad]) => bad, ...share },
  ratio: { label: "update-to-weight ratio", needs: ["rms"], beside: "parameters", make: ([rms], own, beside) => rms === Infinity || beside === Infinity ? Infinity : beside ? rms / beside : NaN, ...number, isAlwaysLog: true },
};
const COMMON = ["rms", "mean", "std", "low", "high"];
const OF_KIND = {
  outputs: [...COMMON, "zero", "dead", "saturated", "nonfinite"], inputs: [...COMMON, "zero", "nonfinite"], watched: [...COMMON, "norm", "zero", "nonfinite"],
  gradients: ["norm", ...COMMON, "zero", "nonfinite"], parameters: ["norm", ...COMMON, "zero", "nonfinite"], parameter_gradients: ["norm", ...COMMON, "zero", "nonfinite"],
  updates: ["ratio", "norm", ...COMMON, "zero", "nonfinite"],
};
export const statisticsOf = kind => OF_KIND[kind];

/* A statistic of the series of a run: {stride, columns, rows: by number of the series}. */
export async function statisticTable(run, kind, name) {
  const { needs, make, beside } = STATISTICS[name];
  const tables = await Promise.all(needs.map(each => run.table(kind, each)));
  const others = beside && run.kinds.includes(beside) ? await run.table(beside, "rms") : null;
  if (needs.length === 1 && !beside && name !== "norm") return tables[0];
  const { stride, columns } = tables[0], rows = new Map();
  for (const [at, first] of tables[0].rows) {
    const own = run.series[at], out = new Float32Array(first.length), all = tables.map(table => table.rows.get(at));
    const partner = beside ? (run.modules.get(own.module)[beside] || []).find(each => each.name === own.name) : null;
    const theirs = partner && others ? others.rows.get(partner.number) : null;
    for (let k = 0; k < first.length; k++) out[k] = beside && !theirs ? NaN : make(all.map((row, j) => row ? row[Math.min(row.length - 1, Math.floor(k * stride / tables[j].stride))] : NaN), own, theirs ? theirs[k] : 0);
    rows.set(at, out);
  }
  return { stride, columns, rows };
}

/* The ends of the scale, over all steps and modules, so that a colour means the same at each step. */
export function rangeOf(statistic, tables) {
  const { fixed, isAlwaysLog } = STATISTICS[statistic];
  if (fixed) return { min: fixed[0], max: fixed[1], isLog: false, least: 0 };
  let min = Infinity, max = -Infinity, least = Infinity;
  for (const table of tables) for (const row of table.rows.values()) for (let k = 0; k < row.length; k++) {
    const v = row[k];
    if (!Number.isFinite(v)) continue;
    if (v < min) min = v;
    if (v > max) max = v;
    if (v > 0 && v < least) least = v;
  }
  if (min > max) return { min: 0, max: 0, isLog: false, least: 0 };
  const isLog = min >= 0 && max > 0 && (isAlwaysLog || max > 100 * least);
  return { min, max, isLog, least: Math.max(least, max / 1e8) };
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
/* Whether there is any at all that is not finite. */
export const hasBad = tables => tables.some(table => [...table.rows.values()].some(row => row.some(v => v === Infinity || v === -Infinity)));
