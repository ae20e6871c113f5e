// Which lines between queries and keys are drawn, of a text of any length.

/** Tokens in a column, at most. */
const MOST = 24;
/** Weights that are too small to be seen as a line are left out. */
const LEAST = 0.04;

/** @typedef {{query: number, key: number, weight: number}} Line */

/**
 * The queries around one, what they read, and which keys stand beside them: all keys of a short text,
 * else those with the strongest lines, the chosen query's first.
 * @param {{query: number, first: number, stop: number, kvLen: number, read: (query: number) => [number, number][]}} given
 * `read` gives keys and weights of a query from `first` to `stop`
 * @returns {{queries: number[], keys: number[], lines: Line[]}}
 */
export function linesOf({ query, first, stop, kvLen, read }) {
  const count = Math.min(MOST, stop - first);
  const begin = Math.max(first, Math.min(query - Math.floor(count / 2), stop - count));
  const queries = Array.from({ length: count }, (_, i) => begin + i);
  const all = queries.flatMap((each) => read(each).filter(([key, weight]) => key >= 0 && weight >= LEAST)
    .map(([key, weight]) => ({ query: each, key, weight })));
  if (kvLen <= MOST) return { queries, keys: Array.from({ length: kvLen }, (_, i) => i), lines: all };
  const rank = (line) => line.weight + (line.query === query ? 1 : 0);
  const strongest = new Set();
  for (const { key } of [...all].sort((a, b) => rank(b) - rank(a))) if (strongest.size < MOST) strongest.add(key);
  return { queries, keys: [...strongest].sort((a, b) => a - b), lines: all.filter(({ key }) => strongest.has(key)) };
}
