// Loads and unloads: buttons and their dialogs.

import { html, useState } from "../../vendor/preact-htm.module.js";
import { get, modelPath, post } from "../api.js";
import { store, Store } from "../store.js";
import { T } from "../text.js";
import { Dialog, Field, useRead } from "./basics.js";
import { notify } from "./notices.js";

/** Loads a model; says what is wrong with it if that fails. */
export async function load(name, config = "") {
  notify(T.models.loading(name), { kind: "busy" });
  try {
    await post(modelPath(name, "/load"), config.trim() ? { config } : {});
    notify(T.models.loaded(name));
  } catch (error) {
    notify(T.models.failed(name), { kind: "bad", detail: error.message, findings: error.findings || [] });
  }
}

async function unload(name, dependents) {
  try {
    await post(modelPath(name, "/unload"), { dependents });
    notify(T.models.unloaded(name));
  } catch (error) {
    notify(error.message, { kind: "bad" });
  }
}

/** The buttons of one model. */
export function ModelActions({ model, compact = false }) {
  const [dialog, setDialog] = useState("");
  if (!store.may.control) return null;
  const loaded = Store.phaseOf(model) === "READY";
  return html`<div class="buttons">
    <button class=${compact ? "small" : ""} onClick=${() => load(model.name)}>${loaded ? T.models.reload : T.models.load}<span class="unseen"> ${model.name}</span></button>
    ${!compact && html`<button onClick=${() => setDialog("load")}>${T.models.loadAs}</button>`}
    ${loaded && html`<button class="${compact ? "small" : ""} danger" onClick=${() => setDialog("unload")}>${T.models.unload}<span class="unseen"> ${model.name}</span></button>`}
    ${dialog === "load" && html`<${LoadDialog} name=${model.name} onClose=${() => setDialog("")} />`}
    ${dialog === "unload" && html`<${UnloadDialog} model=${model} onClose=${() => setDialog("")} />`}
  </div>`;
}

export function LoadDialog({ name: given = "", onClose }) {
  const [name, setName] = useState(given);
  const [config, setConfig] = useState("");
  const submit = (event) => {
    event.preventDefault();
    onClose();
    load(name.trim(), config);
  };
  return html`<${Dialog} title=${T.models.loadTitle} onClose=${onClose}>
    <form onSubmit=${submit}>
      <${Field} label=${T.models.loadName}><input required value=${name} readonly=${Boolean(given)} onInput=${(event) => setName(event.target.value)} /><//>
      <${Field} label=${T.models.loadConfig}><textarea rows="8" spellcheck="false" class="mono" placeholder='{"max_batch_size": 4, …}' value=${config} onInput=${(event) => setConfig(event.target.value)} /><//>
      <footer><button type="button" onClick=${onClose}>${T.models.cancel}</button><button class="primary">${T.models.load}</button></footer>
    </form>
  <//>`;
}

function UnloadDialog({ model, onClose }) {
  const [dependents, setDependents] = useState(false);
  const [typed, setTyped] = useState("");
  const { value } = useRead(() => get(modelPath(model.name)), [model.name]);
  // Behind a token the console is one of a server in use.
  const typing = Boolean(store.session?.tokens);
  const submit = (event) => {
    event.preventDefault();
    onClose();
    unload(model.name, dependents);
  };
  return html`<${Dialog} title=${T.models.unloadTitle(model.name)} onClose=${onClose}>
    <form onSubmit=${submit}>
      <p>${T.models.unloadText}</p>
      ${value?.used_by.length > 0 && html`<div class="notice warn"><p>${T.models.usedBy}</p><ul>${value.used_by.map((each) => html`<li><code>${each}</code></li>`)}</ul></div>`}
      ${value?.made_of.length > 0 && html`<label class="check"><input type="checkbox" checked=${dependents} onChange=${(event) => setDependents(event.target.checked)} /> ${T.models.dependents} <code>${value.made_of.join(", ")}</code></label>`}
      ${typing && html`<${Field} label=${T.models.typeName}><input value=${typed} autocomplete="off" onInput=${(event) => setTyped(event.target.value)} /><//>`}
      <footer><button type="button" onClick=${onClose}>${T.models.cancel}</button><button class="danger" disabled=${typing && typed !== model.name}>${T.models.unload}</button></footer>
    </form>
  <//>`;
}
