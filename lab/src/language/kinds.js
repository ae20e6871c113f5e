// The scores that decide the kind of a head, and the kind: those of qkv.inspection, of weights in the page.

import { UNKNOWN } from "./language.js";

/**
 * Means over the queries that have such a key, NaN where none has, and how many have; docs/inspect-models.md has the
 * formulas. Unknown tokens share an id, and none of them is a duplicate.
 * @param {Float64Array[]} weights by query, of a causal head @param {number[]} ids
 */
export function scoresOf(weights, ids) {
  const earlier = ids.map((id, i) => [...ids.keys()].filter((j) => j < i && ids[j] === id && id !== UNKNOWN));
  const keysOf = {
    induction: (i) => earlier[i].map((j) => j + 1),
    duplicate: (i) => earlier[i],
    previous: (i) => (i > 0 ? [i - 1] : []),
    own: (i) => [i],
    sink: () => [0],
  };
  const rowsOf = (keys) => weights.flatMap((row, i) => (keys(i).length ? [keys(i).reduce((sum, j) => sum + row[j], 0)] : []));
  const rows = Object.entries(keysOf).map(([name, keys]) => [name, rowsOf(keys)]);
  return {
    means: Object.fromEntries(rows.map(([name, each]) => [name, each.reduce((sum, x) => sum + x, 0) / each.length])),
    counts: Object.fromEntries(rows.map(([name, each]) => [name, each.length])),
  };
}

/** The largest mean that reaches the threshold, or the sink where no other does. @param {Record<string, number>} means */
export function kindOf(means, threshold) {
  const reached = Object.keys(means).filter((name) => means[name] >= threshold);
  return reached.sort((a, b) => (a === "sink") - (b === "sink") || means[b] - means[a])[0] ?? null;
}

/** What a mean is of. @param {number} count @param {string} one @param {string} more */
export function withSuchAKey(count, one, more) {
  return count === 1 ? `the one ${one} that has such a key` : `the ${count} ${more} that have such a key`;
}
