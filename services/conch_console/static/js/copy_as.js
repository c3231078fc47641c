// A request as a command or a program. Pure.

import { isBool, isText } from "./tensors.js";

const NUMPY = {
  BOOL: "np.bool_", UINT8: "np.uint8", UINT16: "np.uint16", UINT32: "np.uint32", UINT64: "np.uint64",
  INT8: "np.int8", INT16: "np.int16", INT32: "np.int32", INT64: "np.int64",
  FP16: "np.float16", FP32: "np.float32", FP64: "np.float64", BF16: "np.float32", BYTES: "np.object_",
};
const MANY = 64;

/** Whether all values can be written in JSON of the protocol. */
export function jsonProblem(tensors) {
  for (const each of tensors) {
    if (each.datatype === "FP16" || each.datatype === "BF16") return `${each.datatype} can't be sent as JSON`;
    if (each.values.some((value) => value instanceof Uint8Array)) return "files can't be sent as JSON";
    if (each.values.some((value) => typeof value === "number" && !Number.isFinite(value))) return "JSON has no NaN and infinity";
  }
  return "";
}

/** A text as one word of a shell. */
export const word = (text) => `'${text.replace(/'/g, "'\\''")}'`;

/** A curl command for the REST port. */
export function curl(url, model, version, tensors, parameters, stream) {
  const problem = jsonProblem(tensors);
  if (problem) return `# ${problem}: use Python`;
  if (stream) return `# The infer route of REST has no streams: use Python, or the generate_stream route`;
  const body = {
    ...(Object.keys(parameters).length ? { parameters } : {}),
    inputs: tensors.map((each) => ({ name: each.name, datatype: each.datatype, shape: each.shape, data: each.values })),
  };
  const text = JSON.stringify(body, (_, value) => (typeof value === "bigint" ? `\u0001${value}\u0001` : value)).replace(/"\\u0001(-?\d+)\\u0001"/g, "$1");
  const path = `/v2/models/${encodeURIComponent(model)}${version ? `/versions/${version}` : ""}/infer`;
  return `curl -s ${word(url + path)} \\\n  -H 'Content-Type: application/json' \\\n  -d ${word(text)}`;
}

/** A Python text. */
export const quoted = (text) =>
  JSON.stringify(text).replace(/[^\x20-\x7e]/gu, (character) => {
    const code = character.codePointAt(0);
    return code > 0xffff ? `\\U${code.toString(16).padStart(8, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });

function pythonValue(value, datatype) {
  if (value instanceof Uint8Array) return `open("input", "rb").read()`;
  if (isText(datatype)) return `${quoted(value)}.encode()`;
  if (isBool(datatype)) return value ? "True" : "False";
  if (typeof value === "number" && Number.isNaN(value)) return "np.nan";
  if (value === Infinity) return "np.inf";
  if (value === -Infinity) return "-np.inf";
  return String(value);
}

function arrayCode(tensor) {
  const dtype = NUMPY[tensor.datatype];
  const shape = `(${tensor.shape.join(", ")}${tensor.shape.length === 1 ? "," : ""})`;
  if (tensor.values.length > MANY && !isText(tensor.datatype)) {
    return `np.zeros(${shape}, ${dtype})  # put your ${tensor.values.length} values here`;
  }
  const values = tensor.values.map((value) => pythonValue(value, tensor.datatype)).join(", ");
  return `np.array([${values}], ${dtype}).reshape${shape.replace(",)", ")")}`;
}

const pythonParameters = (parameters) =>
  `{${Object.entries(parameters).map(([key, value]) => `${quoted(key)}: ${typeof value === "boolean" ? (value ? "True" : "False") : typeof value === "string" ? quoted(value) : value}`).join(", ")}}`;

/** Arguments of tritonclient for what the protocol has parameters of its own names. */
function tritonArguments(parameters) {
  const names = { priority: "priority", timeout: "timeout", sequence_id: "sequence_id", sequence_start: "sequence_start", sequence_end: "sequence_end" };
  const own = {};
  const found = [];
  for (const [key, value] of Object.entries(parameters)) {
    if (names[key]) found.push(`${names[key]}=${typeof value === "boolean" ? (value ? "True" : "False") : typeof value === "string" ? quoted(value) : value}`);
    else own[key] = value;
  }
  if (Object.keys(own).length) found.push(`parameters=${pythonParameters(own)}`);
  return found;
}

/** A program for tritonclient over gRPC. */
export function tritonclient(address, model, version, tensors, parameters, stream) {
  const lines = ["import numpy as np", "import tritonclient.grpc as triton", "", `client = triton.InferenceServerClient(${quoted(address)})`, "inputs = []"];
  for (const each of tensors) {
    lines.push(
      `array = ${arrayCode(each)}`,
      `tensor = triton.InferInput(${quoted(each.name)}, array.shape, ${quoted(each.datatype)})`,
      "tensor.set_data_from_numpy(array)",
      "inputs.append(tensor)",
    );
  }
  const more = [...(version ? [`model_version=${quoted(String(version))}`] : []), ...tritonArguments(parameters)];
  const rest = more.length ? `, ${more.join(", ")}` : "";
  const shown = "print({output.name: result.as_numpy(output.name) for output in result.get_response().outputs})";
  if (stream) {
    lines.splice(0, 0, "import queue", "");
    lines.push(
      "responses = queue.Queue()",
      "client.start_stream(lambda result, error: responses.put((result, error)))",
      `client.async_stream_infer(${quoted(model)}, inputs, enable_empty_final_response=True${rest})`,
      "while True:",
      "    result, error = responses.get()",
      "    if error is not None:",
      "        raise error",
      "    if result.get_response().parameters[\"triton_final_response\"].bool_param:",
      "        break",
      `    ${shown}`,
      "client.stop_stream()",
    );
  } else {
    lines.push(`result = client.infer(${quoted(model)}, inputs${rest})`, shown);
  }
  return lines.join("\n");
}

/** A program for conch's own client. */
export function conchClient(address, model, version, tensors, parameters, stream) {
  const lines = ["import numpy as np", "", "import conch", ""];
  const named = tensors.map((each, index) => {
    lines.push(`input_${index} = ${arrayCode(each)}`);
    return [each.name, `input_${index}`];
  });
  const simple = named.every(([name]) => /^[A-Za-z_]\w*$/.test(name) && name !== "parameters");
  const inputs = simple ? named.map(([name, value]) => `${name}=${value}`).join(", ") : `**{${named.map(([name, value]) => `${quoted(name)}: ${value}`).join(", ")}}`;
  const rest = Object.keys(parameters).length ? `, parameters=${pythonParameters(parameters)}` : "";
  const made = `conch.Client(${quoted(address)}, ${quoted(model)}${version ? `, ${quoted(String(version))}` : ""})`;
  lines.push(`with ${made} as client:`);
  if (stream) lines.push(`    for result in client.stream_batch(${inputs}${rest}):`, "        print(result)");
  else lines.push(`    print(client.infer_batch(${inputs}${rest}))`);
  return lines.join("\n");
}
