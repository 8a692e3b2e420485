/* The graph of a run's model: the viewer's page, coloured from here. */

import { html } from "../js/elements.js";
import { STATISTICS, valueIn } from "./statistics.js";

export class Graph {
  /* `data` is what the viewer's page is given. `onSelect` hears the address of the module that the reader selects. */
  constructor(run, data, onSelect) {
    this.run = run;
    this.host = html("div", { class: "pane" });
    this.isBusy = true;
    this.data = data;
    this.onSelect = onSelect;
    this.marked = "";
  }
  /* Opens it where it stands in the page; that takes its size from there. */
  open() {
    const shadow = this.host.attachShadow({ mode: "open" });
    shadow.append(document.querySelector("style").cloneNode(true), document.getElementById("pane").content.cloneNode(true));
    const given = { root: shadow, data: this.data, address: "", tell: (what, part) => { if (what === "selected" && !this.isBusy) this.onSelect(part > 0 ? this.addressOf(part) : null); if (what === "toggled" && !this.isBusy) this.onSelect(this.addressOf(part)); } };
    openPane(given);
    this.page = given.page;
    const { parts, strings, partKinds } = this.data;
    this.addresses = parts.path.map(path => strings[path].replace(/:\d+( … \d+)?$/, ""));
    this.partsOf = new Map();  // by address, the parts that are the module
    parts.part.forEach((kind, i) => {
      if (i && (parts.isModule[i] || partKinds[kind] === "module")) { const own = this.partsOf.get(this.addresses[i]); if (own) own.push(i); else this.partsOf.set(this.addresses[i], [i]); }
    });
    this.isBusy = false;
  }
  addressOf(part) { return this.addresses[part]; }
  /* Selects a module without telling; one that is not in the graph selects nothing. */
  select(address) {
    const [part] = this.partsOf.get(address) || [-1];
    if (part === this.page.state.selected || part < 0 && this.page.state.selected < 0) return;
    if (part < 0 && this.addresses[this.page.state.selected] === address) return;
    this.isBusy = true;
    this.page.select(part, {});
    this.isBusy = false;
  }
  /* Colours each module by its value at a place; one without a value of its own by what is inside. */
  colour(table, kind, statistic, place, range, title) {
    if (this.table !== table || this.kind !== kind) this.prepare(table, kind);
    const values = new Map(), { isWorst, text } = STATISTICS[statistic];
    for (const [address, parts] of this.partsOf) {
      const lists = this.listsOf.get(address);
      let sum = 0, count = 0;
      for (const list of lists) {
        const v = valueIn(table, list, statistic, place);
        if (Number.isNaN(v)) continue;
        sum = isWorst ? Math.max(sum, v) : sum + v;
        count++;
      }
      if (count) for (const part of parts) values.set(part, isWorst ? sum : sum / count);
    }
    this.shown = values;
    this.page.drive.setNumbers("run", { parts: values, text, range, title });
  }
  prepare(table, kind) {
    this.table = table;
    this.kind = kind;
    this.listsOf = new Map();
    const { modules } = this.run;
    for (const address of this.partsOf.keys()) {
      const own = (modules.get(address) || {})[kind];
      const lists = own ? [own] : [...modules].filter(([inner, kinds]) => kinds[kind] && inner.startsWith(address + ".")).map(([, kinds]) => kinds[kind]);
      this.listsOf.set(address, lists);
    }
  }
  /* Marks modules with what was found there: [address, severity, word, text]. */
  mark(list) {
    const marks = new Map();
    for (const [address, severity, word, text] of list) {
      for (const part of this.partsOf.get(address) || []) {
        const before = marks.get(part);
        marks.set(part, { look: severity === "info" ? "name" : severity === "error" ? "removed" : "values", tag: before ? before.tag : word, text: (before ? before.text + "; " : "") + word + ": " + text, colour: "", follows: false, isListed: true, noun: "finding" });
      }
    }
    const key = JSON.stringify([...marks].map(([part, mark]) => [part, mark.text]));
    if (key === this.marked) return;
    this.marked = key;
    this.page.drive.setMarks([...marks]);
  }
}
