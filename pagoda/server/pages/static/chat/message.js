// A message of a conversation, with all that is known of it.

import { Component, html } from "./html.js";
import { icon, IconButton } from "./icons.js";
import { Picture } from "./images.js";
import { Markdown } from "./markdown.js";
import { sends } from "./keys.js";
import { siblings } from "./store.js";
import { TokenView } from "./tokens.js";

const ms = (value) => (value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`);

export class Message extends Component {
  state = { showsTokens: false, results: {} };

  render({ app, at, isRunning }, { showsTokens }) {
    const { words, current, actions } = app, node = current.nodes[at];
    if (app.editing === at) return html`<${Editor} app=${app} at=${at} />`;
    const others = siblings(current, at), place = others.indexOf(at), isOwn = node.role === "user";
    const has = (text) => Boolean(text?.trim()), isCut = !isRunning && CUT.includes(node.finish);
    return html`<article class="message ${node.role}" aria-label=${isOwn ? words.you : node.model ?? words.result}>
      ${!isOwn && html`<h3>${node.role === "tool" ? words.result : node.model}</h3>`}
      ${node.images && html`<div class="pictures">${node.images.map((url, index) =>
        html`<${Picture} url=${url} label=${`${words.attach} ${index + 1}`} />`)}</div>`}
      ${has(node.reasoning) && html`<details class="thought"><summary>${isRunning && !node.content
        ? words.thinking : words.thought}</summary><${Markdown} text=${node.reasoning} copy=${words.copy} /></details>`}
      ${node.role === "assistant" ? showsTokens && node.tokens
        ? html`<${TokenView} tokens=${node.tokens} words=${words} />`
        : html`<${Markdown} text=${node.content} copy=${words.copy} />` : html`<p class="plain">${node.content}</p>`}
      ${(node.calls ?? []).filter(Boolean).map((call) => html`<details class="call"><summary>${words.call}
        <code>${call.name}</code></summary><pre>${pretty(call.arguments)}</pre></details>`)}
      ${isRunning && !node.content && !node.reasoning && !node.calls
        && html`<p class="waiting" role="status"><i></i><i></i><i></i><span>${words.waiting}</span></p>`}
      ${node.error && html`<p class="error" role="alert">${node.error}</p>`}
      ${isCut && !node.error && html`<p class="note">${words[node.finish]}</p>`}
      ${!isRunning && node.calls && current.leaf === at && html`<${Results} app=${app} at=${at} />`}
      <footer>
        ${others.length > 1 && html`<span class="versions">
          <${IconButton} name="left" label=${words.previous} disabled=${!place || isRunning}
            onClick=${() => actions.show(others[place - 1])} />${place + 1}/${others.length}
          <${IconButton} name="right" label=${words.next} disabled=${place === others.length - 1 || isRunning}
            onClick=${() => actions.show(others[place + 1])} /></span>`}
        ${!isRunning && html`
          <${IconButton} name="copy" label=${words.copy} onClick=${() => actions.copy(node.content)} />
          ${isOwn && html`<${IconButton} name="edit" label=${words.edit} onClick=${() => actions.edit(at)} />`}
          ${node.role === "assistant" && html`
            <${IconButton} name="again" label=${words.regenerate} onClick=${() => actions.regenerate(at)} />
            ${isCut && node.content && !node.calls && current.leaf === at
              && html`<${IconButton} name="go" label=${words.goOn} onClick=${() => actions.goOn(at)} />`}
            ${node.tokens && html`<${IconButton} name="tokens" aria-pressed=${showsTokens}
              label=${showsTokens ? words.hideTokens : words.showTokens}
              onClick=${() => this.setState({ showsTokens: !showsTokens })} />`}`}`}
        ${node.stats?.first !== undefined && html`<${Stats} node=${node} words=${words} />`}
      </footer>
    </article>`;
  }
}

// How an answer ends that may be continued; there is a word for each.
const CUT = ["stopped", "interrupted", "length"];

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

// One line of figures; the rest of them unfolds.
function Stats({ node: { stats, id }, words }) {
  const share = stats.prompt ? Math.round(100 * (stats.cached ?? 0) / stats.prompt) : null;
  const short = [words.firstToken(ms(stats.first)), stats.rate && words.rate(stats.rate.toFixed(1)),
    share !== null && words.cached(share)];
  const reasons = Object.entries(stats.reasons ?? {})
    .map(([reason, value]) => `${words.reasons[reason] ?? reason} ${ms(value)}`).join(", ");
  const { facts } = words, known = [
    [facts.first, ms(stats.first)],
    [facts.queue, stats.queue !== undefined && ms(stats.queue) + (reasons && ` (${reasons})`)],
    [facts.prompt, stats.prompt !== undefined && words.tokens(stats.prompt)],
    [facts.cached, share !== null && `${words.ofPrompt(stats.cached ?? 0, stats.prompt)} (${share} %)`],
    [facts.why, stats.miss?.what ? words.miss(stats.miss) : stats.miss],  // chats of earlier versions have its words
    [facts.prefill, stats.prefill !== undefined && ms(stats.prefill)],
    [facts.output, stats.output !== undefined && words.tokens(stats.output)],
    [facts.decode, stats.decode !== undefined && ms(stats.decode)],
    [facts.drafts, stats.drafts && words.ofDrafts(stats.accepted, stats.drafts)],
    [facts.id, html`<code>${id}</code>`],
  ];
  return html`<details class="stats"><summary title=${words.details}>${short.filter(Boolean).join(" · ")}</summary>
    <dl>${known.filter(([, value]) => value).map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>
  </details>`;
}

// What the tools returned that the model called, for the user to fill in.
class Results extends Component {
  render({ app: { words, current, actions }, at }) {
    const calls = current.nodes[at].calls.filter(Boolean);
    const send = (event) => {
      event.preventDefault();
      actions.sendResults(at, calls.map((call, index) => [call, event.target.elements[`result-${index}`].value]));
    };
    return html`<form class="results" onSubmit=${send}>${calls.map((call, index) => html`<label>
      ${words.resultOf(call.name)}<textarea name=${`result-${index}`} rows="2"></textarea></label>`)}
      <button class="primary">${words.sendResults}</button></form>`;
  }
}

// An own message, while it is edited.
class Editor extends Component {
  componentDidMount() {
    const field = this.element.querySelector("textarea");
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }
  render({ app: { words, current, actions }, at }) {
    const send = (field) => field.value.trim() && actions.sendEdited(at, field.value);
    const press = (event) => {
      if (sends(event)) { event.preventDefault(); send(event.target); }
      if (event.key === "Escape") { event.stopPropagation(); actions.edit(null); }
    };
    return html`<form class="message user editor" ref=${this.hold}
      onSubmit=${(event) => { event.preventDefault(); send(event.target.elements[0]); }}>
      <textarea rows="3" aria-label=${words.edit} onKeyDown=${press}
        defaultValue=${current.nodes[at].content}></textarea>
      <footer><button type="button" onClick=${() => actions.edit(null)}>${words.cancel}</button>
        <button class="primary">${words.send}</button></footer></form>`;
  }
}
