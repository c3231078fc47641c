// The server at a glance.

import { html, useEffect, useState } from "../../vendor/preact-htm.module.js";
import { get, post } from "../api.js";
import { Dialog, Empty, Panel, Phase, Scroll, Sparkline, State, usePolled, useStore } from "../components/basics.js";
import { TimeChart } from "../components/chart.js";
import { notify } from "../components/notices.js";
import * as format from "../format.js";
import { quantile } from "../quantiles.js";
import { link } from "../router.js";
import { store, Store } from "../store.js";
import { T } from "../text.js";
import { Rollouts, RolloutState } from "./rollout.js";

const BUSIEST = 8;
const EVENTS = 8;
const FRONTS_MS = 2000;

function Figure({ label, value, hint, tone = "" }) {
  return html`<div class="figure ${tone}"><dt>${label}</dt><dd>${value}</dd><dd class="about">${hint}</dd></div>`;
}

function Figures() {
  const numbers = [...store.numbers.values()];
  const sum = (name) => numbers.reduce((total, each) => total + each[name], 0);
  const [p50, p99] = store.totalQuantiles([0.5, 0.99]);
  const errors = sum("errors");
  return html`<dl class="figures">
    <${Figure} label=${T.overview.rps} value=${format.rate(sum("rps"))} hint=${T.overview.perSecond} />
    <${Figure} label=${T.overview.errors} value=${format.rate(errors)} hint=${T.overview.failing} tone=${errors > 0 ? "bad" : ""} />
    <${Figure} label=${T.overview.p50} value=${format.duration(p50)} hint=${T.overview.latency} />
    <${Figure} label=${T.overview.p99} value=${format.duration(p99)} hint=${T.overview.latency} />
    <${Figure} label=${T.overview.queue} value=${format.short(sum("pending"))} hint=${T.overview.waiting} />
    <${Figure} label=${T.overview.running} value=${format.short(sum("running"))} hint=${T.overview.busy} />
  </dl>`;
}

function Troubles() {
  const failed = [...store.models.values()].filter((model) => Store.failureOf(model));
  const unready = store.connection === "live" && !store.state.ready;
  if (!failed.length && !unready) return null;
  return html`<div class="notice ${failed.length ? "bad" : "warn"}">
    ${unready && html`<p><strong>${T.overview.notReady}</strong> ${T.overview.stageReason[store.state.stage]}.</p>`}
    ${failed.length > 0 && html`<p><strong>${T.overview.failed(failed.length)}</strong></p>
      <ul>${failed.slice(0, 10).map((model) => html`<li key=${model.name}><a href=${link("models", model.name, "config")}>${model.name}</a> <span class="reason">${Store.failureOf(model)}</span></li>`)}</ul>`}
  </div>`;
}

function Busiest() {
  const rows = [...store.numbers].map(([name, numbers]) => [name, numbers]).filter(([, numbers]) => numbers.trend.some(Boolean) || numbers.pending || numbers.errors);
  rows.sort((a, b) => b[1].rps - a[1].rps || a[0].localeCompare(b[0]));
  if (!rows.length) return html`<${Empty}>${store.modelsRead && !store.models.size ? T.overview.noModels : T.overview.noTraffic}<//>`;
  return html`<${Scroll} label=${T.overview.busiest}><table>
    <thead><tr><th scope="col">${T.models.name}</th><th scope="col" class="number">${T.models.rps}</th><th scope="col" class="number">${T.models.p50}</th><th scope="col" class="number">${T.models.p99}</th><th scope="col" class="number wide">${T.models.queue}</th><th scope="col" class="wide">${T.models.trend}</th></tr></thead>
    <tbody>${rows.slice(0, BUSIEST).map(([name, numbers]) => html`<tr key=${name}>
      <th scope="row"><a href=${link("models", name)}>${name}</a></th>
      <td class="number">${format.rate(numbers.rps)}</td>
      <td class="number">${format.duration(quantile(numbers.counts, 0.5))}</td>
      <td class="number">${format.duration(quantile(numbers.counts, 0.99))}</td>
      <td class="number wide">${format.short(numbers.pending)}</td>
      <td class="wide"><${Sparkline} values=${numbers.trend} /></td>
    </tr>`)}</tbody>
  </table><//>`;
}

function Meter({ label, share, text }) {
  return html`<div class="meter"><span>${label}</span><b>${text}</b><div class="track" aria-hidden="true"><i style=${{ width: `${Math.min(share * 100, 100)}%` }}></i></div></div>`;
}

function Machine() {
  const { cpu, process_cpu: own, memory, rss, gpus = [] } = store.machine;
  if (rss === undefined) return html`<${Empty}>${T.live.waiting}<//>`;
  const cpus = store.about?.cpus || 1;
  return html`<div class="meters">
    ${cpu !== undefined && html`<${Meter} label=${T.overview.cpu} share=${cpu} text=${format.percent(cpu)} />`}
    <${Meter} label=${T.overview.cpuProcess} share=${own / cpus} text=${`${format.percent(own)} of one`} />
    ${memory && html`<${Meter} label=${T.overview.memory} share=${memory[0] / memory[1]} text=${`${format.bytes(memory[0])} of ${format.bytes(memory[1])}`} />`}
    <${Meter} label=${T.overview.rss} share=${memory ? rss / memory[1] : 0} text=${format.bytes(rss)} />
    ${gpus.map((gpu, index) => html`
      <${Meter} label=${`${T.overview.gpu} ${index}`} share=${gpu.use || 0} text=${format.percent(gpu.use)} />
      <${Meter} label=${`${T.overview.gpuMemory} ${index}`} share=${gpu.total ? gpu.used / gpu.total : 0} text=${`${format.bytes(gpu.used)} of ${format.bytes(gpu.total)}`} />`)}
    ${!gpus.length && html`<p class="hint">${T.overview.noGpu}</p>`}
  </div>`;
}

/** CPU of each process from one look to the next, as a share of one core. */
export function shares(before, now, seconds) {
  const last = new Map(before.map((each) => [each.name, each.cpu_s]));
  return now.map((each) => (last.has(each.name) && seconds > 0 ? Math.max(each.cpu_s - last.get(each.name), 0) / seconds : null));
}

function Fronts() {
  const { value } = usePolled(() => get("/api/fronts"), [], FRONTS_MS);
  const [seen, setSeen] = useState({ fronts: [], at: 0, shares: [] });
  useEffect(() => {
    if (!value) return;
    const at = performance.now();
    setSeen((before) => ({ fronts: value.fronts, at, shares: shares(before.fronts, value.fronts, (at - before.at) / 1000) }));
  }, [value]);
  if (!value?.fronts.length) return null;
  return html`<${Panel} title=${T.overview.fronts}><${Scroll} label=${T.overview.fronts}><table>
    <thead><tr><th scope="col">${T.overview.front}</th><th scope="col">${T.overview.frontState}</th><th scope="col" class="number">${T.overview.frontConnections}</th><th scope="col" class="number">${T.overview.frontCpu}</th><th scope="col" class="number">${T.overview.frontRestarts}</th></tr></thead>
    <tbody>${value.fronts.map((each, index) => html`<tr key=${each.name}><th scope="row">${each.name}</th><td><${State} tone=${each.serves ? "good" : "bad"} text=${each.serves ? T.overview.frontUp : T.overview.frontDown} /></td><td class="number">${each.connections}</td><td class="number">${seen.shares[index] == null ? format.NONE : format.percent(seen.shares[index])}</td><td class="number">${each.restarts}</td></tr>`)}</tbody>
  </table><//><//>`;
}

function About() {
  const about = store.about;
  if (!about) return html`<${Empty}>${T.live.waiting}<//>`;
  return html`<dl class="facts">
    <dt>${T.overview.version}</dt><dd>conch ${about.version}</dd>
    <dt>${T.overview.uptime}</dt><dd>${format.seconds(store.state.uptime)}</dd>
    <dt>${T.overview.host}</dt><dd>${about.host}, ${about.cpus} ${T.overview.cpus}</dd>
    <dt>${T.overview.pid}</dt><dd>${about.pid}, Python ${about.python}</dd>
    ${about.endpoints.map((each) => html`<dt>${each.service}</dt><dd><code>${each.url}</code> <span class="hint">${each.security}</span></dd>`)}
  </dl>`;
}

function Events() {
  if (!store.events.length) return html`<${Empty}>${T.overview.noEvents}<//>`;
  return html`<ol class="events">${store.events.slice(0, EVENTS).map((event) => html`<li key=${event.revision}>
    <time>${format.clock(event.t)}</time> <a href=${link("models", event.model, event.rollout ? "rollout" : "versions")}>${event.model}</a>${event.version ? ` ${event.version}` : ""}
    ${event.rollout ? html`<${RolloutState} ...${event.rollout} />` : html`<${Phase} phase=${event.phase} title=${event.reason} />`}
  </li>`)}</ol>`;
}

function Drain() {
  const [open, setOpen] = useState(false);
  if (!store.may.control || store.state.stage !== "SERVING") return null;
  const submit = async (event) => {
    event.preventDefault();
    setOpen(false);
    try {
      await post("/api/drain");
      notify(T.overview.drained);
    } catch (error) {
      notify(error.message, { kind: "bad" });
    }
  };
  return html`<button class="danger" onClick=${() => setOpen(true)}>${T.overview.drain}</button>
    ${open && html`<${Dialog} title=${T.overview.drainTitle} onClose=${() => setOpen(false)}><form onSubmit=${submit}><p>${T.overview.drainText}</p>
      <footer><button type="button" onClick=${() => setOpen(false)}>${T.models.cancel}</button><button class="danger">${T.overview.drain}</button></footer></form><//>`}`;
}

export function Overview() {
  useStore();
  const { t, rps, errors } = store.total;
  return html`
    <div class="title"><h1 tabindex="-1">${T.overview.title}</h1><div class="spacer"></div><${Drain} /></div>
    <${Troubles} />
    <${Figures} />
    <${Panel} className="chart-panel"><${TimeChart} title=${T.overview.traffic} times=${t} span=${Math.min(Math.max(t.length, 60), 300)} show=${format.rate} series=${[
      { name: T.live.ok, color: "c1", values: rps },
      { name: T.live.failed, color: "bad", values: errors },
    ]} /><//>
    <${Rollouts} />
    <div class="columns">
      <${Panel} title=${T.overview.busiest}><${Busiest} /><//>
      <${Panel} title=${T.overview.devices}><${Machine} /><//>
      <${Panel} title=${T.overview.events}><${Events} /><//>
      <${Panel} title=${T.overview.server}><${About} /><//>
      <${Fronts} />
    </div>`;
}
