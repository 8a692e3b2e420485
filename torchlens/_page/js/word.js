/* A word to the reader. */

import { $ } from "./outline.js";

const LASTS = 8000;
let going = 0;
/* Shows a text until the next one; unless it is to stay, it goes away by itself. */
export function say(text, isLasting) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
  clearTimeout(going);
  if (text && !isLasting) going = setTimeout(() => say(""), LASTS);
}
