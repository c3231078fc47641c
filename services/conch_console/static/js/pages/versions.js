// The versions of a model and the history of their loads.

import { html } from "../../vendor/preact-htm.module.js";
import { get, modelPath } from "../api.js";
import { Empty, Failed, Panel, Phase, Scroll, useRead } from "../components/basics.js";
import * as format from "../format.js";
import { T } from "../text.js";

const BEGINS = new Set(["STAGING", "LOADING"]);
const ENDS = new Set(["READY", "FAILED"]);

/** Events with the seconds of the load that each one ended, newest first. */
export function withDurations(events) {
  const began = new Map();
  const found = events.map((event) => {
    let took = null;
    if (BEGINS.has(event.phase) && !began.has(event.version)) began.set(event.version, event.t);
    else if (ENDS.has(event.phase) && began.has(event.version)) {
      took = event.t - began.get(event.version);
      began.delete(event.version);
    }
    return { ...event, took };
  });
  return found.reverse();
}

export function VersionsTab({ name, model }) {
  const { value, error, again } = useRead(() => get(modelPath(name, "/history")), [name, model.changes]);
  if (error) return html`<${Failed} error=${error} again=${again} />`;
  const history = withDurations(value || []);
  return html`
    <${Panel} title=${T.models.versions}>${model.versions.length === 0 ? html`<${Empty}>${T.versions.none}<//>` : html`<${Scroll} label=${T.models.versions}><table>
      <thead><tr><th scope="col">${T.versions.version}</th><th scope="col">${T.versions.state}</th><th scope="col">${T.versions.since}</th><th scope="col" class="number">${T.versions.bytes}</th><th scope="col">${T.versions.reason}</th></tr></thead>
      <tbody>${model.versions.map((each) => html`<tr key=${each.version}><th scope="row">${each.version}</th><td><${Phase} phase=${each.phase} /></td><td>${each.t ? format.when(each.t) : format.NONE}</td><td class="number">${format.bytes(each.bytes)}</td><td class="reason">${each.reason}</td></tr>`)}</tbody>
    </table><//>`}<//>
    <${Panel} title=${T.versions.history}>${history.length === 0 ? html`<${Empty}>${T.versions.missing}<//>` : html`<${Scroll} label=${T.versions.history}><table>
      <thead><tr><th scope="col">${T.versions.time}</th><th scope="col">${T.versions.version}</th><th scope="col">${T.versions.phase}</th><th scope="col" class="number">${T.versions.duration}</th><th scope="col">${T.versions.reason}</th></tr></thead>
      <tbody>${history.map((each) => html`<tr key=${each.revision}><td>${format.when(each.t)}</td><td>${each.version || format.NONE}</td><td><${Phase} phase=${each.phase} /></td><td class="number">${each.took === null ? "" : format.duration(each.took * 1e6)}</td><td class="reason">${each.reason}</td></tr>`)}</tbody>
    </table><//>`}<//>`;
}
