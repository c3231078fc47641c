// A model's rollout: its steps, both sides, the verdict, what shadows differ in, and what may be done about it.

import { html, useEffect, useRef, useState } from "../../vendor/preact-htm.module.js";
import { get, modelPath, post } from "../api.js";
import { Dialog, Empty, Failed, Panel, Scroll, Sparkline, State, usePolled } from "../components/basics.js";
import { notify } from "../components/notices.js";
import * as format from "../format.js";
import { link } from "../router.js";
import { store } from "../store.js";
import { T } from "../text.js";

const EVERY_MS = 2000;
const TONES = { STEP: "busy", LOADING: "busy", PAUSED: "warn", BAKING: "busy", ROLLING_BACK: "warn", ABORTING: "bad", ABORTED: "bad", FAILED: "bad", DONE: "good", SPLIT: "good" };
const RUNNING = ["LOADING", "STEP", "PAUSED"];
const ACTIONS = {
  pause: ["LOADING", "STEP"],
  resume: ["PAUSED"],
  advance: ["STEP", "PAUSED"],
  promote: RUNNING,
  abort: RUNNING,
  rollback: ["BAKING", "DONE"],
};
const DANGEROUS = new Set(["promote", "abort", "rollback"]);

/** What may be done about a rollout, in its state. */
export function actionsOf(rollout) {
  const possible = Object.keys(ACTIONS).filter((action) => ACTIONS[action].includes(rollout.state));
  return possible.filter((action) => action !== "rollback" || rollout.previous !== null);
}

/** The steps: those that are over, the present one, and those to come. */
export function stepsOf({ state, step, steps }) {
  const over = state === "BAKING" || state === "DONE";
  const present = ["LOADING", "STEP", "PAUSED"].includes(state);
  return steps.map((text, index) => ({ text, place: over || index < step ? "over" : present && index === step ? "now" : "next" }));
}

export function RolloutState({ state, reason }) {
  return html`<${State} tone=${TONES[state] || "off"} text=${T.rollout.state[state] || state} title=${reason} />`;
}

export const percent = (value) => `${format.short(value)} %`;

async function act(name, action) {
  try {
    await post(modelPath(name, "/rollout/action"), { action });
    notify(T.rollout.done[action](name));
  } catch (error) {
    notify(error.message, { kind: "bad" });
  }
}

function Actions({ name, rollout, again }) {
  const [asked, setAsked] = useState("");
  if (!store.may.control) return null;
  const run = async (action) => {
    setAsked("");
    await act(name, action);
    again();
  };
  const submit = (event) => {
    event.preventDefault();
    run(asked);
  };
  return html`<div class="buttons">
    ${actionsOf(rollout).map((action) => html`<button key=${action} class=${DANGEROUS.has(action) ? "danger" : ""} onClick=${() => (DANGEROUS.has(action) ? setAsked(action) : run(action))}>${T.rollout.action[action]}</button>`)}
    ${asked && html`<${Dialog} title=${T.rollout.ask[asked](name)} onClose=${() => setAsked("")}><form onSubmit=${submit}>
      <p>${T.rollout.askText[asked](rollout)}</p>
      <footer><button type="button" onClick=${() => setAsked("")}>${T.models.cancel}</button><button class="danger">${T.rollout.action[asked]}</button></footer>
    </form><//>`}
  </div>`;
}

/** Requests per second of each version, from one look to the next. */
export function addRates(trends, before, sides, seconds) {
  for (const side of sides) {
    const last = before.get(side.version);
    const points = trends.get(side.version) || [];
    if (last !== undefined && seconds > 0) points.push(Math.max(side.requests - last, 0) / seconds);
    trends.set(side.version, points.slice(-60));
    before.set(side.version, side.requests);
  }
}

function Sides({ rollout }) {
  const kept = useRef({ trends: new Map(), before: new Map(), at: 0 });
  useEffect(() => {
    const now = performance.now();
    addRates(kept.current.trends, kept.current.before, rollout.sides, kept.current.at ? (now - kept.current.at) / 1000 : 0);
    kept.current.at = now;
  }, [rollout]);
  if (!rollout.sides.length) return html`<${Empty}>${T.rollout.noSides}<//>`;
  return html`<${Scroll} label=${T.rollout.sides}><table>
    <thead><tr><th scope="col">${T.versions.version}</th><th scope="col">${T.rollout.role}</th><th scope="col" class="number">${T.rollout.traffic}</th><th scope="col" class="number">${T.rollout.requests}</th><th scope="col" class="number">${T.rollout.failures}</th><th scope="col" class="number">${T.models.p99}</th><th scope="col" class="wide">${T.models.trend}</th></tr></thead>
    <tbody>${rollout.sides.map((side) => html`<tr key=${side.version}>
      <th scope="row">${side.version}</th><td>${T.rollout.roles[side.role] || side.role}</td><td class="number">${percent(side.traffic)}</td>
      <td class="number">${format.short(side.requests)}</td><td class="number">${side.failures ? `${format.short(side.failures)} (${percent((100 * side.failures) / Math.max(side.requests, 1))})` : "0"}</td>
      <td class="number">${side.p99_ms === null ? format.NONE : `≤ ${format.duration(side.p99_ms * 1000)}`}</td>
      <td class="wide"><${Sparkline} values=${kept.current.trends.get(side.version) || []} /></td>
    </tr>`)}</tbody>
  </table><//>`;
}

function Guards({ rollout }) {
  const guard = rollout.declaration.guard || {};
  return html`<dl class="facts">
    <dt>${T.rollout.verdict}</dt><dd>${rollout.verdict || T.rollout.noVerdict}</dd>
    ${rollout.note && html`<dt>${T.rollout.note}</dt><dd>${rollout.note}</dd>`}
    <dt>${T.rollout.limits}</dt><dd>${Object.keys(guard).length ? Object.entries(guard).map(([key, value]) => html`<code>${key} = ${value}</code> `) : T.rollout.noLimits}</dd>
  </dl>`;
}

function figuresOf(output) {
  return ["difference", "max_abs", "cosine", "top", "within", "note"].filter((key) => output[key] !== undefined && output[key] !== null)
    .map((key) => `${key} ${typeof output[key] === "number" ? format.short(output[key]) : output[key]}`).join(", ");
}

function Shadow({ rollout }) {
  const report = rollout.shadow_report;
  if (report.requests === undefined) return null;
  const worst = report.worst;
  const dropped = Object.values(report.dropped).reduce((sum, count) => sum + count, 0);
  return html`<${Panel} title=${T.rollout.shadow}>
    <dl class="facts across">
      <div><dt>${T.rollout.copies}</dt><dd>${format.short(report.requests)}${dropped ? `, ${format.short(dropped)} ${T.rollout.dropped}` : ""}</dd></div>
      <div><dt>${T.rollout.compared}</dt><dd>${format.short(report.compared)}</dd></div>
      <div><dt>${T.rollout.mismatches}</dt><dd>${format.short(report.mismatches)}</dd></div>
    </dl>
    ${worst.length > 0 && html`<p><strong>${T.rollout.worst}</strong></p><${Scroll} label=${T.rollout.worst}><table>
      <thead><tr><th scope="col">${T.versions.time}</th><th scope="col">${T.rollout.request}</th><th scope="col">${T.rollout.differences}</th></tr></thead>
      <tbody>${worst.map((pair, index) => html`<tr key=${index}><td>${format.when(pair.at)}</td><td><code>${pair.request_id || format.NONE}</code></td><td>${pair.outputs.map((output) => html`<p><code>${output.output}</code> ${figuresOf(output)}</p>`)}</td></tr>`)}</tbody>
    </table><//>`}
  <//>`;
}

function History({ rollout }) {
  const rows = [...rollout.history].reverse();
  return html`<${Panel} title=${T.rollout.history}>${rows.length === 0 ? html`<${Empty}>${T.rollout.noHistory}<//>` : html`<${Scroll} label=${T.rollout.history}><table>
    <thead><tr><th scope="col">${T.versions.time}</th><th scope="col">${T.versions.state}</th><th scope="col">${T.rollout.sideOf}</th><th scope="col" class="number">${T.rollout.traffic}</th><th scope="col">${T.versions.reason}</th></tr></thead>
    <tbody>${rows.map((each, index) => html`<tr key=${index}><td>${format.when(each.seconds)}</td><td><${RolloutState} state=${each.state} /></td><td>${each.stable ?? format.NONE} → ${each.candidate ?? format.NONE}</td><td class="number">${percent(each.weight)}</td><td class="reason">${each.reason}${each.called ? ` (${T.rollout.called})` : ""}</td></tr>`)}</tbody>
  </table><//>`}<//>`;
}

export function RolloutTab({ name }) {
  const { value, error, again } = usePolled(() => get(modelPath(name, "/rollout")), [name], EVERY_MS);
  if (!value) return error && html`<${Failed} error=${error} again=${again} />`;
  const labels = Object.entries(value.labels || {});
  if (!value.model) return html`<${Panel}><p class="empty">${T.rollout.none}</p><//>`;
  return html`
    <${Panel} title=${T.rollout.title} actions=${html`<${Actions} name=${name} rollout=${value} again=${again} />`}>
      <p><${RolloutState} state=${value.state} /> ${value.reason}</p>
      <dl class="facts across">
        <div><dt>${T.rollout.sideOf}</dt><dd>${value.stable ?? format.NONE} → ${value.candidate ?? format.NONE}</dd></div>
        <div><dt>${T.rollout.weight}</dt><dd>${percent(value.weight)}${value.shadow ? `, ${T.rollout.shadowed} ${percent(value.shadow)}` : ""}</dd></div>
        <div><dt>${T.versions.since}</dt><dd>${format.seconds(value.seconds)}${value.step_seconds ? ` ${T.rollout.of} ${format.seconds(value.step_seconds)}` : ""}</dd></div>
        <div><dt>${T.rollout.source}</dt><dd>${T.rollout.sources[value.source] || value.source}${value.managed_by ? `, ${value.managed_by}` : ""}</dd></div>
        ${labels.length > 0 && html`<div><dt>${T.rollout.labels}</dt><dd>${labels.map(([label, version]) => `${label} = ${version}`).join(", ")}</dd></div>`}
        ${value.refused.length > 0 && html`<div><dt>${T.rollout.refused}</dt><dd>${value.refused.join(", ")}</dd></div>`}
      </dl>
      ${value.steps.length > 0 && html`<ol class="steps" aria-label=${T.rollout.steps}>${stepsOf(value).map((each, index) => html`<li key=${index} class=${each.place} aria-current=${each.place === "now" ? "step" : null}>${each.text}</li>`)}</ol>`}
    <//>
    <${Panel} title=${T.rollout.sides}><${Sides} rollout=${value} /><//>
    <${Panel} title=${T.rollout.guards}><${Guards} rollout=${value} /><//>
    <${Shadow} rollout=${value} />
    <${History} rollout=${value} />`;
}

/** The rollouts that go on, for the overview; nothing without any. */
export function Rollouts() {
  const { value } = usePolled(() => get("/api/rollouts"), [], EVERY_MS);
  if (!value?.rollouts.length) return null;
  return html`<${Panel} title=${T.rollout.all}><${Scroll} label=${T.rollout.all}><table>
    <thead><tr><th scope="col">${T.models.name}</th><th scope="col">${T.versions.state}</th><th scope="col">${T.rollout.sideOf}</th><th scope="col" class="number">${T.rollout.traffic}</th><th scope="col">${T.rollout.verdict}</th></tr></thead>
    <tbody>${value.rollouts.map((each) => html`<tr key=${each.model}><th scope="row"><a href=${link("models", each.model, "rollout")}>${each.model}</a></th><td><${RolloutState} state=${each.state} /></td><td>${each.stable ?? format.NONE} → ${each.candidate ?? format.NONE}</td><td class="number">${percent(each.weight)}</td><td class="reason">${each.verdict || each.reason}</td></tr>`)}</tbody>
  </table><//><//>`;
}
