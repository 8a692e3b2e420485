"use strict";
/* The page: what is visible, where it stands, and what the reader does with it. Data becomes text through textContent only. */

(() => {
  const started = performance.now();
  const D = JSON.parse(document.getElementById("data").textContent);
  const S = D.strings, E = D.entries, P = D.parts, Q = D.parameters, T = D.statistics;
  const N = P.part.length, NUM = E.label.length;
  const KIND = D.kinds, PART = D.partKinds, SIDE = D.sides;
  const NODE_H = 42, BAR_H = 21, HEAD_H = 26, PAD = 16, FOOT = 14, SMALLEST_TEXT = 11, TEXT = 12;
  const $ = id => document.getElementById(id);
  const svg = $("graph"), stage = $("stage"), panel = $("panel");

  // -- the outline ---------------------------------------------------------------------------------------------------

  const kids = Array.from({ length: N }, () => []), end = new Int32Array(N), depth = new Int32Array(N);
  const unitOf = new Int32Array(NUM), passOfEntry = new Int32Array(NUM);
  for (let i = 1; i < N; i++) { kids[P.parent[i]].push(i); depth[i] = depth[P.parent[i]] + 1; }
  for (let i = N - 1; i >= 0; i--) { end[i] = Math.max(end[i], i + 1); if (i) end[P.parent[i]] = Math.max(end[P.parent[i]], end[i]); }
  for (let i = 0; i < N; i++) {
    P.entries[i].forEach((own, pass) => own.forEach(e => { unitOf[e] = i; passOfEntry[e] = pass; }));
    for (const e of P.buffers[i]) unitOf[e] = i;
  }
  const children = Array.from({ length: NUM }, () => []);
  E.parents.forEach((list, e) => list.forEach(p => children[p].push(e)));
  const isUnit = i => PART[P.part[i]] === "operation";
  const kindOf = i => KIND[P.kind[i]];
  const within = (i, box) => i >= box && i < end[box];
  const VALUELESS = -2; // in place of a row of statistics
  const failedUnit = D.failure ? unitOf[NUM - 1] : -1;

  const state = {
    open: new Uint8Array(N), selected: -1, second: -1, overlay: "", query: "", hits: [], hitAt: -1, pass: new Map(),
    sides: { buffer: "dim", constant: "dim", mask: "dim", view: "dim" }, view: { x: 0, y: 0, k: 1 },
  };
  const scene = { nodes: new Map(), edges: [], orders: new Map(), width: 0, height: 0, fresh: new Set() };
  const timings = { open: 0, render: 0 };

  function siblings(a, b) {
    while (depth[a] > depth[b]) a = P.parent[a];
    while (depth[b] > depth[a]) b = P.parent[b];
    if (a === b) return null;
    while (P.parent[a] !== P.parent[b]) { a = P.parent[a]; b = P.parent[b]; }
    return [a, b];
  }

  // -- edges between operations; what is hidden is bridged -------------------------------------------------------------

  let links = null;  // {pairs: [[a, b]], loops: [[a, b, owner]], outOf: last operation read outside of each part, hidden}

  function connect() {
    const hidden = new Uint8Array(N);
    for (let i = N - 1; i >= 0; i--) {
      if (isUnit(i)) hidden[i] = P.side[i] && state.sides[SIDE[P.side[i]]] === "hide" ? 1 : 0;
      else hidden[i] = kids[i].length && kids[i].every(k => hidden[k]) ? 1 : 0;
    }
    const real = new Array(NUM), seen = new Set(), pairs = [], loops = [];
    const order = Array.from({ length: NUM }, (_, e) => e);
    for (const e of order) {
      const found = new Set();
      for (const p of E.parents[e]) if (hidden[unitOf[p]]) (real[p] || []).forEach(q => found.add(q)); else found.add(p);
      real[e] = found;
      if (hidden[unitOf[e]]) continue;
      const b = unitOf[e];
      for (const p of found) {
        const a = unitOf[p], key = a * N + b;
        if (seen.has(key)) continue;
        seen.add(key);
        if (a === b) { if (P.passes[a] > 1 && !P.buffers[a].includes(p)) loops.push([a, b, a]); continue; }
        const [x, y] = siblings(a, b), box = P.parent[x];
        if (x < y) pairs.push([a, b]);
        else loops.push([x, y, P.passes[box] > 1 ? box : -1]);
      }
    }
    const outOf = new Int32Array(N).fill(-1);
    for (const [a, b] of pairs) {
      for (let i = a; i > 0 && !within(b, i); i = P.parent[i]) outOf[i] = Math.max(outOf[i], a);
    }
    for (let i = N - 1; i > 0; i--) {
      if (isUnit(i)) outOf[i] = i;
      else if (outOf[i] < 0) { let u = end[i] - 1; while (u > i && !isUnit(u)) u--; outOf[i] = u; }
    }
    links = { pairs, loops, outOf, hidden };
  }

  // -- texts -----------------------------------------------------------------------------------------------------------

  const ruler = document.createElement("canvas").getContext("2d");
  const FONT = getComputedStyle(document.body).fontFamily;
  const widths = new Map();
  function widthOf(text, isBold) {
    const key = (isBold ? "b" : "n") + text;
    let w = widths.get(key);
    if (w === undefined) { ruler.font = (isBold ? "600 " : "") + TEXT + "px " + FONT; w = ruler.measureText(text).width; widths.set(key, w); }
    return w;
  }
  function clip(text, most, isBold) {
    if (widthOf(text, isBold) <= most) return text;
    let low = 1, high = text.length;
    while (low < high) {
      const mid = (low + high + 1) >> 1, left = Math.ceil(mid * 0.35);
      if (widthOf(text.slice(0, left) + "…" + text.slice(text.length - (mid - left)), isBold) <= most) low = mid; else high = mid - 1;
    }
    const left = Math.ceil(low * 0.35);
    return text.slice(0, left) + "…" + text.slice(text.length - (low - left));
  }
  const many = n => n.toLocaleString("en-US");
  function short(n, unit) {
    if (!n) return "0" + (unit ? " " + unit : "");
    for (const [size, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (n >= size) return trim(n / size) + " " + name + (unit || "");
    }
    return trim(n) + (unit ? " " + unit : "");
  }
  const trim = x => x >= 100 ? String(Math.round(x)) : x >= 10 ? x.toFixed(1).replace(/\.0$/, "") : x.toFixed(2).replace(/\.?0+$/, "");
  function bytesText(n) {
    for (const [size, name] of [[2 ** 40, "TB"], [2 ** 30, "GB"], [2 ** 20, "MB"], [1024, "KB"]]) if (n >= size) return (n / size).toFixed(1) + " " + name;
    return n + " B";
  }
  function timeText(us) { return us >= 1e6 ? trim(us / 1e6) + " s" : us >= 1e3 ? trim(us / 1e3) + " ms" : trim(us) + " µs"; }
  function numberText(x) {
    if (x === null || x === undefined) return "–";
    const size = Math.abs(x);
    return size !== 0 && (size < 1e-3 || size >= 1e5) ? x.toExponential(2) : String(Math.round(x * 1e4) / 1e4);
  }
  const percent = x => x === 0 ? "0 %" : x < 0.001 ? "< 0.1 %" : (x * 100).toFixed(1) + " %";

  function entriesNow(unit) {
    const passes = P.entries[unit];
    return passes[Math.min(state.pass.get(unit) || 0, passes.length - 1)] || [];
  }
  function shapeOf(i) {
    if (i === failedUnit) return "";
    const unit = isUnit(i) ? i : links.outOf[i];
    const own = unit > 0 ? entriesNow(unit) : [];
    if (!own.length) return "";
    return S[E.shape[own[0]]] + (own.length > 1 ? "  + " + (own.length - 1) : "");
  }
  function typeOf(i) { return S[P.type[i]].replace(/^__(\w+)__$/, "$1").replace(/_$/, ""); }
  function titleOf(i) {
    const full = S[P.title[i]];
    if (full.length <= 30 || isUnit(i) && S[P.path[i]] !== full) return full;
    let box = P.parent[i];
    while (box > 0 && !S[P.path[box]]) box = P.parent[box];
    const above = box > 0 ? S[P.path[box]].replace(/:\d+$/, "") + "." : "";
    return above && full.startsWith(above) ? "…" + full.slice(above.length) : full;
  }
  const ownParams = new Map();
  function paramsIn(i) {
    let found = ownParams.get(i);
    if (!found) {
      const set = new Set();
      for (let u = i; u < end[i]; u++) for (const p of P.params[u]) set.add(p);
      ownParams.set(i, found = [...set]);
    }
    return found;
  }
  const paramCount = i => paramsIn(i).reduce((sum, p) => sum + Q.count[p], 0);
  function noteOf(i) {
    const notes = [];
    if (P.passes[i] > 1) notes.push("× " + many(P.passes[i]));
    if (state.overlay) { const v = overlayValue(i); if (v !== null) notes.push(overlayText(v)); }
    else if (paramsIn(i).length) notes.push(short(paramCount(i)) + " params");
    else if (isUnit(i) && S[P.path[i]] && S[P.path[i]] !== S[P.title[i]]) notes.push(pathNote(S[P.path[i]]));
    else if (!isUnit(i) && P.passes[i] < 2) notes.push(many(countUnits(i)) + (countUnits(i) === 1 ? " op" : " ops"));
    return notes.join(" · ");
  }
  function pathNote(path) {
    if (path.length <= 16) return "@" + path;
    const parts = path.split(".");
    let text = parts.pop();
    while (parts.length && text.length + parts[parts.length - 1].length < 14) text = parts.pop() + "." + text;
    return "@…" + text;
  }
  const failedText = () => D.failure.operation ? D.failure.operation + "(" + D.failure.arguments + ")" : "raise";
  function describe(i) {
    const bits = [S[P.title[i]], typeOf(i), shapeOf(i).replace(/×/g, " by ")];
    if (P.passes[i] > 1) bits.push(P.passes[i] + " times");
    if (!isUnit(i)) bits.push(countUnits(i) + " operations");
    return bits.filter(Boolean).join(", ");
  }
  const counts = new Map();
  function countUnits(i) {
    let c = counts.get(i);
    if (c === undefined) { c = 0; for (let u = i; u < end[i]; u++) if (isUnit(u)) c += P.entries[u].length; counts.set(i, c); }
    return c;
  }

  // -- overlays ----------------------------------------------------------------------------------------------------------

  const SCALE = [[0, 32, 77], [49, 68, 107], [102, 105, 112], [149, 143, 120], [202, 185, 105], [255, 234, 70]];
  const overlays = new Map();
  overlays.set("time", { values: E.micros, isSum: true, text: timeText });
  overlays.set("memory", { values: E.bytes, isSum: true, text: bytesText });
  if (E.flops.some(v => v > 0)) overlays.set("FLOPs", { values: E.flops.map(v => v || null), isSum: true, text: v => short(v) });
  if (E.backward.some(v => v !== null)) overlays.set("backward time", { values: E.backward, isSum: true, text: timeText });
  if (E.gradnorm.some(v => v !== null)) overlays.set("gradient norm", { values: E.gradnorm, isSum: false, text: numberText });
  const UNITS = { seconds: v => timeText(v * 1e6), bytes: v => v < 0 ? "-" + bytesText(-v) : bytesText(v), FLOPs: v => short(v) };
  for (const own of D.overlays) {
    overlays.set(own.name, { parts: new Map(own.parts.map((p, k) => [p, own.values[k]])), isSum: own.isSum, isOwn: true, text: UNITS[own.unit] || numberText });
  }
  function overlayValue(i) {
    const o = overlays.get(state.overlay);
    if (!o) return null;
    if (o.parts) return o.parts.has(i) ? o.parts.get(i) : null;
    let sum = 0, count = 0;
    for (let u = i; u < end[i]; u++) for (const own of P.entries[u]) for (const e of own) if (o.values[e] !== null) { sum += o.values[e]; count++; }
    return count ? (o.isSum ? sum : sum / count) : null;
  }
  const overlayText = v => overlays.get(state.overlay).text(v);
  function colourAt(t) {
    const at = Math.max(0, Math.min(1, t)) * (SCALE.length - 1), i = Math.min(SCALE.length - 2, Math.floor(at)), f = at - i;
    return SCALE[i].map((c, k) => Math.round(c + (SCALE[i + 1][k] - c) * f));
  }
  const css = c => "rgb(" + c.join(",") + ")";
  function inkOn(c) {
    const [r, g, b] = c.map(v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#10151d" : "#ffffff";
  }

  // -- layout of what is visible -----------------------------------------------------------------------------------------

  function measure(i) {
    const title = titleOf(i), note = noteOf(i), type = typeOf(i), shape = shapeOf(i);
    if (i === failedUnit) return { w: Math.ceil(Math.min(520, Math.max(widthOf(title, true), widthOf(failedText()), widthOf(D.failure.message.split("\n")[0])) + 20)), h: NODE_H + 19 };
    const most = 330;
    let w = Math.max(widthOf(title, true) + (note ? widthOf(note) + 18 : 0) + (isUnit(i) ? 0 : 16), widthOf(type) + widthOf(shape) + 20, 104) + 20;
    w = Math.min(w, most);
    return { w: Math.ceil(w), h: NODE_H };
  }

  function arrange() {
    if (!links) connect();
    const { pairs, loops, hidden } = links;
    const rep = new Int32Array(N), shown = new Uint8Array(N);
    shown[0] = 1;
    for (let i = 1; i < N; i++) {
      const p = P.parent[i];
      if (shown[p] && state.open[p]) { rep[i] = i; shown[i] = 1; } else rep[i] = rep[p];
    }
    const edgeMap = new Map(), level = new Map();
    const at = box => { let l = level.get(box); if (!l) level.set(box, l = { edges: new Map(), ins: new Set(), outs: new Set(), loops: [] }); return l; };
    const join = (box, from, to, source, edge) => {
      const l = at(box), key = from + ">" + to + ">" + source;
      let e = l.edges.get(key);
      if (!e) l.edges.set(key, e = { from, to, source, ends: [] });
      e.ends.push(edge);
    };
    for (const [a, b] of pairs) {
      const s = rep[a], t = rep[b];
      if (s === t) continue;
      const key = s * N + t;
      if (edgeMap.has(key)) continue;
      const edge = { s, t };
      edgeMap.set(key, edge);
      let [x, y] = siblings(s, t) || [0, 0];
      const box = P.parent[x];
      for (let u = s; u !== x; u = P.parent[u]) { at(P.parent[u]).outs.add(s); join(P.parent[u], u, "o" + s, s, edge); }
      for (let u = t; u !== y; u = P.parent[u]) { at(P.parent[u]).ins.add(s); join(P.parent[u], "i" + s, u, s, edge); }
      join(box, x, y, s, edge);
    }
    const selfLoops = new Set();
    for (const [x, y, owner] of loops) {
      if (owner >= 0 && shown[owner] && (!state.open[owner] || PART[P.part[owner]] === "module" || x === y)) selfLoops.add(owner);
      else if (owner >= 0 ? shown[owner] : shown[x] && shown[y]) if (x !== y && shown[x]) at(P.parent[x]).loops.push([x, y]);
    }
    const boxes = new Map();
    function lay(i) {
      if (!state.open[i] || !kids[i].length) { const m = measure(i); return { w: m.w, h: m.h, ins: null, outs: null }; }
      const l = at(i), nodes = [], index = new Map();
      const put = (id, node) => { index.set(id, nodes.length); nodes.push({ id, ...node }); };
      for (const s of l.ins) put("i" + s, { w: 8, h: 0, kind: "in" });
      const inner = kids[i].filter(k => !hidden[k]);
      for (const k of inner) {
        const own = lay(k);
        boxes.set(k, own);
        put(k, { w: own.w, h: own.h, kind: "node", isSide: isUnit(k) && P.side[k] > 0 && SIDE[P.side[k]] !== "view", extra: selfLoops.has(k) ? 26 : 0 });
      }
      for (const s of l.outs) put("o" + s, { w: 8, h: 0, kind: "out" });
      const edges = [];
      for (const e of l.edges.values()) {
        const from = boxes.get(e.from), to = boxes.get(e.to);
        const isSide = typeof e.from === "number" && isUnit(e.from) && P.side[e.from] > 0 && SIDE[P.side[e.from]] !== "view";
        edges.push({
          from: index.get(e.from), to: index.get(e.to), source: e.source, ends: e.ends, isSide,
          fromOffset: from && from.outs ? from.outs.get(e.source) || 0 : 0, toOffset: to && to.ins ? to.ins.get(e.source) || 0 : 0,
        });
      }
      const made = Layout.layoutBox(nodes, edges, scene.orders.get(i));
      const order = scene.orders.get(i) || new Map();
      for (const [id, pos] of made.order) if (typeof id === "number" && !order.has(id)) order.set(id, pos);
      scene.orders.set(i, order);
      const skips = Layout.findSkips(nodes.length, edges);
      const head = i === 0 ? 0 : HEAD_H + 8, foot = i === 0 ? 0 : FOOT, pad = i === 0 ? 0 : PAD;
      const title = i === 0 ? 0 : Math.min(420, widthOf(titleOf(i), true) + widthOf(typeOf(i)) + widthOf(noteOf(i)) + 76);
      const loopRoom = l.loops.length ? 18 + 10 * l.loops.length : 0;
      const w = Math.max(made.width + 2 * pad + loopRoom, title), h = made.height + head + foot;
      const dx = (w - made.width - loopRoom) / 2;
      const ins = new Map(), outs = new Map();
      nodes.forEach((node, k) => {
        if (node.kind === "in") ins.set(+node.id.slice(1), made.placed[k].x + dx - w / 2);
        if (node.kind === "out") outs.set(+node.id.slice(1), made.placed[k].x + dx - w / 2);
      });
      return { w: Math.ceil(w), h, ins, outs, made, nodes, edges, skips, dx, head, loops: l.loops, index, loopRoom };
    }
    const root = lay(0);
    scene.nodes = new Map();
    scene.edges = [];
    scene.links = [...edgeMap.values()];
    scene.rep = rep;
    scene.selfLoops = selfLoops;
    (function spread(i, own, x, y) {
      const isBox = Boolean(own.made);
      if (i) scene.nodes.set(i, { id: i, x, y, w: own.w, h: own.h, isBox });
      if (i && selfLoops.has(i)) {
        const r = x + own.w + (isUnit(i) || isBox ? 0 : 5), top = y + 10, low = y + NODE_H - 6;
        scene.edges.push({ d: `M${r} ${low}h4c22 0 22 ${top - low} 2 ${top - low}`, kind: "loop", tip: [r, top, -1], ends: [{ s: i, t: i }] });
      }
      if (!isBox) return;
      const ox = x + own.dx, oy = y + own.head;
      own.nodes.forEach((node, k) => {
        if (node.kind === "node") spread(node.id, boxes.get(node.id), ox + own.made.placed[k].x - node.w / 2, oy + own.made.placed[k].y);
      });
      own.edges.forEach((e, k) => {
        const points = own.made.lines[k].map(([px, py]) => [px + ox, py + oy]);
        const isIn = own.nodes[e.from].kind === "in", isOut = own.nodes[e.to].kind === "out";
        if (isIn) points[0][1] = y + HEAD_H;
        if (isOut) points[points.length - 1][1] = y + own.h;
        const target = own.nodes[e.to], isBoxed = target.kind === "node" && boxes.get(target.id).made;
        const last = points[points.length - 1];
        const kind = own.skips[k] ? "skip" : e.isSide ? "side" : "";
        if (!isOut && !isBoxed) last[1] -= 5;
        scene.edges.push({ d: Layout.pathOf(points), kind, tip: isOut || isBoxed ? null : [last[0], last[1] + 5, 0], ends: e.ends });
      });
      own.loops.forEach(([a, b], k) => {
        const from = scene.nodes.get(a), to = scene.nodes.get(b);
        if (!from || !to) return;
        const r = x + own.w - 12 - 10 * k, y0 = from.y + Math.min(from.h - 10, from.h / 2 + 6), y1 = to.y + Math.min(16, to.h / 2);
        scene.edges.push({
          d: `M${from.x + from.w} ${y0}H${r - 8}Q${r} ${y0} ${r} ${y0 - 8}V${y1 + 8}Q${r} ${y1} ${r - 8} ${y1}H${to.x + to.w + 5}`,
          kind: "loop", tip: [to.x + to.w, y1, -1], ends: [{ s: a, t: b }],
        });
      });
    })(0, root, 0, 0);
    scene.width = root.w;
    scene.height = root.h;
  }

  // -- drawing -----------------------------------------------------------------------------------------------------------

  const NS = "http://www.w3.org/2000/svg";
  function make(name, attributes, parent) {
    const el = document.createElementNS(NS, name);
    for (const key in attributes) el.setAttribute(key, attributes[key]);
    if (parent) parent.appendChild(el);
    return el;
  }
  function html(name, attributes, ...inside) {
    const el = document.createElement(name);
    for (const key in attributes) if (key.startsWith("on")) el.addEventListener(key.slice(2), attributes[key]); else el.setAttribute(key, attributes[key]);
    for (const one of inside) el.append(one);
    return el;
  }
  function label(parent, text, x, y, className, anchor) {
    const el = make("text", { x, y, class: className, ...(anchor ? { "text-anchor": anchor } : {}) }, parent);
    el.textContent = text;
    return el;
  }

  const world = make("g", { id: "world" }, svg);
  const elements = new Map();

  function draw(before) {
    const boxesLayer = make("g", {}), edgesLayer = make("g", {}), nodesLayer = make("g", {});
    elements.clear();
    const range = overlayRange();
    for (const node of scene.nodes.values()) {
      if (node.isBox) drawBox(node, boxesLayer, nodesLayer); else drawNode(node, nodesLayer, range, before);
    }
    for (const edge of scene.edges) {
      edge.el = make("path", { class: "edge " + edge.kind, d: edge.d }, edgesLayer);
      if (edge.tip) {
        const [x, y, dir] = edge.tip;
        const d = dir ? `M${x} ${y}l7 -4v8z` : `M${x} ${y}l-4 -7h8z`;
        edge.arrow = make("path", { class: "arrow " + edge.kind, d }, edgesLayer);
      } else edge.arrow = null;
    }
    world.replaceChildren(boxesLayer, edgesLayer, nodesLayer);
    light();
    drawLegend(range);
  }

  function common(g, node) {
    const i = node.id;
    g.dataset.id = i;
    g.setAttribute("role", "button");
    g.setAttribute("tabindex", i === focusable() ? "0" : "-1");
    g.setAttribute("aria-label", describe(i));
    if (!isUnit(i)) g.setAttribute("aria-expanded", String(Boolean(state.open[i])));
    elements.set(i, g);
  }
  function focusable() {
    if (scene.nodes.has(state.selected)) return state.selected;
    return scene.nodes.keys().next().value;
  }

  function drawNode(node, layer, range, before) {
    const { id, x, y, w, h } = node;
    const side = SIDE[P.side[id]], isDim = side && state.sides[side] === "dim" && !state.overlay;
    const fresh = before && !before.has(id) ? " fresh" : "";
    const g = make("g", { class: "node k-" + kindOf(id) + (isDim ? " dim" : "") + fresh + (failedUnit > 0 && id !== failedUnit && within(failedUnit, id) ? " has-failed" : ""), transform: `translate(${x} ${y})` }, layer);
    if (P.passes[id] > 1 && !isUnit(id)) {
      make("rect", { class: "frame", x: 5, y: 5, width: w, height: h, rx: 6 }, g);
      make("rect", { class: "body", x: 2.5, y: 2.5, width: w, height: h, rx: 6 }, g);
      make("rect", { class: "frame", x: 2.5, y: 2.5, width: w, height: h, rx: 6 }, g);
    }
    const body = make("rect", { class: "body", width: w, height: h, rx: 6 }, g);
    make("path", { class: "bar-fill", d: `M0 ${BAR_H}V6a6 6 0 0 1 6 -6H${w - 6}a6 6 0 0 1 6 6V${BAR_H}z` }, g);
    make("rect", { class: "frame", width: w, height: h, rx: 6 }, g);
    const note = noteOf(id), lead = isUnit(id) ? 9 : 22;
    let noteText = note;
    const title = clip(titleOf(id), w - lead - 9 - Math.min(note ? widthOf(note) + 10 : 0, note.startsWith("@") ? w * 0.42 : w * 0.6), true);
    if (note) noteText = clip(note, w - lead - 18 - widthOf(title, true));
    if (!isUnit(id)) label(g, "▸", 9, 15, "title");
    label(g, title, lead, 15, "title");
    if (noteText) label(g, noteText, w - 9, 15, "note", "end");
    const shape = shapeOf(id), type = id === failedUnit ? failedText() : typeOf(id);
    const shapeText = clip(shape, w * 0.66);
    const typeEl = label(g, clip(type, w - 26 - (shape ? widthOf(shapeText) : 0)), 9, 36, "type");
    if (id === failedUnit) label(g, clip(D.failure.message.split("\n")[0], w - 18), 9, 54, "error");
    const shapeEl = shape ? label(g, shapeText, w - 9, 36, "shape", "end") : null;
    if (state.overlay) {
      const value = overlayValue(id);
      if (value !== null) {
        const c = colourAt(range.max > range.min ? (value - range.min) / (range.max - range.min) : 1), ink = inkOn(c);
        body.style.fill = css(c);
        typeEl.style.fill = ink;
        if (shapeEl) shapeEl.style.fill = ink;
      }
    }
    const tip = make("title", {}, g);
    tip.textContent = describe(id);
    const hits = hitsIn(id);
    if (hits) {
      if (state.hitSet.has(id)) g.classList.add("hit");
      const inside = hits - (state.hitSet.has(id) ? 1 : 0);
      if (inside) {
        const text = many(inside) + (inside === 1 ? " hit" : " hits"), tw = widthOf(text) + 12;
        const b = make("g", { class: "hit-badge", transform: `translate(${w - tw + 6} ${-9})` }, g);
        make("rect", { width: tw, height: 17, rx: 8 }, b);
        label(b, text, tw / 2, 12.5, "", "middle");
      }
    }
    common(g, node);
  }

  function drawBox(node, layer, heads) {
    const { id, x, y, w, h } = node;
    const hasFailed = failedUnit > 0 && within(failedUnit, id) ? " has-failed" : "";
    const box = make("g", { class: "box", transform: `translate(${x} ${y})` }, layer);
    make("rect", { class: "back", width: w, height: h, rx: 8 }, box);
    const g = make("g", { class: "box-head k-" + kindOf(id) + hasFailed, transform: `translate(${x} ${y})` }, heads);
    make("path", { class: "bar-fill", d: `M0 ${HEAD_H}V8a8 8 0 0 1 8 -8H${w - 8}a8 8 0 0 1 8 8V${HEAD_H}z` }, g);
    make("rect", { class: "frame", width: w, height: h, rx: 8, "pointer-events": "none", fill: "none" }, g);
    const note = noteOf(id), title = clip(titleOf(id), w - 40 - widthOf(note), true);
    label(g, "▾", 9, 17.5, "title");
    label(g, title, 22, 17.5, "title");
    const room = w - 22 - widthOf(title, true) - widthOf(note) - 34;
    if (room > 40) label(g, clip(typeOf(id), room), 30 + widthOf(title, true), 17.5, "note");
    if (note) label(g, note, w - 10, 17.5, "note", "end");
    common(g, node);
  }

  function overlayRange() {
    if (!state.overlay) return null;
    let min = Infinity, max = -Infinity;
    for (const node of scene.nodes.values()) {
      if (node.isBox) continue;
      const v = overlayValue(node.id);
      if (v !== null) { min = Math.min(min, v); max = Math.max(max, v); }
    }
    return { min, max };
  }

  const LEGEND = [["input", "input"], ["output", "output"], ["module", "module"], ["group", "folded"], ["weights", "with parameters"], ["norm", "normalisation"],
    ["activation", "activation"], ["compute", "other computation"], ["view", "view"], ["source", "buffer, constant"]];
  function drawLegend(range) {
    const legend = $("legend");
    legend.replaceChildren();
    if (state.overlay && range.min <= range.max) {
      const stops = SCALE.map((c, i) => css(c) + " " + (100 * i / (SCALE.length - 1)) + "%").join(",");
      const scale = html("div", { class: "scale" });
      scale.style.background = "linear-gradient(90deg," + stops + ")";
      legend.append(html("div", {}, state.overlay + (overlays.get(state.overlay).isSum ? ", sum of what is inside" : ", mean of what is inside")), scale,
        html("div", { class: "ends" }, html("span", {}, overlayText(range.min)), html("span", {}, overlayText(range.max))));
      return;
    }
    const used = new Set([...scene.nodes.values()].map(node => kindOf(node.id)));
    for (const [kind, text] of LEGEND) {
      if (!used.has(kind)) continue;
      const swatch = html("i");
      swatch.style.background = `var(--k-${kind})`;
      legend.append(html("div", { class: "row" }, swatch, text));
    }
    for (const [kind, text] of [["skip", "residual"], ["loop", "loop"]]) {
      if (!scene.edges.some(e => e.kind === kind)) continue;
      const line = make("svg", { viewBox: "0 0 22 10" });
      make("path", { class: "edge " + kind, d: "M0 5H22" }, line);
      legend.append(html("div", { class: "row" }, line, text));
    }
  }

  // -- what lights up ------------------------------------------------------------------------------------------------------

  function reach(from, next) {
    const seen = new Uint8Array(NUM), pending = from.slice();
    for (const e of pending) seen[e] = 1;
    while (pending.length) for (const f of next[pending.pop()]) if (!seen[f]) { seen[f] = 1; pending.push(f); }
    return seen;
  }
  function entriesIn(i) {
    const found = [];
    for (let u = i; u < end[i]; u++) if (isUnit(u)) { for (const own of P.entries[u]) found.push(...own); found.push(...P.buffers[u]); }
    return found;
  }
  function repsOf(seen) {
    const reps = new Set();
    for (let e = 0; e < NUM; e++) if (seen[e]) reps.add(scene.rep[unitOf[e]]);
    return reps;
  }
  function light() {
    const chosen = state.selected > 0 && (!state.open[0] || state.selected !== 0);
    world.classList.toggle("lit", chosen);
    for (const [i, el] of elements) { el.classList.toggle("sel", i === state.selected); el.classList.toggle("second", i === state.second); el.classList.remove("off"); }
    const tint = (edge, cls) => { for (const el of [edge.el, edge.arrow]) if (el) { el.classList.remove("off", "anc", "desc", "way"); if (cls) el.classList.add(cls); } };
    if (!chosen) { for (const edge of scene.edges) tint(edge, ""); return; }
    const own = entriesIn(state.selected);
    const above = reach(own, E.parents), below = reach(own, children);
    if (state.second > 0) {
      const other = entriesIn(state.second);
      const up = reach(other, E.parents), down = reach(other, children);
      const way = new Uint8Array(NUM);
      for (let e = 0; e < NUM; e++) way[e] = (below[e] && up[e]) || (above[e] && down[e]) ? 1 : 0;
      const on = repsOf(way);
      for (const [i, el] of elements) el.classList.toggle("off", !on.has(i) && i !== state.selected && i !== state.second);
      for (const edge of scene.edges) tint(edge, edge.ends.some(({ s, t }) => on.has(s) && on.has(t)) ? "way" : "off");
      state.way = [...on];
      return;
    }
    const anc = repsOf(above), desc = repsOf(below);
    for (const [i, el] of elements) el.classList.toggle("off", !anc.has(i) && !desc.has(i) && i !== state.selected);
    const self = new Set(repsOf(Object.assign(new Uint8Array(NUM), Object.fromEntries(own.map(e => [e, 1])))));
    for (const edge of scene.edges) {
      let cls = "off";
      for (const { s, t } of edge.ends) {
        if (s === t && within(state.selected, s)) { cls = "desc"; break; }
        if (anc.has(s) && anc.has(t) && !(self.has(s) && !self.has(t))) { cls = "anc"; break; }
        if (desc.has(s) && desc.has(t)) { cls = "desc"; break; }
      }
      tint(edge, cls);
    }
  }

  // -- pan and zoom --------------------------------------------------------------------------------------------------------

  function applyView() {
    const { x, y, k } = state.view;
    world.setAttribute("transform", `translate(${x} ${y}) scale(${k})`);
    drawMap();
    remember();
  }
  function size() { return [stage.clientWidth, stage.clientHeight]; }
  function fit(isOpening) {
    const [w, h] = size(), margin = 24;
    let k = Math.min((w - 2 * margin) / scene.width, (h - 2 * margin) / scene.height, 1.35);
    let y = (h - scene.height * k) / 2, x = (w - scene.width * k) / 2;
    if (isOpening && k * TEXT < SMALLEST_TEXT) {
      k = Math.min(1, SMALLEST_TEXT / TEXT + 0.001);
      y = margin;
      const first = scene.nodes.values().next().value;
      x = scene.width * k <= w - 2 * margin ? (w - scene.width * k) / 2 : w / 2 - (first.x + first.w / 2) * k;
    }
    state.view = { x, y, k };
    applyView();
  }
  function zoom(factor, cx, cy) {
    const v = state.view, k = Math.max(0.05, Math.min(4, v.k * factor));
    state.view = { k, x: cx - (cx - v.x) * k / v.k, y: cy - (cy - v.y) * k / v.k };
    applyView();
  }
  function bringIntoView(i, isCentred) {
    const node = scene.nodes.get(i);
    if (!node) return;
    const [w, h] = size(), v = state.view, m = 50;
    if (v.k * TEXT < 9) v.k = 1;
    const height = Math.min(node.h, NODE_H) * v.k;
    const x = v.x + (node.x + node.w / 2) * v.k, y = v.y + node.y * v.k;
    if (isCentred || x < m || x > w - m || y < m || y + height > h - m) {
      v.x += w / 2 - x;
      v.y += h * 0.42 - y;
    }
    applyView();
  }

  const map = $("map"), ink = map.getContext("2d");
  let mapScale = 1;
  function drawMap() {
    const ratio = window.devicePixelRatio || 1, mw = 180, mh = 140;
    if (map.width !== mw * ratio) { map.width = mw * ratio; map.height = mh * ratio; map.style.width = mw + "px"; map.style.height = mh + "px"; }
    const style = getComputedStyle(document.documentElement);
    ink.setTransform(ratio, 0, 0, ratio, 0, 0);
    ink.clearRect(0, 0, mw, mh);
    mapScale = Math.min((mw - 12) / scene.width, (mh - 12) / scene.height);
    const ox = (mw - scene.width * mapScale) / 2, oy = (mh - scene.height * mapScale) / 2;
    map.offset = [ox, oy];
    for (const node of scene.nodes.values()) {
      const [x, y, w, h] = [node.x, node.y, node.w, node.h].map(v => v * mapScale);
      if (node.isBox) { ink.strokeStyle = style.getPropertyValue("--line"); ink.strokeRect(ox + x, oy + y, w, h); }
      else { ink.fillStyle = node.id === state.selected ? style.getPropertyValue("--accent") : style.getPropertyValue("--edge"); ink.fillRect(ox + x, oy + y, Math.max(2, w), Math.max(1.5, h)); }
    }
    const [w, h] = size(), v = state.view;
    ink.strokeStyle = style.getPropertyValue("--accent");
    ink.lineWidth = 1.5;
    ink.strokeRect(ox - v.x / v.k * mapScale, oy - v.y / v.k * mapScale, w / v.k * mapScale, h / v.k * mapScale);
    ink.lineWidth = 1;
  }

  // -- acting ----------------------------------------------------------------------------------------------------------------

  function refresh(before) {
    const t = performance.now();
    arrange();
    draw(before);
    timings.render = performance.now() - t;
  }
  function toggle(i, pointer) {
    if (isUnit(i) || i === 0) return;
    const t = performance.now();
    const old = scene.nodes.get(i), v = state.view, before = new Set(scene.nodes.keys());
    state.open[i] = state.open[i] ? 0 : 1;
    if (!state.open[i] && state.selected > i && within(state.selected, i)) state.selected = i;
    if (old) {
      const ox = v.x + (old.x + old.w / 2) * v.k, oy = v.y + old.y * v.k;
      refresh(before);
      const now = scene.nodes.get(i);
      v.x = ox - (now.x + now.w / 2) * v.k;
      v.y = oy - now.y * v.k;
      if (pointer) {  // The title stays under the pointer.
        const [px, py] = pointer, half = now.w / 2 * v.k - 10;
        if (Math.abs(px - ox) > half) v.x += px - ox - Math.sign(px - ox) * half;
        const low = (now.isBox ? HEAD_H : NODE_H) * v.k - 3;
        if (py - oy > low) v.y += py - oy - low / 2;
      }
    } else refresh(before);
    applyView();
    showPanel();
    timings.toggle = performance.now() - t;
  }
  function reveal(i) {
    let changed = false;
    for (let p = P.parent[i]; p >= 0; p = P.parent[p]) if (!state.open[p]) { state.open[p] = 1; changed = true; }
    if (links.hidden[i]) { const side = SIDE[P.side[i]]; if (side) { state.sides[side] = "dim"; drawSides(); links = null; changed = true; } }
    if (changed) refresh(new Set(scene.nodes.keys()));
  }
  function select(i, options) {
    const o = options || {};
    if (o.second) { state.second = i === state.selected ? -1 : i; } else { state.selected = i; state.second = -1; }
    if (i > 0) reveal(i);
    for (const [id, el] of elements) el.setAttribute("tabindex", id === focusable() ? "0" : "-1");
    light();
    if (o.isFocused && elements.get(i)) elements.get(i).focus({ preventScroll: true });
    if (i > 0 && o.isShown !== false) bringIntoView(i, o.isCentred); else applyView();
    showPanel();
    drawCrumbs();
    if (i > 0) $("live").textContent = describe(i);
  }
  function goUp() {
    if (state.selected <= 0) return;
    const p = P.parent[state.selected];
    select(p > 0 ? p : -1, { isFocused: true });
  }
  function follow(direction) {
    if (state.selected <= 0) { select(scene.nodes.keys().next().value, { isFocused: true }); return; }
    const i = state.selected, here = scene.nodes.get(i);
    if (!here) return;
    if (direction === "down" || direction === "up") {
      if (direction === "down" && here.isBox) { select(kids[i].find(k => scene.nodes.has(k)), { isFocused: true }); return; }
      const found = [];
      for (const { s, t } of scene.links) {
        if (direction === "down" && within(s, i) && !within(t, i)) found.push(t);
        if (direction === "up" && within(t, i) && !within(s, i)) found.push(s);
      }
      // The main line before its side branches: the nearest in height, then in breadth.
      const far = k => { const n = scene.nodes.get(k); return Math.abs(n.y - here.y) + 0.5 * Math.abs(n.x + n.w / 2 - here.x - here.w / 2) + (SIDE[P.side[k]] && SIDE[P.side[k]] !== "view" ? 5000 : 0); };
      found.sort((a, b) => far(a) - far(b));
      if (found.length) select(found[0], { isFocused: true });
      else if (direction === "up" && P.parent[i] > 0) select(P.parent[i], { isFocused: true });
      return;
    }
    let best = -1, least = Infinity;
    for (const node of scene.nodes.values()) {
      if (node.id === i || node.isBox) continue;
      const dx = (node.x + node.w / 2 - here.x - here.w / 2) * (direction === "right" ? 1 : -1), dy = Math.abs(node.y - here.y);
      if (dx > 8 && dy < 90) { const far = dx + 4 * dy; if (far < least) { least = far; best = node.id; } }
    }
    if (best > 0) select(best, { isFocused: true });
  }

  // -- search ------------------------------------------------------------------------------------------------------------------

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
  function search(query) {
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
    draw();
    remember();
  }
  const hitsIn = i => state.hits.length ? hitSums[end[i]] - hitSums[i] : 0;
  function showHits() {
    const n = state.hits.length;
    $("hits").textContent = !state.query ? "" : state.hitAt >= 0 ? (state.hitAt + 1) + " of " + many(n) : many(n) + (n === 1 ? " hit" : " hits");
  }
  function walk(step) {
    if (!state.hits.length) return;
    state.hitAt = (state.hitAt + step + state.hits.length) % state.hits.length;
    select(state.hits[state.hitAt], { isCentred: true });
    showHits();
  }

  // -- the panel -----------------------------------------------------------------------------------------------------------------

  function bytesOf(text) { const raw = atob(text), out = new Uint8Array(raw.length); for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i); return out; }
  let histograms = null, heat = null, heatStart = null;
  function unpack() {
    if (histograms) return;
    histograms = bytesOf(T.histograms);
    heat = bytesOf(T.heat);
    heatStart = [0];
    T.rows.forEach((r, i) => heatStart.push(heatStart[i] + r * T.cols[i]));
  }
  function histogram(row) {
    unpack();
    const el = make("svg", { class: "hist", viewBox: `0 0 ${T.bins} 100`, preserveAspectRatio: "none", role: "img", "aria-label": "Histogram from " + numberText(T.low[row]) + " to " + numberText(T.high[row]) });
    for (let b = 0; b < T.bins; b++) {
      const v = histograms[row * T.bins + b] / 255 * 100;
      if (v) make("rect", { x: b + 0.06, y: 100 - v, width: 0.88, height: v }, el);
    }
    return el;
  }
  function heatMap(row) {
    unpack();
    const rows = T.rows[row], cols = T.cols[row], canvas = html("canvas", { width: cols, height: rows, role: "img", "aria-label": "Heat map, " + rows + " by " + cols });
    canvas.width = cols; canvas.height = rows;
    const ctx = canvas.getContext("2d"), img = ctx.createImageData(cols, rows);
    for (let i = 0; i < rows * cols; i++) {
      const v = heat[heatStart[row] + i], c = v === 255 ? [230, 60, 50] : colourAt(v / 254);
      img.data.set([...c, 255], i * 4);
    }
    ctx.putImageData(img, 0, 0);
    canvas.style.height = Math.max(14, Math.min(200, 316 * rows / cols)) + "px";
    return canvas;
  }
  function statBlock(row, heading) {
    const out = document.createDocumentFragment();
    out.append(html("h3", {}, heading));
    const cells = [["min", T.min[row]], ["mean", T.mean[row]], ["max", T.max[row]], ["std", T.std[row]]].map(([name, v]) => html("div", {}, html("span", {}, name), numberText(v)));
    cells.push(html("div", {}, html("span", {}, "zeros"), percent(T.zeros[row])));
    cells.push(html("div", T.nonfinite[row] > 0 ? { class: "bad" } : {}, html("span", {}, "non-finite"), percent(T.nonfinite[row])));
    out.append(html("div", { class: "nums" }, ...cells), histogram(row),
      html("div", { class: "pair" }, html("span", {}, numberText(T.low[row])), html("span", {}, numberText(T.high[row]))));
    if (T.rows[row] * T.cols[row] > 1) {
      out.append(heatMap(row), html("div", { class: "pair" }, html("span", {}, "one example, last two dimensions"), html("span", {}, numberText(T.heatlow[row]) + " … " + numberText(T.heathigh[row]))));
    }
    if (T.sample[row]) out.append(html("div", { class: "sub" }, "Mean, std and zeros from " + many(T.sample[row]) + " of the values."));
    return out;
  }
  function linkTo(e) {
    const i = unitOf[e], text = e === NUM - 1 && D.failure ? S[P.title[i]] : S[E.label[e]];
    return html("button", { type: "button", title: S[P.path[i]] + "  " + S[E.shape[e]], onclick: () => { if (P.entries[i].length > 1 && !P.buffers[i].includes(e)) state.pass.set(i, passOfEntry[e]); select(i, { isCentred: false }); } }, text);
  }
  function linkList(heading, list) {
    const out = document.createDocumentFragment();
    if (!list.length) return out;
    const links = html("div", { class: "links" }, ...list.slice(0, 40).map(linkTo));
    if (list.length > 40) links.append("and " + many(list.length - 40) + " more");
    out.append(html("h3", {}, heading), links);
    return out;
  }
  function facts(rows) {
    const list = html("dl");
    for (const [name, value] of rows) if (value !== "" && value !== null) list.append(html("dt", {}, name), html("dd", {}, value));
    return list;
  }
  function placeBlock(place) {
    const out = document.createDocumentFragment();
    if (place < 0) return out;
    const [where, text] = D.places[place];
    out.append(html("h3", {}, "Source"), html("div", { class: "sub" }, S[where]));
    if (S[text]) out.append(html("code", {}, S[text]));
    return out;
  }
  function passBlock(i) {
    const most = isUnit(i) ? P.entries[i].length : P.passes[i];
    if (most < 2 || !isUnit(i) && !["loop", "module"].includes(PART[P.part[i]])) return null;
    const now = Math.min(state.pass.get(i) || 0, most - 1);
    const shown = html("span", {}, (now + 1) + " / " + many(most));
    const change = to => {
      const at = Math.max(0, Math.min(most - 1, to));
      state.pass.set(i, at);
      for (let u = i + 1; u < end[i]; u++) {
        const own = isUnit(u) ? P.entries[u].length : P.passes[u];
        if (own > 1) state.pass.set(u, own === most ? at : Math.floor(at * own / most));
      }
      draw();
      showPanel();
    };
    const slider = html("input", { type: "range", min: 1, max: most, value: now + 1, "aria-label": "Pass", id: "pass" });
    slider.addEventListener("change", () => { change(slider.value - 1); $("pass").focus(); });
    return html("div", { class: "passes" }, html("span", {}, "Pass"), html("button", { type: "button", "aria-label": "Previous pass", id: "pass-back", onclick: () => { change(now - 1); $("pass-back").focus(); } }, "‹"),
      slider, html("button", { type: "button", "aria-label": "Next pass", id: "pass-next", onclick: () => { change(now + 1); $("pass-next").focus(); } }, "›"), shown);
  }
  function showPanel() {
    const i = state.selected;
    panel.replaceChildren();
    panel.scrollTop = 0;
    if (i <= 0) { showModel(); return; }
    const kind = PART[P.part[i]];
    panel.append(html("h2", {}, S[P.title[i]]));
    const sub = kind === "operation" ? typeOf(i) : kind === "module" ? S[P.type[i]] : ({ loop: "loop", repeat: "identical parts, folded", step: "one of identical parts", span: "span" })[kind] + " · " + S[P.type[i]];
    panel.append(html("div", { class: "sub" }, sub + (S[P.path[i]] && S[P.path[i]] !== S[P.title[i]] ? " in " + S[P.path[i]] : "")));
    if (i === failedUnit) {
      panel.append(html("h3", {}, "Failed"), html("div", { class: "error" }, D.failure.message));
      if (D.failure.arguments) panel.append(html("h3", {}, "Arguments"), html("code", {}, D.failure.arguments));
    }
    const passes = passBlock(i);
    if (passes) panel.append(passes);
    const all = entriesIn(i), buffers = isUnit(i) ? P.buffers[i] : [];
    const params = paramsIn(i), time = all.reduce((sum, e) => sum + E.micros[e], 0), flops = all.reduce((sum, e) => sum + E.flops[e], 0);
    if (isUnit(i)) {
      const own = entriesNow(i), e = own[0];
      const isFailed = i === failedUnit;
      panel.append(facts([
        ["Label", isFailed ? "" : own.map(k => S[E.label[k]]).join(", ")], ["Operation", isFailed ? D.failure.operation : typeOf(i) !== S[P.type[i]] || S[P.path[i]] === S[P.title[i]] ? S[E.label[e]].split("_")[0] : ""],
        ["Shape", isFailed ? "" : own.map(k => S[E.shape[k]]).join("; ")], ["Input shapes", E.parents[e].filter(p => !buffers.includes(p)).map(p => S[E.shape[p]]).join("; ")],
        ["Type", isFailed ? "" : S[E.dtype[e]]], ["Size", isFailed ? "" : bytesText(own.reduce((sum, k) => sum + E.bytes[k], 0))],
        ["Time", isFailed ? "" : timeText(own.reduce((sum, k) => sum + E.micros[k], 0))], ["All passes", P.entries[i].length > 1 ? timeText(time) : ""],
        ["FLOPs", E.flops[e] ? short(E.flops[e]) : ""], ["Arguments", S[E.args[e]]],
        ["Values", !isFailed && own.some(k => E.stat[k] === VALUELESS) ? "none: the tensor is " + D.valueless : ""],
        [state.overlay, state.overlay && overlays.get(state.overlay).isOwn && overlayValue(i) !== null ? overlayText(overlayValue(i)) : ""],
        ["Backward", isFailed || E.backward[e] === null ? "" : timeText(own.reduce((sum, k) => sum + (E.backward[k] || 0), 0))],
      ]));
      own.forEach(k => { if (E.stat[k] >= 0) panel.append(statBlock(E.stat[k], own.length > 1 ? "Values of " + S[E.label[k]] : "Values")); });
      own.forEach(k => { if (E.grad[k] >= 0) panel.append(statBlock(E.grad[k], "Gradient")); });
      panel.append(linkList("Parents", [...new Set(own.flatMap(k => E.parents[k]))].filter(p => !buffers.includes(p))));
      panel.append(linkList("Children", [...new Set(own.flatMap(k => children[k]))]));
    } else {
      const units = new Set(), ins = new Set(), outs = new Set();
      for (const e of all) units.add(unitOf[e]);
      for (const e of all) { for (const p of E.parents[e]) if (!within(unitOf[p], i)) ins.add(p); for (const c of children[e]) if (!within(unitOf[c], i)) outs.add(c); }
      panel.append(facts([
        ["Operations", many(countUnits(i))], ["Output shape", shapeOf(i)], ["Input shapes", [...new Set([...ins].map(e => S[E.shape[e]]))].slice(0, 4).join("; ")],
        ["Parameters", params.length ? many(paramCount(i)) : ""], ["Their size", params.length ? bytesText(params.reduce((sum, p) => sum + Q.bytes[p], 0)) : ""],
        ["Tensors", bytesText(all.reduce((sum, e) => sum + E.bytes[e], 0))], ["Time", timeText(time)], ["FLOPs", flops ? short(flops) : ""],
        ["Backward", all.some(e => E.backward[e] !== null) ? timeText(all.reduce((sum, e) => sum + (E.backward[e] || 0), 0)) : ""],
        [state.overlay, state.overlay && overlays.get(state.overlay).isOwn && overlayValue(i) !== null ? overlayText(overlayValue(i)) : ""],
      ]));
      panel.append(html("div", { class: "passes" }, html("button", { type: "button", onclick: () => toggle(i) }, state.open[i] ? "Collapse" : "Expand")));
      const out = links.outOf[i], shown = out > 0 ? entriesNow(out) : [];
      if (shown.length && E.stat[shown[0]] >= 0) panel.append(statBlock(E.stat[shown[0]], "Values of its output, " + S[E.label[shown[0]]]));
      panel.append(linkList("Parents", [...ins]), linkList("Children", [...outs]));
    }
    if (params.length) {
      const list = html("div", { class: "params" });
      for (const p of params.slice(0, isUnit(i) ? 20 : 12)) {
        const item = html("div", {}, html("b", {}, S[Q.address[p]]), " " + S[Q.shape[p]] + " ", html("span", { class: "sub" }, S[Q.dtype[p]] + ", " + bytesText(Q.bytes[p]) + (Q.trained[p] ? "" : ", frozen")));
        if (Q.stat[p] >= 0 && isUnit(i)) item.append(histogram(Q.stat[p]), html("div", { class: "pair" }, html("span", {}, numberText(T.low[Q.stat[p]])), html("span", {}, "std " + numberText(T.std[Q.stat[p]])), html("span", {}, numberText(T.high[Q.stat[p]]))));
        if (Q.grad[p] >= 0) item.append(html("div", { class: "sub" }, "gradient std " + numberText(T.std[Q.grad[p]]) + ", largest " + numberText(Math.max(Math.abs(T.min[Q.grad[p]]), Math.abs(T.max[Q.grad[p]])))));
        list.append(item);
      }
      panel.append(html("h3", {}, "Parameters"), list);
      if (params.length > list.children.length) list.append(html("div", {}, "and " + many(params.length - list.children.length) + " more"));
    }
    if (buffers.length) {
      const list = html("div", { class: "params" });
      for (const e of buffers) list.append(html("div", {}, html("b", {}, S[E.args[e]]), " " + S[E.shape[e]]));
      panel.append(html("h3", {}, "Buffers"), list);
    }
    panel.append(placeBlock(isUnit(i) && P.place[i] < 0 ? E.place[entriesNow(i)[0]] : P.place[i]));
  }
  function showModel() {
    panel.append(html("h2", {}, D.title), html("div", { class: "sub" }, D.failure ? "The forward pass failed." : "One forward pass."));
    if (D.valueless) panel.append(html("div", { class: "sub", id: "valueless" }, "Tensors without values are " + D.valueless + ": shapes, sizes and FLOPs are there, statistics are not, and times are those of working out shapes."));
    if (D.note) panel.append(html("div", { class: "sub", id: "note" }, D.note));
    panel.append(facts([
      ["Tensors", many(D.tensors)], ["Their size", bytesText(D.bytes)], ["Parameters", many(D.params)], ["Their size", bytesText(D.paramBytes)],
      ["Forward pass", timeText(D.seconds * 1e6)], ["FLOPs", E.flops.some(Boolean) ? short(E.flops.reduce((a, b) => a + b, 0)) : ""],
    ]));
    panel.append(html("h3", {}, "How to"), html("div", { class: "sub" }, "Click a box to open it, again to close it. Shift-click a second one to see the paths between the two. Press ? for the keys."));
  }
  function drawCrumbs() {
    const nav = $("crumbs"), chain = [];
    for (let i = state.selected; i > 0; i = P.parent[i]) chain.unshift(i);
    nav.replaceChildren();
    if (!chain.length) return;
    for (const i of chain) {
      let above = P.parent[i];
      while (above > 0 && !S[P.path[above]]) above = P.parent[above];
      const head = above > 0 ? S[P.path[above]] + "." : "", full = S[P.title[i]];
      const text = head && full.startsWith(head) ? full.slice(head.length) : full;
      nav.append("› ", html("button", { type: "button", title: full, onclick: () => select(i, {}) }, text.length > 28 ? text.slice(0, 26) + "…" : text));
    }
  }
  function drawSides() {
    const names = { buffer: "Buffers", constant: "Constants", mask: "Masks", view: "Views" };
    $("sides").replaceChildren(...Object.keys(names).map(side => {
      const choice = html("select", { "aria-label": names[side] }, ...["show", "dim", "hide"].map(v => html("option", v === state.sides[side] ? { value: v, selected: "" } : { value: v }, v)));
      choice.addEventListener("change", () => { state.sides[side] = choice.value; links = null; scene.orders.clear(); refresh(); applyView(); });
      return html("label", {}, names[side], choice);
    }));
  }

  // -- the address -----------------------------------------------------------------------------------------------------------------

  let pending = 0, written = "";
  function hashText() {
    const opened = [];
    for (let i = 1; i < N; i++) if (state.open[i]) opened.push(i.toString(36));
    const [w, h] = size(), v = state.view;
    const bits = ["e=" + opened.join("."), "v=" + [(w / 2 - v.x) / v.k, (h / 2 - v.y) / v.k].map(Math.round).join(",") + "," + v.k.toFixed(3)];
    if (state.selected > 0) bits.push("s=" + state.selected.toString(36));
    if (state.second > 0) bits.push("t=" + state.second.toString(36));
    if (state.overlay) bits.push("o=" + encodeURIComponent(state.overlay));
    if (state.query) bits.push("q=" + encodeURIComponent(state.query));
    const sides = Object.entries(state.sides).filter(([, v]) => v !== "dim").map(([k, v]) => k + ":" + v);
    if (sides.length) bits.push("h=" + sides.join(","));
    return "#" + bits.join("&");
  }
  function remember() {
    if (pending) return;
    pending = setTimeout(() => {
      pending = 0;
      written = hashText();
      try { history.replaceState(null, "", written); } catch (error) {
        if (error.name !== "SecurityError") throw error;  // A page inside a page has no address of its own.
      }
    }, 150);
  }
  function restore(text) {
    const found = Object.fromEntries(text.replace(/^#/, "").split("&").map(bit => { const at = bit.indexOf("="); return [bit.slice(0, at), bit.slice(at + 1)]; }));
    if (found.e === undefined || !found.v) return false;
    const valid = t => { const i = parseInt(t, 36); return i > 0 && i < N ? i : -1; };
    state.open.fill(0);
    state.open[0] = 1;
    for (const bit of found.e.split(".")) { const i = valid(bit); if (i > 0 && !isUnit(i)) state.open[i] = 1; }
    state.selected = found.s ? valid(found.s) : -1;
    state.second = found.t ? valid(found.t) : -1;
    const overlay = found.o ? decodeURIComponent(found.o) : "";
    state.overlay = overlays.has(overlay) ? overlay : "";
    for (const bit of (found.h || "").split(",")) { const [k, v] = bit.split(":"); if (k in state.sides && ["show", "dim", "hide"].includes(v)) state.sides[k] = v; }
    links = null;
    arrange();
    const query = found.q ? decodeURIComponent(found.q) : "";
    $("query").value = query;
    search(query);
    const [x, y, k] = found.v.split(",").map(Number), [w, h] = size();
    if ([x, y, k].every(Number.isFinite) && k > 0) state.view = { k, x: w / 2 - x * k, y: h / 2 - y * k };
    $("overlay").value = state.overlay;
    drawSides();
    applyView();
    showPanel();
    drawCrumbs();
    return true;
  }

  // -- opening -----------------------------------------------------------------------------------------------------------------------

  /* Expands, largest first, until at least 10 and at most 40 nodes show. */
  function openReadable() {
    state.open[0] = 1;
    if (failedUnit > 0) for (let p = P.parent[failedUnit]; p > 0; p = P.parent[p]) state.open[p] = 1;
    connect();
    const shown = i => kids[i].filter(k => !links.hidden[k]).length;
    const visible = () => { let n = 0; (function count(i) { for (const k of kids[i]) if (!links.hidden[k]) { if (state.open[k]) count(k); else n++; } })(0); return n; };
    for (let now = visible(); now < 10; now = visible()) {
      const candidates = [];
      (function look(i) { for (const k of kids[i]) if (!isUnit(k)) { if (state.open[k]) look(k); else candidates.push(k); } })(0);
      // A small loop stays one node. Large things first, modules before what is folded.
      const worth = k => countUnits(k) * (PART[P.part[k]] === "module" ? 4 : 1) / (1 + depth[k]);
      const isSmallLoop = k => (PART[P.part[k]] === "loop" || P.passes[k] > 1 && PART[P.part[k]] === "module") && countUnits(k) < 500;
      const fits = candidates.filter(k => now - 1 + shown(k) <= 40 && !isSmallLoop(k));
      if (!fits.length) break;
      fits.sort((a, b) => worth(b) - worth(a) || a - b);
      state.open[fits[0]] = 1;
    }
  }

  const KEYS = [["Click, Enter", "expand or collapse"], ["Arrows", "follow the edges"], ["Backspace", "to the box around"], ["Shift-click", "paths to a second node"], ["/", "search; Enter to the next hit, Shift-Enter back"],
    ["f", "fit to the window"], ["+  −", "zoom"], ["[  ]", "previous, next pass of a loop"], ["Escape", "clear the selection"], ["?", "this list"]];
  function showKeys() {
    const dialog = $("keys"), table = html("table");
    for (const [key, text] of KEYS) table.append(html("tr", {}, html("td", {}, html("kbd", {}, key)), html("td", {}, text)));
    dialog.replaceChildren(html("h2", {}, "Keys"), table, html("form", { method: "dialog" }, html("button", { autofocus: "" }, "Close")));
    if (!dialog.open) dialog.showModal();
  }

  function listen() {
    let drag = null;
    const local = event => { const r = stage.getBoundingClientRect(); return [event.clientX - r.left, event.clientY - r.top]; };
    svg.addEventListener("pointerdown", event => {
      if (event.button) return;
      const [x, y] = local(event);
      const target = event.target.closest("[data-id]");
      drag = { x, y, vx: state.view.x, vy: state.view.y, moved: false, id: target ? +target.dataset.id : -1, isShift: event.shiftKey };
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", event => {
      if (!drag) return;
      const [x, y] = local(event);
      if (!drag.moved && Math.hypot(x - drag.x, y - drag.y) < 4) return;
      drag.moved = true;
      svg.classList.add("drag");
      state.view.x = drag.vx + x - drag.x;
      state.view.y = drag.vy + y - drag.y;
      applyView();
    });
    svg.addEventListener("pointerup", event => {
      svg.classList.remove("drag");
      const now = drag;
      drag = null;
      if (!now || now.moved) return;
      if (now.id < 0) { if (state.selected > 0) select(-1); return; }
      if (now.isShift && state.selected > 0) { select(now.id, { second: true, isShown: false }); return; }
      const t = performance.now();
      state.selected = now.id;
      state.second = -1;
      if (isUnit(now.id)) select(now.id, { isShown: false, isFocused: true });
      else { toggle(now.id, local(event)); drawCrumbs(); const el = elements.get(now.id); if (el) el.focus({ preventScroll: true }); $("live").textContent = describe(now.id); }
      timings.click = performance.now() - t;
    });
    svg.addEventListener("pointercancel", () => { drag = null; svg.classList.remove("drag"); });
    svg.addEventListener("wheel", event => {
      event.preventDefault();
      const [x, y] = local(event);
      if (event.ctrlKey || event.metaKey || !event.shiftKey && Math.abs(event.deltaX) < 1 && event.deltaMode === 0 && Math.abs(event.deltaY) >= 50 || event.deltaMode) zoom(Math.exp(-Math.max(-120, Math.min(120, event.deltaMode ? event.deltaY * 30 : event.deltaY)) * 0.0018), x, y);
      else { state.view.x -= event.deltaX; state.view.y -= event.deltaY; applyView(); }
    }, { passive: false });
    svg.addEventListener("focusin", event => {
      const target = event.target.closest("[data-id]");
      if (target && +target.dataset.id !== state.selected && target.matches(":focus-visible") && !drag) select(+target.dataset.id, {});
    });
    const mapMove = event => {
      const r = map.getBoundingClientRect(), [w, h] = size(), v = state.view;
      v.x = w / 2 - (event.clientX - r.left - map.offset[0]) / mapScale * v.k;
      v.y = h / 2 - (event.clientY - r.top - map.offset[1]) / mapScale * v.k;
      applyView();
    };
    map.addEventListener("pointerdown", event => { map.setPointerCapture(event.pointerId); mapMove(event); });
    map.addEventListener("pointermove", event => { if (event.buttons) mapMove(event); });
    $("fit").addEventListener("click", () => fit(false));
    $("help").addEventListener("click", showKeys);
    $("query").addEventListener("input", () => search($("query").value));
    $("query").addEventListener("keydown", event => {
      if (event.key === "Enter") { event.preventDefault(); walk(event.shiftKey ? -1 : 1); }
      if (event.key === "Escape") { $("query").value = ""; search(""); const el = elements.get(focusable()); if (el) el.focus({ preventScroll: true }); }
    });
    $("overlay").addEventListener("change", () => { state.overlay = $("overlay").value; refresh(); applyView(); showPanel(); });
    document.addEventListener("keydown", event => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog, summary, #panel, #bar button")) return;
      const keys = {
        ArrowDown: () => follow("down"), ArrowUp: () => follow("up"), ArrowLeft: () => follow("left"), ArrowRight: () => follow("right"),
        Enter: () => { if (state.selected > 0) { toggle(state.selected); if (elements.get(state.selected)) elements.get(state.selected).focus({ preventScroll: true }); } },
        " ": () => keys.Enter(), Backspace: goUp, f: () => fit(false), "?": showKeys, "/": () => { $("query").focus(); $("query").select(); }, Escape: () => select(-1),
        "+": () => zoom(1.2, size()[0] / 2, size()[1] / 2), "=": () => keys["+"](), "-": () => zoom(1 / 1.2, size()[0] / 2, size()[1] / 2),
        "[": () => { const b = $("pass-back"); if (b) { b.click(); if (elements.get(state.selected)) elements.get(state.selected).focus({ preventScroll: true }); } },
        "]": () => { const b = $("pass-next"); if (b) { b.click(); if (elements.get(state.selected)) elements.get(state.selected).focus({ preventScroll: true }); } },
      };
      if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
    });
    window.addEventListener("resize", drawMap);
    window.addEventListener("hashchange", () => { if (location.hash !== written) restore(location.hash); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMap);
  }

  function start() {
    $("name").textContent = D.title;
    $("overlay").append(html("option", { value: "" }, "kind"), ...[...overlays.keys()].map(name => html("option", { value: name }, name)));
    drawSides();
    if (D.failure) {
      const where = D.failure.module ? " in " + D.failure.module : "";
      $("failure").append("The forward pass failed" + where + (D.failure.operation ? ", in " + D.failure.operation + "(" + D.failure.arguments + ")" : "") + ": " + D.failure.message,
        html("button", { type: "button", onclick: () => select(failedUnit, { isCentred: true }) }, "Show"));
      $("failure").hidden = false;
    }
    listen();
    if (!restore(location.hash)) {
      openReadable();
      arrange();
      draw();
      fit(true);
      showPanel();
      if (failedUnit > 0) select(failedUnit, {});
    }
    timings.open = performance.now() - started;
    timings.sinceNavigation = performance.now();
  }
  start();

  window.torchlens = {
    timings, state, scene, D, toggle, select, search, walk, fit, shown: () => [...scene.nodes.values()].filter(n => !n.isBox).length,
    title: i => S[P.title[i]],
    find: text => { for (let i = 1; i < N; i++) if (S[P.title[i]] === text) return i; return -1; },
    screen: i => { const n = scene.nodes.get(i), v = state.view, r = stage.getBoundingClientRect(); return n ? { x: r.left + v.x + n.x * v.k, y: r.top + v.y + n.y * v.k, w: n.w * v.k, h: n.h * v.k } : null; },
  };
})();
