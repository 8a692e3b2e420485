/* Short messages to the user. */

import { $ } from "./outline.js";

const LASTS = 8000;
let going = 0;
/* Shows a text until the next one. It disappears after a while unless it is to stay. */
export function say(text, isLasting) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
  clearTimeout(going);
  if (text && !isLasting) going = setTimeout(() => say(""), LASTS);
}
