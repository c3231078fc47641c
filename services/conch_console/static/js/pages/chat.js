// Talks to a model, and shows its answers as they come, with what they took.

import { html, useEffect, useRef, useState } from "../../vendor/preact-htm.module.js";
import { chat, get } from "../api.js";
import { chatBody, chatCurl, newAnswer, openaiClient, tokenRate, withEvent } from "../chat.js";
import { Empty, Failed, Field, Panel, useRead } from "../components/basics.js";
import { addressOf, CopyAs } from "../components/copy.js";
import * as format from "../format.js";
import { store, Store } from "../store.js";
import { ValueError } from "../tensors.js";
import { T } from "../text.js";

const SETTINGS = { system: "", temperature: "", maxTokens: "", topP: "", stop: "" };

/** The port with OpenAI's routes: one of their own, or the REST port. */
const address = () => addressOf(store.about?.endpoints.some((each) => each.service === "OpenAI") ? "OpenAI" : "HTTP");

function Figures({ answer }) {
  const { usage } = answer;
  const [count, rate] = usage ? [T.chat.tokens, T.chat.rate] : [T.chat.pieces, T.chat.pieceRate];
  const perSecond = tokenRate(answer);
  const facts = [
    [T.chat.first, answer.first === null ? null : format.duration(answer.first * 1000)],
    [count, answer.pieces > 0 && format.short(usage ? usage.completion_tokens : answer.pieces)],
    [rate, perSecond && format.rate(perSecond)],
    [T.chat.prompt, usage && format.short(usage.prompt_tokens)],
    [T.chat.finish, answer.stopped ? T.chat.stopped : answer.finish],
  ];
  return html`<dl class="facts across">${facts.filter(([, value]) => value).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

function Turn({ turn }) {
  const { answer } = turn;
  const waits = turn.running && !answer.text && !answer.reasoning;
  return html`<li class="turn">
    <h3>${T.chat.you}</h3><pre class="said">${turn.text}</pre>
    <h3>${turn.model}</h3>
    ${waits && html`<p class="hint running">${T.chat.waiting}</p>`}
    ${answer.reasoning && html`<details class="more"><summary>${T.chat.reasoning}</summary><pre>${answer.reasoning}</pre></details>`}
    ${answer.text && html`<pre class="answer">${answer.text}${turn.running && html`<i class="caret" aria-hidden="true"></i>`}</pre>`}
    ${answer.calls.map((call, index) => html`<pre class="call" key=${index}>${T.chat.call} ${call.name}(${call.arguments})</pre>`)}
    ${answer.error && html`<div class="notice bad" role="alert"><p class="reason">${answer.error}</p></div>`}
    <${Figures} answer=${answer} />
  </li>`;
}

export function Chat() {
  const ready = [...store.models.values()].filter((model) => Store.phaseOf(model) === "READY").map((model) => model.name);
  const { value, error, again } = useRead(() => get("/api/chat"), [ready.join("\n")]);
  const [chosen, setChosen] = useState("");
  const [settings, setSettings] = useState(SETTINGS);
  const [text, setText] = useState("");
  const [turns, setTurns] = useState([]);
  const [problem, setProblem] = useState("");
  const abort = useRef(null);
  const log = useRef(null);
  const follows = useRef(true); // the end of the conversation, unless the user has scrolled up
  useEffect(() => () => abort.current?.abort(), []);
  useEffect(() => {
    if (follows.current && log.current) log.current.scrollTop = log.current.scrollHeight;
  }, [turns]);
  const models = value?.models || [];
  const model = models.find((each) => each.id === chosen) || models[0];
  const running = turns.some((turn) => turn.running);
  const heading = html`<div class="title"><h1 tabindex="-1">${T.chat.title}</h1></div>`;
  if (!store.may.infer) return html`${heading}<${Panel}><${Empty}>${T.try.off}<//><//>`;
  if (error && !value) return html`${heading}<${Failed} error=${error} again=${again} />`;
  if (!model) return html`${heading}<${Panel}><${Empty}>${value ? T.chat.none : "…"}<//><//>`;

  const update = (change) => setTurns((before) => [...before.slice(0, -1), { ...before[before.length - 1], ...change(before[before.length - 1]) }]);
  const put = (name) => (event) => setSettings({ ...settings, [name]: event.target.value });
  const submit = async (event) => {
    event.preventDefault();
    if (running || !text.trim()) return;
    let body;
    try {
      body = chatBody(model.id, settings, turns, text);
    } catch (failed) {
      if (!(failed instanceof ValueError)) throw failed;
      setProblem(failed.message);
      return;
    }
    follows.current = true;
    setProblem("");
    setText("");
    setTurns([...turns, { text, model: model.id, body, running: true, answer: newAnswer() }]);
    const mine = (abort.current = new AbortController());
    const began = performance.now();
    const answered = (change) => mine === abort.current && update(change);
    try {
      await chat(model.model, body, mine.signal, (_, content) => {
        const at = performance.now() - began;
        answered((turn) => ({ answer: withEvent(turn.answer, content, at) }));
      });
    } catch (failed) {
      const stopped = mine.signal.aborted;
      answered((turn) => ({ answer: { ...turn.answer, stopped, error: stopped ? "" : failed.message } }));
    }
    answered(() => ({ running: false }));
  };
  const clear = () => {
    abort.current?.abort();
    abort.current = null;
    setTurns([]);
  };
  const keys = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  const last = turns[turns.length - 1];
  return html`${heading}<form class="chat" onSubmit=${submit}>
    <${Panel}>
      <ol class="turns" ref=${log} onScroll=${({ target }) => (follows.current = target.scrollHeight - target.scrollTop - target.clientHeight < 40)} role="log" aria-label=${T.chat.conversation} aria-live="polite" aria-busy=${running} tabindex="0">${turns.map((turn, index) => html`<${Turn} key=${index} turn=${turn} />`)}</ol>
      ${!last && html`<${Empty}>${T.chat.empty}<//>`}
      <${Field} label=${T.chat.message}><textarea rows="3" value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${keys} /><//>
      ${problem && html`<p class="problem" role="alert">${problem}</p>`}
      <footer><span class="hint">${T.chat.keys}</span><span class="spacer"></span>
        ${last && html`<button type="button" onClick=${clear}>${T.chat.clear}</button>`}
        ${running ? html`<button type="button" class="danger" onClick=${() => abort.current?.abort()}>${T.chat.stop}</button>` : html`<button class="primary">${T.try.send}</button>`}
      </footer>
      ${last && html`<${CopyAs} code=${{ curl: () => chatCurl(address(), last.body), openai: () => openaiClient(address(), last.body) }} />`}
    <//>
    <${Panel} title=${T.try.parameters}><div class="fields">
      <${Field} label=${T.chat.model}><select value=${model.id} disabled=${running} onChange=${(event) => setChosen(event.target.value)}>${models.map((each) => html`<option key=${each.id} value=${each.id}>${each.id}</option>`)}</select><//>
      <${Field} label=${T.chat.system}><textarea rows="3" value=${settings.system} onInput=${put("system")} /><//>
      <div class="grid">
        <${Field} label="temperature"><input inputmode="decimal" value=${settings.temperature} onInput=${put("temperature")} /><//>
        <${Field} label="max_tokens"><input inputmode="numeric" value=${settings.maxTokens} onInput=${put("maxTokens")} /><//>
        <${Field} label="top_p"><input inputmode="decimal" value=${settings.topP} onInput=${put("topP")} /><//>
      </div>
      <${Field} label=${T.chat.stops}><textarea rows="2" class="mono" spellcheck="false" value=${settings.stop} onInput=${put("stop")} /><//>
    </div><//>
  </form>`;
}
