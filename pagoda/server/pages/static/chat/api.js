// The server's API, as this page uses it. All addresses are relative: the page may be behind a prefix.

import { forgetKey, hasKey, headers, setKey } from "../common/key.js";

export class Refused extends Error {}

// Sends a request; asks for the key, by `askKey(isWrong)`, as often as the answer is 401 and one is given.
async function call(path, askKey, body, signal) {
  for (;;) {
    const response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers: { ...headers(), ...(body && { "Content-Type": "application/json" }) },
      body: body && JSON.stringify(body),
      cache: "no-store",
      signal,
    });
    if (response.ok) return response;
    if (response.status === 401) {
      const isWrong = hasKey();
      forgetKey();
      const key = await askKey(isWrong);
      if (key) {
        setKey(key);
        continue;
      }
    }
    const text = await response.text();
    let message = text || `${response.status}`;
    try { message = JSON.parse(text).error.message; } catch { /* a proxy's page */ }
    throw new Refused(message);
  }
}

export const getModels = async (askKey) => (await (await call("v1/models", askKey)).json()).data;

// Calls onChunk for each piece of the answer, in order; returns at its end.
export async function chat(body, askKey, signal, onChunk) {
  const response = await call("v1/chat/completions", askKey, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new TypeError("the answer broke off");
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(chunk.error.message);
      onChunk(chunk);
    }
  }
}

let isTold = true;

// What the server knows of a request that ran, among it why no more of its prompt was cached; null if it does not tell.
export async function getRequest(id) {
  if (!isTold) return null;
  const response = await fetch(`requests/${encodeURIComponent(id)}`, { headers: headers(), cache: "no-store" });
  if (response.ok) return response.json();
  isTold = response.status !== 404;  // a server without keys that serves other machines tells nobody
  return null;
}
