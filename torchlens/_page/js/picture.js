/* Exports the current graph as a self-contained SVG or PNG. */

import { D, scene, state } from "./outline.js";
import { overlayText } from "./overlays.js";
import { SCALE, css } from "./scale.js";
import { html, label, make } from "./elements.js";
import { addTip, drawAll, world } from "./draw.js";
import { legendTitle, shownRange } from "./legend.js";
import { say } from "./word.js";

const MARGIN = 20, LONGEST_SIDE = 16000, MOST_PIXELS = 120e6;  // of a PNG, which browsers make at once in memory
const KEPT = ["fill", "paint-order", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-weight"];

/* An SVG element without classes, variables and style sheets. */
export function picture() {
  drawAll();
  const scale = state.overlay ? 46 : 0;
  const [w, h] = [scene.width + 2 * MARGIN, scene.height + 2 * MARGIN + scale].map(Math.ceil);
  const paper = getComputedStyle(document.documentElement).getPropertyValue("--paper").trim();
  const out = make("svg", { width: w, height: h, viewBox: `0 0 ${w} ${h}`, "font-family": getComputedStyle(document.body).fontFamily });
  make("title", {}, out).textContent = D.title;
  make("rect", { width: w, height: h, fill: paper }, out);
  const copy = world.cloneNode(true);
  copy.setAttribute("transform", `translate(${MARGIN} ${MARGIN})`);
  inline(world, copy);
  out.append(copy);
  if (scale) drawScale(out, MARGIN, h - scale);
  return out;
}
function inline(from, to) {
  if (from instanceof SVGGraphicsElement) {
    if (from.matches(".pick")) { to.remove(); return; }
    const style = getComputedStyle(from);
    if (style.display === "none") { to.remove(); return; }
    for (const name of from.childElementCount && from.tagName === "g" ? ["opacity"] : KEPT) {
      const value = style.getPropertyValue(name);
      if (value && !(name === "opacity" && value === "1") && !(name === "stroke-dasharray" && value === "none")) to.setAttribute(name, value);
    }
  }
  for (const name of [...to.getAttributeNames()]) if (["class", "style", "tabindex", "role", "id"].includes(name) || /^(aria|data)-/.test(name)) to.removeAttribute(name);
  const inner = [...to.children];
  [...from.children].forEach((child, k) => inline(child, inner[k]));
  if (from.matches(".node") && !from.querySelector(":scope > title")) addTip(to, +from.dataset.id);
}
function drawScale(out, x, y) {
  const range = shownRange(), ink = getComputedStyle(document.body).color;
  if (!range) return;
  const fade = make("linearGradient", { id: "scale" }, make("defs", {}, out));
  SCALE.slice().reverse().forEach((c, k) => make("stop", { offset: k / (SCALE.length - 1), "stop-color": css(c) }, fade));
  const text = (t, dx, dy, anchor) => { const el = label(out, t, x + dx, y + dy, "", anchor); el.setAttribute("fill", ink); el.setAttribute("font-size", 12); el.removeAttribute("class"); };
  text(legendTitle(), 0, 8, "start");
  make("rect", { x, y: y + 14, width: 190, height: 11, fill: "url(#scale)" }, out);
  text(overlayText(range.isLog ? range.least : range.min), 0, 38, "start");
  text(overlayText(range.max), 190, 38, "end");
}

function fileName(ending) { return (D.title.replace(/[^\p{L}\p{N}._-]+/gu, "_").slice(0, 80) || "model") + ending; }
function download(blob, name) {
  const url = URL.createObjectURL(blob), link = html("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}
export const svgText = () => new XMLSerializer().serializeToString(picture());
export function saveSvg() { download(new Blob([svgText()], { type: "image/svg+xml" }), fileName(".svg")); }
export async function savePng() {
  const shown = picture(), w = +shown.getAttribute("width"), h = +shown.getAttribute("height");
  const k = Math.min(2, LONGEST_SIDE / w, LONGEST_SIDE / h, Math.sqrt(MOST_PIXELS / (w * h)));
  const image = new Image(w, h);
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(new XMLSerializer().serializeToString(shown));
  await image.decode();
  const canvas = html("canvas", { width: Math.floor(w * k), height: Math.floor(h * k) });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  const blob = await new Promise(done => canvas.toBlob(done, "image/png"));
  if (!blob) { say("The browser cannot make a picture of this size. Close some boxes, or save it as SVG."); return; }
  download(blob, fileName(".png"));
  if (k < 1) say("The picture is scaled down to " + Math.round(k * 100) + " %, since it would be too large. SVG has no limit.");
}
