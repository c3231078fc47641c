// Settings of log and traces, and the flags of the server.

import { html, useState } from "../../vendor/preact-htm.module.js";
import { get, post } from "../api.js";
import { Empty, Failed, Field, Panel, Scroll, useRead, useStore } from "../components/basics.js";
import { notify } from "../components/notices.js";
import { store } from "../store.js";
import { T } from "../text.js";

const TRACE_FIELDS = ["trace_level", "trace_rate", "trace_count"];

async function save(path, changes, again) {
  try {
    await post(path, changes);
    notify(T.settings.saved);
    again();
  } catch (error) {
    notify(error.message, { kind: "bad" });
  }
}

function LogForm({ settings, fixed, again }) {
  const [changes, setChanges] = useState({});
  const value = (name) => (name in changes ? changes[name] : settings[name]);
  const put = (name, found) => setChanges({ ...changes, [name]: found });
  const off = fixed || !store.may.control;
  const submit = (event) => {
    event.preventDefault();
    save("/api/settings/log", changes, again);
    setChanges({});
  };
  return html`<form onSubmit=${submit} class="form"><fieldset disabled=${off}>
    ${["log_info", "log_warning", "log_error"].map((name) => html`<label class="check"><input type="checkbox" checked=${value(name)} onChange=${(event) => put(name, event.target.checked)} /> ${T.settings.names[name]}</label>`)}
    <${Field} label=${T.settings.names.log_verbose_level}><input type="number" min="0" value=${value("log_verbose_level")} onInput=${(event) => put("log_verbose_level", Number(event.target.value))} /><//>
    <${Field} label=${T.settings.names.log_format}><select value=${value("log_format")} onChange=${(event) => put("log_format", event.target.value)}><option value="default">default</option><option value="ISO8601">ISO8601</option></select><//>
    ${!off && html`<footer><button class="primary" disabled=${!Object.keys(changes).length}>${T.settings.save}</button></footer>`}
  </fieldset>${fixed && html`<p class="hint">${T.settings.fixed}</p>`}</form>`;
}

function TraceForm({ settings, again }) {
  const [changes, setChanges] = useState({});
  const value = (name) => (name in changes ? changes[name] : settings[name][0]);
  const submit = (event) => {
    event.preventDefault();
    save("/api/settings/trace", Object.fromEntries(Object.entries(changes).map(([name, text]) => [name, [text]])), again);
    setChanges({});
  };
  const put = (name) => (event) => setChanges({ ...changes, [name]: event.target.value });
  return html`<form onSubmit=${submit} class="form"><fieldset disabled=${!store.may.control}>
    ${TRACE_FIELDS.map((name) => html`<${Field} label=${T.settings.names[name]}>${name === "trace_level" ? html`<select value=${value(name)} onChange=${put(name)}>${[...new Set(["OFF", "TIMESTAMPS", value(name)])].map((each) => html`<option value=${each}>${each}</option>`)}</select>` : html`<input value=${value(name)} onInput=${put(name)} />`}<//>`)}
    <dl class="facts">${Object.entries(settings).filter(([name]) => !TRACE_FIELDS.includes(name)).map(([name, values]) => html`<dt>${T.settings.names[name] || name}</dt><dd><code>${values.join(", ") || "–"}</code></dd>`)}</dl>
    ${store.may.control && html`<footer><button class="primary" disabled=${!Object.keys(changes).length}>${T.settings.save}</button></footer>`}
  </fieldset></form>`;
}

function Flags({ flags }) {
  const [text, setText] = useState("");
  const [changed, setChanged] = useState(false);
  const rows = flags.filter((flag) => flag.name.includes(text.trim().toLowerCase()) && (!changed || flag.source !== "default"));
  return html`<div class="filters"><input type="search" aria-label=${T.settings.filter} placeholder=${T.settings.filter} value=${text} onInput=${(event) => setText(event.target.value)} />
    <label class="check"><input type="checkbox" checked=${changed} onChange=${(event) => setChanged(event.target.checked)} /> ${T.settings.onlyChanged}</label></div>
    <${Scroll} label=${T.settings.flags}><table><thead><tr><th scope="col">${T.settings.name}</th><th scope="col">${T.settings.value}</th><th scope="col">${T.settings.source}</th></tr></thead>
    <tbody>${rows.map((flag) => html`<tr key=${flag.name}><th scope="row"><code>--${flag.name}</code></th><td><code class="value">${flag.value || "–"}</code></td><td class=${flag.source === "default" ? "muted" : ""}>${flag.source}</td></tr>`)}</tbody></table><//>`;
}

export function Settings() {
  useStore();
  const { value, error, again } = useRead(() => get("/api/settings"), [store.epoch]);
  const head = html`<div class="title"><h1 tabindex="-1">${T.settings.title}</h1></div>`;
  if (!store.may.admin) return html`${head}<${Panel}><${Empty}>${T.settings.admin}<//><//>`;
  if (error && !value) return html`${head}<${Failed} error=${error} again=${again} />`;
  if (!value) return head;
  return html`${head}
    ${!store.may.control && html`<div class="notice"><p>${T.settings.readOnly}</p></div>`}
    <div class="columns"><${Panel} title=${T.settings.log}><${LogForm} settings=${value.log} fixed=${value.log_fixed} again=${again} /><//>
    <${Panel} title=${T.settings.trace}><${TraceForm} settings=${value.trace} again=${again} /><//></div>
    <${Panel} title=${T.settings.flags}><${Flags} flags=${value.flags} /><//>`;
}
