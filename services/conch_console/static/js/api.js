// Calls of the server, and streams of server-sent events.

export class ApiError extends Error {
  constructor(status, content) {
    super(content.error?.message || content.error || `the server answered ${status}`);
    this.status = status;
    this.code = content.code || "";
    this.findings = content.findings || [];
  }
}

const OWN = { "X-Conch-Console": "1" };

async function checked(response) {
  if (response.ok) return response;
  let content = {};
  try {
    content = await response.json();
  } catch {
    // not from this server
  }
  throw new ApiError(response.status, content);
}

export async function get(path) {
  return (await checked(await fetch(path, { cache: "no-store" }))).json();
}

export async function send(method, path, content) {
  const body = content === undefined ? undefined : JSON.stringify(content);
  const headers = body === undefined ? OWN : { ...OWN, "Content-Type": "application/json" };
  return (await checked(await fetch(path, { method, headers, body }))).json();
}

export const post = (path, content = {}) => send("POST", path, content);
export const modelPath = (name, rest = "") => `/api/models/${encodeURIComponent(name)}${rest}`;

/** Splits a stream of text into events; calls `take(name, content)` for each. */
export class EventReader {
  constructor(take) {
    this.take = take;
    this.text = "";
  }

  feed(piece) {
    this.text += piece;
    let end;
    while ((end = this.text.indexOf("\n\n")) >= 0) {
      const block = this.text.slice(0, end);
      this.text = this.text.slice(end + 2);
      let name = "message";
      let data = "";
      for (const line of block.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) data += line.slice(6);
      }
      if (data && data !== "[DONE]") this.take(name, JSON.parse(data));
    }
  }
}

/** Reads a stream of events until its end. */
export async function stream(path, options, take) {
  const response = await checked(await fetch(path, { cache: "no-store", ...options }));
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  const events = new EventReader(take);
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    events.feed(decoder.decode(value, { stream: true }));
  }
}

/** Sends a request to a model; calls `take` for each event. */
export function infer(name, version, { body, headLength }, signal, take) {
  const path = modelPath(name, `${version ? `/versions/${version}` : ""}/infer`);
  const headers = { ...OWN, "Content-Type": "application/octet-stream", "Inference-Header-Content-Length": String(headLength) };
  return stream(path, { method: "POST", headers, body, signal }, take);
}

/** Sends a chat to a model; calls `take` for each event. */
export function chat(name, content, signal, take) {
  const body = JSON.stringify({ ...content, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } });
  return stream(modelPath(name, "/chat"), { method: "POST", headers: { ...OWN, "Content-Type": "application/json" }, body, signal }, take);
}

/** How long to wait before the next try of a connection: doubles up to 15 s, with some chance. */
export function backOff(tries, random = Math.random) {
  return Math.min(500 * 2 ** tries, 15000) * (0.75 + random() / 2);
}
