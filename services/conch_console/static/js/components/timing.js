// Where the time of one request went, as one bar of its stages.

import { html } from "../../vendor/preact-htm.module.js";
import * as format from "../format.js";
import { T } from "../text.js";

export function Timing({ timing, round, first }) {
  const whole = timing.stages.reduce((sum, [, us]) => sum + us, 0) || timing.total_us || 1;
  return html`<div class="timing">
    ${timing.stages.length > 0 && html`<div class="stagebar" aria-hidden="true">${timing.stages.map(([name, us]) => html`<i class="bar ${name}" style=${{ width: `${(us / whole) * 100}%` }}></i>`)}</div>
    <ul class="legend">${timing.stages.map(([name, us]) => html`<li><i class="bar ${name}" aria-hidden="true"></i>${T.try.stages[name]} <b>${format.duration(us)}</b></li>`)}</ul>`}
    <p class="hint">${format.duration(timing.total_us)} ${T.try.total}${first ? ` · ${format.duration(first)} ${T.try.first}` : ""}${round ? ` · ${format.duration(round * 1000)} ${T.try.round}` : ""}${timing.batch ? ` · ${T.try.batch(timing.batch.rows, timing.batch.requests)}` : ""}</p>
  </div>`;
}
