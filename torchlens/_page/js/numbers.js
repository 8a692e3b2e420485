/* Formats numbers and measures the width of texts. */

export const TEXT = 12;
const FONT = getComputedStyle(document.body).fontFamily;
/* One canvas for each font weight: changing the font of a canvas is slow. */
function ruler(weight) {
  const ink = document.createElement("canvas").getContext("2d"), widths = new Map();
  ink.font = weight + TEXT + "px " + FONT;
  return text => {
    let w = widths.get(text);
    if (w === undefined) widths.set(text, w = ink.measureText(text).width);
    return w;
  };
}
const plainWidth = ruler(""), boldWidth = ruler("600 ");
export function widthOf(text, isBold) { return isBold ? boldWidth(text) : plainWidth(text); }
export function clip(text, most, isBold) {
  if (widthOf(text, isBold) <= most) return text;
  let low = 1, high = text.length;
  while (low < high) {
    const mid = (low + high + 1) >> 1, left = Math.ceil(mid * 0.35);
    if (widthOf(text.slice(0, left) + "…" + text.slice(text.length - (mid - left)), isBold) <= most) low = mid; else high = mid - 1;
  }
  const left = Math.ceil(low * 0.35);
  return text.slice(0, left) + "…" + text.slice(text.length - (low - left));
}
const grouped = new Intl.NumberFormat("en-US");
export const many = n => grouped.format(n);
export function short(n, unit) {
  if (!n) return "0" + (unit ? " " + unit : "");
  for (const [size, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (n >= size) return trim(n / size) + " " + name + (unit || "");
  }
  return trim(n) + (unit ? " " + unit : "");
}
const trim = x => x >= 100 ? String(Math.round(x)) : x >= 10 ? x.toFixed(1).replace(/\.0$/, "") : x.toFixed(2).replace(/\.?0+$/, "");
export function bytesText(n) {
  for (const [size, name] of [[2 ** 40, "TB"], [2 ** 30, "GB"], [2 ** 20, "MB"], [1024, "KB"]]) if (n >= size) return (n / size).toFixed(1) + " " + name;
  return n + " B";
}
export function timeText(us) { return us >= 1e6 ? trim(us / 1e6) + " s" : us >= 1e3 ? trim(us / 1e3) + " ms" : trim(us) + " µs"; }
export function numberText(x) {
  if (x === null || x === undefined) return "–";
  const size = Math.abs(x);
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? x.toExponential(2) : String(Math.round(x * 1e4) / 1e4);
}
export const percent = x => x === 0 ? "0 %" : x < 0.001 ? "< 0.1 %" : (x * 100).toFixed(1) + " %";
