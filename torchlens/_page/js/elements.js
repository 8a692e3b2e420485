/* Creates elements. Data is only ever set as textContent. */

const NS = "http://www.w3.org/2000/svg";
export function make(name, attributes, parent) {
  const el = document.createElementNS(NS, name);
  for (const key in attributes) el.setAttribute(key, attributes[key]);
  if (parent) parent.appendChild(el);
  return el;
}
export function html(name, attributes, ...inside) {
  const el = document.createElement(name);
  for (const key in attributes) if (key.startsWith("on")) el.addEventListener(key.slice(2), attributes[key]); else el.setAttribute(key, attributes[key]);
  for (const one of inside) el.append(one);
  return el;
}
export function label(parent, text, x, y, className, anchor) {
  const el = make("text", { x, y, class: className, ...(anchor ? { "text-anchor": anchor } : {}) }, parent);
  el.textContent = text;
  return el;
}
