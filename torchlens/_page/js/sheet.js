/* On a phone, the panel is a sheet at the bottom that can be dragged up. */

const SIZES = ["", "half", "high"];  // how far it is up
function setSize(side, grip, size, halfUp) {
  if (size) side.dataset.size = size; else delete side.dataset.size;
  side.style.height = "";
  grip.setAttribute("aria-expanded", String(Boolean(size)));
  if (size === "half") halfUp();
}
/* `halfUp` is called when the sheet covers the lower half. */
export function listenToSheet(side, grip, halfUp) {
  let from = null;
  grip.addEventListener("pointerdown", event => { from = { y: event.clientY, height: side.offsetHeight, moved: false }; grip.setPointerCapture(event.pointerId); });
  grip.addEventListener("pointermove", event => {
    if (!from) return;
    const by = from.y - event.clientY;
    if (Math.abs(by) > 6) from.moved = true;
    if (from.moved) side.style.height = Math.max(60, from.height + by) + "px";
  });
  const end = () => {
    if (!from) return;
    const moved = from.moved, share = side.offsetHeight / side.parentElement.offsetHeight;
    from = null;
    if (moved) setSize(side, grip, share < 0.3 ? "" : share < 0.72 ? "half" : "high", halfUp);
    else next();
  };
  const next = () => setSize(side, grip, SIZES[(SIZES.indexOf(side.dataset.size || "") + 1) % SIZES.length], halfUp);
  grip.addEventListener("pointerup", end);
  grip.addEventListener("pointercancel", end);
  grip.addEventListener("keydown", event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); next(); } });
}
