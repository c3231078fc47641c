// Sends a request to the model, and shows what comes back as it comes.

import { html, useEffect, useRef, useState } from "../../vendor/preact-htm.module.js";
import { infer } from "../api.js";
import { Empty, Field, Panel } from "../components/basics.js";
import { addressOf, CopyAs } from "../components/copy.js";
import { Outputs } from "../components/outputs.js";
import { Timing } from "../components/timing.js";
import { conchClient, curl, tritonclient } from "../copy_as.js";
import { fieldsOf, parametersOf, tensorsOf } from "../form.js";
import { loadPixels, pixelsToValues } from "../image.js";
import { store } from "../store.js";
import { elements, encodeTensor, isFloat, isInteger, isText, parseShape, parseValues, randomValues, requestBody, ValueError } from "../tensors.js";
import { T } from "../text.js";

const MOST_RESPONSES = 1000;

function ImageFields({ field, change }) {
  const image = field.image;
  const number = (name) => (event) => change({ image: { ...image, [name]: Number(event.target.value) }, made: null });
  const own = typeof image.range === "object";
  return html`<div class="grid">
    <${Field} label=${T.try.image.width}><input type="number" min="1" max="4096" value=${image.width} onInput=${number("width")} /><//>
    <${Field} label=${T.try.image.height}><input type="number" min="1" max="4096" value=${image.height} onInput=${number("height")} /><//>
    <${Field} label=${T.try.image.channels}><select value=${image.channels} onChange=${number("channels")}><option value="1">${T.try.image.grey}</option><option value="3">${T.try.image.colour}</option></select><//>
    <${Field} label=${T.try.image.order}><select value=${image.order} onChange=${(event) => change({ image: { ...image, order: event.target.value }, made: null })}><option value="NHWC">NHWC</option><option value="NCHW">NCHW</option></select><//>
    <${Field} label=${T.try.image.range}><select value=${own ? "own" : image.range || "unit"} onChange=${(event) => change({ image: { ...image, range: event.target.value === "own" ? { low: 0, high: 16 } : event.target.value }, made: null })}>${Object.entries(T.try.image.ranges).map(([key, text]) => html`<option value=${key}>${text}</option>`)}</select><//>
    ${own && html`<${Field} label=${T.try.image.low}><input type="number" step="any" value=${image.range.low} onInput=${(event) => change({ image: { ...image, range: { ...image.range, low: Number(event.target.value) } }, made: null })} /><//>
      <${Field} label=${T.try.image.high}><input type="number" step="any" value=${image.range.high} onInput=${(event) => change({ image: { ...image, range: { ...image.range, high: Number(event.target.value) } }, made: null })} /><//>`}
    <label class="check"><input type="checkbox" checked=${Boolean(image.invert)} onChange=${(event) => change({ image: { ...image, invert: event.target.checked }, made: null })} /> ${T.try.image.invert}</label>
  </div>`;
}

/** The shape for an image of these settings: sizes where the model leaves them free. */
export function imageShape(dims, image) {
  const sizes = image.order === "NCHW" ? [image.channels, image.height, image.width] : [image.height, image.width, image.channels];
  const tail = dims.length >= 3 ? sizes : dims.length === 2 && dims[0] !== -1 && dims[0] !== 1 ? sizes.slice(0, 2) : [image.width * image.height * image.channels];
  const lead = dims.slice(0, Math.max(dims.length - tail.length, 0)).map((dim) => (dim < 0 ? 1 : dim));
  return [...lead, ...tail].slice(0, dims.length);
}

async function imageValues(file, field) {
  const { image } = field;
  const pixels = await loadPixels(file, image.width, image.height);
  const range = image.range || "unit";
  const values = pixelsToValues(pixels, image.width, image.height, { ...image, range, round: isInteger(field.datatype) });
  return field.datatype.endsWith("64") && isInteger(field.datatype) ? values.map((value) => BigInt(Math.round(value))) : values;
}

async function fileValues(file, field) {
  if (isText(field.datatype)) return [new Uint8Array(await file.arrayBuffer())];
  return parseValues(await file.text(), field.datatype).values;
}

function InputField({ field, change, problem }) {
  const chosen = useRef(null);
  const id = `input-${field.name}`;
  const take = async (file) => {
    if (!file) return;
    try {
      const made = field.way === "image" ? await imageValues(file, field) : await fileValues(file, field);
      const shape = field.way === "image" ? imageShape(field.dims, field.image).join(", ") : field.shape;
      change({ made, shape, note: `${file.name}: ${T.try.made(made.length)}`, problem: "" });
    } catch (error) {
      change({ made: null, note: "", problem: error.message });
    }
  };
  const again = (changes) => {
    change(changes);
    if (chosen.current?.files[0]) setTimeout(() => chosen.current && take(chosen.current.files[0]), 0);
  };
  const fill = () => {
    try {
      const count = elements(parseShape(field.shape));
      change({ made: randomValues(field.datatype, count), note: T.try.made(count), problem: "" });
    } catch (error) {
      change({ problem: error.message });
    }
  };
  return html`<fieldset class="input ${field.used ? "" : "unused"}">
    <legend><code>${field.name}</code> <span class="muted">${field.datatype} [${field.dims.join(", ")}]</span>
      ${field.optional && html`<label class="check"><input type="checkbox" checked=${field.used} onChange=${(event) => change({ used: event.target.checked })} /> ${T.try.use}</label>`}</legend>
    ${field.used && html`
      <div class="grid">
        <${Field} label=${T.try.shape}><input value=${field.shape} spellcheck="false" onInput=${(event) => change({ shape: event.target.value, made: field.way === "random" ? null : field.made })} /><//>
        <${Field} label=${T.try.as}><select value=${field.way} onChange=${(event) => change({ way: event.target.value, made: null, note: "", problem: "" })}>${field.ways.map((way) => html`<option value=${way}>${T.try.ways[way]}</option>`)}</select><//>
      </div>
      ${field.way === "values" && html`<textarea id=${id} class="mono" rows=${Math.min(Math.max(Math.ceil(field.text.length / 60), 1 + (isText(field.datatype) ? 1 : 0)), 8)} spellcheck="false" aria-label=${`${field.name}: ${isText(field.datatype) ? T.try.textHint : T.try.valuesHint}`} placeholder=${isText(field.datatype) ? T.try.textHint : T.try.valuesHint} value=${field.text} onInput=${(event) => change({ text: event.target.value })} />`}
      ${field.way === "random" && html`<div class="buttons"><button type="button" onClick=${fill}>${T.try.fill}</button><span class="hint">${field.note}</span></div>`}
      ${field.way === "image" && html`<${ImageFields} field=${field} change=${again} />`}
      ${(field.way === "image" || field.way === "file") && html`<div class="buttons"><input type="file" ref=${chosen} aria-label=${`${field.name}: ${T.try.choose}`} accept=${field.way === "image" ? "image/*" : null} onChange=${(event) => take(event.target.files[0])} /><span class="hint">${field.note || (field.way === "file" ? (isText(field.datatype) ? T.try.fileText : T.try.fileCsv) : "")}</span></div>`}
      ${(field.problem || problem) && html`<p class="problem" role="alert">${field.problem || problem}</p>`}`}
  </fieldset>`;
}

function Parameters({ options, change, signature }) {
  const put = (name) => (event) => change({ ...options, [name]: event.target.type === "checkbox" ? event.target.checked : event.target.value });
  const labelled = signature.outputs.some((output) => isFloat(output.datatype) && output.labels);
  return html`<details class="more"><summary>${T.try.parameters}</summary><div class="grid">
    <${Field} label=${T.try.priority}><input inputmode="numeric" value=${options.priority} onInput=${put("priority")} /><//>
    <${Field} label=${T.try.timeout}><input inputmode="numeric" value=${options.timeout} onInput=${put("timeout")} /><//>
    ${signature.sequence && html`<${Field} label=${T.try.sequence}><input value=${options.sequenceId} onInput=${put("sequenceId")} /><//>
      <label class="check"><input type="checkbox" checked=${options.sequenceStart} onChange=${put("sequenceStart")} /> ${T.try.start}</label><label class="check"><input type="checkbox" checked=${options.sequenceEnd} onChange=${put("sequenceEnd")} /> ${T.try.end}</label>`}
    ${labelled && html`<label class="check"><input type="checkbox" checked=${options.classes} onChange=${put("classes")} /> ${T.try.classes}</label>`}
    </div><${Field} label=${T.try.custom}><textarea rows="2" class="mono" spellcheck="false" placeholder='{"temperature": 0.5}' value=${options.custom} onInput=${put("custom")} /><//>
  </details>`;
}

function codeOf({ model, version, tensors, parameters, stream }) {
  return {
    curl: () => curl(addressOf("HTTP"), model, version, tensors, parameters, stream),
    triton: () => tritonclient(addressOf("gRPC"), model, version, tensors, parameters, stream),
    conch: () => conchClient(addressOf("gRPC"), model, version, tensors, parameters, stream),
  };
}

const NO_OPTIONS = { priority: "", timeout: "", sequenceId: "", sequenceStart: true, sequenceEnd: true, custom: "", classes: false };

export function TryTab({ name, model, about }) {
  const ready = Object.keys(about?.ready || {});
  const [version, setVersion] = useState("");
  const chosen = version && ready.includes(version) ? version : ready[ready.length - 1];
  const signature = about?.ready[chosen];
  const shape = JSON.stringify(signature || null);
  const [fields, setFields] = useState([]);
  const [options, setOptions] = useState(NO_OPTIONS);
  const [problem, setProblem] = useState({});
  const [run, setRun] = useState(null);
  const abort = useRef(null);
  const current = useRef(null);
  useEffect(() => {
    if (signature) setFields(fieldsOf(signature));
  }, [shape]);
  useEffect(() => () => abort.current?.abort(), []);
  if (!store.may.infer) return html`<${Panel}><${Empty}>${T.try.off}<//><//>`;
  if (!signature) return html`<${Panel}><${Empty}>${about ? T.model.notLoaded : "…"}<//><//>`;
  const change = (index) => (changes) => setFields((before) => before.map((field, at) => (at === index ? { ...field, ...changes } : field)));
  const update = (state) => {
    current.current = { ...current.current, ...state };
    setRun(current.current);
  };
  const submit = async (event) => {
    event?.preventDefault();
    let tensors;
    let parameters;
    try {
      tensors = tensorsOf(fields);
      parameters = parametersOf(options);
      for (const each of tensors) encodeTensor(each.datatype, each.values.slice(0, 1));
    } catch (error) {
      if (!(error instanceof ValueError)) throw error;
      setProblem({ field: error.field, text: error.message });
      return;
    }
    setProblem({});
    const outputs = options.classes ? signature.outputs.map((output) => (output.labels ? { name: output.name, parameters: { classification: 5 } } : { name: output.name })) : [];
    const request = { model: name, version: version ? chosen : "", tensors, parameters, stream: signature.decoupled };
    abort.current?.abort();
    const mine = (abort.current = new AbortController());
    const began = performance.now();
    current.current = { request, responses: [], count: 0, running: true, error: "", timing: null, round: null, first: null };
    update({});
    try {
      await infer(name, request.version, requestBody(tensors, { parameters, outputs }), mine.signal, (kind, content) => {
        if (kind === "end") update({ timing: content });
        else if (content.error) update({ error: content.error, count: current.current.count + 1 });
        else update({ responses: [...current.current.responses, content].slice(-MOST_RESPONSES), count: current.current.count + 1, first: current.current.first ?? performance.now() - began });
      });
    } catch (error) {
      if (mine.signal.aborted) return;
      update({ error: error.message });
    }
    update({ running: false, round: performance.now() - began });
  };
  const cancel = () => {
    abort.current?.abort();
    update({ running: false });
  };
  const keys = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit(event);
  };
  return html`<div class="try">
    <${Panel} title=${T.try.input}><form onSubmit=${submit} onKeyDown=${keys}>
      ${ready.length > 1 && html`<${Field} label=${T.model.version} className="inline"><select value=${version} onChange=${(event) => setVersion(event.target.value)}><option value="">newest</option>${ready.map((each) => html`<option value=${each}>${each}</option>`)}</select><//>`}
      ${fields.map((field, index) => html`<${InputField} key=${field.name} field=${field} change=${change(index)} problem=${problem.field === field.name ? problem.text : ""} />`)}
      <${Parameters} options=${options} change=${setOptions} signature=${signature} />
      ${problem.text && !problem.field && html`<p class="problem" role="alert">${problem.text}</p>`}
      <footer>${run?.running ? html`<button type="button" class="danger" onClick=${cancel}>${T.try.cancel}</button>` : null}<button class="primary" title="Ctrl+Enter">${run ? T.try.again : T.try.send}</button></footer>
    </form><//>
    <${Panel} title=${T.try.result} className="result"><div aria-live="polite" aria-busy=${Boolean(run?.running)}>
      ${!run && html`<${Empty}>${T.try.empty}<//>`}
      ${run?.running && html`<p class="hint running">${T.try.sending}</p>`}
      ${run?.error && html`<div class="notice bad"><p class="reason">${run.error}</p></div>`}
      ${run && run.count > 0 && html`<p class="hint">${T.try.responses(run.count)}</p>`}
      ${run && run.responses.length > 0 && html`<${Outputs} responses=${run.responses} running=${run.running} />`}
      ${run?.timing && html`<${Timing} timing=${run.timing} round=${run.round} first=${run.request.stream ? run.responses[0]?.at_us : null} />`}
    </div>${run && html`<${CopyAs} code=${codeOf(run.request)} />`}<//>
  </div>`;
}
