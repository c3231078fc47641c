// Histograms of latencies with buckets of powers of two, and their quantiles. Pure.

const FIRST = 10; // the letter A: up to 2**10 ns
const LETTERS = /([A-Z])([0-9a-z]+)/g;

/** The counts by bucket of a text such as "Hk4I1e"; adds them to `into`. */
export function addBuckets(text, into = new Map()) {
  for (const [, letter, count] of text.matchAll(LETTERS)) {
    const bucket = letter.charCodeAt(0) - 65 + FIRST;
    into.set(bucket, (into.get(bucket) || 0) + parseInt(count, 36));
  }
  return into;
}

/** Takes the counts of such a text out again. */
export function takeBuckets(text, from) {
  for (const [, letter, count] of text.matchAll(LETTERS)) {
    const bucket = letter.charCodeAt(0) - 65 + FIRST;
    const left = (from.get(bucket) || 0) - parseInt(count, 36);
    if (left > 0) from.set(bucket, left);
    else from.delete(bucket);
  }
  return from;
}

/** How many times were counted. */
export function total(counts) {
  let sum = 0;
  for (const count of counts.values()) sum += count;
  return sum;
}

/** The quantile in microseconds, by interpolation within its bucket; null without counts. */
export function quantile(counts, share) {
  const all = total(counts);
  if (!all) return null;
  let rank = share * all;
  for (const bucket of [...counts.keys()].sort((a, b) => a - b)) {
    const count = counts.get(bucket);
    if (rank <= count) {
      const low = bucket === FIRST ? 0 : 2 ** (bucket - 1);
      const high = 2 ** bucket;
      return (low + (high - low) * (rank / count)) / 1000;
    }
    rank -= count;
  }
  return null;
}

/** Several quantiles at once. */
export function quantiles(counts, shares) {
  return shares.map((share) => quantile(counts, share));
}
