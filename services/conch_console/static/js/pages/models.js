// The table of all models.

import { html, useState } from "../../vendor/preact-htm.module.js";
import { Empty, Phase, Scroll, Sparkline, useStore } from "../components/basics.js";
import { LoadDialog, ModelActions } from "../components/model_actions.js";
import * as format from "../format.js";
import { quantile } from "../quantiles.js";
import { link } from "../router.js";
import { store, Store } from "../store.js";
import { T } from "../text.js";

const MOST_ROWS = 150; // drawn anew each second
const ORDER = ["FAILED", "LOADING", "STAGING", "WARMING", "DRAINING", "READY", "UNLOADED"];

/** The rows of the table: filtered, then sorted by a column. */
export function rowsOf(models, numbers, { filter, phase, sort, down }) {
  const wanted = filter.trim().toLowerCase();
  const rows = models
    .filter((model) => (!wanted || model.name.toLowerCase().includes(wanted)) && (!phase || Store.phaseOf(model) === phase))
    .map((model) => {
      const live = numbers.get(model.name);
      const quick = live && live.counts.size;
      return {
        model,
        live,
        phase: Store.phaseOf(model),
        rps: live ? live.rps : 0,
        p50: quick ? quantile(live.counts, 0.5) : null,
        p99: quick ? quantile(live.counts, 0.99) : null,
        queue: live ? live.pending : 0,
        memory: model.versions.reduce((sum, version) => sum + (version.bytes || 0), 0) || null,
      };
    });
  const key = {
    name: (row) => row.model.name,
    state: (row) => ORDER.indexOf(row.phase),
    backend: (row) => row.model.backend || "",
    instances: (row) => row.model.instances || 0,
  }[sort] || ((row) => row[sort] ?? -1);
  rows.sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    const order = typeof x === "string" ? x.localeCompare(y) : x - y;
    return (down ? -order : order) || a.model.name.localeCompare(b.model.name);
  });
  return rows;
}

function Heading({ name, text, sort, down, onSort, className = "" }) {
  const sorted = sort === name;
  return html`<th scope="col" class=${className} aria-sort=${sorted ? (down ? "descending" : "ascending") : null}>
    <button class="sort" onClick=${() => onSort(name)}><span>${text}</span><i aria-hidden="true">${sorted ? (down ? "↓" : "↑") : ""}</i></button>
  </th>`;
}

function Versions({ model }) {
  const shown = model.versions.filter((version) => version.phase !== "UNLOADED");
  if (!shown.length) return html`<${Phase} phase=${Store.phaseOf(model)} title=${model.reason} />`;
  return html`<span class="versions">${shown.map((version) => {
    const staged = version.phase === "STAGING" && version.staging ? ` ${format.percent(version.staged / version.staging)}` : "";
    return html`<span key=${version.version}><b>${version.version}</b> <${Phase} phase=${version.phase} title=${version.reason} />${staged}${(version.labels || []).map((label) => html` <span class="badge">${label}</span>`)}</span>`;
  })}</span>`;
}

export function Models() {
  useStore();
  const [filter, setFilter] = useState("");
  const [phase, setPhase] = useState("");
  const [order, setOrder] = useState({ sort: "name", down: false });
  const [loading, setLoading] = useState(false);
  const [all, setAll] = useState(false);
  const models = [...store.models.values()];
  const rows = rowsOf(models, store.numbers, { filter, phase, ...order });
  const onSort = (name) => setOrder((before) => ({ sort: name, down: before.sort === name ? !before.down : name !== "name" && name !== "backend" && name !== "state" }));
  const heading = (name, text, className) => html`<${Heading} name=${name} text=${text} className=${className} onSort=${onSort} ...${order} />`;
  const phases = [...new Set(models.map((model) => Store.phaseOf(model)))].sort((a, b) => ORDER.indexOf(a) - ORDER.indexOf(b));
  return html`
    <div class="title"><h1 tabindex="-1">${T.models.title}</h1><span class="count">${T.models.count(rows.length, models.length)}</span><div class="spacer"></div>
      ${store.may.control && html`<button onClick=${() => setLoading(true)}>${T.models.loadOther}</button>`}
    </div>
    ${loading && html`<${LoadDialog} onClose=${() => setLoading(false)} />`}
    <div class="filters">
      <input type="search" aria-label=${T.models.filter} placeholder=${T.models.filter} value=${filter} onInput=${(event) => setFilter(event.target.value)} />
      <select aria-label=${T.models.state} value=${phase} onChange=${(event) => setPhase(event.target.value)}>
        <option value="">${T.models.all}</option>
        ${phases.map((each) => html`<option value=${each}>${T.phase[each]}</option>`)}
      </select>
    </div>
    ${rows.length === 0 ? html`<section class="panel"><${Empty}>${store.modelsRead ? (models.length ? T.models.none : T.models.empty) : T.live.waiting}<//></section>` : html`<section class="panel flush"><${Scroll} label=${T.models.title}><table class="models">
      <thead><tr>
        ${heading("name", T.models.name)}${heading("state", T.models.versions)}${heading("backend", T.models.kind, "wide")}${heading("instances", T.models.instances, "number wide")}
        ${heading("rps", T.models.rps, "number")}${heading("p50", T.models.p50, "number mid")}${heading("p99", T.models.p99, "number mid")}${heading("queue", T.models.queue, "number mid")}${heading("memory", T.models.memory, "number wide")}
        <th scope="col" class="wide">${T.models.trend}</th>${store.may.control && html`<th scope="col" class="mid"><span class="unseen">${T.models.actions}</span></th>`}
      </tr></thead>
      <tbody>${(all ? rows : rows.slice(0, MOST_ROWS)).map((row) => html`<tr key=${row.model.name}>
        <th scope="row"><a href=${link("models", row.model.name)}>${row.model.name}</a></th>
        <td><${Versions} model=${row.model} /></td>
        <td class="wide muted">${row.model.ensemble ? T.models.ensemble : row.model.backend || format.NONE}</td>
        <td class="number wide">${row.model.instances && !row.model.ensemble ? row.model.instances : format.NONE}</td>
        <td class="number">${row.rps ? format.rate(row.rps) : html`<span class="muted">0</span>`}</td>
        <td class="number mid">${format.duration(row.p50)}</td>
        <td class="number mid">${format.duration(row.p99)}</td>
        <td class="number mid">${row.queue || html`<span class="muted">0</span>`}</td>
        <td class="number wide">${row.memory ? format.bytes(row.memory) : format.NONE}</td>
        <td class="wide"><${Sparkline} values=${row.live ? row.live.trend : []} /></td>
        ${store.may.control && html`<td class="mid"><${ModelActions} model=${row.model} compact /></td>`}
      </tr>`)}</tbody>
    </table><//></section>${!all && rows.length > MOST_ROWS && html`<button onClick=${() => setAll(true)}>${T.models.showAll(rows.length)}</button>`}`}`;
}
