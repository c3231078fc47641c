// The form of a request, from a model's metadata. Pure.

import { imageLayout } from "./image.js";
import { elements, firstShape, firstValues, isFloat, isInteger, isText, parseShape, parseValues, ValueError, valuesText } from "./tensors.js";

const MOST_SHOWN = 2000;

/** The fields to begin with: one for each input. */
export function fieldsOf(signature) {
  return signature.inputs.map((input) => {
    const shape = firstShape(input.shape);
    const count = elements(shape);
    const image = isText(input.datatype) ? null : imageLayout(input.shape);
    const few = count <= MOST_SHOWN;
    return {
      name: input.name,
      datatype: input.datatype,
      dims: input.shape,
      optional: input.optional,
      used: !input.optional,
      shape: shape.join(", "),
      way: few ? "values" : "random",
      ways: [
        "values",
        "random",
        ...(image ? ["image"] : []),
        ...(isText(input.datatype) || isInteger(input.datatype) || isFloat(input.datatype) ? ["file"] : []),
      ],
      text: few ? valuesText(firstValues(input.datatype, count), input.datatype) : "",
      image,
      made: null, // values of a file, an image or at random
      note: "",
    };
  });
}

/** Why a shape does not fit the dims of an input; empty if it does. */
export function shapeProblem(shape, dims) {
  if (shape.length !== dims.length) return `expected ${dims.length} dimensions, as ${JSON.stringify(dims)}, got ${shape.length}`;
  const wrong = dims.findIndex((dim, index) => dim >= 0 && dim !== shape[index]);
  return wrong < 0 ? "" : `dimension ${wrong + 1} must be ${dims[wrong]}, got ${shape[wrong]}`;
}

/** The tensor of a field. Throws ValueError: what was typed is none. */
export function tensorOf(field) {
  let shape = parseShape(field.shape);
  let values;
  if (field.way === "values") {
    const parsed = parseValues(field.text, field.datatype);
    values = parsed.values;
    // Nested JSON says its shape itself.
    if (parsed.shape && parsed.shape.length === field.dims.length) shape = parsed.shape;
  } else {
    values = field.made;
    if (!values) throw new ValueError(field.way === "random" ? "fill it first" : "choose a file first");
  }
  const problem = shapeProblem(shape, field.dims);
  if (problem) throw new ValueError(`shape: ${problem}`);
  const count = elements(shape);
  if (values.length !== count) {
    throw new ValueError(`expected ${count} value${count === 1 ? "" : "s"} for the shape [${shape.join(", ")}], got ${values.length}`);
  }
  return { name: field.name, datatype: field.datatype, shape, values };
}

/** All tensors of a form; throws an error with `field` for the first that is wrong. */
export function tensorsOf(fields) {
  return fields
    .filter((field) => field.used)
    .map((field) => {
      try {
        return tensorOf(field);
      } catch (error) {
        if (error instanceof ValueError) error.field = field.name;
        throw error;
      }
    });
}

/** Parameters of the request from what was typed; empty texts are left out. */
export function parametersOf({ priority, timeout, sequenceId, sequenceStart, sequenceEnd, custom }) {
  const found = {};
  const number = (text, name) => {
    if (!/^\d+$/.test(text.trim())) throw new ValueError(`${name} must be a whole number`);
    return Number(text);
  };
  if (priority) found.priority = number(priority, "priority");
  if (timeout) found.timeout = number(timeout, "timeout");
  if (sequenceId) {
    found.sequence_id = /^\d+$/.test(sequenceId.trim()) ? Number(sequenceId) : sequenceId.trim();
    found.sequence_start = Boolean(sequenceStart);
    found.sequence_end = Boolean(sequenceEnd);
  }
  if (custom && custom.trim()) {
    let given;
    try {
      given = JSON.parse(custom);
    } catch (error) {
      throw new ValueError(`parameters are no JSON: ${error.message}`);
    }
    if (typeof given !== "object" || given === null || Array.isArray(given)) throw new ValueError("parameters must be a JSON object");
    Object.assign(found, given);
  }
  return found;
}
