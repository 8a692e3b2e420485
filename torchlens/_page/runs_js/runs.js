/* Runs: what is known of each, and its numbers as they come. */

import { isLive, source } from "./source.js";

export const KINDS = { outputs: "Outputs", inputs: "Inputs", gradients: "Gradients of outputs", parameters: "Parameters", parameter_gradients: "Gradients of parameters", updates: "Updates", watched: "Watched" };

/* Numbers over places that grow at the end. `valid` is the number of places that are known and still so. */
class Growing {
  constructor(ask, join) { this.ask = ask; this.join = join; this.valid = 0; this.stride = 0; this.value = null; this.asked = null; }
  get(count) {
    if (this.valid >= count && this.value) return this.value;
    if (!this.asked) this.asked = this.fetch(count).finally(() => { this.asked = null; });
    return this.asked;
  }
  async fetch(count) {
    const from = this.valid, block = await this.ask({ from: this.valid, stride: this.stride });
    this.value = this.join(block.head.stride === this.stride ? this.value : null, block);
    this.stride = block.head.stride;
    if (this.valid >= from) this.valid = Math.max(count, 1);  // unless something before changed meanwhile
    return this.value;
  }
  changed(from) { this.valid = Math.min(this.valid, from); }
}

function floats(body) {
  const halves = new Uint16Array(body.buffer, body.byteOffset, body.byteLength >> 1), bits = new Uint32Array(halves.length);
  for (let i = 0; i < halves.length; i++) bits[i] = halves[i] << 16;
  return new Float32Array(bits.buffer);
}
/* Old columns before the new ones. */
function appended(old, kept, fresh) {
  const out = new fresh.constructor(kept + fresh.length);
  if (old) out.set(old.subarray(0, kept));
  out.set(fresh, kept);
  return out;
}
/* The rows of a table lie in one piece of memory, each with room for more: a step that comes in is written behind the others, and nothing is copied. */
function joinTable(old, { head, body }) {
  const all = floats(body), kept = head.from / head.stride, { columns, series } = head, count = kept + columns;
  const isSame = old && old.series.length === series.length && series.every((number, k) => number === old.series[k]);
  let store = old && old.store, { room } = old || {};
  if (!isSame || room < count) {
    room = count + (kept ? Math.max(64, count >> 1) : isLive ? 64 : 0);
    store = new Float32Array(series.length * room);
    if (kept) series.forEach((number, k) => { const before = old && old.rows.get(number), own = store.subarray(k * room, k * room + kept); if (before) own.set(before.subarray(0, kept)); else own.fill(NaN); });
  }
  const rows = new Map();
  series.forEach((number, k) => {
    store.set(all.subarray(k * columns, (k + 1) * columns), k * room + kept);
    rows.set(number, store.subarray(k * room, k * room + count));
  });
  return { stride: head.stride, columns: count, series, rows, store, room, ends: isSame && old.ends ? old.ends.slice(0, kept) : [] };
}
function joinHistograms(old, { head, body }) {
  const kept = head.from / head.stride, { columns, levels } = head, codes = new Map();
  if (old) for (const [code, row] of old.rows) codes.set(code, row.subarray(0, kept));
  const fresh = new Map(head.bins.map((code, k) => [code, body.subarray(k * columns, (k + 1) * columns)]));
  const rows = new Map();
  for (const code of new Set([...codes.keys(), ...fresh.keys()])) rows.set(code, appended(codes.get(code), kept, fresh.get(code) || new Uint8Array(columns)));
  return { stride: head.stride, columns: kept + columns, levels, rows };
}
function joinScalar(old, { head, body }) {
  const kept = head.from / head.stride, all = new Float64Array(body.buffer, body.byteOffset, head.columns * 4), own = {};
  ["steps", "values", "low", "high"].forEach((name, k) => { own[name] = appended(old ? old[name] : null, kept, all.subarray(k * head.columns, (k + 1) * head.columns)); });
  return own;
}

export class Run {
  constructor({ run, name, model }, colour) {
    this.id = run; this.name = name; this.model = model; this.colour = colour;
    this.isShown = true;
    this.revision = 0;
    this.forget();
  }
  forget() {
    this.steps = []; this.merged = []; this.series = []; this.modules = new Map(); this.scalars = {}; this.findings = []; this.problems = [];
    this.counts = [0, 0, 0]; this.drops = []; this.isFinished = false;
    this.tables = new Map(); this.histogramsOf = new Map(); this.scalarsOf = new Map();
  }
  /* Asks what is new. Other numbers are asked for when they are looked at. */
  async refresh() {
    const told = await source.summary(this.id, { have: this.revision, series: this.series.length, findings: this.findings.length });
    if (told.isOther) this.forget();
    const { from } = told;
    this.steps.length = this.merged.length = from;
    this.steps.push(...told.steps);
    this.merged.push(...told.merged);
    for (const own of [...this.tables.values(), ...this.histogramsOf.values()]) own.changed(from);
    for (const [name, own] of this.scalarsOf) if (told.scalars[name] !== this.scalars[name]) own.changed(Math.min(told.scalars[name], this.scalars[name] || 0) - 1);
    for (const [module, kind, name, shape, dtype] of told.series) {
      const number = this.series.length, own = { number, module, kind, name, shape, dtype };
      this.series.push(own);
      if (!this.modules.has(module)) this.modules.set(module, {});
      const kinds = this.modules.get(module);
      (kinds[kind] = kinds[kind] || []).push(own);
    }
    this.findings.push(...told.findings);
    const { scalars, problems, counts, drops, isFinished, ranks } = told;
    Object.assign(this, { scalars, problems, counts, drops, isFinished, ranks });
    this.revision = told.revision || 1;
  }
  get count() { return this.steps.length; }
  get kinds() { return Object.keys(KINDS).filter(kind => this.series.some(own => own.kind === kind)); }
  /* The place of a step: the first that is not before it. (Steps that were merged go by the last of them.) */
  placeOf(step) {
    let low = 0, high = this.steps.length - 1;
    while (low < high) { const mid = (low + high) >> 1; if (this.steps[mid] < step) low = mid + 1; else high = mid; }
    return low;
  }
  table(kind, statistic) {
    const key = kind + "/" + statistic;
    if (!this.tables.has(key)) this.tables.set(key, new Growing(known => source.table(this.id, kind, statistic, known), joinTable));
    return this.tables.get(key).get(this.count);
  }
  histograms(series) {
    if (!this.histogramsOf.has(series)) this.histogramsOf.set(series, new Growing(known => source.histograms(this.id, series, known), joinHistograms));
    return this.histogramsOf.get(series).get(this.count);
  }
  scalar(name) {
    if (!this.scalarsOf.has(name)) this.scalarsOf.set(name, new Growing(known => source.scalar(this.id, name, known), joinScalar));
    return this.scalarsOf.get(name).get(this.scalars[name]);
  }
}
