/* Edits: the line of Python that edits the selected operation or module. */

import { html } from "./elements.js";

const EDITS = new Map([
  ["set to zero", () => "0.0"],
  ["its mean", () => "'mean'"],
  ["other rows of the batch", () => "'resample'"],
  ["from another history", key => "other[" + key + "]"],
  ["scale", () => "torchlens.edits.at(scale=2.0)"],
  ["add a direction", () => "torchlens.edits.at(add=direction)"],
  ["put a module in", () => "torchlens.edits.splice(module)"],
  ["a function", () => "lambda value: value"],
]);
const USES = new Map([
  ["replay what is behind it", edits => "new = history.replay(" + edits + ")"],
  ["run the model again", edits => "new = history.rerun(model, x, edits=" + edits + ")"],
  ["in every call of a block", edits => "with torchlens.edit(model, " + edits + ", history):"],
]);
let chosen = EDITS.keys().next().value, used = USES.keys().next().value; // the same for every part

function choice(name, options, now, change) {
  const list = html("select", { "aria-label": name, onchange: () => change(list.value) }, ...[...options.keys()].map(own => html("option", { value: own }, own)));
  list.value = now;
  return list;
}
export function editBlock(key) {
  if (key === null) return document.createDocumentFragment();
  const quoted = JSON.stringify(key), line = html("code", { id: "edit-line" });
  const copied = html("button", { type: "button", id: "edit-copy", onclick: () => copy(line, copied) }, "Copy");
  const show = () => {
    line.textContent = USES.get(used)("{" + quoted + ": " + EDITS.get(chosen)(quoted) + "}");
    copied.textContent = "Copy";
  };
  show();
  return html("div", { class: "edit" }, html("h3", {}, "Edit"),
    html("div", { class: "passes" }, choice("Edit", EDITS, chosen, to => { chosen = to; show(); }), choice("How", USES, used, to => { used = to; show(); }), copied), line);
}
/* Copies the line; where the browser does not allow that, it is selected. */
function copy(line, button) {
  const select = () => { getSelection().selectAllChildren(line); button.textContent = "Selected"; };
  if (!navigator.clipboard) { select(); return; }
  navigator.clipboard.writeText(line.textContent).then(() => { button.textContent = "Copied"; }, select);
}
