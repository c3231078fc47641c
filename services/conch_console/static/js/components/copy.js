// A request as commands and programs, to copy.

import { html, useState } from "../../vendor/preact-htm.module.js";
import { store } from "../store.js";
import { T } from "../text.js";

/** The address of a port for clients on the server's machine. */
export const addressOf = (service) => store.about?.endpoints.find((each) => each.service === service)?.url || (service === "gRPC" ? "127.0.0.1:8001" : "http://127.0.0.1:8000");

/** Buttons for each kind of `code`, by functions that write it. */
export function CopyAs({ code }) {
  const [shown, setShown] = useState("");
  const [copied, setCopied] = useState(false);
  const text = shown ? code[shown]() : "";
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 2000);
  };
  return html`<div class="copy"><div class="segments" role="group" aria-label=${T.try.copy}><span class="hint">${T.try.copy}</span>${Object.keys(code).map((key) => html`<button type="button" key=${key} aria-pressed=${shown === key} onClick=${() => setShown(shown === key ? "" : key)}>${T.try[key]}</button>`)}</div>
    ${shown && html`<div class="snippet"><pre tabindex="0">${text}</pre><button type="button" class="small" onClick=${copy}>${copied ? T.try.copied : "Copy"}</button></div>`}</div>`;
}
