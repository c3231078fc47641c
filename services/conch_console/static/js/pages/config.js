// The config of a model: effective lines with their sources, the file with findings at their lines.

import { html, useState } from "../../vendor/preact-htm.module.js";
import { get, modelPath } from "../api.js";
import { Empty, Failed, FindingHint, Findings, Panel, Scroll, useRead } from "../components/basics.js";
import { T } from "../text.js";

function Origin({ origin }) {
  if (origin === null || origin === "") return null;
  const written = origin.startsWith("config.pbtxt");
  return html`<span class="origin ${written ? "" : "added"}">${written ? origin.replace("config.pbtxt:", "line ") : T.config.origin[origin] || origin}</span>`;
}

function Effective({ lines }) {
  return html`<p class="hint">${T.config.legend}</p><${Scroll} label=${T.config.effective} className="code"><table><tbody>${lines.map(([text, origin], index) => html`<tr key=${index} class=${origin && !origin.startsWith("config.pbtxt") ? "added" : ""}>
    <td class="line">${index + 1}</td><td><code>${text}</code></td><td><${Origin} origin=${origin} /></td>
  </tr>`)}</tbody></table><//>`;
}

function File({ text, findings }) {
  const byLine = new Map();
  for (const each of findings) if (each.line) byLine.set(each.line, [...(byLine.get(each.line) || []), each]);
  return html`<${Scroll} label=${T.config.file} className="code"><table><tbody>${text.replace(/\n$/, "").split("\n").map((line, index) => html`
    <tr key=${index} class=${byLine.has(index + 1) ? "marked" : ""}><td class="line">${index + 1}</td><td><code>${line || " "}</code></td></tr>
    ${(byLine.get(index + 1) || []).map((each) => html`<tr class="finding ${each.severity}"><td></td><td><p><b>${each.severity}</b> ${each.path && html`<code>${each.path}</code> `}${each.message}</p><${FindingHint} finding=${each} /></td></tr>`)}
  `)}</tbody></table><//>`;
}

export function ConfigTab({ name, model }) {
  const { value, error, again } = useRead(() => get(modelPath(name, "/config")), [name, model.changes]);
  const [view, setView] = useState("");
  if (error) return html`<${Failed} error=${error} again=${again} />`;
  if (!value) return html`<${Panel}><${Empty}>…<//><//>`;
  const placed = value.findings.some((each) => each.line && each.file === value.file);
  const shown = view || (value.lines.length && !placed ? "effective" : "file");
  const button = (key, text) => html`<button aria-pressed=${shown === key} onClick=${() => setView(key)}>${text}</button>`;
  return html`
    <${Panel} title=${T.config.findings}>${value.findings.length ? html`<${Findings} findings=${value.findings} />` : html`<p class="good-text">${T.config.none}</p>`}<//>
    <${Panel}>
      <div class="filters"><div class="segments" role="group">${button("effective", T.config.effective)}${button("file", T.config.file)}</div>${shown === "file" && html`<code class="hint">${value.file}</code>`}</div>
      ${shown === "effective" ? html`<${Effective} lines=${value.lines} />` : value.text === null ? html`<${Empty}>${T.config.noFile}<//>` : html`<${File} text=${value.text} findings=${value.findings.filter((each) => each.file === value.file)} />`}
    <//>`;
}
