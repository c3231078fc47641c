// Formats numbers for people. Pure.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
export const NONE = "–";

/** A number with three significant digits, such as 12.3 or 1.24k. */
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9) return `${trim(value / 1e9)}G`;
  if (size >= 1e6) return `${trim(value / 1e6)}M`;
  if (size >= 1e4) return `${trim(value / 1e3)}k`;
  return trim(value);
}

function trim(value) {
  const size = Math.abs(value);
  if (size >= 1000) return String(Math.round(value));
  const text = size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

/** A rate per second. */
export function rate(value) {
  if (value === null || value === undefined) return NONE;
  return value > 0 && value < 0.05 ? "<0.1" : short(Math.round(value * 10) / 10);
}

/** Microseconds as µs, ms or s. */
export function duration(us) {
  if (us === null || us === undefined || Number.isNaN(us)) return NONE;
  if (us === 0) return "0";
  if (us < 1000) return `${trim(us)} µs`;
  if (us < 1e6) return `${trim(us / 1e3)} ms`;
  return seconds(us / 1e6);
}

/** Seconds as s, min, h or days. */
export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 60) return `${trim(value)} s`;
  const whole = Math.floor(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** Bytes with a binary unit. */
export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  let size = value;
  let unit = 0;
  while (Math.abs(size) >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit ? trim(size) : size} ${UNITS[unit]}`;
}

/** A share from 0 to 1 as percent. */
export function percent(value) {
  return value === null || value === undefined ? NONE : `${trim(value * 100)} %`;
}

/** The time of day of a Unix time. */
export function clock(t, withMs = false) {
  const date = new Date(t * 1000);
  const two = (n) => String(n).padStart(2, "0");
  const text = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  return withMs ? `${text}.${String(date.getMilliseconds()).padStart(3, "0")}` : text;
}

/** Date and time of a Unix time, of today the time only. */
export function when(t, now = Date.now() / 1000) {
  const date = new Date(t * 1000);
  if (date.toDateString() === new Date(now * 1000).toDateString()) return clock(t);
  const two = (n) => String(n).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${clock(t)}`;
}

/** A shape, such as [1, 16]. */
export function shape(dims) {
  return `[${dims.join(", ")}]`;
}
