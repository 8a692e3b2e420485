/* Work in pieces: between two of them the browser has its turn, so that no piece keeps the reader waiting. */

const channel = new MessageChannel(), waiting = [];
channel.port1.onmessage = () => waiting.shift()();
/* The browser's turn. Those who ask for one go on one by one, in their order, each in a task of its own. */
export const turn = () => new Promise(done => { waiting.push(done); channel.port2.postMessage(0); });
/* After the next frame. A page in the background has no frames. */
export const afterFrame = () => new Promise(done => { const timer = setTimeout(done, 100); requestAnimationFrame(() => setTimeout(() => { clearTimeout(timer); done(); })); });
