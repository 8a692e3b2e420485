/* The colour scale of values. */

export const SCALE = [[0, 32, 77], [49, 68, 107], [102, 105, 112], [149, 143, 120], [202, 185, 105], [255, 234, 70]];
export function colourAt(t) {
  const at = Math.max(0, Math.min(1, t)) * (SCALE.length - 1), i = Math.min(SCALE.length - 2, Math.floor(at)), f = at - i;
  return SCALE[i].map((c, k) => Math.round(c + (SCALE[i + 1][k] - c) * f));
}
export const css = c => "rgb(" + c.join(",") + ")";
export function inkOn(c) {
  const [r, g, b] = c.map(v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#10151d" : "#ffffff";
}
