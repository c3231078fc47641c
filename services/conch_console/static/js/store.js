// What all pages share: session, models, live numbers, and the connection that keeps them up to date.

import { ApiError, backOff, get, stream } from "./api.js";
import { addBuckets, quantile, takeBuckets } from "./quantiles.js";
import { T } from "./text.js";

const WINDOW = 10; // seconds of quantiles and rates
const TREND = 60; // seconds of the small charts
const LONG = 3600; // seconds of the large ones
const MOST_EVENTS = 100;
const MOST_RECORDS = 1000;

/** The live numbers of one model, over all of its versions. */
export class ModelNumbers {
  constructor() {
    this.recent = []; // [buckets, failed] of the last seconds
    this.counts = new Map();
    this.trend = [];
    this.gauges = new Map(); // by number of the version
    this.ok = 0;
    this.failed = 0;
  }

  /** Takes what one second brought; most models bring nothing. */
  add(lines) {
    let buckets = "";
    let failed = 0;
    for (const [number, fails, pending, running, text] of lines) {
      buckets += text;
      failed += fails;
      this.gauges.set(number, [pending, running]);
    }
    let ok = 0;
    if (buckets) {
      addBuckets(buckets, this.counts);
      for (const [, count] of buckets.matchAll(/[A-Z]([0-9a-z]+)/g)) ok += parseInt(count, 36);
    }
    this.recent.push([buckets, failed, ok]);
    this.ok += ok;
    this.failed += failed;
    if (this.recent.length > WINDOW) {
      const [old, oldFailed, oldOk] = this.recent.shift();
      if (old) takeBuckets(old, this.counts);
      this.ok -= oldOk;
      this.failed -= oldFailed;
    }
    this.trend.push(ok);
    if (this.trend.length > TREND) this.trend.shift();
  }

  get rps() {
    return this.recent.length ? this.ok / this.recent.length : 0;
  }

  get errors() {
    return this.recent.length ? this.failed / this.recent.length : 0;
  }

  get pending() {
    let sum = 0;
    for (const [pending] of this.gauges.values()) sum += pending;
    return sum;
  }

  get running() {
    let sum = 0;
    for (const [, running] of this.gauges.values()) sum += running;
    return sum;
  }
}

export class Store {
  constructor() {
    this.session = null;
    this.about = null;
    this.models = new Map();
    this.modelsRead = false;
    this.numbers = new Map();
    this.names = new Map();
    this.state = { stage: "STARTING", ready: false, uptime: 0 };
    this.machine = {};
    this.events = [];
    this.records = [];
    this.recordsRead = false;
    this.total = { t: [], rps: [], errors: [] };
    this.detail = { model: "", points: [] };
    this.connection = "connecting";
    this.nextTry = 0;
    this.refusal = ""; // why the server lets no further page watch
    this.expired = false;
    this.watching = { model: "", logs: false };
    this.tries = 0;
    this.abort = null;
    this.listeners = new Set();
    this.epoch = "";
    this.revision = 0;
    this.wake = null;
  }

  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  changed() {
    for (const listener of [...this.listeners]) listener();
  }

  // Session

  async readSession() {
    this.session = await get("/api/session");
    this.changed();
  }

  get may() {
    return { control: Boolean(this.session?.control), infer: Boolean(this.session?.infer), admin: this.session?.role === "admin" };
  }

  /** Shows the form to log in; the page reads nothing meanwhile. */
  askLogin() {
    this.session = { tokens: true, policy: this.session.policy };
    if (this.abort) this.abort.abort("switch");
    if (this.wake) this.wake();
    this.changed();
  }

  // Models

  async readModels() {
    const found = await get("/api/models");
    this.models = new Map(found.models.map((model) => [model.name, model]));
    this.epoch = found.epoch;
    this.revision = found.revision;
    this.modelsRead = true;
    this.changed();
  }

  /** The state of a model in one word: that of its best version. */
  static phaseOf(model) {
    const phases = model.versions.map((version) => version.phase);
    for (const phase of ["READY", "LOADING", "WARMING", "STAGING", "DRAINING", "FAILED"]) if (phases.includes(phase)) return phase;
    return model.reason ? "FAILED" : "UNLOADED";
  }

  /** Why the newest load failed; empty if it did not. */
  static failureOf(model) {
    const failed = model.versions.filter((version) => version.phase === "FAILED");
    return failed.length ? failed[failed.length - 1].reason || "failed" : model.reason;
  }

  takeEvents(events) {
    let unknown = false;
    for (const event of events) {
      this.revision = event.revision;
      this.events.unshift(event);
      const model = this.models.get(event.model);
      if (!model) {
        unknown = true;
        continue;
      }
      if (event.rollout) continue;
      if (!event.version) {
        model.reason = event.phase === "FAILED" ? event.reason : "";
        continue;
      }
      let version = model.versions.find((each) => each.version === event.version);
      if (!version) {
        version = { version: event.version, bytes: null };
        model.versions.push(version);
        model.versions.sort((a, b) => a.version - b.version);
      }
      version.phase = event.phase;
      version.reason = event.reason;
      version.t = event.t;
      if (event.phase === "READY") {
        model.reason = "";
        unknown = true; // its backend and instances may be others
      }
      model.changes = (model.changes || 0) + 1;
    }
    this.events.length = Math.min(this.events.length, MOST_EVENTS);
    return unknown;
  }

  numbersOf(name) {
    let numbers = this.numbers.get(name);
    if (!numbers) {
      numbers = new ModelNumbers();
      this.numbers.set(name, numbers);
    }
    return numbers;
  }

  // Live

  /** What the page shows besides the numbers of all: opens the stream anew if that changes. */
  watch(model = "", logs = false) {
    if (this.watching.model === model && this.watching.logs === logs) return;
    this.watching = { model, logs };
    if (this.detail.model !== model && model) this.detail = { model, points: [] };
    if (!logs) this.recordsRead = false;
    if (this.abort) this.abort.abort("switch");
  }

  /** Keeps the stream open, as long as the user may read. */
  async run() {
    while (this.session.read) {
      this.abort = new AbortController();
      const { model, logs } = this.watching;
      const query = new URLSearchParams({ ...(model ? { model } : {}), ...(logs ? { logs: "1" } : {}) });
      try {
        await stream(`/api/live?${query}`, { signal: this.abort.signal }, (name, content) => this.take(name, content));
      } catch (error) {
        if (error === "switch" || this.abort.signal.reason === "switch") continue;
        this.refusal = error instanceof ApiError && error.status === 429 ? T.errors.viewers : "";
        if (error instanceof ApiError && [401, 403].includes(error.status)) {
          this.expired = true;
          this.askLogin();
          return;
        }
      }
      if (this.abort.signal.reason === "switch") continue;
      await this.pause();
    }
  }

  async pause() {
    const wait = backOff(this.tries);
    this.tries += 1;
    this.connection = "lost";
    this.nextTry = Date.now() + wait;
    this.changed();
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, wait);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
    this.wake = null;
  }

  take(name, content) {
    if (name === "hello") this.hello(content);
    else if (name === "tick") this.tick(content);
    else if (name === "detail") this.takeDetail(content);
    else if (name === "logs") this.takeRecords(content);
    this.changed();
  }

  hello(content) {
    // What happened while no stream was open is not told again.
    const again = this.connection === "lost" || this.epoch !== content.epoch || this.revision !== content.revision;
    this.connection = "live";
    this.tries = 0;
    this.state = content.state;
    this.names = new Map(content.names.map(([number, model, version]) => [number, [model, version]]));
    for (const numbers of this.numbers.values()) numbers.gauges.clear();
    if (again || !this.modelsRead) {
      this.readModels().catch(() => {});
      get("/api/server").then((about) => {
        this.about = about;
        this.changed();
      }, () => {});
    }
    if (this.watching.logs) {
      get("/api/logs").then(({ records }) => {
        const first = records.length ? records[0].n : 0;
        this.records = this.epochOfRecords === content.epoch ? [...this.records.filter((each) => each.n < first), ...records] : records;
        this.epochOfRecords = content.epoch;
        this.records = this.records.slice(-MOST_RECORDS);
        this.recordsRead = true;
        this.changed();
      }, () => {});
    }
  }

  tick(content) {
    this.state = content.state;
    this.machine = content;
    for (const [number, model, version] of content.names || []) this.names.set(number, [model, version]);
    const byModel = new Map();
    for (const line of content.m) {
      const known = this.names.get(line[0]);
      if (!known) continue;
      const lines = byModel.get(known[0]);
      if (lines) lines.push(line);
      else byModel.set(known[0], [line]);
    }
    for (const name of byModel.keys()) this.numbersOf(name);
    let ok = 0;
    let failed = 0;
    for (const [name, numbers] of this.numbers) {
      const lines = byModel.get(name) || [];
      numbers.add(lines);
      ok += numbers.trend[numbers.trend.length - 1];
      failed += lines.reduce((sum, line) => sum + line[1], 0);
    }
    const { t, rps, errors } = this.total;
    t.push(content.t);
    rps.push(ok);
    errors.push(failed);
    for (const list of [t, rps, errors]) if (list.length > LONG) list.shift();
    if (content.reread || this.takeEvents(content.events || [])) this.readSoon();
  }

  /** Reads the models once for several changes. */
  readSoon() {
    if (this.reading) return;
    this.reading = setTimeout(() => {
      this.reading = null;
      this.readModels().catch(() => {});
    }, 300);
  }

  takeDetail({ model, versions, text }) {
    if (model !== this.detail.model) this.detail = { model, points: [] };
    this.detail.points.push({ t: this.machine.t, versions, text });
    if (this.detail.points.length > LONG) this.detail.points.shift();
  }

  takeRecords(records) {
    const last = this.records.length ? this.records[this.records.length - 1].n : 0;
    this.records.push(...records.filter((each) => each.n > last));
    if (this.records.length > MOST_RECORDS) this.records.splice(0, this.records.length - MOST_RECORDS);
  }

  /** Quantiles in microseconds over all models, of the last seconds. */
  totalQuantiles(shares) {
    const counts = new Map();
    for (const numbers of this.numbers.values()) for (const [bucket, count] of numbers.counts) counts.set(bucket, (counts.get(bucket) || 0) + count);
    return shares.map((share) => quantile(counts, share));
  }
}

export const store = new Store();
