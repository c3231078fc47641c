// The charts of one model, from what came since the page was opened.

import { html, useState } from "../../vendor/preact-htm.module.js";
import { Empty, Panel } from "../components/basics.js";
import { BatchHeat, TimeChart } from "../components/chart.js";
import * as format from "../format.js";
import { addBuckets, quantiles } from "../quantiles.js";
import { store } from "../store.js";
import { T } from "../text.js";

const SHARES = [0.5, 0.9, 0.99];
const COUNTS = ["ok", "failed", "rejected", "cancelled", "hits"];

/** The series of all charts; of one version, or of all together. */
export function seriesOf(points, version) {
  const found = { t: [], counts: COUNTS.map(() => []), latency: SHARES.map(() => []), pending: [], running: [], stages: T.live.stageNames.map(() => []), batches: [] };
  for (const point of points) {
    const rows = point.versions.filter((each) => !version || each.version === version);
    found.t.push(point.t);
    COUNTS.forEach((name, at) => found.counts[at].push(rows.reduce((sum, row) => sum + row[name], 0)));
    const counts = new Map();
    for (const row of rows) addBuckets(row.latencies, counts);
    quantiles(counts, SHARES).forEach((value, at) => found.latency[at].push(value));
    found.pending.push(rows.reduce((sum, row) => sum + row.pending, 0));
    found.running.push(rows.reduce((sum, row) => sum + row.running, 0));
    const busiest = rows.reduce((best, row) => (!best || row.ok > best.ok ? row : best), null);
    const ran = busiest && busiest.ok > 0;
    found.stages.forEach((list, at) => list.push(ran ? busiest.stages_us[at] : null));
    const batch = {};
    for (const row of rows) for (const [size, runs] of Object.entries(row.batches)) batch[size] = (batch[size] || 0) + runs;
    found.batches.push(batch);
  }
  return found;
}

/** The series of a model that takes text: rates between two looks, and gauges; null where there is nothing to show. */
export function textSeries(points) {
  const found = { generated: [], prompt: [], cached: [], first: [], cache: [] };
  points.forEach((point, at) => {
    const [now, before] = [point.text, at ? points[at - 1].text : null];
    // Counts begin again when the server has been restarted.
    const seconds = now && before && now.generated >= before.generated ? point.t - points[at - 1].t : 0;
    const grown = (name) => (seconds > 0 ? now[name] - before[name] : 0);
    for (const name of ["generated", "prompt", "cached"]) found[name].push(seconds > 0 ? grown(name) / seconds : null);
    found.first.push(grown("first") > 0 ? (grown("first_s") * 1e6) / grown("first") : null);
    found.cache.push(now?.cache ?? null);
  });
  return found;
}

function TextFacts({ text }) {
  return html`<dl class="facts across">
    <div><dt>${T.live.engine}</dt><dd>${T.live.slots(text.running, text.waiting)}</dd></div>
    ${text.context > 0 && html`<div><dt>${T.live.context}</dt><dd>${T.live.contextOf(text.context, text.longest)}</dd></div>`}
  </dl>`;
}

export function LiveTab({ name, model }) {
  const [span, setSpan] = useState(60);
  const [version, setVersion] = useState(0);
  const { points, model: shown } = store.detail;
  if (shown !== name || !points.length) return html`<${Panel}><${Empty}>${model.versions.some((each) => each.phase === "READY") ? T.live.waiting : T.model.notLoaded}<//><//>`;
  const last = points[points.length - 1].t;
  const from = points.findIndex((point) => point.t >= last - span - 1);
  const inside = points.slice(Math.max(from, 0));
  const series = seriesOf(inside, version);
  const text = points[points.length - 1].text;
  const words = text && textSeries(inside);
  const versions = [...new Set(points[points.length - 1].versions.map((each) => each.version))];
  const quiet = !series.counts.some((list) => list.some(Boolean));
  const chart = (title, list, more) => html`<${Panel} key=${title} className="chart-panel"><${TimeChart} title=${title} times=${series.t} span=${span} series=${list} ...${more} /><//>`;
  const [ok, failed, rejected, cancelled, hits] = series.counts;
  return html`
    <div class="filters">
      <div class="segments" role="group" aria-label=${T.live.window}>${Object.entries(T.live.minutes).map(([value, text]) => html`<button key=${value} aria-pressed=${span === Number(value)} onClick=${() => setSpan(Number(value))}>${text}</button>`)}</div>
      ${versions.length > 1 && html`<select aria-label=${T.model.version} value=${version} onChange=${(event) => setVersion(Number(event.target.value))}>
        <option value="0">${T.model.allVersions}</option>${versions.map((each) => html`<option value=${each}>${T.model.version} ${each}</option>`)}</select>`}
      ${quiet && html`<span class="hint">${T.live.quiet}</span>`}
    </div>
    ${text && html`<${TextFacts} text=${text} />`}
    <div class="charts">
      ${words && chart(T.live.tokens, [
        { name: T.live.generated, color: "c1", values: words.generated },
        { name: T.live.prompt, color: "c3", values: words.prompt },
        ...(words.cached.some(Boolean) ? [{ name: T.live.cached, color: "c5", values: words.cached }] : []),
      ], { show: format.rate })}
      ${words && chart(T.live.first, [{ name: T.live.mean, color: "c2", values: words.first }], { show: format.duration })}
      ${words && words.cache.some((each) => each !== null) && chart(T.live.cache, [{ name: T.live.share, color: "c4", values: words.cache }], { show: format.percent })}
      ${chart(T.live.outcomes, [
        { name: T.live.ok, color: "c1", values: ok },
        { name: T.live.failed, color: "bad", values: failed },
        { name: T.live.rejected, color: "warn", values: rejected },
        { name: T.live.cancelled, color: "c5", values: cancelled },
        ...(hits.some(Boolean) ? [{ name: T.live.hits, color: "c3", values: hits }] : []),
      ], { show: format.rate })}
      ${chart(T.live.latency, ["p50", "p90", "p99"].map((label, at) => ({ name: label, color: ["c1", "c2", "c4"][at], values: series.latency[at] })), { show: format.duration })}
      ${chart(T.live.queue, [{ name: T.live.pending, color: "c4", values: series.pending }, { name: T.live.running, color: "c1", values: series.running }], {})}
      ${chart(T.live.stages, T.live.stageNames.map((stage, at) => ({ name: stage, color: ["c4", "c3", "c1", "c2"][at], values: series.stages[at] })), { show: format.duration, stack: true })}
      <${Panel} className="chart-panel"><${BatchHeat} title=${T.live.batches} times=${series.t} batches=${series.batches} span=${span} /><//>
    </div>`;
}
