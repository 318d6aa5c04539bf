// Icons, as paths of 24 by 24.

import { html } from "./html.js";

const PATHS = {
  menu: "M4 6h16M4 12h16M4 18h16",
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  image: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15 9h.01",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  again: "M4 12a8 8 0 0 1 14-5l2 2M20 4v5h-5M20 12a8 8 0 0 1-14 5l-2-2M4 20v-5h5",
  go: "M6 5l12 7-12 7z",
  tokens: "M4 7h6v4H4zM13 7h7v4h-7zM4 14h9v4H4zM16 14h4v4h-4z",
  remove: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  save: "M12 4v11M7 10l5 5 5-5M5 20h14",
  close: "M6 6l12 12M18 6L6 18",
  left: "M15 5l-7 7 7 7",
  right: "M9 5l7 7-7 7",
  down: "M12 5v14M6 13l6 6 6-6",
  sliders: "M4 7h10M18 7h2M4 17h2M10 17h10M16 5v4M8 15v4",
};

export const icon = (name) => html`<svg viewBox="0 0 24 24" aria-hidden="true"><path d=${PATHS[name]} /></svg>`;

// A button with an icon; its label is its tip, too.
export function IconButton({ name, label, ...rest }) {
  return html`<button type="button" class="icon" title=${label} aria-label=${label} ...${rest}>${icon(name)}</button>`;
}
