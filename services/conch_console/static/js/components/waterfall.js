// One trace as bars over time.

import { html } from "../../vendor/preact-htm.module.js";
import * as format from "../format.js";
import { T } from "../text.js";
import { Scroll } from "./basics.js";

/** Start and length of a bar in percent of the whole. */
export function place(start, length, whole) {
  if (!(whole > 0)) return [0, 100];
  const left = Math.min(Math.max((start / whole) * 100, 0), 99.5);
  return [left, Math.min(Math.max((length / whole) * 100, 0.5), 100 - left)];
}

export function Waterfall({ trace }) {
  const whole = Math.max(...trace.rows.map(([, , , start, length]) => start + length), 0.001);
  return html`<${Scroll} label=${T.traces.waterfall}><table class="waterfall">
    <thead><tr><th scope="col">${T.traces.stage}</th><th scope="col" class="bars"><span>0</span><span>${format.duration(whole / 2)}</span><span>${format.duration(whole)}</span></th><th scope="col" class="number">${T.traces.start}</th><th scope="col" class="number">${T.traces.length}</th></tr></thead>
    <tbody>${trace.rows.map(([depth, label, stage, start, length]) => {
      const [left, width] = place(start, length, whole);
      return html`<tr class=${stage ? "" : "request"}>
        <th scope="row" style=${{ paddingLeft: `${8 + depth * 14}px` }}>${label}</th>
        <td class="bars"><i class="bar ${stage || "whole"}" style=${{ left: `${left}%`, width: `${width}%` }}></i></td>
        <td class="number">${format.duration(start)}</td><td class="number">${format.duration(length)}</td>
      </tr>`;
    })}</tbody>
  </table><//>
  ${trace.more_rows > 0 && html`<p class="hint">${T.traces.more(trace.more_rows)}</p>`}
  ${trace.spans.length > 0 && html`<h3>${T.traces.spans}</h3><${Scroll} label=${T.traces.spans}><table class="waterfall"><tbody>${trace.spans.map(([name, start, length]) => {
    const [left, width] = place(start, length, whole);
    return html`<tr><th scope="row">${name}</th><td class="bars"><i class="bar span" style=${{ left: `${left}%`, width: `${width}%` }}></i></td><td class="number">${format.duration(start)}</td><td class="number">${format.duration(length)}</td></tr>`;
  })}</tbody></table><//>`}`;
}
