// The page around the messages: the list of conversations, the bar, where one writes, and what is asked for.

import { Component, Dialog, html } from "./html.js";
import { icon, IconButton } from "./icons.js";
import { Picture } from "./images.js";
import { isTouch, sends } from "./keys.js";
import { Message } from "./message.js";
import { Settings } from "./settings.js";
import { path } from "./store.js";

export function App({ app }) {
  const { words, notice, actions } = app;
  return html`<div class="page ${app.showsChats ? "shows-chats" : ""}">
    <${Chats} app=${app} />
    <div class="scrim" onClick=${() => actions.toggleChats(false)}></div>
    <div class="talk">
      <${Bar} app=${app} />
      <${Messages} app=${app} current=${app.current} />
      <${Composer} app=${app} ref=${(composer) => { app.composer = composer; }} />
    </div>
    ${app.showsSettings && html`<${Settings} app=${app} key=${app.current.id} />`}
    ${app.key && html`<${KeyDialog} app=${app} isWrong=${app.key.isWrong} />`}
    <div class="notice" role="status">${notice && html`<p>${notice.text}
      ${notice.undo && html`<button type="button" onClick=${notice.undo}>${words.undo}</button>`}
      <${IconButton} name="close" label=${words.close} onClick=${() => actions.notify(null)} /></p>`}</div>
  </div>`;
}

function Chats({ app }) {
  const { words, conversations, current, actions, wanted } = app, asked = wanted.trim().toLowerCase();
  const holds = ({ title, nodes }) =>
    [title, ...nodes.map(({ content }) => content)].some((text) => text.toLowerCase().includes(asked));
  const shown = asked ? conversations.filter(holds) : conversations;
  return html`<nav class="chats" aria-label=${words.chats}>
    <header><img src="common/icon.svg" alt="" /><strong>pagoda</strong>
      <${IconButton} name="close" class="icon phone" label=${words.close}
        onClick=${() => actions.toggleChats(false)} /></header>
    <button type="button" class="new" onClick=${actions.begin}>${icon("plus")}${words.newChat}</button>
    ${conversations.length > 5 && html`<input type="search" placeholder=${words.search} aria-label=${words.search}
      value=${wanted} onInput=${(event) => actions.search(event.target.value)} />`}
    <ul>${shown.map((one) => html`<li key=${one.id} class=${one === current ? "current" : ""}>
      ${one.id === app.naming ? html`<${Title} app=${app} conversation=${one} />` : html`<button type="button"
        class="title" aria-current=${one === current ? "page" : null} title=${one.title}
        onClick=${() => actions.open(one)}>${app.running.has(one.id) && html`<i class="busy"></i>`}
        ${one.title || words.untitled}</button>`}
      <${IconButton} name="edit" label=${words.rename} onClick=${() => actions.name(one.id)} />
      <${IconButton} name="save" label=${words.exportOne} onClick=${() => actions.exportFile([one])} />
      <${IconButton} name="remove" label=${words.remove} onClick=${() => actions.remove(one)} /></li>`)}</ul>
    <footer>
      <div><button type="button" onClick=${() => actions.exportFile(conversations)}>${words.exportAll}</button>
        <label class="button">${words.importFile}<input type="file" accept=".json" class="hidden"
          onChange=${actions.importFile} /></label></div>
      <p>${words.private}</p>
      <p><a href="dashboard">${words.dashboard}</a><a href="docs">${words.docs}</a>
        <button type="button" class="link" lang=${app.otherCode} onClick=${actions.switchLanguage}>
          ${words.other}</button></p>
    </footer></nav>`;
}

// The title of a conversation while it is changed: Enter and a click elsewhere keep it, Escape does not.
class Title extends Component {
  componentDidMount() { this.element.select(); }
  render({ app: { words, actions }, conversation }) {
    const press = (event) => {
      if (event.key === "Escape") event.target.value = conversation.title;
      if (!["Enter", "Escape"].includes(event.key) || event.isComposing) return;
      event.stopPropagation();
      event.target.blur();
    };
    return html`<input class="title" ref=${this.hold} aria-label=${words.rename} defaultValue=${conversation.title}
      maxlength="80" onKeyDown=${press} onBlur=${(event) => actions.rename(conversation, event.target.value)} />`;
  }
}

function Bar({ app }) {
  const { words, models, current, actions } = app;
  return html`<header class="bar">
    <${IconButton} name="menu" class="icon phone" label=${words.menu} aria-expanded=${app.showsChats}
      onClick=${() => actions.toggleChats(true)} />
    <select aria-label=${words.model} value=${app.modelOf(current)}
      onChange=${(event) => actions.choose(event.target.value)}>
      ${models.map(({ id }) => html`<option value=${id}>${id}</option>`)}</select>
    <span class="room"></span>
    <${IconButton} name="sliders" label=${words.settings} aria-expanded=${app.showsSettings}
      onClick=${() => actions.toggleSettings(!app.showsSettings)} />
    <${IconButton} name="plus" class="icon phone" label=${words.newChat} onClick=${actions.begin} /></header>`;
}

// It stays at its end while an answer grows, unless the reader has scrolled up.
class Messages extends Component {
  isAtEnd = true;
  state = { isAway: false };

  look = () => {
    const { scrollHeight, scrollTop, clientHeight } = this.element;
    this.isAtEnd = scrollHeight - scrollTop - clientHeight < 40;
    if (this.state.isAway === this.isAtEnd) this.setState({ isAway: !this.isAtEnd });
  };

  toEnd = () => { this.element.scrollTop = this.element.scrollHeight; };

  componentDidUpdate(before) {
    const { app, current } = this.props;
    if (this.isAtEnd || before.current !== current || app.goesToEnd) this.toEnd();
    app.goesToEnd = false;
  }
  componentDidMount() { this.toEnd(); }

  render({ app, current }, { isAway }) {
    const { words } = app, shown = path(current), isRunning = app.running.has(current.id);
    return html`<main><div class="scroll" ref=${this.hold} onScroll=${this.look}>
      <div class="column" role="log" aria-live="polite" aria-busy=${isRunning}>
        ${shown.map((at) => html`<${Message} key=${`${current.id}-${at}`} app=${app} at=${at}
          isRunning=${isRunning && at === current.leaf} />`)}
        ${!shown.length && html`<${Welcome} app=${app} />`}
      </div></div>
      ${isAway && html`<${IconButton} name="down" class="icon to-end" label=${words.bottom} onClick=${this.toEnd} />`}
    </main>`;
  }
}

function Welcome({ app: { words, actions } }) {
  return html`<div class="welcome"><img src="common/icon.svg" alt="" /><h1>${words.welcome}</h1>
    <div>${words.ideas.map((idea) =>
      html`<button type="button" onClick=${() => actions.send(idea, [])}>${idea}</button>`)}</div></div>`;
}

class Composer extends Component {
  state = { text: "", images: [] };

  componentDidMount() { this.focus(); }
  focus() { if (!isTouch()) this.field.focus(); }

  send = () => {
    const { text, images } = this.state, { app } = this.props;
    if (!text.trim() && !images.length || app.running.has(app.current.id)) return;
    this.setState({ text: "", images: [] });
    app.actions.send(text, images);
  };

  press = (event) => {
    const { actions, current } = this.props.app;
    if (sends(event)) { event.preventDefault(); this.send(); }
    const last = path(current).findLast((at) => current.nodes[at].role === "user");
    if (event.key !== "ArrowUp" || this.state.text || last === undefined) return;
    event.preventDefault();
    actions.edit(last);
  };

  add = async (files) => {
    const added = await this.props.app.actions.readImages([...files].filter(({ type }) => type.startsWith("image/")));
    this.setState(({ images }) => ({ images: [...images, ...added] }));
  };

  componentDidUpdate() {
    this.field.style.height = "auto";
    this.field.style.height = `${this.field.scrollHeight}px`;
  }

  render({ app }, { text, images }) {
    const { words, actions, current } = app, isRunning = app.running.has(current.id), sees = app.sees(current);
    const take = (event, files) => { if (sees && files.length) { event.preventDefault(); this.add(files); } };
    return html`<form class="composer" onSubmit=${(event) => { event.preventDefault(); this.send(); }}
      onDragOver=${(event) => event.preventDefault()} onDrop=${(event) => take(event, event.dataTransfer.files)}>
      <div class="box">
        ${images.length > 0 && html`<div class="pictures">${images.map((url, index) => html`<span>
          <${Picture} url=${url} label=${`${words.attach} ${index + 1}`} /><${IconButton} name="close"
            label=${words.detach} onClick=${() => this.setState({ images: images.filter((one) => one !== url) })} />
          </span>`)}</div>`}
        <textarea rows="1" placeholder=${words.placeholder} aria-label=${words.placeholder} value=${text}
          ref=${(field) => { this.field = field; }} onInput=${(event) => this.setState({ text: event.target.value })}
          onKeyDown=${this.press} onPaste=${(event) => take(event, event.clipboardData.files)}></textarea>
        ${sees && html`<label class="icon" title=${words.attach}>${icon("image")}<input type="file" accept="image/*"
          multiple class="hidden" aria-label=${words.attach}
          onChange=${(event) => this.add(event.target.files)} /></label>`}
        ${isRunning
          ? html`<${IconButton} name="stop" class="icon primary" label=${words.stop} onClick=${actions.stop} />`
          : html`<button class="icon primary" title=${words.send} aria-label=${words.send}
              disabled=${!text.trim() && !images.length}>${icon("send")}</button>`}
      </div><p class="hint">${words.hint}</p></form>`;
  }
}

class KeyDialog extends Dialog {
  render({ app: { words, actions }, isWrong }) {
    const send = (event) => {
      event.preventDefault();
      actions.giveKey(event.target.elements.key.value.trim());
      event.target.reset();
    };
    return html`<dialog class="key" ref=${this.hold} aria-labelledby="key-title" onCancel=${() => actions.giveKey("")}>
      <form onSubmit=${send}><h2 id="key-title">${words.keyTitle}</h2>
      <label>${words.key}<input name="key" type="password" autocomplete="off" required autofocus /></label>
      <p>${isWrong ? html`<span class="error" role="alert">${words.keyWrong}</span>` : words.keyNote}</p>
      <button class="primary">${words.keySend}</button></form></dialog>`;
  }
}
