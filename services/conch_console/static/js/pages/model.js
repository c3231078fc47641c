// One model: its head, and a tab for each of its sides.

import { html, useEffect } from "../../vendor/preact-htm.module.js";
import { get, modelPath } from "../api.js";
import { Failed, Panel, Phase, Tabs, useRead, useStore } from "../components/basics.js";
import { ModelActions } from "../components/model_actions.js";
import * as format from "../format.js";
import { link } from "../router.js";
import { store, Store } from "../store.js";
import { T } from "../text.js";
import { ConfigTab } from "./config.js";
import { InputsTab } from "./inputs.js";
import { LiveTab } from "./live.js";
import { LogView } from "./logs.js";
import { RolloutTab } from "./rollout.js";
import { TraceView } from "./traces.js";
import { TryTab } from "./try.js";
import { VersionsTab } from "./versions.js";

const TABS = { live: LiveTab, try: TryTab, config: ConfigTab, versions: VersionsTab, rollout: RolloutTab, inputs: InputsTab, traces: TracesTab, logs: LogsTab };

function TracesTab({ name }) {
  return html`<${TraceView} model=${name} />`;
}

function LogsTab({ name }) {
  return html`<${LogView} model=${name} />`;
}

function Facts({ model, about }) {
  const names = (list) => list.map((name, index) => html`${index ? ", " : ""}<a href=${link("models", name)}>${name}</a>`);
  const groups = about?.groups || [];
  return html`<dl class="facts across">
    <div><dt>${T.model.backend}</dt><dd>${model.ensemble ? T.models.ensemble : model.backend || format.NONE}${model.decoupled ? `, ${T.model.decoupled}` : ""}</dd></div>
    ${model.max_batch !== undefined && html`<div><dt>${T.model.batch}</dt><dd>${model.max_batch || T.model.noBatch}</dd></div>`}
    ${groups.length > 0 && html`<div><dt>${T.model.instances}</dt><dd>${groups.map((each) => `${each.count} × ${each.kind.replace("KIND_", "")}${each.device >= 0 ? ` ${each.device}` : ""}`).join(", ")}</dd></div>`}
    ${about?.workers.length > 0 && html`<div><dt>${T.model.workers}</dt><dd>${about.workers.map((each) => html`<span title=${each.reason}>${each.pid || format.NONE} ${each.state}${each.restarts ? `, ${each.restarts} restarts` : ""} </span>`)}</dd></div>`}
    ${about?.made_of.length > 0 && html`<div><dt>${T.model.madeOf}</dt><dd>${names(about.made_of)}</dd></div>`}
    ${about?.used_by.length > 0 && html`<div><dt>${T.model.usedBy}</dt><dd>${names(about.used_by)}</dd></div>`}
    <div><dt>${T.model.location}</dt><dd><code>${model.location || format.NONE}</code></dd></div>
  </dl>`;
}

export function ModelPage({ name, tab }) {
  useStore();
  const current = tab in TABS ? tab : "live";
  const model = store.models.get(name);
  const { value, error, again } = useRead(() => get(modelPath(name)), [name, model?.changes, store.epoch]);
  useEffect(() => {
    store.watch(current === "live" ? name : "", current === "logs");
    return () => store.watch();
  }, [name, current]);
  if (!model) {
    if (!store.modelsRead) return html`<h1 tabindex="-1">${name}</h1>`;
    return html`<h1 tabindex="-1">${name}</h1><${Panel}><p class="empty">${T.model.unknown}</p><//>`;
  }
  const failure = Store.failureOf(model);
  const Tab = TABS[current];
  const ready = model.versions.filter((version) => version.phase === "READY").map((version) => version.version);
  return html`
    <div class="title"><h1 tabindex="-1">${name}</h1><${Phase} phase=${Store.phaseOf(model)} />
      ${ready.length > 0 && html`<span class="count">${T.model.version} ${ready.join(", ")}</span>`}
      <div class="spacer"></div><${ModelActions} model=${model} /></div>
    ${failure && html`<div class="notice bad"><p class="reason">${failure}</p><p><a href=${link("models", name, "config")}>${T.config.findings}</a></p></div>`}
    ${model.notes?.map((note) => html`<div class="notice warn"><p>${note}</p></div>`)}
    <${Facts} model=${model} about=${value} />
    <${Tabs} label=${T.model.tabsLabel} current=${current} items=${Object.entries(T.model.tabs).map(([key, text]) => [key, text, link("models", name, key)])} />
    ${error && !value && html`<${Failed} error=${error} again=${again} />`}
    <${Tab} key=${name} name=${name} model=${model} about=${value} />`;
}
