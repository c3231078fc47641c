// Outputs of a model: as values, as bars of classes, as an image, or as text that grows.

import { html, useEffect, useRef, useState } from "../../vendor/preact-htm.module.js";
import * as format from "../format.js";
import { imageLayout, valuesToPixels } from "../image.js";
import { isFloat } from "../tensors.js";
import { T } from "../text.js";

const MOST_CELLS = 256;
const MOST_BARS = 10;
const BARS_AT_MOST = 10000;

/** How an output can be shown, the best way first. */
export function viewsOf(output) {
  if (output.datatype === "BYTES") return output.data.some((each) => typeof each === "string" && /^[-\d.e+]+:\d+(:.*)?$/.test(each)) ? ["bars", "table"] : ["table"];
  if (!output.data) return ["table"];
  const inner = output.shape.filter((dim) => dim !== 1);
  const views = ["table"];
  if (isFloat(output.datatype) && inner.length === 1 && inner[0] >= 3 && inner[0] <= BARS_AT_MOST) views.unshift("bars");
  const layout = imageLayout(output.shape);
  if (layout && layout.width >= 8 && layout.height >= 8 && (output.shape.length > 2 || (inner.length === 1 && inner[0] >= 64 && Number.isInteger(Math.sqrt(inner[0]))))) {
    if (output.shape.length > 2) views.unshift("image");
    else views.push("image");
  }
  return views;
}

/** The classes with the largest scores: [label, score]. */
export function classesOf(output) {
  if (output.datatype === "BYTES") {
    return output.data.map((text) => {
      const [score, index, label] = text.split(":");
      return [label || index, Number(score)];
    });
  }
  return output.data
    .map((score, index) => [String(index), typeof score === "number" ? score : NaN])
    .filter(([, score]) => !Number.isNaN(score))
    .sort((a, b) => b[1] - a[1])
    .slice(0, MOST_BARS);
}

function Bars({ output }) {
  const classes = classesOf(output);
  const most = Math.max(...classes.map(([, score]) => Math.abs(score)), 1e-9);
  return html`<table class="classes"><tbody>${classes.map(([label, score]) => html`<tr><th scope="row">${label}</th><td class="bars"><i class="bar ${score < 0 ? "negative" : ""}" style=${{ width: `${(Math.abs(score) / most) * 100}%` }}></i></td><td class="number">${format.short(score)}</td></tr>`)}</tbody></table>`;
}

function Image({ output }) {
  const canvas = useRef(null);
  const { width, height, channels, order } = imageLayout(output.shape);
  useEffect(() => {
    const target = canvas.current;
    target.width = width;
    target.height = height;
    target.getContext("2d").putImageData(new ImageData(valuesToPixels(output.data, width, height, channels, order), width, height), 0, 0);
  }, [output]);
  return html`<canvas ref=${canvas} class="picture" role="img" aria-label=${`${output.name} ${format.shape(output.shape)}`}></canvas>`;
}

const cell = (value) => (value === null ? "null" : typeof value === "object" ? `base64: ${value.base64.slice(0, 60)}${value.base64.length > 60 ? "…" : ""}` : typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(6))) : String(value));

function Values({ output }) {
  if (!output.data) {
    const { summary } = output;
    return html`<p class="hint">${T.try.summary(summary.elements)}</p><dl class="facts">${Object.entries(summary).filter(([key]) => key !== "first" && key !== "elements").map(([key, value]) => html`<dt>${key}</dt><dd>${format.short(value)}</dd>`)}</dl>`;
  }
  const shown = output.data.slice(0, MOST_CELLS);
  const more = output.data.length - shown.length + (output.left_out || 0);
  const texts = output.datatype === "BYTES";
  return html`${texts ? html`<ol class="texts" start="0">${shown.map((value) => html`<li><pre>${cell(value)}</pre></li>`)}</ol>` : html`<div class="cells" tabindex="0" role="group" aria-label=${output.name}>${shown.map((value) => html`<span>${cell(value)}</span>`)}</div>`}
    ${more > 0 && html`<p class="hint">${T.try.more(more)}</p>`}`;
}

function Output({ output }) {
  const views = viewsOf(output);
  const [chosen, setChosen] = useState("");
  const view = views.includes(chosen) ? chosen : views[0];
  return html`<section class="output"><header><h3><code>${output.name}</code></h3><span class="muted">${output.datatype} ${format.shape(output.shape)}</span>
    ${views.length > 1 && html`<div class="segments" role="group" aria-label=${output.name}>${views.map((each) => html`<button type="button" key=${each} aria-pressed=${view === each} onClick=${() => setChosen(each)}>${T.try.views[each]}</button>`)}</div>`}</header>
    ${view === "bars" ? html`<${Bars} output=${output} />` : view === "image" ? html`<${Image} output=${output} />` : html`<${Values} output=${output} />`}
  </section>`;
}

/** Text outputs of several responses, joined as they come. */
export function joinedTexts(responses) {
  const found = new Map();
  for (const response of responses) {
    for (const output of response.outputs) {
      if (output.datatype !== "BYTES") continue;
      found.set(output.name, (found.get(output.name) || "") + output.data.filter((each) => typeof each === "string").join(""));
    }
  }
  return found;
}

export function Outputs({ responses, running }) {
  const [at, setAt] = useState(-1);
  const many = responses.length > 1;
  const shown = responses[at >= 0 && at < responses.length ? at : responses.length - 1];
  const texts = many || running ? joinedTexts(responses) : new Map();
  return html`
    ${[...texts].map(([name, text]) => html`<section class="output" key=${name}><header><h3><code>${name}</code></h3><span class="muted">${T.try.views.text}</span></header><pre class="growing">${text}${running && html`<i class="caret" aria-hidden="true"></i>`}</pre></section>`)}
    ${many && html`<label class="field inline"><span>Response</span><input type="range" min="1" max=${responses.length} value=${at < 0 ? responses.length : at + 1} onInput=${(event) => setAt(Number(event.target.value) - 1)} /><output>${(at < 0 ? responses.length - 1 : at) + 1}, ${format.duration(shown.at_us)}</output></label>`}
    ${shown.outputs.map((output) => html`<${Output} key=${output.name} output=${output} />`)}
    ${Object.keys(shown.parameters || {}).length > 0 && html`<dl class="facts">${Object.entries(shown.parameters).map(([key, value]) => html`<dt>${key}</dt><dd>${String(value)}</dd>`)}</dl>`}`;
}
