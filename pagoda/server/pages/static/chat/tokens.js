// An answer as its tokens: each in a colour by its probability; the pointer, focus or a tap shows what else was likely.

import { Component, html } from "./html.js";

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share < 0.1 ? "< 0.1" : share.toFixed(share < 10 ? 1 : 0);
};
const level = (logprob) => Math.min(4, Math.floor(-logprob / 0.7));  // 0: likely; 4: it was a surprise
const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";

export class TokenView extends Component {
  state = { at: null };

  // One listener for all: an answer may have thousands.
  follow = (event) => {
    const element = event.target.closest("[data-at]");
    if (!element) return;
    const box = this.element.getBoundingClientRect(), { left, bottom } = element.getClientRects()[0];
    const x = Math.max(0, Math.min(left - box.left, box.width - 220));
    this.setState({ at: Number(element.dataset.at), x, y: bottom - box.top + 4 });
  };

  leave = () => this.setState({ at: null });

  move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = step && this.element.querySelector(`[data-at="${(this.state.at ?? -1) + step}"]`);
    if (next) { event.preventDefault(); this.follow({ target: next }); }
  };

  render({ tokens, words }, { at, x, y }) {
    const shown = at === null ? null : tokens[at];
    return html`<div class="tokens" tabindex="0" role="group" aria-label=${words.showTokens} ref=${this.hold}
      onMouseOver=${this.follow} onClick=${this.follow} onMouseLeave=${this.leave} onBlur=${this.leave}
      onKeyDown=${this.move}>
      <${Spans} tokens=${tokens} count=${tokens.length} />
      ${shown && html`<div class="likely" role="status" ref=${(element) => element && place(element, x, y)}>
        <p><code>${visible(shown[0])}</code> ${words.probability(percent(shown[1]))}</p>
        <ol>${shown[2].map(([text, logprob]) => html`<li class=${text === shown[0] ? "taken" : ""}>
          <code>${visible(text)}</code><span>${words.probability(percent(logprob))}</span>
          <meter min="0" max="1" value=${Math.exp(logprob)} aria-hidden="true"></meter></li>`)}</ol></div>`}
    </div>`;
  }
}

// By its style object, which the policy of the page allows; a style attribute it does not.
function place(element, x, y) {
  element.style.left = `${x}px`;
  element.style.top = `${y}px`;
}

class Spans extends Component {
  shouldComponentUpdate(next) { return next.count !== this.props.count || next.tokens !== this.props.tokens; }
  render({ tokens }) {
    return tokens.map(([text, logprob], at) =>
      html`<span key=${at} data-at=${at} class="level-${level(logprob)}">${text}</span>`);
  }
}
