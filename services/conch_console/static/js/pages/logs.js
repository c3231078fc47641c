// The server's log as it is written.

import { html, useEffect, useLayoutEffect, useRef, useState } from "../../vendor/preact-htm.module.js";
import { Empty, Panel, useStore } from "../components/basics.js";
import * as format from "../format.js";
import { store } from "../store.js";
import { T } from "../text.js";

const LEVELS = { all: () => true, warning: (each) => each.level !== "info" && each.level !== "debug", error: (each) => each.level === "error" || each.level === "critical", crash: (each) => each.crash };
const MOST = 500;

/** Lines that a filter lets through, the newest last. */
export function linesOf(records, { level, model, text }) {
  const wanted = text.trim().toLowerCase();
  return records
    .filter((each) => LEVELS[level](each) && (!model || each.models.includes(model)) && (!wanted || each.message.toLowerCase().includes(wanted) || each.logger.toLowerCase().includes(wanted)))
    .slice(-MOST);
}

export function LogView({ model = "" }) {
  const [filter, setFilter] = useState({ level: "all", model, text: "" });
  const [paused, setPaused] = useState(null);
  const box = useRef(null);
  const follows = useRef(true);
  const records = paused || store.records;
  const lines = linesOf(records, filter);
  useLayoutEffect(() => {
    if (box.current && follows.current) box.current.scrollTop = box.current.scrollHeight;
  });
  const fresh = paused ? store.records.filter((each) => each.n > (paused.length ? paused[paused.length - 1].n : 0)).length : 0;
  const set = (name) => (event) => setFilter({ ...filter, [name]: event.target.value });
  return html`
    <div class="filters">
      <select aria-label=${T.logs.level} value=${filter.level} onChange=${set("level")}>${Object.entries(T.logs.levels).map(([value, text]) => html`<option value=${value}>${text}</option>`)}</select>
      ${!model && html`<select aria-label=${T.logs.model} value=${filter.model} onChange=${set("model")}><option value="">${T.logs.allModels}</option>${[...store.models.keys()].map((name) => html`<option value=${name}>${name}</option>`)}</select>`}
      <input type="search" aria-label=${T.logs.text} placeholder=${T.logs.text} value=${filter.text} onInput=${set("text")} />
      <div class="spacer"></div>
      <button aria-pressed=${Boolean(paused)} onClick=${() => setPaused(paused ? null : [...store.records])}>${paused ? T.logs.resume : T.logs.pause}</button>
    </div>
    <${Panel} className="flush">
      ${lines.length === 0 ? html`<${Empty}>${store.recordsRead && records.length ? T.logs.none : store.recordsRead ? T.logs.empty : "…"}<//>` : html`<div class="log" tabindex="0" role="region" aria-label=${T.logs.title} ref=${box} onScroll=${(event) => { const at = event.target; follows.current = at.scrollHeight - at.scrollTop - at.clientHeight < 40; }}>
        ${lines.map((each) => html`<div key=${each.n} class="entry ${each.level} ${each.crash ? "crash" : ""}">
          <time>${format.clock(each.t, true)}</time><b>${each.crash ? "crash" : each.level}</b>
          <div><pre>${each.message}</pre>${each.trace && html`<details><summary>${each.trace.trimEnd().split("\n").pop()}</summary><pre>${each.trace}</pre></details>`}<small>${each.logger}</small></div>
        </div>`)}
      </div>`}
    <//>
    <p class="hint">${paused ? T.logs.paused(fresh) : T.logs.follow}</p>`;
}

export function Logs() {
  useStore();
  useEffect(() => {
    store.watch("", true);
    return () => store.watch();
  }, []);
  return html`<div class="title"><h1 tabindex="-1">${T.logs.title}</h1></div><${LogView} />`;
}
