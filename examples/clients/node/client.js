// A client of conch in Node.js: unary and streamed inference, model control, TLS and shared memory.
"use strict";

const fs = require("node:fs");
const path = require("node:path");
const { parseArgs, promisify } = require("node:util");

const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const USAGE =
  "usage: client [--address HOST:PORT] [--root-cert FILE] " +
  "unary | stream | load MODEL | unload MODEL | shared-memory";
const PROTOS = path.join(__dirname, "..", "..", "..", "proto");
const COUNT = 16; // elements of each tensor of the model `simple`
const BYTES = 4 * COUNT;

// Sends one request and prints the sum of its two vectors.
async function unary(call) {
  const request = { model_name: "simple", inputs: inputs(), raw_input_contents: vectors() };
  const response = await call("ModelInfer", request);
  const place = response.outputs.findIndex((output) => output.name === "OUTPUT0");
  console.log("unary:", numbers(response.raw_output_contents[place]));
}

// Has a decoupled model write text, and prints each word as it comes.
async function stream(call, client) {
  const prompt = Buffer.from("A");
  const length = Buffer.alloc(4);
  length.writeUInt32LE(prompt.length);
  const words = Buffer.alloc(4);
  words.writeInt32LE(5);
  const exchange = client.ModelStreamInfer({ deadline: deadline() });
  exchange.write({
    model_name: "word_chain",
    inputs: [
      { name: "prompt", datatype: "BYTES", shape: [1] },
      { name: "max_words", datatype: "INT32", shape: [1] },
    ],
    raw_input_contents: [Buffer.concat([length, prompt]), words],
  });
  exchange.end(); // The server ends the stream after the last response.
  for await (const message of exchange) {
    if (message.error_message) throw new Error(message.error_message);
    console.log("stream:", message.infer_response.raw_output_contents[0].subarray(4).toString());
  }
}

// Loads a model, or loads it again.
async function load(call, _, model) {
  await call("RepositoryModelLoad", { model_name: model });
  const { ready } = await call("ModelReady", { name: model });
  console.log(`load: ${model} is ${ready ? "ready" : "not ready"}`);
}

// Unloads a model.
async function unload(call, _, model) {
  await call("RepositoryModelUnload", { model_name: model });
  const { ready } = await call("ModelReady", { name: model });
  console.log(`unload: ${model} is ${ready ? "ready" : "not ready"}`);
}

// As unary, with all tensors in a region of system shared memory: two inputs, then the output.
// Node.js can't map memory, but it can read and write the file that the server maps.
async function sharedMemory(call) {
  const name = `client-node-${process.pid}`;
  const file = `/dev/shm/${name}`;
  const contents = Buffer.concat([...vectors(), Buffer.alloc(BYTES)]);
  fs.writeFileSync(file, contents, { flag: "wx" });
  try {
    await call("SystemSharedMemoryRegister", { name, key: `/${name}`, byte_size: contents.length });
    try {
      const placed = (tensor, place) => ({ ...tensor, parameters: region(name, place * BYTES) });
      await call("ModelInfer", {
        model_name: "simple",
        inputs: inputs().map(placed),
        outputs: [placed({ name: "OUTPUT0" }, 2)],
      });
      console.log("shared-memory:", numbers(fs.readFileSync(file).subarray(2 * BYTES)));
    } finally {
      await call("SystemSharedMemoryUnregister", { name });
    }
  } finally {
    fs.unlinkSync(file);
  }
}

function inputs() {
  return ["INPUT0", "INPUT1"].map((name) => ({ name, datatype: "INT32", shape: [1, COUNT] }));
}

// 0 to 15, and ones: little-endian, as the protocol has them.
function vectors() {
  const [counted, ones] = [Buffer.alloc(BYTES), Buffer.alloc(BYTES)];
  for (let place = 0; place < COUNT; place++) {
    counted.writeInt32LE(place, 4 * place);
    ones.writeInt32LE(1, 4 * place);
  }
  return [counted, ones];
}

function region(name, offset) {
  return {
    shared_memory_region: { string_param: name },
    shared_memory_offset: { int64_param: offset },
    shared_memory_byte_size: { int64_param: BYTES },
  };
}

function numbers(raw) {
  return Array.from({ length: raw.length / 4 }, (_, place) => raw.readInt32LE(4 * place)).join(" ");
}

function deadline() {
  return Date.now() + 30_000;
}

function connect(address, rootCert) {
  const options = { includeDirs: [PROTOS], keepCase: true, longs: Number };
  const { inference } = grpc.loadPackageDefinition(loader.loadSync("inference/grpc_service.proto", options));
  const credentials = rootCert
    ? grpc.credentials.createSsl(fs.readFileSync(rootCert))
    : grpc.credentials.createInsecure();
  return new inference.GRPCInferenceService(address, credentials);
}

function parse() {
  const options = { address: { type: "string", default: "localhost:8001" }, "root-cert": { type: "string" } };
  const { values, positionals } = parseArgs({ options, allowPositionals: true });
  const commands = { unary, stream, load, unload, "shared-memory": sharedMemory };
  const [name, ...rest] = positionals;
  const command = Object.hasOwn(commands, name ?? "") ? commands[name] : undefined;
  const models = name === "load" || name === "unload" ? 1 : 0;
  if (!command || rest.length !== models) throw new Error("wrong arguments");
  return { address: values.address, rootCert: values["root-cert"], command, model: rest[0] };
}

async function main() {
  let options;
  try {
    options = parse();
  } catch {
    console.error(USAGE);
    process.exitCode = 2;
    return;
  }
  const client = connect(options.address, options.rootCert);
  const call = (method, request) => promisify(client[method]).call(client, request, { deadline: deadline() });
  try {
    await options.command(call, client, options.model);
  } finally {
    client.close();
  }
}

main().catch((error) => {
  console.error("error:", error.details ?? error.message);
  process.exitCode = 1;
});
