/* The positions of everything visible. */

import { D, FOOT, HEAD_H, LINE_H, N, NODE_H, P, PAD, PART, SIDE, failedUnit, isUnit, kids, scene, siblings, state } from "./outline.js";
import { columnsIn, connect, links } from "./links.js";
import { widthOf } from "./numbers.js";
import { extraLines, failedText, noteOf, readOf, shapeOf, titleOf, typeOf } from "./names.js";
import { placeIdle } from "./idle.js";
import { layoutBox, pathOf } from "./layout.js";

const VALUE_ROOM = 76;  // for a number beside the title, when the nodes are coloured by one
function measure(i) {
  const title = titleOf(i), note = noteOf(i, true), type = typeOf(i) + " " + readOf(i), shape = shapeOf(i);
  if (i === failedUnit) return { w: Math.ceil(Math.min(520, Math.max(widthOf(title, true), widthOf(failedText()), widthOf(D.failure.message.split("\n")[0])) + 20)), h: NODE_H + 19 };
  const most = 330;
  let w = Math.max(widthOf(title, true) + Math.max(VALUE_ROOM, note ? widthOf(note) + 18 : 0) + (isUnit(i) ? 0 : 16), widthOf(type) + widthOf(shape) + 20, 104) + 20;
  w = Math.min(w, most);
  const lines = extraLines(i);
  for (const line of lines) w = Math.max(w, Math.min(most, widthOf(line) + 20));
  return { w: Math.ceil(w), h: NODE_H + LINE_H * lines.length };
}

export function arrange() {
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
  for (const [a, b, isResidual] of pairs) {
    const s = rep[a], t = rep[b];
    if (s === t) continue;
    const key = s * N + t, known = edgeMap.get(key);
    if (known) { known.isResidual = known.isResidual && isResidual; known.pairs.push([a, b]); continue; }
    const edge = { s, t, isResidual, pairs: [[a, b]] };
    edgeMap.set(key, edge);
    let [x, y] = siblings(s, t) || [0, 0];
    const box = P.parent[x];
    for (let u = s; u !== x; u = P.parent[u]) { at(P.parent[u]).outs.add(s); join(P.parent[u], u, "o" + s, s, edge); }
    for (let u = t; u !== y; u = P.parent[u]) { at(P.parent[u]).ins.add(s); join(P.parent[u], "i" + s, u, s, edge); }
    join(box, x, y, s, edge);
  }
  const selfLoops = new Map();  // what goes along the loop of each part
  const add = (i, pair) => { const list = selfLoops.get(i); if (list) list.push(pair); else selfLoops.set(i, [pair]); };
  for (const [x, y, around, a, b] of loops) {
    if (!shown[around]) continue;
    if (!state.open[around] || PART[P.part[around]] === "module") add(around, [a, b]);
    else if (x === y) add(x, [a, b]);
    else {
      const own = at(around).loops, known = own.find(([s, t]) => s === x && t === y);
      if (known) known[2].push([a, b]); else own.push([x, y, [[a, b]]]);
    }
  }
  const boxes = new Map();
  const line = (area, edge) => scene.edges.push({ area, ...edge, el: null, arrow: null });  // with where it goes, from a corner to the opposite
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
    const edges = [], columns = kids[i].filter(k => state.open[k]).length > 1 ? columnsIn(i) : null;
    for (const e of l.edges.values()) {
      const from = boxes.get(e.from), to = boxes.get(e.to);
      const isSide = typeof e.from === "number" && isUnit(e.from) && P.side[e.from] > 0 && SIDE[P.side[e.from]] !== "view";
      edges.push({
        from: index.get(e.from), to: index.get(e.to), source: e.source, ends: e.ends, isSide,
        isAside: Boolean(columns && e.from === columns[0] && e.to === columns[1] && state.open[e.from] && state.open[e.to]),
        fromOffset: from && from.outs ? from.outs.get(e.source) || 0 : 0, toOffset: to && to.ins ? to.ins.get(e.source) || 0 : 0,
      });
    }
    const made = layoutBox(nodes, edges, scene.orders.get(i));
    const order = scene.orders.get(i) || new Map();
    for (const [id, pos] of made.order) if (typeof id === "number" && !order.has(id)) order.set(id, pos);
    scene.orders.set(i, order);
    const head = i === 0 ? 0 : HEAD_H + 8, idle = placeIdle(i, made.height), foot = i === 0 ? 0 : FOOT, pad = i === 0 ? 0 : PAD;
    const title = i === 0 ? 0 : Math.min(560, widthOf(titleOf(i), true) + widthOf(typeOf(i)) + widthOf(noteOf(i, true)) + 76);
    const loopRoom = l.loops.length ? 18 + 10 * l.loops.length : 0;
    const right = loopRoom + (idle ? idle.w : 0), w = Math.max(made.width + 2 * pad + right, title), h = Math.max(made.height, idle ? idle.h : 0) + head + foot;
    const dx = (w - made.width - right) / 2;
    const ins = new Map(), outs = new Map();
    nodes.forEach((node, k) => {
      if (node.kind === "in") ins.set(+node.id.slice(1), made.placed[k].x + dx - w / 2);
      if (node.kind === "out") outs.set(+node.id.slice(1), made.placed[k].x + dx - w / 2);
    });
    return { w: Math.ceil(w), h, ins, outs, made, nodes, edges, dx, head, loops: l.loops, index, loopRoom, idle };
  }
  const root = lay(0);
  scene.nodes = new Map();
  scene.edges = [];
  scene.links = [...edgeMap.values()];
  scene.rep = rep;
  scene.selfLoops = selfLoops;
  scene.idle = [];
  (function spread(i, own, x, y) {
    const isBox = Boolean(own.made);
    if (i) scene.nodes.set(i, { id: i, x, y, w: own.w, h: own.h, isBox });
    if (i && selfLoops.has(i)) {
      const r = x + own.w + (isUnit(i) || isBox ? 0 : 5), top = y + 10, low = y + NODE_H - 6;
      line([r, top - 4, r + 26, low + 4], { d: `M${r} ${low}h4c22 0 22 ${top - low} 2 ${top - low}`, kind: "loop", tip: [r, top, -1], ends: [{ s: i, t: i, pairs: selfLoops.get(i) }] });
    }
    if (!isBox) return;
    const ox = x + own.dx, oy = y + own.head;
    if (own.idle) for (const node of own.idle.nodes) scene.idle.push({ ...node, x: ox + own.made.width + own.loopRoom + node.x, y: oy + node.y });
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
      const kind = e.ends.every(edge => edge.isResidual) ? "skip" : e.isSide ? "side" : "";
      if (!isOut && !isBoxed) last[1] -= 5;
      line(areaOf(points), { d: pathOf(points), kind, tip: isOut || isBoxed ? null : [last[0], last[1] + 5, 0], ends: e.ends, from: own.nodes[e.from].kind === "node" ? points[0] : null });
    });
    own.loops.forEach(([a, b, pairs], k) => {
      const from = scene.nodes.get(a), to = scene.nodes.get(b);
      if (!from || !to) return;
      const r = (own.idle ? ox + own.made.width + own.loopRoom + PAD : x + own.w) - 12 - 10 * k, y0 = from.y + Math.min(from.h - 10, from.h / 2 + 6), y1 = to.y + Math.min(16, to.h / 2);
      line([Math.min(from.x + from.w, to.x + to.w), Math.min(y0, y1), r, Math.max(y0, y1)], {
        d: `M${from.x + from.w} ${y0}H${r - 8}Q${r} ${y0} ${r} ${y0 - 8}V${y1 + 8}Q${r} ${y1} ${r - 8} ${y1}H${to.x + to.w + 5}`,
        kind: "loop", tip: [to.x + to.w, y1, -1], ends: [{ s: a, t: b, pairs }],
      });
    });
  })(0, root, 0, 0);
  scene.width = root.w;
  scene.height = root.h;
}
function areaOf(points) {
  const xs = points.map(p => p[0]), ys = points.map(p => p[1]);
  return [Math.min(...xs), Math.min(...ys), Math.max(...xs), Math.max(...ys)];
}
