/* The attention weights of an operation, head by head. */

import { D } from "./outline.js";
import { many, numberText } from "./numbers.js";
import { html } from "./elements.js";
import { bytesOf, heatPicture } from "./statistics.js";

const A = D.attention, rowOf = new Map(A.entry.map((e, row) => [e, row]));
let shownHead = 0; // the same in every layer
export function attentionBlock(e) {
  const row = rowOf.get(e), out = html("div", { class: "attention" });
  if (row === undefined) return document.createDocumentFragment();
  const num = A.high[row].length, bytes = bytesOf(A.heads[row]), place = html("div"), shown = html("span");
  const show = to => {
    const head = shownHead = Math.max(0, Math.min(num - 1, to)), size = A.rows[row] * A.cols[row];
    shown.textContent = head + 1 + " / " + num;
    place.replaceChildren(heatPicture(A.rows[row], A.cols[row], bytes, head * size, "Attention of head " + head),
      html("div", { class: "pair" }, html("span", {}, many(A.queries[row]) + " queries down, " + many(A.keys[row]) + " keys across"), html("span", {}, "0 … " + numberText(A.high[row][head]))));
  };
  const step = (name, by, sign) => html("button", { type: "button", "aria-label": name, onclick: () => show(shownHead + by) }, sign);
  out.append(html("h3", {}, "Attention"), html("div", { class: "passes" }, html("span", {}, "Head"), step("Previous head", -1, "‹"), shown, step("Next head", 1, "›")), place);
  show(shownHead);
  return out;
}
