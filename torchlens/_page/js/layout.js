/* Layered layout of one box: layers, dummy nodes for long edges, crossing reduction by barycenters, coordinates.

A box has children with sizes, and ports: the points on its upper and lower border where edges enter and leave.
Expanded children are laid out first; then they are nodes with a size and ports. */

const GAP_X = 26, GAP_DUMMY = 14, GAP_Y = 24, SWEEPS = 8, PORT = 10, MOST_ENDS = 5;

/* nodes: {id, w, h, kind: 'node'|'in'|'out', isSide, outs, ins}, in order of execution; edges: {from, to, source} by index.
`order` is the result of an earlier layout: children keep their order in a row. Returns the sizes, the centre x and top y
of each node, and the points of each edge. */
export function layoutBox(nodes, edges, order) {
  const { rank: ranks, moved } = layerOf(nodes, edges);
  const items = nodes.map((node, i) => ({ node, rank: ranks[i], w: node.w, x: 0, up: [], down: [], at: i, isDummy: false }));
  const chains = addDummies(items, edges, moved);
  const byRank = [];
  for (const item of items) (byRank[item.rank] ||= []).push(item);
  for (let r = 0; r < byRank.length; r++) byRank[r] ||= [];
  startOrder(byRank, order);
  reduceCrossings(byRank, order);
  assignX(byRank);
  straighten(byRank, items);
  return placeAll(byRank, items, edges, chains);
}

function layerOf(nodes, edges) {
  const n = nodes.length, rank = new Array(n).fill(0);
  const out = nodes.map(() => []), into = nodes.map(() => []), beside = new Set();
  for (const e of edges) { out[e.from].push(e.to); into[e.to].push(e.from); if (e.isAside) beside.add(e.from + "/" + e.to); }
  const order = topological(nodes, out, into);
  const hasIn = nodes.some(node => node.kind === "in"), least = new Array(n).fill(hasIn ? 1 : 0);
  const goDown = () => {
    for (const i of order) {
      if (nodes[i].kind === "in") continue;
      let r = least[i];
      for (const p of into[i]) r = Math.max(r, rank[p] + (beside.has(p + "/" + i) ? 0 : 1));
      rank[i] = r;
    }
  };
  goDown();
  if (beside.size) {  // The first of two columns begins no higher than the second, which may read what takes rows of its own.
    for (const e of edges) if (e.isAside) least[e.from] = rank[e.to];
    goDown();
  }
  // Nodes without inputs (constants, masks) are placed just above their first reader.
  for (const i of order.slice().reverse()) {
    if (nodes[i].kind !== "node" || !out[i].length) continue;
    if (nodes[i].isSide || !into[i].length) {
      const low = Math.min(...out[i].map(t => rank[t])) - 1;
      if (low > rank[i] && (nodes[i].isSide || into[i].length === 0)) rank[i] = low;
    }
  }
  const moved = breakRows(nodes, rank, out);
  let last = 0;
  for (let i = 0; i < n; i++) if (nodes[i].kind !== "out") last = Math.max(last, rank[i]);
  for (let i = 0; i < n; i++) if (nodes[i].kind === "out") rank[i] = last + 1;
  return { rank, moved };
}

/* Breaks a long row of nodes without successors (the outputs of a detector) into several. Returns the moved nodes, each with
the middle of the row above, through which its edge passes. */
function breakRows(nodes, rank, out) {
  const rows = new Map(), moved = new Map();
  nodes.forEach((node, i) => {
    if (node.kind !== "node" || out[i].length) return;
    if (rows.has(rank[i])) rows.get(rank[i]).push(i); else rows.set(rank[i], [i]);
  });
  for (const row of rows.values()) {
    const count = Math.ceil(row.length / MOST_ENDS), width = Math.ceil(row.length / count);
    row.forEach((i, k) => { const down = Math.floor(k / width); if (down) { rank[i] += down; moved.set(i, row[Math.floor((width - 1) / 2)] + 0.5); } });
  }
  return moved;
}

function topological(nodes, out, into) {
  const left = into.map(list => list.length), ready = [], order = [];
  for (let i = 0; i < nodes.length; i++) if (!left[i]) ready.push(i);
  while (ready.length) {
    const i = ready.shift();
    order.push(i);
    for (const t of out[i]) if (--left[t] === 0) ready.push(t);
  }
  return order;
}

/* Long edges from one source share one chain of dummy nodes. Returns the items on the path of each edge. */
function addDummies(items, edges, moved) {
  const chains = new Map(), paths = [];
  const link = (a, b, weight, e, isFirst, isLast) => {
    a.down.push({ item: b, weight, offset: isFirst ? e.fromOffset || 0 : 0, other: isLast ? e.toOffset || 0 : 0 });
    b.up.push({ item: a, weight, offset: isLast ? e.toOffset || 0 : 0, other: isFirst ? e.fromOffset || 0 : 0 });
  };
  for (const e of edges) {
    const from = items[e.from], to = items[e.to], path = [from];
    if (e.isAside) { paths.push([from, to]); continue; }
    const key = e.from + "/" + e.source + (moved.has(e.to) ? "/" + moved.get(e.to) : "");
    let chain = chains.get(key);
    if (!chain) chains.set(key, chain = []);
    for (let r = from.rank + 1; r < to.rank; r++) {
      let dummy = chain[r];
      if (!dummy) {
        dummy = chain[r] = { node: null, rank: r, w: 4, x: 0, up: [], down: [], at: moved.get(e.to) ?? from.at + 0.5, isDummy: true, key: key + "/" + r };
        items.push(dummy);
        const above = path[path.length - 1];
        link(above, dummy, above.isDummy ? 8 : 1, e, path.length === 1, false);
      }
      path.push(dummy);
    }
    const above = path[path.length - 1];
    link(above, to, above.isDummy ? 1 : e.isSide ? 1 : 4, e, path.length === 1, true);
    path.push(to);
    paths.push(path);
  }
  return paths;
}


function startOrder(byRank, order) {
  for (const row of byRank) {
    row.sort((a, b) => a.at - b.at || (a.isDummy ? 1 : 0) - (b.isDummy ? 1 : 0));
    row.forEach((item, i) => { item.pos = i; });
  }
  if (order) for (const row of byRank) keepOrder(row, order);
}

/* Children of an earlier layout keep their order. */
function keepOrder(row, order) {
  const slots = [], known = [];
  row.forEach((item, i) => { if (!item.isDummy && order.has(item.node.id)) { slots.push(i); known.push(item); } });
  known.sort((a, b) => order.get(a.node.id) - order.get(b.node.id));
  slots.forEach((slot, i) => { row[slot] = known[i]; });
  row.forEach((item, i) => { item.pos = i; });
}

function reduceCrossings(byRank, order) {
  if (byRank.every(row => row.length < 2)) return;
  let best = crossings(byRank), bestRows = byRank.map(row => row.slice());
  for (let sweep = 0; sweep < SWEEPS && best > 0; sweep++) {
    const isDown = sweep % 2 === 0;
    for (let k = 1; k < byRank.length; k++) {
      const row = byRank[isDown ? k : byRank.length - 1 - k];
      for (const item of row) {
        const near = isDown ? item.up : item.down;
        item.bary = near.length ? near.reduce((sum, e) => sum + spot(e.item, e.other), 0) / near.length : item.pos;
      }
      row.sort((a, b) => a.bary - b.bary || a.pos - b.pos);
      row.forEach((item, i) => { item.pos = i; });
      if (order) keepOrder(row, order);
    }
    const count = crossings(byRank);
    if (count < best) { best = count; bestRows = byRank.map(row => row.slice()); }
  }
  bestRows.forEach((row, r) => { byRank[r] = row; row.forEach((item, i) => { item.pos = i; }); });
}

/* The position in its row at which an edge meets an item; each port of a box has its own. */
function spot(item, offset) { return item.pos + offset / (item.w + 1); }

function crossings(byRank) {
  let count = 0;
  for (const row of byRank) {
    const ends = [];
    for (const item of row) for (const e of item.down) ends.push([spot(item, e.offset), spot(e.item, e.other)]);
    for (let i = 0; i < ends.length; i++) {
      for (let j = i + 1; j < ends.length; j++) {
        if ((ends[i][0] - ends[j][0]) * (ends[i][1] - ends[j][1]) < 0) count++;
      }
    }
  }
  return count;
}

/* Places each item near its neighbours in other rows, with a minimal distance within a row. Each row is solved exactly, by
pooling items that would overlap. */
function assignX(byRank) {
  for (const row of byRank) {
    let x = 0;
    row.forEach((item, i) => { if (i) x += space(row[i - 1], item); item.x = x; });
    const middle = x / 2;
    for (const item of row) item.x -= middle;
  }
  const upwards = byRank.slice().reverse(), before = new Map();
  for (let sweep = 0; sweep < 26; sweep++) {
    const isDown = sweep % 2 === 0;
    for (const row of isDown ? byRank : upwards) settle(row, isDown || sweep >= 22, !isDown || sweep >= 22);
    // After two sweeps without a change, no sweep changes anything.
    if (isDown || sweep >= 22 || !isSettled(byRank, before)) continue;
    sweep = 21;
  }
}
function isSettled(byRank, before) {
  let isSame = true;
  for (const row of byRank) for (const item of row) {
    if (!(Math.abs(before.get(item) - item.x) < 0.01)) isSame = false;
    before.set(item, item.x);
  }
  return isSame;
}


/* Aligns long edges and chains of operations vertically if a lane is free. */
function straighten(byRank, items) {
  const isLink = (a, b) => a.isDummy && b.isDummy || !a.isDummy && !b.isDummy && a.down.length === 1 && b.up.length === 1 && !b.up[0].offset && !b.up[0].other;
  const done = new Set();
  for (const item of items) {
    if (done.has(item)) continue;
    const chain = [item];
    for (let next = item; next;) {
      done.add(next);
      const below = next.down.map(e => e.item).find(other => !done.has(other) && isLink(next, other));
      if (below) chain.push(below);
      next = below;
    }
    if (chain.length > 1) moveTogether(chain, byRank);
  }
}

function moveTogether(chain, byRank) {
  let low = -Infinity, high = Infinity, sum = 0;
  for (const item of chain) {
    const row = byRank[item.rank], before = row[item.pos - 1], after = row[item.pos + 1];
    if (before) low = Math.max(low, before.x + space(before, item));
    if (after) high = Math.min(high, after.x - space(item, after));
    sum += item.x;
  }
  if (low > high) return;
  const x = Math.max(low, Math.min(high, sum / chain.length));
  for (const item of chain) item.x = x;
}

function space(a, b) {
  return a.w / 2 + b.w / 2 + (a.isDummy || b.isDummy ? GAP_DUMMY : GAP_X);
}

function settle(row, isUp, isDown) {
  const blocks = [];  // neighbours that touch, by where they begin in the row
  let shift = 0;
  for (let i = 0; i < row.length; i++) {
    const item = row[i];
    if (i) shift += space(row[i - 1], item);
    item.shift = shift;
    let want = 0, weight = 0;
    if (isUp) for (const e of item.up) { want += e.weight * (e.item.x + e.other - e.offset); weight += e.weight; }
    if (isDown) for (const e of item.down) { want += e.weight * (e.item.x + e.other - e.offset); weight += e.weight; }
    if (!weight) { weight = 0.01; want = item.x * weight; }
    let block = { want: want - weight * shift, weight, from: i };
    while (blocks.length) {
      const before = blocks[blocks.length - 1];
      if (before.want / before.weight <= block.want / block.weight) break;
      before.want += block.want; before.weight += block.weight;
      block = blocks.pop();
    }
    blocks.push(block);
  }
  for (let k = 0, i = 0; k < blocks.length; k++) {
    const x = blocks[k].want / blocks[k].weight, to = k + 1 < blocks.length ? blocks[k + 1].from : row.length;
    for (; i < to; i++) row[i].x = x + row[i].shift;
  }
}

function placeAll(byRank, items, edges, paths) {
  let left = Infinity, right = -Infinity;
  for (const item of items) {
    if (item.isDummy || item.node.kind !== "node") { left = Math.min(left, item.x - 6); right = Math.max(right, item.x + 6); }
    else { left = Math.min(left, item.x - item.w / 2); right = Math.max(right, item.x + item.w / 2 + (item.node.extra || 0)); }
  }
  if (left > right) { left = 0; right = 0; }
  let y = 0;
  const tops = [], heights = [];
  byRank.forEach((row, r) => {
    const h = Math.max(0, ...row.map(item => item.isDummy || item.node.kind !== "node" ? 0 : item.node.h));
    const isPorts = row.length > 0 && row.every(item => !item.isDummy && item.node.kind !== "node");
    tops[r] = y;
    heights[r] = h;
    const spread = bend(row), next = byRank[r + 1];
    const isLast = r > 0 && next && next.every(item => !item.isDummy && item.node.kind === "out");
    y += h + (isPorts && r === 0 || isLast ? PORT + Math.min(10, spread / 12) : GAP_Y + Math.min(26, spread / 14));
    if (r === byRank.length - 1) y = tops[r] + h;
  });
  const order = new Map();
  for (const row of byRank) row.forEach(item => { if (!item.isDummy) order.set(item.node.id, item.pos); });
  const inColumns = new Set(edges.filter(e => e.isAside).flatMap(e => [items[e.from], items[e.to]]));
  const placed = items.filter(item => !item.isDummy).map(item => ({
    x: item.x - left, y: tops[item.rank] + (inColumns.has(item) ? 0 : (heights[item.rank] - (item.node.kind === "node" ? item.node.h : 0)) / 2), rank: item.rank,
  }));
  const lines = edges.map((e, i) => {
    if (e.isAside) return aroundColumn(placed[e.from], items[e.from].node, placed[e.to], items[e.to].node, e);
    const path = paths[i], points = [];
    path.forEach((item, k) => {
      const top = tops[item.rank], bottom = top + heights[item.rank];
      const isFirst = k === 0, isLast = k === path.length - 1;
      if (isFirst) {
        const at = placed[e.from], x = at.x + (e.fromOffset || 0);
        const own = items[e.from].node.kind === "node" ? items[e.from].node.h : 0;
        points.push([x, at.y + own]);
        if (bottom - at.y - own > 1) points.push([x, bottom]);
      } else if (isLast) {
        const at = placed[e.to], x = at.x + (e.toOffset || 0);
        if (at.y - top > 1) points.push([x, top]);
        points.push([x, at.y]);
      } else {
        points.push([item.x - left, top]);
        if (bottom > top) points.push([item.x - left, bottom]);
      }
    });
    return points;
  });
  return { width: right - left, height: y, placed, lines, order };
}

/* From the bottom of one column, up between the two, to the top of the other. */
function aroundColumn(from, fromNode, to, toNode, e) {
  const x0 = from.x + (e.fromOffset || 0), x1 = to.x + (e.toOffset || 0), bottom = from.y + fromNode.h + 9, top = to.y - 11;
  const lane = to.x + (to.x > from.x ? -1 : 1) * (toNode.w / 2 + 13);
  return [[x0, from.y + fromNode.h], [x0, bottom], [lane, bottom], [lane, top], [x1, top], [x1, to.y]];
}

/* The horizontal extent of the edges below a row: rows with long slanted edges get more space. */
function bend(row) {
  let most = 0;
  for (const item of row) for (const e of item.down) most = Math.max(most, Math.abs(item.x + e.offset - e.item.x - e.other));
  return most;
}

/* A line through points: straight down within rows, smooth between them. */
export function pathOf(points) {
  let d = "M" + rounded(points[0][0]) + " " + rounded(points[0][1]);
  for (let i = 1; i < points.length; i++) {
    const [x0, y0] = points[i - 1], [x1, y1] = points[i];
    if (Math.abs(x0 - x1) < 0.6) d += "L" + rounded(x1) + " " + rounded(y1);
    else {
      const mid = (y0 + y1) / 2;
      d += "C" + rounded(x0) + " " + rounded(mid) + " " + rounded(x1) + " " + rounded(mid) + " " + rounded(x1) + " " + rounded(y1);
    }
  }
  return d;
}

function rounded(x) { return Math.round(x * 10) / 10; }
