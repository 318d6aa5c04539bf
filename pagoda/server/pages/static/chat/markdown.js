// Text of a model as elements. It may be hostile: HTML in it is shown, not read; what Markdown makes of the rest passes
// DOMPurify; images are links, so that nothing is loaded; links open in a tab that does not know this one.

import createDOMPurify from "./vendor/dompurify.js";
import { Marked } from "./vendor/marked.js";
import { copyText } from "./copy.js";
import { Component, html } from "./html.js";

const escape = (text) => text.replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);
const marked = new Marked({
  gfm: true,
  renderer: {
    html: ({ text }) => escape(text),
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
  },
});
const purify = createDOMPurify(window);
const ALLOWED = {
  ALLOWED_TAGS: ["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "del", "code", "pre",
    "blockquote", "ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td", "a", "input"],
  ALLOWED_ATTR: ["href", "align", "start", "type", "checked", "disabled"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
purify.addHook("afterSanitizeAttributes", (element) => {
  if (element.tagName === "A") {
    element.setAttribute("target", "_blank");
    element.setAttribute("rel", "noopener noreferrer nofollow");
  }
  if (element.tagName === "INPUT") element.replaceWith(element.hasAttribute("checked") ? "☑" : "☐");
});

// One block of the text. It is made again only if its source changes: during a stream, that is the last one.
class Block extends Component {
  shouldComponentUpdate(next) { return next.token.raw !== this.props.token.raw; }
  componentDidMount() { this.fill(); }
  componentDidUpdate() { this.fill(); }
  fill() {
    const { token, copy } = this.props;
    const fragment = purify.sanitize(marked.parser([token]), ALLOWED);
    for (const code of fragment.querySelectorAll("pre")) {
      const button = Object.assign(document.createElement("button"), { className: "copy", textContent: copy });
      button.addEventListener("click", () => copyText(code.querySelector("code").textContent));
      code.append(button);
    }
    this.element.replaceChildren(fragment);
  }
  render() { return html`<div class="block" ref=${this.hold}></div>`; }
}

export class Markdown extends Component {
  shouldComponentUpdate(next) { return next.text !== this.props.text; }
  render({ text, copy }) {
    const tokens = marked.lexer(text).filter(({ type }) => type !== "space");
    return html`<div class="markdown">${tokens.map((token, index) =>
      html`<${Block} key=${index} token=${token} copy=${copy} />`)}</div>`;
  }
}
