// Preact and htm as one: html`<p>...</p>` is what render and components take.

import { Component as PreactComponent, h, render } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
export { render };

// A component that may reach the element to which it gives `ref=${this.hold}`.
export class Component extends PreactComponent {
  element = null;
  hold = (element) => { this.element = element; };
}

// One that is a dialog; the focus returns to where it was when it goes.
export class Dialog extends Component {
  componentDidMount() {
    this.element.showModal();
    (this.element.querySelector("[autofocus]") ?? this.element).focus();
  }
  componentWillUnmount() { this.element.close(); }
}
