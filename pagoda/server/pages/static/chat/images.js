// Images that the user adds. They are drawn, not loaded: the page may load nothing, an image in its own text included.

import { Component, html } from "./html.js";

const MOST = 1024;  // pixels of a side: models see no more, and the browser's storage is small

// Returns a file as the address of a JPEG; throws if it is no image.
export async function readImage(file) {
  const image = await createImageBitmap(file);
  const scale = Math.min(1, MOST / Math.max(image.width, image.height));
  const canvas = Object.assign(document.createElement("canvas"), {
    width: Math.max(1, Math.round(image.width * scale)), height: Math.max(1, Math.round(image.height * scale)),
  });
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.85);
}

export class Picture extends Component {
  shouldComponentUpdate(next) { return next.url !== this.props.url; }
  componentDidMount() { this.draw(); }
  componentDidUpdate() { this.draw(); }
  async draw() {
    const canvas = this.element;
    const [, type, data] = /^data:([^;]+);base64,(.*)$/.exec(this.props.url) ?? [];
    if (!data) return;
    const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    const image = await createImageBitmap(new Blob([bytes], { type }));
    canvas.width = image.width;
    canvas.height = image.height;
    canvas.getContext("2d").drawImage(image, 0, 0);
  }
  render({ label }) {
    return html`<canvas class="picture" role="img" ref=${this.hold} aria-label=${label}></canvas>`;
  }
}
