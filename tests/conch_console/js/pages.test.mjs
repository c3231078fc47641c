// The rules of pages and the store, without a browser; run by tests/conch_console/unit/test_browser_modules.py.
import assert from "node:assert/strict";
import { test } from "node:test";
import { pathToFileURL } from "node:url";

const STATIC = process.env.CONCH_STATIC;
const load = (name) => import(pathToFileURL(`${STATIC}/js/${name}`));
const { ModelNumbers, Store } = await load("store.js");
const { parseRoute, link } = await load("router.js");
const { rowsOf } = await load("pages/models.js");
const { withDurations } = await load("pages/versions.js");
const { actionsOf, addRates, stepsOf } = await load("pages/rollout.js");
const { binLabel, driftOf, typical } = await load("pages/inputs.js");
const { shares } = await load("pages/overview.js");
const { linesOf } = await load("pages/logs.js");
const { matching } = await load("pages/traces.js");
const { seriesOf, textSeries } = await load("pages/live.js");
const { imageShape } = await load("pages/try.js");
const { bySize, stacked } = await load("components/chart.js");
const { place } = await load("components/waterfall.js");
const { classesOf, joinedTexts, viewsOf } = await load("components/outputs.js");

test("numbers are those of the last ten seconds", () => {
  const numbers = new ModelNumbers();
  for (let second = 0; second < 12; second += 1) numbers.add([[0, second < 2 ? 5 : 0, 1, 2, "H10"]]);
  assert.equal(numbers.rps, 36);
  assert.equal(numbers.errors, 0);
  assert.deepEqual([numbers.pending, numbers.running], [1, 2]);
  for (let second = 0; second < 10; second += 1) numbers.add([]);
  assert.deepEqual([numbers.rps, numbers.counts.size], [0, 0]);
});

test("events change the state of models", () => {
  const store = new Store();
  store.models = new Map([["m", { name: "m", reason: "", versions: [{ version: 1, phase: "READY", reason: "" }] }]]);
  assert.equal(store.takeEvents([{ revision: 5, model: "m", version: 1, phase: "DRAINING", reason: "", t: 1 }]), false);
  assert.equal(Store.phaseOf(store.models.get("m")), "DRAINING");
  store.takeEvents([{ revision: 6, model: "m", version: 2, phase: "FAILED", reason: "broken", t: 2 }]);
  assert.equal(Store.failureOf(store.models.get("m")), "broken");
  assert.equal(store.takeEvents([{ revision: 7, model: "new", version: 1, phase: "LOADING", reason: "", t: 3 }]), true);
  assert.equal(store.revision, 7);
});

test("addresses survive any name of a model", () => {
  for (const name of ["m", "a/b", "<img onerror=alert(1)>", "100%", "ü ü"]) assert.deepEqual(parseRoute(link("models", name, "try")), ["models", name, "try"]);
});

test("rows are filtered and sorted", () => {
  const model = (name, phase) => ({ name, reason: "", versions: [{ version: 1, phase }] });
  const models = [model("b", "READY"), model("a", "FAILED"), model("ab", "READY")];
  const names = (options) => rowsOf(models, new Map(), { filter: "", phase: "", sort: "name", down: false, ...options }).map((row) => row.model.name);
  assert.deepEqual(names({}), ["a", "ab", "b"]);
  assert.deepEqual(names({ filter: "B" }), ["ab", "b"]);
  assert.deepEqual(names({ phase: "READY", down: true }), ["b", "ab"]);
  assert.deepEqual(names({ sort: "state" }), ["a", "ab", "b"]);
});

test("each load has its duration", () => {
  const event = (revision, version, phase, t) => ({ revision, version, phase, t });
  const found = withDurations([event(1, 1, "STAGING", 1), event(2, 1, "LOADING", 2), event(3, 1, "READY", 4), event(4, 2, "LOADING", 5), event(5, 2, "FAILED", 6)]);
  assert.deepEqual(found.map((each) => each.took), [1, null, 3, null, null]);
});

test("lines of the log are filtered", () => {
  const line = (n, level, message, models = [], crash = false) => ({ n, level, message, models, crash, logger: "conch.x" });
  const records = [line(1, "info", "loaded"), line(2, "warning", "slow", ["m"]), line(3, "error", "died", ["m"], true)];
  const numbers = (filter) => linesOf(records, { level: "all", model: "", text: "", ...filter }).map((each) => each.n);
  assert.deepEqual(numbers({}), [1, 2, 3]);
  assert.deepEqual(numbers({ level: "warning" }), [2, 3]);
  assert.deepEqual(numbers({ level: "crash" }), [3]);
  assert.deepEqual(numbers({ model: "m", text: "SLOW" }), [2]);
});

test("traces are filtered", () => {
  const traces = [{ model: "a", us: 500, code: "" }, { model: "b", us: 5000, code: "INTERNAL" }];
  assert.equal(matching(traces, { model: "a" }).length, 1);
  assert.equal(matching(traces, { slowMs: 1 })[0].model, "b");
  assert.equal(matching(traces, { failed: true })[0].model, "b");
});

test("series add versions up, and choose one", () => {
  const row = (version, ok) => ({ version, ok, failed: 1, rejected: 0, cancelled: 0, hits: 0, pending: 1, running: 0, latencies: `H${ok}`, stages_us: [1, 2, 3, 4], batches: { 4: ok } });
  const points = [{ t: 1, versions: [row(1, 5), row(2, 7)] }];
  assert.deepEqual(seriesOf(points, 0).counts[0], [12]);
  assert.deepEqual(seriesOf(points, 2).counts[0], [7]);
  assert.deepEqual(seriesOf(points, 0).batches, [{ 4: 12 }]);
});

test("tokens are rates, and the first token's time is a mean of those that came", () => {
  const text = (generated, first, first_s, more) => ({ generated, prompt: 0, cached: 0, first, first_s, ...more });
  const points = [
    { t: 1, text: text(10, 1, 0.5, { cache: 0.25 }) },
    { t: 3, text: text(30, 3, 0.9) },
    { t: 4, text: text(30, 3, 0.9) },
    { t: 5, text: text(5, 1, 0.1) },
    { t: 6, text: null },
  ];
  const found = textSeries(points);
  assert.deepEqual(found.generated, [null, 10, 0, null, null]);
  assert.deepEqual(found.first.map((each) => each && Math.round(each)), [null, 200000, null, null, null]);
  assert.deepEqual(found.cache, [0.25, null, null, null, null]);
});

test("charts stack, group and place", () => {
  assert.deepEqual(stacked([[1, null], [2, 3]]), [[1, null], [3, 3]]);
  assert.deepEqual(bySize({ 1: 1, 3: 2, 4: 1, 500: 1 }), [1, 0, 3, 0, 0, 0, 0, 1]);
  assert.deepEqual(place(50, 25, 100), [50, 25]);
  assert.deepEqual(place(0, 0, 0), [0, 100]);
  assert.ok(place(99.9, 5, 100).reduce((a, b) => a + b) <= 100);
});

test("outputs are shown as what they look like", () => {
  const output = (datatype, shape, data) => ({ name: "y", datatype, shape, data });
  assert.equal(viewsOf(output("FP32", [1, 10], Array(10).fill(0.1)))[0], "bars");
  assert.equal(viewsOf(output("FP32", [1, 3, 8, 8], Array(192).fill(0)))[0], "image");
  assert.equal(viewsOf(output("INT32", [1, 16], Array(16).fill(0)))[0], "table");
  assert.deepEqual(classesOf(output("BYTES", [2], ["0.9:1:one", "0.1:2"])), [["one", 0.9], ["2", 0.1]]);
  assert.deepEqual(classesOf(output("FP32", [3], [0.1, "nan", 0.5])), [["2", 0.5], ["0", 0.1]]);
  assert.equal(joinedTexts([{ outputs: [output("BYTES", [1], ["a "])] }, { outputs: [output("BYTES", [1], ["b"])] }]).get("y"), "a b");
  assert.deepEqual(imageShape([-1, 3, -1, -1], { order: "NCHW", channels: 3, width: 4, height: 2 }), [1, 3, 2, 4]);
  assert.deepEqual(imageShape([-1, 64], { order: "NHWC", channels: 1, width: 8, height: 8 }), [1, 64]);
});

test("a rollout shows its step and offers what its state allows", () => {
  const rollout = { state: "STEP", step: 1, steps: ["1% 5m", "5% 5m", "50% 5m"], previous: null };
  assert.deepEqual(stepsOf(rollout).map((each) => each.place), ["over", "now", "next"]);
  assert.deepEqual(actionsOf(rollout), ["pause", "advance", "promote", "abort"]);
  assert.deepEqual(actionsOf({ ...rollout, state: "PAUSED" }), ["resume", "advance", "promote", "abort"]);
  assert.deepEqual(actionsOf({ ...rollout, state: "DONE" }), []);
  assert.deepEqual(actionsOf({ ...rollout, state: "BAKING", previous: 7 }), ["rollback"]);
  assert.deepEqual(stepsOf({ ...rollout, state: "DONE", step: 2 }).map((each) => each.place), ["over", "over", "over"]);
});

test("rates are those between two looks", () => {
  const [trends, before] = [new Map(), new Map()];
  for (const requests of [10, 30, 5]) addRates(trends, before, [{ version: 7, requests }], 2);
  assert.deepEqual(trends.get(7), [10, 0]);
  const front = (cpu_s) => ({ name: "front 0", cpu_s });
  assert.deepEqual([shares([], [front(1)], 2), shares([front(1)], [front(2)], 2)], [[null], [0.5]]);
});

test("columns of inputs are told in words", () => {
  assert.deepEqual([0.05, 0.1, 0.3].map((psi) => driftOf(psi)[0]), ["none", "some", "much"]);
  assert.deepEqual([{ upto: 12345 }, { upto: null }, { is: "null" }, { value: "<b>" }].map(binLabel), ["up to 12.3k", "above", "null", "<b>"]);
  assert.equal(typical({ kind: "number", quantiles: { 0.05: 1, 0.5: 2, 0.95: 3 } }), "2, mostly 1 to 3");
  assert.equal(typical({ kind: "number", quantiles: {} }), "");
  assert.equal(typical({ kind: "category", top: [{ value: "a", share: 0.5 }] }), "a 50 %");
});
