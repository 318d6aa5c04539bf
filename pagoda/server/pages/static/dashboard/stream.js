// The server's stream, read by fetch: an EventSource cannot send a key.

import { forgetKey, hasKey, headers } from "../common/key.js";

const RETRY_MS = 1000;

// Calls on.first, on.frame for what the server sends, on.key when it wants a key (and waits for the promise that this
// returns), on.lost(reason) when it cannot be reached. Connects again until the page is closed. Returns what connects
// at once, to the `address()` of then.
export function follow(address, on) {
  let current = null;
  keepConnected(address, on, (controller) => { current = controller; });
  return () => current.abort();
}

async function keepConnected(address, on, onConnect) {
  for (;;) {
    const controller = new AbortController(), { signal } = controller;
    onConnect(controller);
    try {
      const response = await fetch(address(), { headers: headers(), cache: "no-store", signal });
      if (response.status === 401) {
        const isWrong = hasKey();
        forgetKey();
        await on.key(isWrong);
        continue;
      }
      if (!response.ok) throw new Error((await response.json()).error.message);
      await readEvents(response.body, on);
      on.lost("the server has ended its stream");
    } catch (error) {
      if (signal.aborted) continue;
      on.lost(error instanceof TypeError ? "the server cannot be reached" : error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

async function readEvents(body, on) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "", isFirst = true;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      (isFirst ? on.first : on.frame)(JSON.parse(data));
      isFirst = false;
    }
  }
}
