// The newest traces, and where the time of one of them went.

import { html, useEffect, useState } from "../../vendor/preact-htm.module.js";
import { get, modelPath, post } from "../api.js";
import { Empty, Failed, Field, Panel, Scroll, useRead, useStore } from "../components/basics.js";
import { notify } from "../components/notices.js";
import { Waterfall } from "../components/waterfall.js";
import * as format from "../format.js";
import { store } from "../store.js";
import { T } from "../text.js";

/** Traces that a filter lets through. */
export function matching(traces, { model, slowMs, failed }) {
  return traces.filter((trace) => (!model || trace.model === model) && (!slowMs || trace.us >= slowMs * 1000) && (!failed || trace.code || trace.cancelled));
}

function Sampling({ model, sampling, again }) {
  const left = sampling[model];
  useEffect(() => {
    if (left === undefined) return undefined;
    const timer = setInterval(again, 1000);
    return () => clearInterval(timer);
  }, [left === undefined]);
  if (left !== undefined) return html`<span class="hint" role="status">${T.traces.sampling(left)}</span>`;
  if (!store.may.control) return null;
  const start = async () => {
    try {
      await post(model ? modelPath(model, "/sample") : "/api/traces/sample", { count: 10 });
      again();
    } catch (error) {
      notify(error.message, { kind: "bad" });
    }
  };
  return html`<button onClick=${start}>${T.traces.sample}</button>`;
}

function One({ trace, traces }) {
  const others = trace.batch && trace.batch.requests > 1 ? traces.filter((each) => each.id !== trace.id && each.batch?.key === trace.batch.key) : [];
  return html`<${Panel} title=${`${trace.model} ${trace.version || ""}`}>
    <p class="hint">${format.clock(trace.t, true)} · ${format.duration(trace.us)} · ${trace.protocol}${trace.request_id && html` · <code>${trace.request_id}</code>`} · ${T.traces.kept[trace.kept] || trace.kept}
      ${trace.batch && html` · ${T.traces.batchAlone(trace.batch.size, trace.batch.requests)}`}</p>
    ${others.length > 0 && html`<p class="hint">${T.traces.batch(others.length)}: ${others.slice(0, 10).map((each) => html`<a href=${`#/traces/${each.id}`}>${each.id}</a> `)}</p>`}
    ${trace.error && html`<div class="notice bad"><p><b>${trace.code}</b> <span class="reason">${trace.error}</span></p></div>`}
    <${Waterfall} trace=${trace} />
  <//>`;
}

export function TraceView({ model = "", chosen = "" }) {
  const { value, error, again } = useRead(() => get("/api/traces"), []);
  const [filter, setFilter] = useState({ model, slowMs: "", failed: false });
  const [id, setId] = useState(chosen);
  useEffect(() => setId(chosen), [chosen]);
  if (error && !value) return html`<${Failed} error=${error} again=${again} />`;
  if (!value) return html`<${Panel}><${Empty}>…<//><//>`;
  const traces = matching(value.traces, { ...filter, slowMs: Number(filter.slowMs) || 0 });
  const names = [...new Set(value.traces.map((trace) => trace.model))].sort();
  const shown = value.traces.find((trace) => String(trace.id) === String(id)) || traces[0];
  return html`
    <div class="filters">
      ${!model && html`<select aria-label=${T.traces.model} value=${filter.model} onChange=${(event) => setFilter({ ...filter, model: event.target.value })}><option value="">${T.traces.all}</option>${names.map((name) => html`<option value=${name}>${name}</option>`)}</select>`}
      <${Field} label=${T.traces.slow} className="inline"><input type="number" min="0" value=${filter.slowMs} onInput=${(event) => setFilter({ ...filter, slowMs: event.target.value })} /><//>
      <label class="check"><input type="checkbox" checked=${filter.failed} onChange=${(event) => setFilter({ ...filter, failed: event.target.checked })} /> ${T.traces.failed}</label>
      <div class="spacer"></div>
      <${Sampling} model=${model} sampling=${value.sampling} again=${again} /><button onClick=${again}>${T.traces.refresh}</button>
    </div>
    ${traces.length === 0 ? html`<${Panel}><${Empty}>${value.traces.length ? T.traces.none : T.traces.off}<//><//>` : html`<div class="split">
      <section class="panel flush"><${Scroll} label=${T.traces.title} className="tall"><table class="choose">
        <thead><tr><th scope="col">${T.traces.time}</th>${!model && html`<th scope="col">${T.traces.model}</th>`}<th scope="col" class="number">${T.traces.duration}</th><th scope="col">${T.traces.outcome}</th></tr></thead>
        <tbody>${traces.map((trace) => html`<tr key=${trace.id} class=${shown === trace ? "chosen" : ""}>
          <td><button class="row" aria-pressed=${shown === trace} onClick=${() => setId(trace.id)}>${format.clock(trace.t, true)}</button></td>
          ${!model && html`<td>${trace.model}</td>`}<td class="number">${format.duration(trace.us)}</td>
          <td>${trace.code ? html`<span class="state bad"><i aria-hidden="true"></i>${trace.code}</span>` : trace.cancelled ? T.live.cancelled : html`<span class="muted">${T.traces.ok}</span>`}</td>
        </tr>`)}</tbody>
      </table><//></section>
      ${shown && html`<${One} trace=${shown} traces=${value.traces} />`}
    </div>`}`;
}

export function Traces({ chosen }) {
  useStore();
  return html`<div class="title"><h1 tabindex="-1">${T.traces.title}</h1></div><${TraceView} chosen=${chosen} />`;
}
