// A conversation: its requests, its answers as they come, and both as a command or a program. Pure.

import { quoted, word } from "./copy_as.js";
import { ValueError } from "./tensors.js";

const NUMBERS = { temperature: "temperature", max_tokens: "maxTokens", top_p: "topP" };

/** The messages that go on: answers that have no text are left out, with what they were asked. */
function messagesOf(system, turns, text) {
  const told = turns.filter((turn) => turn.answer.text);
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...told.flatMap((turn) => [{ role: "user", content: turn.text }, { role: "assistant", content: turn.answer.text }]),
    { role: "user", content: text },
  ];
}

/** The body of a request; raises ValueError for a setting that is no number. */
export function chatBody(model, settings, turns, text) {
  const body = { model, messages: messagesOf(settings.system, turns, text) };
  for (const [name, key] of Object.entries(NUMBERS)) {
    const written = String(settings[key]).trim();
    if (!written) continue;
    if (!Number.isFinite(Number(written))) throw new ValueError(`${name}: “${written}” is no number`);
    body[name] = Number(written);
  }
  const stop = settings.stop.split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  return body;
}

/** An answer before its first event. */
export const newAnswer = () => ({ text: "", reasoning: "", calls: [], finish: "", usage: null, error: "", pieces: 0, first: null, last: null });

/** The answer with one more event, which comes `at` milliseconds after the request. */
export function withEvent(answer, event, at) {
  if (event.error) return { ...answer, error: event.error.message || String(event.error) };
  const found = { ...answer, usage: event.usage || answer.usage };
  const choice = event.choices?.[0];
  if (!choice) return found;
  const { content, reasoning, reasoning_content: thought, tool_calls: calls } = choice.delta || {};
  found.text += content || "";
  found.reasoning += reasoning || thought || "";
  if (calls?.length) found.calls = withCalls(answer.calls, calls);
  if (content || reasoning || thought || calls?.length) {
    found.first ??= at;
    found.last = at;
    found.pieces += 1;
  }
  found.finish = choice.finish_reason || found.finish;
  return found;
}

function withCalls(before, added) {
  const calls = before.slice();
  for (const { index = 0, function: part = {} } of added) {
    const call = calls[index] || { name: "", arguments: "" };
    calls[index] = { name: call.name + (part.name || ""), arguments: call.arguments + (part.arguments || "") };
  }
  return calls;
}

/** Tokens a second between the first and the last one, or pieces if the model counts no tokens; null for too few. */
export function tokenRate(answer) {
  const count = answer.usage ? answer.usage.completion_tokens : answer.pieces;
  const elapsed = answer.last - answer.first;
  return count > 1 && elapsed > 0 ? (1000 * (count - 1)) / elapsed : null;
}

/** A curl command for OpenAI's route. */
export function chatCurl(url, body) {
  const text = JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } });
  return `curl -sN ${word(`${url}/v1/chat/completions`)} \\\n  -H 'Content-Type: application/json' \\\n  -d ${word(text)}`;
}

function python(value) {
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([key, each]) => `${quoted(key)}: ${python(each)}`).join(", ")}}`;
  return typeof value === "string" ? quoted(value) : String(value);
}

/** A program for OpenAI's client. */
export function openaiClient(url, body) {
  return [
    "import openai",
    "",
    `client = openai.OpenAI(base_url=${quoted(`${url}/v1`)}, api_key="none")`,
    "stream = client.chat.completions.create(",
    ...Object.entries(body).map(([key, value]) => `    ${key}=${python(value)},`),
    "    stream=True,",
    ")",
    "for chunk in stream:",
    "    if chunk.choices:",
    '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
  ].join("\n");
}
