// Conversations, in the browser's localStorage: each is one entry.
//
// A conversation is a tree: {id, title, changed, settings, model, nodes, leaf}. A node is {role, parent, content, ...};
// its `parent` is the place in `nodes` of the one before it, -1 if there is none. What is shown is the path to `leaf`:
// an edit or another answer is a sibling, and nothing is lost. Further fields of nodes: `images` of the user; `id`,
// `model`, `reasoning`, `calls`, `tokens`, `finish`, `error`, `stats` of answers; `call` of tools' results.

const PREFIX = "pagoda-chat/";
const DEFAULTS = "pagoda-chat-defaults";

const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;

export const create = (settings) =>
  ({ id: newId(), title: "", changed: Date.now(), settings: { ...settings }, nodes: [], leaf: -1 });

export function path(conversation) {
  const found = [];
  for (let at = conversation.leaf; at >= 0; at = conversation.nodes[at].parent) found.unshift(at);
  return found;
}

// Adds a node after `parent` and shows it.
export function add(conversation, parent, node) {
  conversation.leaf = conversation.nodes.push({ content: "", ...node, parent }) - 1;
  conversation.changed = Date.now();
  if (!conversation.title && node.role === "user") conversation.title = node.content.trim().slice(0, 80);
  return conversation.nodes[conversation.leaf];
}

// The places of all nodes that could be where this one is.
export function siblings({ nodes }, at) {
  return [...nodes.keys()].filter((other) => nodes[other].parent === nodes[at].parent);
}

// Shows the path through a node: to what was added last after it.
export function show(conversation, at) {
  const { nodes } = conversation;
  for (let next = at; next >= 0; next = nodes.findLastIndex((node) => node.parent === at)) at = next;
  conversation.leaf = at;
}

export function load() {
  const found = [];
  for (const key of Object.keys(localStorage).filter((one) => one.startsWith(PREFIX))) {
    const one = parse(localStorage.getItem(key));
    if (one) found.push(one);
  }
  return found.sort((a, b) => b.changed - a.changed);
}

function parse(text) {
  try { return clean(JSON.parse(text)); } catch { return null; }
}

// Returns a conversation that may come from a file, or null if it is none.
export function clean(one) {
  const isGood = one && typeof one.id === "string" && Array.isArray(one.nodes) && Number.isInteger(one.leaf)
    && one.leaf < one.nodes.length && one.nodes.every((node, at) => typeof node?.content === "string"
      && ["user", "assistant", "tool"].includes(node.role) && Number.isInteger(node.parent) && node.parent < at);
  if (!isGood) return null;
  for (const node of one.nodes) if (node.role === "assistant") node.finish ??= "interrupted";
  return { ...one, title: String(one.title ?? ""), changed: Number(one.changed) || 0, settings: { ...one.settings } };
}

// Returns whether it is kept. Where there is no room, the probabilities of tokens go first.
export function save(conversation, all) {
  const write = () => {
    try {
      localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
      return true;
    } catch { return false; }
  };
  if (write()) return true;
  for (const other of [...all].sort((a, b) => a.changed - b.changed)) {
    if (!other.nodes.some((node) => node.tokens)) continue;
    for (const node of other.nodes) delete node.tokens;
    if (other !== conversation) localStorage.setItem(PREFIX + other.id, JSON.stringify(other));
    if (write()) return true;
  }
  return false;
}

export const remove = (conversation) => localStorage.removeItem(PREFIX + conversation.id);

// The conversation that an event of the browser says was changed or deleted (null) in another tab.
export function changedElsewhere(event) {
  if (!event.key?.startsWith(PREFIX)) return null;
  return { id: event.key.slice(PREFIX.length), now: event.newValue && parse(event.newValue) };
}

export function getDefaults() {
  try { return JSON.parse(localStorage.getItem(DEFAULTS)) ?? {}; } catch { return {}; }
}

export function setDefaults(settings) {
  try { localStorage.setItem(DEFAULTS, JSON.stringify(settings)); } catch { /* the next visit begins without them */ }
}

export const toFile = (conversations) => JSON.stringify({ format: "pagoda-chat", version: 1, conversations }, null, 1);

// Returns the conversations of a file, each with an id that is none of `taken`; throws if it is another file.
export function fromFile(text, taken) {
  const { format, conversations } = JSON.parse(text);
  const found = format === "pagoda-chat" ? conversations.map(clean) : [null];
  if (found.includes(null)) throw new TypeError("not a file of conversations");
  return found.map((one) => (taken.has(one.id) ? { ...one, id: newId() } : one));
}
