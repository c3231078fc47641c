// What a model's requests bring, column by column, beside its training set.

import { html } from "../../vendor/preact-htm.module.js";
import { get, modelPath } from "../api.js";
import { Empty, Failed, Panel, Scroll, State, usePolled } from "../components/basics.js";
import * as format from "../format.js";
import { T } from "../text.js";

const EVERY_MS = 5000;
const SOME = 0.1;
const MUCH = 0.25;
const [WIDTH, HEIGHT] = [96, 28];

/** The word and tone of a population stability index, by its usual limits. */
export function driftOf(psi) {
  if (psi < SOME) return ["none", "good"];
  return psi < MUCH ? ["some", "warn"] : ["much", "bad"];
}

/** The label of a bin. */
export function binLabel(bin) {
  if (bin.value !== undefined) return bin.value;
  if (bin.is !== undefined) return T.inputs.is[bin.is];
  return bin.upto === null ? T.inputs.above : T.inputs.upto(format.short(bin.upto));
}

/** Typical values of a column: the middle of its numbers, or its most frequent categories. */
export function typical(column) {
  if (column.kind === "category") return column.top.slice(0, 3).map((each) => `${each.value} ${format.percent(each.share)}`).join(", ");
  const { 0.05: low, 0.5: middle, 0.95: high } = column.quantiles;
  return middle === undefined ? "" : T.inputs.between(format.short(low), format.short(middle), format.short(high));
}

function Shares({ bins }) {
  const most = Math.max(...bins.flatMap((bin) => [bin.training, bin.requests]), 1e-9);
  const step = WIDTH / bins.length;
  const bar = (share, at, name) => html`<rect class=${name} x=${at} y=${HEIGHT - (HEIGHT * share) / most} width=${Math.max(step / 2 - 0.5, 0.5)} height=${(HEIGHT * share) / most} />`;
  return html`<svg class="shares" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${T.inputs.shares}>
    ${bins.map((bin, index) => html`<g key=${index}><title>${`${binLabel(bin)}: ${format.percent(bin.training)} ${T.inputs.of}, ${format.percent(bin.requests)} ${T.inputs.inRequests}`}</title>${bar(bin.training, index * step, "training")}${bar(bin.requests, index * step + step / 2, "requests")}</g>`)}
  </svg>`;
}

function Psi({ column }) {
  if (column.psi === null) return html`<span class="hint">${column.note || format.NONE}</span>`;
  const [word, tone] = driftOf(column.psi);
  return html`${format.short(column.psi)} <${State} tone=${tone} text=${T.inputs.drift[word]} />`;
}

function Columns({ profile }) {
  const compared = profile.training !== null;
  return html`<${Scroll} label=${T.inputs.column}><table>
    <thead><tr><th scope="col">${T.inputs.column}</th><th scope="col" class="number">${T.inputs.nulls}</th><th scope="col">${T.inputs.typical}</th>${compared && html`<th scope="col">${T.inputs.psi}</th><th scope="col">${T.inputs.fresh}</th><th scope="col" class="wide">${T.inputs.shares}</th>`}</tr></thead>
    <tbody>${profile.columns.map((column) => html`<tr key=${column.name}>
      <th scope="row">${column.name}</th><td class="number">${column.rows ? format.percent(column.nulls / column.rows) : format.NONE}</td><td>${typical(column)}</td>
      ${compared && html`<td><${Psi} column=${column} /></td>
      <td>${column.new === undefined || column.new === null ? "" : format.percent(column.new)}${column.new_values?.length ? html` <span class="hint">${column.new_values.slice(0, 3).join(", ")}</span>` : ""}</td>
      <td class="wide">${column.bins.length > 0 && html`<${Shares} bins=${column.bins} />`}</td>`}
    </tr>`)}</tbody>
  </table><//>`;
}

export function InputsTab({ name }) {
  const { value, error, again } = usePolled(() => get(modelPath(name, "/profiles")), [name], EVERY_MS);
  if (!value) return error && html`<${Failed} error=${error} again=${again} />`;
  if (!value.profiles.length) return html`<${Panel}><p class="empty">${T.inputs.none}</p><//>`;
  return value.profiles.map((profile) => html`<${Panel} key=${profile.version} title=${T.inputs.title(profile.version)}>
    <dl class="facts across">
      <div><dt>${T.inputs.requests}</dt><dd>${format.short(profile.requests)}</dd></div>
      <div><dt>${T.inputs.rows}</dt><dd>${format.short(profile.rows)}</dd></div>
      <div><dt>${T.inputs.covers}</dt><dd>${format.seconds(profile.seconds)}</dd></div>
      <div><dt>${T.inputs.training}</dt><dd>${profile.training ? T.inputs.trainingRows(format.short(profile.training.rows)) : profile.training_note || T.inputs.noTraining}</dd></div>
      ${profile.left_out.length > 0 && html`<div><dt>${T.inputs.leftOut}</dt><dd>${profile.left_out.join(", ")}</dd></div>`}
    </dl>
    ${profile.requests ? html`<${Columns} profile=${profile} />` : html`<${Empty}>${T.inputs.waiting}<//>`}
  <//>`);
}
