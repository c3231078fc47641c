// Messages on what was done, read out to users of screen readers.

import { html, useEffect, useState } from "../../vendor/preact-htm.module.js";
import { T } from "../text.js";
import { Findings } from "./basics.js";

const listeners = new Set();
let notices = [];
let number = 0;

/** Shows a message; those that are no failures go after a while. */
export function notify(text, { kind = "good", detail = "", findings = [] } = {}) {
  number += 1;
  const notice = { number, text, kind, detail, findings };
  notices = [...notices.filter((each) => each.text !== text), notice].slice(-4);
  for (const listener of listeners) listener();
  if (kind !== "bad") setTimeout(() => dismiss(notice.number), 6000);
}

function dismiss(which) {
  notices = notices.filter((each) => each.number !== which);
  for (const listener of listeners) listener();
}

export function Notices() {
  const [, again] = useState(0);
  useEffect(() => {
    const listener = () => again((n) => n + 1);
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, []);
  return html`<div class="notices" role="status" aria-live="polite">
    ${notices.map((each) => html`<div key=${each.number} class="notice ${each.kind}">
      <p><strong>${each.text}</strong> ${each.detail}</p>
      ${each.findings.length > 0 && html`<${Findings} findings=${each.findings} />`}
      <button class="quiet" onClick=${() => dismiss(each.number)}>${T.models.close}</button>
    </div>`)}
  </div>`;
}
