// The page to talk on: what it knows, and what can be done. Everything is drawn from `app`, by view.js.

import { getModels, Refused } from "./api.js";
import { copyText } from "./copy.js";
import { html, render } from "./html.js";
import { readImage } from "./images.js";
import * as store from "./store.js";
import { answer } from "./turn.js";
import { App } from "./view.js";
import { getLanguage, languages, setLanguage } from "./words.js";

const SAVE_MS = 500;
const NOTICE_MS = 8000;

const app = {
  conversations: store.load(),
  current: null,
  models: [],
  running: new Map(),  // id of a conversation -> the controller that stops its answer
  editing: null,
  wanted: "",
  naming: null,  // the id of the conversation whose title is changed
  showsChats: false,
  showsSettings: false,
  key: null,  // {isWrong, give}: it is asked for
  notice: null,
  composer: null,
  sees: (conversation) => can(app.models.find(({ id }) => id === app.modelOf(conversation)), "vision"),
  modelOf: ({ model }) => (app.models.some(({ id }) => id === model) ? model : app.models[0]?.id ?? ""),
  actions: {},
};

const newestFirst = (conversations) => conversations.sort((a, b) => b.changed - a.changed);

// Undefined of a model that does not say.
const can = (model, what) => model?.capabilities?.includes(what);

let isDrawn = true;

// Draws with the next frame; a page that is not seen has none, and is drawn a little later.
function draw() {
  if (!isDrawn) return;
  isDrawn = false;
  requestAnimationFrame(paint);
  setTimeout(paint, 100);
}

function paint() {
  if (isDrawn) return;
  isDrawn = true;
  render(html`<${App} app=${app} />`, document.querySelector("#app"));
}

function setWords(language) {
  app.words = languages[language];
  app.otherCode = language === "zh" ? "en" : "zh";
  document.documentElement.lang = language;
}

// ---- what is kept

const unsaved = new Set();
let saving = null;

function save(conversation, isNow = true) {
  if (!app.conversations.includes(conversation)) return;
  unsaved.add(conversation);
  if (isNow) saveAll(); else saving ??= setTimeout(saveAll, SAVE_MS);
}

function saveAll() {
  clearTimeout(saving);
  saving = null;
  for (const conversation of unsaved) {
    if (!store.save(conversation, app.conversations)) notify(app.words.full);
  }
  unsaved.clear();
}

// ---- what is asked

let asking = null;

// Resolves with a key of the user; requests that need one at the same time share it.
function askKey(isWrong) {
  asking ??= new Promise((resolve) => {
    app.key = { isWrong, give: (key) => { app.key = null; asking = null; resolve(key); draw(); } };
    draw();
  });
  return asking;
}

async function readModels() {
  try {
    app.models = (await getModels(askKey)).filter((model) => can(model, "completion") ?? true);
    if (!app.models.length) notify(app.words.noModel);
  } catch (error) {
    notify(error instanceof Refused ? error.message : app.words.unreachable);
  }
  draw();
}

async function run(conversation, node) {
  const controller = new AbortController();
  app.running.set(conversation.id, controller);
  app.conversations = [conversation, ...app.conversations.filter((one) => one !== conversation)];
  app.goesToEnd = true;
  if (!app.models.length) await readModels();
  const onChange = () => {
    conversation.changed = Date.now();
    save(conversation, false);
    draw();
  };
  onChange();
  await answer(conversation, node, app.modelOf(conversation), {
    askKey, signal: controller.signal, onChange, words: () => app.words,
    onEnd: () => { app.running.delete(conversation.id); draw(); },
  });
  save(conversation);
}

let hiding = null;

function notify(text, undo) {
  app.notice = text && { text, undo };
  clearTimeout(hiding);
  if (text) hiding = setTimeout(() => notify(null), NOTICE_MS);
  draw();
}

// Shows a conversation, and names it in the address, so that a reload and the way back lead to it.
function open(conversation) {
  const isLeft = app.conversations.includes(app.current);  // an empty one is nothing to come back to
  if (location.hash !== `#${conversation.id}`) {
    history[isLeft ? "pushState" : "replaceState"](null, "", `#${conversation.id}`);
  }
  Object.assign(app, { current: conversation, editing: null, showsChats: false });
  app.composer?.focus();
  draw();
}

// Shows one that is not kept until something is said in it.
function begin() {
  const { model } = app.current ?? app.conversations[0] ?? {};
  open({ ...store.create(store.getDefaults()), model });
}

// Shows what the address names.
function openNamed() {
  const named = app.conversations.find(({ id }) => location.hash === `#${id}`);
  if (named) open(named); else begin();
}

// Adds nodes after `parent`, and an answer to them.
function ask(parent, ...nodes) {
  const { current } = app;
  if (app.running.has(current.id)) return;
  app.editing = null;
  for (const node of nodes) { store.add(current, parent, node); parent = current.leaf; }
  run(current, store.add(current, parent, { role: "assistant" }));
}

function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

Object.assign(app.actions, {
  begin,
  notify,
  send: (content, images) => ask(app.current.leaf, { role: "user", content, ...(images.length && { images }) }),
  stop: () => app.running.get(app.current.id)?.abort(),
  edit: (at) => { app.editing = at; draw(); if (at === null) app.composer.focus(); },
  sendEdited: (at, content) => {
    const { role, images, parent } = app.current.nodes[at];
    ask(parent, { role, content, ...(images && { images }) });
  },
  regenerate: (at) => ask(app.current.nodes[at].parent),
  goOn: (at) => { if (!app.running.has(app.current.id)) run(app.current, app.current.nodes[at]); },
  sendResults: (at, results) =>
    ask(at, ...results.map(([call, content]) => ({ role: "tool", content, call: call.id }))),
  show: (at) => { store.show(app.current, at); save(app.current); draw(); },
  copy: (text) => copyText(text).then(() => notify(app.words.copied)),
  choose: (model) => { app.current.model = model; save(app.current); draw(); },
  change: (name, value) => {
    app.current.settings[name] = value;
    store.setDefaults(app.current.settings);
    save(app.current);
    draw();
  },
  resetSettings: () => {
    app.current.settings = {};
    store.setDefaults({});
    save(app.current);
    app.showsSettings = false;
    draw();
  },
  open,
  search: (wanted) => { app.wanted = wanted; draw(); },
  name: (id) => { app.naming = id; draw(); },
  rename: (conversation, title) => {
    app.naming = null;
    conversation.title = title.trim() || conversation.title;
    save(conversation);
    draw();
  },
  remove: (conversation) => {
    app.running.get(conversation.id)?.abort();
    app.conversations = app.conversations.filter((one) => one !== conversation);
    store.remove(conversation);
    if (app.current === conversation) begin();
    notify(app.words.removed, () => {
      app.conversations = newestFirst([conversation, ...app.conversations]);
      save(conversation);
      notify(null);
    });
  },
  exportFile: (conversations) => download("pagoda-chats.json", store.toFile(conversations)),
  importFile: async ({ target }) => {
    try {
      const added = store.fromFile(await target.files[0].text(), new Set(app.conversations.map(({ id }) => id)));
      app.conversations = newestFirst([...added, ...app.conversations]);
      notify(app.words.imported(added.length));
      for (const one of added) save(one);
    } catch {
      notify(app.words.badFile);
    }
    target.value = "";
  },
  readImages: async (files) => {
    const read = await Promise.allSettled(files.map(readImage));
    if (read.some(({ status }) => status === "rejected")) notify(app.words.badImage);
    return read.filter(({ status }) => status === "fulfilled").map(({ value }) => value);
  },
  toggleChats: (isShown) => { app.showsChats = isShown; draw(); },
  toggleSettings: (isShown) => { app.showsSettings = isShown; draw(); },
  giveKey: (key) => app.key?.give(key),
  switchLanguage: () => { setLanguage(app.otherCode); setWords(app.otherCode); draw(); },
});

addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) app.actions.stop();
  if (event.key === "Escape" && app.showsChats) app.actions.toggleChats(false);
  if (event.key !== "/" || event.target.closest("input, textarea, select, dialog")) return;
  event.preventDefault();
  app.composer.focus();
});
addEventListener("pagehide", saveAll);
addEventListener("popstate", openNamed);
addEventListener("storage", (event) => {
  const changed = store.changedElsewhere(event);
  if (!changed || app.running.has(changed.id)) return;
  const others = app.conversations.filter(({ id }) => id !== changed.id);
  app.conversations = newestFirst(changed.now ? [changed.now, ...others] : others);
  if (app.current.id === changed.id && changed.now) app.current = changed.now;
  draw();
});

setWords(getLanguage());
openNamed();
readModels();
