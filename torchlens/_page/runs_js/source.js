/* Where the numbers of runs come from: a server that reads their folders, or the page itself, which then sends no request.

Both answer with blocks (see _monitor/read/run_tables.py): a head, and numbers. */

export const DATA = JSON.parse(document.getElementById("data").textContent);

function parsed(bytes) {
  const size = new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
  return { head: JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + size))), body: bytes.slice(4 + size) };
}

class Server {
  constructor() { this.token = new URLSearchParams(location.search).get("token") || ""; }
  address(what, options) { return what + "?" + new URLSearchParams({ ...options, token: this.token }); }
  async ask(what, options) {
    const answer = await fetch(this.address(what, options), { cache: "no-store" });
    if (!answer.ok) throw new Error("The server answered " + answer.status + " to " + what);
    return answer;
  }
  async json(what, options) { return (await this.ask(what, options)).json(); }
  async block(what, options) { return parsed(new Uint8Array(await (await this.ask(what, options)).arrayBuffer())); }
  runs() { return this.json("runs", {}); }
  summary(run, known) { return this.json("run", { run, ...known }); }
  graph(run) { return this.json("graph", { run }); }
  table(run, kind, statistic, known) { return this.block("table", { run, kind, statistic, ...known }); }
  histograms(run, series, known) { return this.block("histograms", { run, series, ...known }); }
  scalar(run, name, known) { return this.block("scalar", { run, name, ...known }); }
  /* Calls `hear` with {run: revision} whenever a run has changed, and `lost` when the server is not there (any more, yet again). */
  listen(hear, lost) {
    const events = new EventSource(this.address("events", {}));
    events.addEventListener("message", event => { lost(false); hear(JSON.parse(event.data)); });
    events.addEventListener("error", () => lost(true));
  }
}

class Pack {
  async open() {
    const raw = Uint8Array.from(atob(DATA.packed), letter => letter.charCodeAt(0));
    const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
    const all = parsed(new Uint8Array(await new Response(stream).arrayBuffer()));
    this.index = all.head;
    this.body = all.body;
    DATA.packed = "";
  }
  at([start, length]) { return parsed(this.body.subarray(start, start + length)); }
  async runs() { await this.open(); return this.index.runs.map(({ name, model }, run) => ({ run, name, model, revision: 1 })); }
  async summary(run) { return this.index.runs[run].summary; }
  async graph(run) { return this.index.runs[run].graph; }
  async table(run, kind, statistic) {
    const place = this.index.runs[run].tables[kind + "/" + statistic];
    const { head, body } = this.at(place);
    // Differences from column to column, first their upper bytes, then their lower ones: so they are packed well.
    const count = head.columns * head.series.length, bits = new Uint16Array(count);
    for (let i = 0; i < count; i++) bits[i] = (body[i] << 8 | body[count + i]) + (i % head.columns ? bits[i - 1] : 0);
    return { head, body: new Uint8Array(bits.buffer) };
  }
  async histograms(run, series) { return this.at(this.index.runs[run].histograms[series]); }
  async scalar(run, name) { return this.at(this.index.runs[run].scalars[name]); }
  listen() {}
}

export const isLive = !DATA.packed;
export const source = isLive ? new Server() : new Pack();
