// Images as tensors: the browser decodes and resizes, this puts the pixels in order. All but `loadPixels` is pure.

export const RANGES = {
  bytes: { low: 0, high: 255 },
  unit: { low: 0, high: 1 },
  signed: { low: -1, high: 1 },
  imagenet: { mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225] },
};

/** How an input may take an image: width, height, channels and layout; null if it can't. */
export function imageLayout(dims) {
  const inner = dims.filter((dim, index) => !(index === 0 && (dim === -1 || dim === 1) && dims.length > 3));
  if (inner.length === 3) {
    const [first, , last] = inner;
    if (last === 1 || last === 3) return layout("NHWC", inner[1], inner[0], last);
    if (first === 1 || first === 3) return layout("NCHW", inner[2], inner[1], first);
    if (inner.every((dim) => dim === -1)) return layout("NHWC", -1, -1, 3);
  }
  const grey = dims.filter((dim, index) => !(index === 0 && dims.length > 1 && (dim === -1 || dim === 1)));
  if (grey.length === 2 && grey.every((dim) => dim === -1 || dim >= 4)) return layout("NHWC", grey[1], grey[0], 1);
  if (grey.length === 1 && grey[0] >= 16) {
    const side = Math.sqrt(grey[0]);
    if (Number.isInteger(side)) return layout("NHWC", side, side, 1);
    const coloured = Math.sqrt(grey[0] / 3);
    if (Number.isInteger(coloured)) return layout("NHWC", coloured, coloured, 3);
  }
  return null;
}

function layout(order, width, height, channels) {
  return { order, width: width < 0 ? 224 : width, height: height < 0 ? 224 : height, channels };
}

/** The elements of an image. Pixels are RGBA bytes, row by row.
 *  Options: order NHWC or NCHW, channels 1 or 3, range of RANGES or {low, high}, invert, round. */
export function pixelsToValues(pixels, width, height, options) {
  const { order, channels, invert = false, round = false } = options;
  const range = typeof options.range === "string" ? RANGES[options.range] : options.range;
  const area = width * height;
  const values = new Array(area * channels);
  for (let at = 0; at < area; at += 1) {
    const [red, green, blue] = [pixels[4 * at], pixels[4 * at + 1], pixels[4 * at + 2]];
    const parts = channels === 1 ? [0.299 * red + 0.587 * green + 0.114 * blue] : [red, green, blue];
    for (let channel = 0; channel < channels; channel += 1) {
      const share = (invert ? 255 - parts[channel] : parts[channel]) / 255;
      const value = range.mean
        ? (share - range.mean[channels === 1 ? 1 : channel]) / range.std[channels === 1 ? 1 : channel]
        : range.low + share * (range.high - range.low);
      values[order === "NCHW" ? channel * area + at : at * channels + channel] = round ? Math.round(value) : value;
    }
  }
  return values;
}

/** Decodes and resizes an image file; returns RGBA bytes. */
export async function loadPixels(file, width, height) {
  const bitmap = await createImageBitmap(file);
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#fff"; // behind transparent pixels
  context.fillRect(0, 0, width, height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  return context.getImageData(0, 0, width, height).data;
}

/** RGBA bytes to show a tensor as an image: values are stretched from the least to the most. */
export function valuesToPixels(values, width, height, channels, order) {
  let least = Infinity;
  let most = -Infinity;
  for (const value of values) {
    if (typeof value !== "number") continue;
    if (value < least) least = value;
    if (value > most) most = value;
  }
  const scale = most > least ? 255 / (most - least) : 0;
  const area = width * height;
  const pixels = new Uint8ClampedArray(4 * area);
  for (let at = 0; at < area; at += 1) {
    for (let channel = 0; channel < 3; channel += 1) {
      const from = channels === 1 ? 0 : channel;
      const value = values[order === "NCHW" ? from * area + at : at * channels + from];
      pixels[4 * at + channel] = (value - least) * scale;
    }
    pixels[4 * at + 3] = 255;
  }
  return pixels;
}
