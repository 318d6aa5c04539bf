// One answer of the model: what is asked for, and what becomes of the chunks of its stream.

import { chat, getRequest, Refused } from "./api.js";
import { path } from "./store.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const NUM_TOP = 5;

// The body of the request whose answer is `node`, the last of its path.
export function bodyOf(conversation, node, model) {
  const { settings, nodes } = conversation;
  const before = path(conversation).map((at) => nodes[at]).filter((one) => one !== node);
  const messages = before.map(messageOf);
  if (settings.system?.trim()) messages.unshift({ role: "system", content: settings.system });
  const body = { model, messages, stream: true, stream_options: { include_usage: true }, return_timings: true };
  for (const name of NUMBERS) if (Number.isFinite(settings[name])) body[name] = settings[name];
  if (settings.reasoning_effort) body.reasoning_effort = settings.reasoning_effort;
  if (settings.tools?.trim()) body.tools = JSON.parse(settings.tools);
  if (settings.probabilities ?? true) Object.assign(body, { logprobs: true, top_logprobs: NUM_TOP });
  if (node.content) {  // it is to be continued
    messages.push({ role: "assistant", content: node.content });
    Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  }
  return body;
}

function messageOf({ role, content, images, calls, call }) {
  if (role === "tool") return { role, content, tool_call_id: call };
  if (calls) {
    const made = calls.map(({ id, name, arguments: text }) =>
      ({ id, type: "function", function: { name, arguments: text } }));
    return { role, content, tool_calls: made };
  }
  if (!images?.length) return { role, content };
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role, content: content ? [...parts, { type: "text", text: content }] : parts };
}

// Adds what a chunk brings to the node.
function take(node, chunk, began) {
  node.id = chunk.id;
  const stats = node.stats;
  if (chunk.usage) {
    stats.prompt = chunk.usage.prompt_tokens;
    stats.output = chunk.usage.completion_tokens;
    stats.cached = chunk.usage.prompt_tokens_details?.cached_tokens;
  }
  if (chunk.timings) {
    const { queue_ms: queue, queue_reasons: reasons, prefill_ms: prefill, decode_ms: decode } = chunk.timings;
    const { predicted_per_second: rate, draft_n: drafts, draft_n_accepted: accepted } = chunk.timings;
    Object.assign(stats, { queue, reasons, prefill, decode, rate, drafts, accepted });
  }
  const choice = chunk.choices[0];
  if (!choice) return;
  const { content, reasoning, tool_calls: calls } = choice.delta;
  if (content || reasoning || calls) stats.first ??= performance.now() - began;
  if (reasoning) node.reasoning = (node.reasoning ?? "") + reasoning;
  if (content) node.content += content;
  for (const { index, id, function: { name, arguments: text } } of calls ?? []) {
    node.calls ??= [];
    const call = (node.calls[index] ??= { id, name, arguments: "" });
    call.arguments += text;
  }
  for (const { token, logprob, top_logprobs: top } of choice.logprobs?.content ?? []) {
    const short = (value) => Math.round(value * 1000) / 1000;
    (node.tokens ??= []).push([token, short(logprob), top.map((one) => [one.token, short(one.logprob)])]);
  }
  if (choice.finish_reason) node.finish = choice.finish_reason;
}

// Fills `node` with the model's answer. onChange is called after each piece and whatever comes later, onEnd at the end.
export async function answer(conversation, node, model, { askKey, signal, onChange, onEnd, words }) {
  const body = bodyOf(conversation, node, model);
  Object.assign(node, { model, stats: {}, finish: undefined, error: undefined });
  const began = performance.now();
  try {
    await chat(body, askKey, signal, (chunk) => { take(node, chunk, began); onChange(); });
  } catch (error) {
    if (signal.aborted) node.finish = "stopped";
    else if (error instanceof Refused) node.error = error.message;
    else node.error = node.id ? words().broken : words().unreachable;
  }
  node.finish ??= "interrupted";
  onEnd();
  await explain(node).catch(() => {});
  onChange();
}

// Asks the server why no more of the prompt was cached; and for the counts of an answer that was stopped.
async function explain(node) {
  const known = node.id && await getRequest(node.id);
  if (!known) return;
  const stats = node.stats;
  stats.prompt ??= known.prompt_tokens;
  stats.cached ??= known.cached_tokens;
  stats.output ??= known.output_tokens;
  if (known.prefix_miss) stats.miss = known.prefix_miss;
}
