// Tensors from what people type, and their bytes as the protocol sends them. Pure.

const FIXED = {
  BOOL: 1, UINT8: 1, INT8: 1, UINT16: 2, INT16: 2, FP16: 2, BF16: 2, UINT32: 4, INT32: 4, FP32: 4,
  UINT64: 8, INT64: 8, FP64: 8,
};
const RANGES = {
  UINT8: [0n, 255n], INT8: [-128n, 127n], UINT16: [0n, 65535n], INT16: [-32768n, 32767n],
  UINT32: [0n, 4294967295n], INT32: [-2147483648n, 2147483647n],
  UINT64: [0n, 18446744073709551615n], INT64: [-9223372036854775808n, 9223372036854775807n],
};
const SPECIAL = { nan: NaN, inf: Infinity, "+inf": Infinity, infinity: Infinity, "-inf": -Infinity, "-infinity": -Infinity };

export class ValueError extends Error {}

export const isText = (datatype) => datatype === "BYTES";
export const isFloat = (datatype) => /^(FP|BF)/.test(datatype);
export const isBool = (datatype) => datatype === "BOOL";
export const isInteger = (datatype) => datatype in RANGES;

/** How many elements a shape has. */
export const elements = (shape) => shape.reduce((product, dim) => product * dim, 1);

/** The dims of a text such as "1, 16" or "[1 16]". */
export function parseShape(text) {
  const parts = text.replace(/[[\]()]/g, " ").split(/[\s,x×]+/).filter(Boolean);
  return parts.map((part) => {
    if (!/^\d{1,9}$/.test(part)) throw new ValueError(`"${part}" is no dimension: whole numbers from 0, such as 1, 16`);
    return Number(part);
  });
}

/** A shape to begin with: one sample, and 1 where a dimension is free. */
export const firstShape = (dims) => dims.map((dim) => (dim < 0 ? 1 : dim));

/** The values of a text: JSON (also nested), CSV, or numbers between spaces. Nested JSON also gives a shape. */
export function parseValues(text, datatype) {
  const trimmed = text.trim();
  if (!trimmed) return { values: [], shape: null };
  if (trimmed.startsWith("[")) return fromJson(trimmed, datatype);
  if (isText(datatype)) return { values: text.replace(/\n$/, "").split("\n"), shape: null };
  const values = trimmed.split(/[\s,;]+/).filter(Boolean).map((word) => parseOne(word, datatype));
  return { values, shape: null };
}

function fromJson(text, datatype) {
  // Large integers would lose digits as numbers, so they are read as texts.
  const source = isInteger(datatype) ? text.replace(/(?<![\w".])-?\d{16,}(?![\w".])/g, '"$&"') : text;
  let found;
  try {
    found = JSON.parse(source);
  } catch (error) {
    throw new ValueError(`this begins like JSON and is none: ${error.message}`);
  }
  const shape = [];
  for (let at = found; Array.isArray(at); at = at[0]) shape.push(at.length);
  const flat = [];
  flatten(found, shape, 0, flat, datatype);
  return { values: flat, shape };
}

function flatten(list, shape, depth, into, datatype) {
  if (list.length !== shape[depth]) throw new ValueError("rows of the list have different lengths");
  for (const each of list) {
    if (depth + 1 < shape.length) {
      if (!Array.isArray(each)) throw new ValueError("rows of the list have different depths");
      flatten(each, shape, depth + 1, into, datatype);
    } else {
      if (Array.isArray(each)) throw new ValueError("rows of the list have different depths");
      into.push(isText(datatype) ? String(each) : parseOne(each, datatype));
    }
  }
}

function parseOne(word, datatype) {
  if (isBool(datatype)) {
    if (word === true || /^(true|1|yes)$/i.test(word)) return true;
    if (word === false || /^(false|0|no)$/i.test(word)) return false;
    throw new ValueError(`"${word}" is no BOOL: true or false`);
  }
  if (isFloat(datatype)) {
    const text = String(word).toLowerCase();
    const number = text in SPECIAL ? SPECIAL[text] : Number(word);
    if (word === null || word === true || word === false || text === "" || (Number.isNaN(number) && text !== "nan")) {
      throw new ValueError(`"${word}" is no number`);
    }
    return number;
  }
  if (!/^[+-]?\d+$/.test(String(word))) throw new ValueError(`"${word}" is no whole number, as ${datatype} has them`);
  const number = BigInt(word);
  const [least, most] = RANGES[datatype];
  if (number < least || number > most) throw new ValueError(`${word} is out of the range of ${datatype}: ${least} to ${most}`);
  return datatype.endsWith("64") ? number : Number(number);
}

/** Random values. `random` gives numbers from 0 to 1. */
export function randomValues(datatype, count, random = Math.random) {
  const make = isText(datatype)
    ? () => Array.from({ length: 8 }, () => String.fromCharCode(97 + Math.floor(random() * 26))).join("")
    : isBool(datatype)
      ? () => random() < 0.5
      : isFloat(datatype)
        ? () => Math.round(random() * 1e4) / 1e4
        : datatype.endsWith("64")
          ? () => BigInt(Math.floor(random() * 100))
          : () => Math.floor(random() * 100);
  return Array.from({ length: count }, make);
}

/** Values to begin with, so that a request can be sent at once. */
export function firstValues(datatype, count) {
  const make = isText(datatype)
    ? () => "text"
    : isBool(datatype)
      ? () => false
      : datatype.endsWith("64") && isInteger(datatype)
        ? (index) => BigInt(index % 100)
        : (index) => index % 100;
  return Array.from({ length: count }, (_, index) => make(index));
}

/** The values as a person would type them. */
export function valuesText(values, datatype) {
  if (isText(datatype)) return values.join("\n");
  return values.map(String).join(" ");
}

/** The bytes of a tensor. Elements of BYTES are texts or Uint8Arrays. */
export function encodeTensor(datatype, values) {
  if (isText(datatype)) return encodeTexts(values);
  const size = FIXED[datatype];
  if (!size) throw new ValueError(`datatype ${datatype} is not known`);
  const out = new Uint8Array(size * values.length);
  const view = new DataView(out.buffer);
  const write = {
    BOOL: (at, value) => view.setUint8(at, value ? 1 : 0),
    UINT8: (at, value) => view.setUint8(at, value),
    INT8: (at, value) => view.setInt8(at, value),
    UINT16: (at, value) => view.setUint16(at, value, true),
    INT16: (at, value) => view.setInt16(at, value, true),
    UINT32: (at, value) => view.setUint32(at, value, true),
    INT32: (at, value) => view.setInt32(at, value, true),
    UINT64: (at, value) => view.setBigUint64(at, BigInt(value), true),
    INT64: (at, value) => view.setBigInt64(at, BigInt(value), true),
    FP16: (at, value) => view.setUint16(at, halfBits(value), true),
    BF16: (at, value) => view.setUint16(at, brainBits(value), true),
    FP32: (at, value) => view.setFloat32(at, value, true),
    FP64: (at, value) => view.setFloat64(at, value, true),
  }[datatype];
  for (let index = 0; index < values.length; index += 1) write(index * size, values[index]);
  return out;
}

function encodeTexts(values) {
  const encoder = new TextEncoder();
  const parts = values.map((value) => (value instanceof Uint8Array ? value : encoder.encode(String(value))));
  const out = new Uint8Array(parts.reduce((sum, part) => sum + 4 + part.length, 0));
  const view = new DataView(out.buffer);
  let at = 0;
  for (const part of parts) {
    view.setUint32(at, part.length, true);
    out.set(part, at + 4);
    at += 4 + part.length;
  }
  return out;
}

const scratch = new DataView(new ArrayBuffer(8));

function brainBits(value) {
  scratch.setFloat32(0, value);
  const bits = scratch.getUint32(0);
  if (Number.isNaN(value)) return (bits >>> 16) | 0x40;
  return ((bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16) & 0xffff; // to the nearest, ties to even
}

function halfBits(value) {
  if (Number.isNaN(value)) return 0x7e00;
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
  const size = Math.abs(value);
  if (size >= 65520) return sign | 0x7c00;
  if (size < 2 ** -14) return sign | even(size * 2 ** 24);
  const exponent = Math.floor(Math.log2(size));
  const fixed = size < 2 ** exponent ? exponent - 1 : size >= 2 ** (exponent + 1) ? exponent + 1 : exponent;
  return sign | (((fixed + 15) << 10) + even((size / 2 ** fixed - 1) * 1024));
}

function even(value) {
  const low = Math.floor(value);
  const rest = value - low;
  return rest > 0.5 || (rest === 0.5 && low % 2) ? low + 1 : low;
}

/** The body of a request, and the length of its JSON. Inputs: name, datatype, shape, values. */
export function requestBody(inputs, options = {}) {
  const encoded = inputs.map((each) => encodeTensor(each.datatype, each.values));
  const head = {
    ...(options.id ? { id: options.id } : {}),
    ...(options.parameters && Object.keys(options.parameters).length ? { parameters: options.parameters } : {}),
    inputs: inputs.map((each, index) => ({
      name: each.name,
      datatype: each.datatype,
      shape: each.shape,
      parameters: { binary_data_size: encoded[index].length },
    })),
    ...(options.outputs && options.outputs.length ? { outputs: options.outputs } : {}),
  };
  const text = new TextEncoder().encode(JSON.stringify(head));
  const body = new Uint8Array(text.length + encoded.reduce((sum, part) => sum + part.length, 0));
  body.set(text);
  let at = text.length;
  for (const part of encoded) {
    body.set(part, at);
    at += part.length;
  }
  return { body, headLength: text.length };
}
