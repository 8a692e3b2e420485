/* The properties of a part as lines of text, for comparison with another part. */

import { E, P, Q, S, T, isUnit } from "./outline.js";
import { links } from "./links.js";
import { bytesText, many, numberText, short, timeText } from "./numbers.js";
import { countUnits, entriesNow, paramCount, paramsIn, shapeOf, typeOf, wordFor } from "./names.js";
import { entriesIn } from "./light.js";

export function factsOf(i) {
  const own = isUnit(i) ? entriesNow(i) : [], all = entriesIn(i), params = paramsIn(i);
  const sum = column => all.reduce((total, e) => total + column[e], 0);
  const shown = isUnit(i) ? own : links.outOf[i] > 0 ? entriesNow(links.outOf[i]) : [];
  const row = shown.length ? E.stat[shown[0]] : -1;
  const facts = [
    ["Name", S[P.title[i]]], ["Type", typeOf(i)], ["Label", own.length ? S[E.label[own[0]]] : ""],
    ["Shape", shapeOf(i)], ["Dtype", shown.length ? S[E.dtype[shown[0]]] : ""], ["Arguments", own.length ? S[E.args[own[0]]] : ""],
    ["Passes", P.passes[i] > 1 ? many(P.passes[i]) : ""], [{ input: "Inputs", output: "Outputs" }[wordFor(i, "")] || "Operations", many(countUnits(i))],
    ["Parameters", params.length ? many(paramCount(i)) : ""],
  ];
  if (isUnit(i)) for (const p of params.slice(0, 8)) facts.push([S[Q.address[p]].split(".").pop(), S[Q.shape[p]] + (Q.stat[p] >= 0 ? ", mean " + numberText(T.mean[Q.stat[p]]) + ", std " + numberText(T.std[Q.stat[p]]) : "")]);
  facts.push(["Size", bytesText(sum(E.bytes))], ["FLOPs", sum(E.flops) ? short(sum(E.flops)) : ""], ["Time", timeText(sum(E.micros))]);
  if (row >= 0) facts.push(["Mean", numberText(T.mean[row])], ["Deviation", numberText(T.std[row])], ["Least", numberText(T.min[row])], ["Greatest", numberText(T.max[row])]);
  return facts.filter(([, text]) => text !== "");
}
