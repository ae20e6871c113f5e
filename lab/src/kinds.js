// The scores that decide the kind of a head, and the kind: those of qkv.inspection, of weights in the page.

import { UNKNOWN } from "./language.js";

/**
 * Means over the queries that have such a key, NaN where none has; docs/inspect-models.md has the formulas.
 * Unknown tokens share an id, and none of them is a duplicate.
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
  const meanOf = (keys) => {
    const rows = weights.flatMap((row, i) => (keys(i).length ? [keys(i).reduce((sum, j) => sum + row[j], 0)] : []));
    return rows.reduce((sum, x) => sum + x, 0) / rows.length;
  };
  return Object.fromEntries(Object.entries(keysOf).map(([name, keys]) => [name, meanOf(keys)]));
}

/** The largest score that reaches the threshold, or the sink where no other does. @param {Record<string, number>} scores */
export function kindOf(scores, threshold) {
  const reached = Object.keys(scores).filter((name) => scores[name] >= threshold);
  return reached.sort((a, b) => (a === "sink") - (b === "sink") || scores[b] - scores[a])[0] ?? null;
}
