// The pure modules of the console; run by tests/conch_console/unit/test_browser_modules.py.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { test } from "node:test";
import { pathToFileURL } from "node:url";

const STATIC = process.env.CONCH_STATIC;
const load = (name) => import(pathToFileURL(`${STATIC}/js/${name}`));
const { addBuckets, quantile, takeBuckets, total } = await load("quantiles.js");
const format = await load("format.js");
const tensors = await load("tensors.js");
const { fieldsOf, parametersOf, shapeProblem, tensorOf, tensorsOf } = await load("form.js");
const { imageLayout, pixelsToValues, valuesToPixels } = await load("image.js");
const copy = await load("copy_as.js");
const chat = await load("chat.js");
const { EventReader, backOff } = await load("api.js");

test("buckets are added and taken out again", () => {
  const counts = addBuckets("A2Hk4I1eZ1");
  assert.deepEqual([...counts], [[10, 2], [17, 724], [18, 50], [35, 1]]);
  assert.equal(total(counts), 777);
  assert.equal(takeBuckets("A2Hk4I1eZ1", counts).size, 0);
});

test("quantiles lie within their bucket and rise", () => {
  const counts = addBuckets("H50I50");
  const values = [0.01, 0.25, 0.5, 0.75, 0.99].map((share) => quantile(counts, share));
  assert.ok(values.every((value, index) => !index || value >= values[index - 1]));
  assert.ok(values[0] > 2 ** 16 / 1000 && values[4] <= 2 ** 18 / 1000);
  assert.equal(quantile(counts, 0.5), 2 ** 17 / 1000);
  assert.equal(quantile(new Map(), 0.5), null);
});

test("numbers are short", () => {
  const cases = [[0, "0"], [0.5, "0.5"], [12.34, "12.3"], [9999, "9999"], [12345, "12.3k"], [4.5e6, "4.5M"], [null, "–"]];
  for (const [value, text] of cases) assert.equal(format.short(value), text);
  const times = [[0, "0"], [0.5, "0.5 µs"], [950, "950 µs"], [1500, "1.5 ms"], [2.5e6, "2.5 s"], [90e6, "1 min 30 s"]];
  for (const [us, text] of times) assert.equal(format.duration(us), text);
  assert.equal(format.bytes(1536), "1.5 KiB");
  assert.equal(format.rate(0.01), "<0.1");
  assert.equal(format.percent(0.123), "12.3 %");
});

test("values are read from numbers, CSV and JSON", () => {
  assert.deepEqual(tensors.parseValues("1 2,3;4\n5", "INT32").values, [1, 2, 3, 4, 5]);
  assert.deepEqual(tensors.parseValues("[[1, 2], [3, 4]]", "FP32"), { values: [1, 2, 3, 4], shape: [2, 2] });
  assert.deepEqual(tensors.parseValues("9223372036854775807", "INT64").values, [9223372036854775807n]);
  assert.deepEqual(tensors.parseValues("[9223372036854775807]", "INT64").values, [9223372036854775807n]);
  assert.deepEqual(tensors.parseValues("nan -inf 1e3", "FP16").values, [NaN, -Infinity, 1000]);
  assert.deepEqual(tensors.parseValues("true 0 yes", "BOOL").values, [true, false, true]);
  assert.deepEqual(tensors.parseValues("a b\nc", "BYTES").values, ["a b", "c"]);
  for (const [text, datatype] of [["300", "UINT8"], ["-1", "UINT64"], ["1.5", "INT32"], ["x", "FP32"], ["[[1],[2,3]]", "INT32"], ["[1,", "INT32"], ["2", "BOOL"]]) {
    assert.throws(() => tensors.parseValues(text, datatype), tensors.ValueError, `${text} as ${datatype}`);
  }
});

test("a body has the JSON first and every tensor behind it", () => {
  const inputs = [
    { name: "a", datatype: "INT16", shape: [2], values: [1, -2] },
    { name: "b", datatype: "BYTES", shape: [2], values: ["é", new Uint8Array([0, 255])] },
  ];
  const { body, headLength } = tensors.requestBody(inputs, { parameters: { priority: 1 }, outputs: [{ name: "y" }] });
  const head = JSON.parse(new TextDecoder().decode(body.slice(0, headLength)));
  assert.deepEqual(head.inputs.map((each) => each.parameters.binary_data_size), [4, 12]);
  assert.deepEqual(head.parameters, { priority: 1 });
  assert.deepEqual([...body.slice(headLength)], [1, 0, 254, 255, 2, 0, 0, 0, 0xc3, 0xa9, 2, 0, 0, 0, 0, 255]);
});

const signature = {
  inputs: [
    { name: "x", datatype: "FP32", shape: [-1, 3], optional: false },
    { name: "image", datatype: "UINT8", shape: [-1, 3, 224, 224], optional: false },
    { name: "note", datatype: "BYTES", shape: [1], optional: true },
  ],
};

test("a form begins with values that can be sent, and says what is wrong", () => {
  const [x, image, note] = fieldsOf(signature);
  assert.deepEqual(tensorOf(x), { name: "x", datatype: "FP32", shape: [1, 3], values: [0, 1, 2] });
  assert.deepEqual(image.ways.slice(0, 3), ["values", "random", "image"]);
  assert.equal(image.way, "random");
  assert.equal(note.used, false);
  assert.match(shapeProblem([2, 4], [-1, 3]), /dimension 2 must be 3, got 4/);
  assert.throws(() => tensorsOf([{ ...x, text: "1 2" }]), (error) => error.field === "x" && /expected 3 values/.test(error.message));
  assert.deepEqual(tensorOf({ ...x, text: "[[1,2,3],[4,5,6]]" }).shape, [2, 3]);
});

test("parameters are checked and left out where they are empty", () => {
  assert.deepEqual(parametersOf({ priority: "", timeout: "", custom: "" }), {});
  assert.deepEqual(parametersOf({ priority: "2", timeout: "500", sequenceId: "7", sequenceStart: true, custom: '{"t": 0.5}' }), { priority: 2, timeout: 500, sequence_id: 7, sequence_start: true, sequence_end: false, t: 0.5 });
  assert.throws(() => parametersOf({ priority: "x" }), tensors.ValueError);
  assert.throws(() => parametersOf({ custom: "[1]" }), tensors.ValueError);
});

test("images are put in order", () => {
  assert.deepEqual(imageLayout([-1, 3, 32, 64]), { order: "NCHW", width: 64, height: 32, channels: 3 });
  assert.deepEqual(imageLayout([32, 64, 1]), { order: "NHWC", width: 64, height: 32, channels: 1 });
  assert.deepEqual(imageLayout([-1, 64]), { order: "NHWC", width: 8, height: 8, channels: 1 });
  assert.equal(imageLayout([-1, 10]), null);
  const pixels = new Uint8ClampedArray([255, 0, 0, 255, 0, 255, 0, 255]);
  assert.deepEqual(pixelsToValues(pixels, 2, 1, { order: "NHWC", channels: 3, range: "unit" }), [1, 0, 0, 0, 1, 0]);
  assert.deepEqual(pixelsToValues(pixels, 2, 1, { order: "NCHW", channels: 3, range: "bytes", invert: true }), [0, 255, 255, 0, 255, 255]);
  assert.deepEqual(pixelsToValues(pixels, 2, 1, { order: "NHWC", channels: 1, range: { low: 0, high: 16 }, round: true }), [5, 9]);
  const [red] = pixelsToValues(pixels, 2, 1, { order: "NHWC", channels: 3, range: "imagenet" });
  assert.ok(Math.abs(red - (1 - 0.485) / 0.229) < 1e-9);
  assert.deepEqual([...valuesToPixels([0, 10], 2, 1, 1, "NHWC")], [0, 0, 0, 255, 255, 255, 255, 255]);
});

test("a command says why a request can't be one", () => {
  const tensor = (datatype, values) => [{ name: "x", datatype, shape: [values.length], values }];
  assert.match(copy.curl("http://h", "a b", "2", tensor("INT64", [9007199254740993n]), {}, false), /a%20b\/versions\/2\/infer[\s\S]*"data":\[9007199254740993\]/);
  assert.match(copy.curl("http://h", "m", "", tensor("BYTES", ["it's"]), {}, false), /it'\\''s/);
  for (const each of [tensor("FP16", [1]), tensor("FP32", [NaN]), tensor("BYTES", [new Uint8Array(1)])]) assert.match(copy.curl("http://h", "m", "", each, {}, false), /^# .*use Python/);
});

test("a shell reads the words of a command as they are", () => {
  const words = (command) => execFileSync("sh", ["-c", command.replace(/^curl/, "printf '%s\\n'")], { encoding: "utf8" }).split("\n");
  for (const model of ["it's", "a'$(echo b)'c", "(a) `b` & *!~"]) {
    const tensors = [{ name: model, datatype: "INT32", shape: [1], values: [1] }];
    const found = words(copy.curl("http://h", model, "2", tensors, {}, false));
    assert.equal(found[1], `http://h/v2/models/${encodeURIComponent(model)}/versions/2/infer`);
    assert.equal(JSON.parse(found[5]).inputs[0].name, model);
    const url = `http://h/${model}`;
    assert.equal(words(chat.chatCurl(url, { messages: [] }))[1], `${url}/v1/chat/completions`);
  }
});

test("events are read however the text is cut", () => {
  const text = 'event: a\ndata: {"n":1}\n\n:\n\nevent: b\ndata: [2]\n\n';
  for (let cut = 0; cut <= text.length; cut += 1) {
    const seen = [];
    const reader = new EventReader((name, content) => seen.push([name, content]));
    reader.feed(text.slice(0, cut));
    reader.feed(text.slice(cut));
    assert.deepEqual(seen, [["a", { n: 1 }], ["b", [2]]]);
  }
});

test("waits grow and stay bounded", () => {
  const waits = Array.from({ length: 12 }, (_, tries) => backOff(tries, () => 0.5));
  assert.ok(waits.every((wait, index) => !index || wait >= waits[index - 1]) && waits[11] === 15000);
});

test("a conversation goes on without answers that failed", () => {
  const settings = { system: "s", temperature: " 0.5 ", maxTokens: "", topP: "", stop: "a\n\nb c" };
  const turns = [
    { text: "one", answer: { ...chat.newAnswer(), text: "1" } },
    { text: "two", answer: { ...chat.newAnswer(), error: "no" } },
  ];
  const body = chat.chatBody("m", settings, turns, "three");
  assert.deepEqual(body.messages.map((each) => each.content), ["s", "one", "1", "three"]);
  assert.deepEqual([body.temperature, body.stop, "top_p" in body], [0.5, ["a", "b c"], false]);
  assert.throws(() => chat.chatBody("m", { ...settings, topP: "much" }, [], "x"), /top_p: “much” is no number/);
  assert.match(chat.chatCurl("http://h", { messages: [{ content: "it's" }] }), /it'\\''s/);
  assert.match(chat.openaiClient("http://h", body), /messages=\[\{"role": "system", "content": "s"\}/);
});

test("an answer grows by events", () => {
  const chunk = (delta, finish_reason = null, usage = null) => ({ choices: [{ delta, finish_reason }], usage });
  const call = (name, text) => chunk({ tool_calls: [{ index: 0, function: { name, arguments: text } }] });
  const events = [chunk({ role: "assistant" }), chunk({ reasoning: "hm" }), chunk({ content: "a" }), call("f", "{"), call("", "}"), chunk({}, "stop"), { choices: [], usage: { completion_tokens: 5 } }];
  const answer = events.reduce((before, event, index) => chat.withEvent(before, event, 100 * index), chat.newAnswer());
  assert.deepEqual([answer.text, answer.reasoning, answer.finish], ["a", "hm", "stop"]);
  assert.deepEqual(answer.calls, [{ name: "f", arguments: "{}" }]);
  assert.deepEqual([answer.first, answer.last], [100, 400]);
  assert.equal(Math.round(chat.tokenRate(answer)), 13);
  assert.equal(chat.tokenRate(chat.newAnswer()), null);
  assert.equal(chat.withEvent(answer, { error: { message: "broken" } }, 9).error, "broken");
});

test("the end of OpenAI's streams is no event", () => {
  const found = [];
  new EventReader((name, content) => found.push(content)).feed('data: {"a":1}\n\ndata: [DONE]\n\n');
  assert.deepEqual(found, [{ a: 1 }]);
});
