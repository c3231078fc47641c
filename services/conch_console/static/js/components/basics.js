// Small parts that all pages use.

import { html, useEffect, useRef, useState } from "../../vendor/preact-htm.module.js";
import { store } from "../store.js";
import { T } from "../text.js";

/** Renders again whenever the store changes. */
export function useStore() {
  const [, again] = useState(0);
  useEffect(() => store.subscribe(() => again((n) => n + 1)), []);
  return store;
}

/** What a call gives: {value, error, again}; read anew when `keys` change. */
export function useRead(read, keys) {
  const [state, setState] = useState({ value: null, error: null });
  const [tries, setTries] = useState(0);
  useEffect(() => {
    let current = true;
    read().then(
      (value) => current && setState({ value, error: null }),
      (error) => current && setState((before) => ({ value: before.value, error })),
    );
    return () => {
      current = false;
    };
  }, [...keys, tries]);
  return { ...state, again: () => setTries((n) => n + 1) };
}

/** As `useRead`, and again so many milliseconds after each answer. */
export function usePolled(read, keys, ms) {
  const [state, setState] = useState({ value: null, error: null });
  const [tries, setTries] = useState(0);
  useEffect(() => {
    let current = true;
    let timer = 0;
    const look = async () => {
      try {
        const value = await read();
        if (current) setState({ value, error: null });
      } catch (error) {
        if (current) setState((before) => ({ value: before.value, error }));
      }
      if (current) timer = setTimeout(look, ms);
    };
    look();
    return () => {
      current = false;
      clearTimeout(timer);
    };
  }, [...keys, tries]);
  return { ...state, again: () => setTries((n) => n + 1) };
}

const PHASES = { READY: "good", FAILED: "bad", LOADING: "busy", STAGING: "busy", WARMING: "busy", DRAINING: "warn", UNLOADED: "off" };
const STAGES = { SERVING: "good", STARTING: "busy", FAILED: "bad", DRAINING: "warn", STOPPING: "warn", NOT_READY: "bad" };

/** A state: a mark with a colour, and a word. */
export function State({ tone, text, title }) {
  return html`<span class="state ${tone}" title=${title || null}><i aria-hidden="true"></i>${text}</span>`;
}

export function Phase({ phase, title }) {
  return html`<${State} tone=${PHASES[phase] || "off"} text=${T.phase[phase] || phase} title=${title} />`;
}

export function Stage({ state }) {
  const name = state.stage === "SERVING" && !state.ready ? "NOT_READY" : state.stage;
  return html`<${State} tone=${STAGES[name] || "off"} text=${T.stage[name] || name} />`;
}

export function Panel({ title, children, actions, className = "" }) {
  return html`<section class="panel ${className}">
    ${title && html`<header><h2>${title}</h2>${actions && html`<div class="actions">${actions}</div>`}</header>`}
    ${children}
  </section>`;
}

export function Empty({ children }) {
  return html`<p class="empty">${children}</p>`;
}

export function Failed({ error, again }) {
  return html`<div class="notice bad" role="alert">
    <p><strong>${T.errors.load}</strong> ${error.message}</p>
    ${again && html`<button onClick=${again}>${T.errors.retry}</button>`}
  </div>`;
}

/** A table that can be scrolled sideways where it is wider than the page. */
export function Scroll({ label, children, className = "" }) {
  return html`<div class="scroll ${className}" tabindex="0" role="region" aria-label=${label}>${children}</div>`;
}

/** A few points as a line of 96 by 20 pixels. */
export function Sparkline({ values }) {
  const points = values.slice(-60);
  const most = Math.max(...points, 1);
  if (!points.some(Boolean)) return html`<span class="spark flat" aria-hidden="true"></span>`;
  const step = 96 / 59;
  const offset = 60 - points.length;
  const path = points.map((value, index) => `${((index + offset) * step).toFixed(1)},${(19 - (value / most) * 17).toFixed(1)}`);
  return html`<svg class="spark" viewBox="0 0 96 20" preserveAspectRatio="none" aria-hidden="true"><polyline points=${path.join(" ")} /></svg>`;
}

/** A dialog of the browser: it keeps the focus, and closes with Escape. */
export function Dialog({ title, onClose, children }) {
  const box = useRef(null);
  useEffect(() => {
    const dialog = box.current;
    dialog.showModal();
    return () => dialog.close();
  }, []);
  return html`<dialog ref=${box} aria-labelledby="dialog-title" onCancel=${(event) => { event.preventDefault(); onClose(); }}>
    <h2 id="dialog-title">${title}</h2>
    ${children}
  </dialog>`;
}

/** Tabs as links: each has an address of its own. */
export function Tabs({ label, items, current }) {
  return html`<nav class="tabs" aria-label=${label}>
    ${items.map(([name, text, href]) => html`<a key=${name} href=${href} aria-current=${name === current ? "page" : null}>${text}</a>`)}
  </nav>`;
}

export function Field({ label, children, className = "" }) {
  return html`<label class="field ${className}"><span>${label}</span>${children}</label>`;
}

/** Findings of a check: place, text, and what would be right. */
export function Findings({ findings }) {
  return html`<ul class="findings">
    ${findings.map((each) => html`<li class=${each.severity}>
      <code class="place">${each.file}${each.line ? `:${each.line}:${each.column}` : ""}</code>
      <p><b>${each.severity}</b> ${each.path && html`<code>${each.path}</code>`} ${each.message}</p>
      <${FindingHint} finding=${each} />
    </li>`)}
  </ul>`;
}

export function FindingHint({ finding }) {
  const parts = [
    finding.expected && `${T.config.expected} ${finding.expected}`,
    finding.found && `${T.config.found} ${finding.found}`,
    finding.nearest && `${T.config.nearest} “${finding.nearest}”?`,
  ].filter(Boolean);
  return parts.length ? html`<p class="hint">${parts.join("; ")}</p>` : null;
}
