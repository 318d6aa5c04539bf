// How the model is asked: for one conversation, and as a beginning for the next ones.

import { Dialog, html } from "./html.js";
import { IconButton } from "./icons.js";

const RANGES = {
  temperature: [0, 2, 0.1], top_p: [0, 1, 0.05], top_k: [0, 1000, 1], min_p: [0, 1, 0.01],
  repetition_penalty: [0.1, 2, 0.05], max_tokens: [1, null, 1], seed: [0, null, 1],
};
const EFFORTS = ["none", "minimal", "low", "medium", "high"];

export class Settings extends Dialog {
  state = { isBad: false };

  render({ app: { words, current, actions } }, { isBad }) {
    const { settings } = current, change = (name) => (event) => {
      const { type, value, checked } = event.target;
      actions.change(name, type === "checkbox" ? checked : type === "number" ? value && Number(value) : value);
    };
    const changeTools = (event) => {
      const isGood = isList(event.target.value);
      this.setState({ isBad: !isGood });
      if (isGood) change("tools")(event);
    };
    const shut = () => actions.toggleSettings(false);
    return html`<dialog class="settings" tabindex="-1" ref=${this.hold} aria-labelledby="settings-title" onClose=${shut}
      onClick=${(event) => event.target === this.element && shut()}>
      <header><h2 id="settings-title">${words.settings}</h2><${IconButton} name="close" label=${words.close}
        onClick=${shut} /></header>
      <p class="note">${words.scope}</p>
      <label>${words.system}<textarea rows="4" placeholder=${words.systemHint} value=${settings.system ?? ""}
        onInput=${change("system")}></textarea></label>
      <fieldset><legend>${words.sampling}</legend>
        ${Object.entries(RANGES).map(([name, [min, max, step]]) => html`<label>${words[name]}
          <input type="number" name=${name} min=${min} max=${max} step=${step} placeholder=${words.modelsOwn}
            value=${settings[name] ?? ""} onChange=${change(name)} /></label>`)}
        <label>${words.reasoning_effort}<select value=${settings.reasoning_effort ?? ""}
          onChange=${change("reasoning_effort")}><option value="">${words.modelsOwn}</option>
          ${EFFORTS.map((effort) => html`<option>${effort}</option>`)}</select></label></fieldset>
      <label class="check"><input type="checkbox" checked=${settings.probabilities ?? true}
        onChange=${change("probabilities")} />${words.probabilities}</label>
      <label>${words.tools}<textarea rows="4" class="code" spellcheck=${false} aria-invalid=${isBad}
        defaultValue=${settings.tools ?? ""} onInput=${changeTools}></textarea></label>
      ${isBad && html`<p class="error" role="alert">${words.badTools}</p>`}
      <footer><button type="button" onClick=${actions.resetSettings}>${words.reset}</button>
        <button type="button" class="primary" onClick=${shut}>${words.close}</button></footer></dialog>`;
  }
}

function isList(text) {
  if (!text.trim()) return true;
  try { return Array.isArray(JSON.parse(text)); } catch { return false; }
}
