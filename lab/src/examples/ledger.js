// Counts of scalar operations of softmax(Q K^T / sqrt(d)) V done by hand: closed forms for any
// size, and a walkthrough of thirty steps for three tokens.

import { quoted } from "../drawing/format.js";
import { traceOf } from "./kernel.js";

/** Each count with its formula, for n queries and keys of d numbers, values of d too. */
export const COUNTS = [
  ["qk_multiply", "n² d", (n, d) => n * n * d],
  ["qk_add", "n² (d − 1)", (n, d) => n * n * (d - 1)],
  ["scale_divide", "n²", (n) => n * n],
  ["softmax_compare", "n (n − 1)", (n) => n * (n - 1)],
  ["softmax_subtract", "n²", (n) => n * n],
  ["softmax_exp", "n²", (n) => n * n],
  ["softmax_add", "n (n − 1)", (n) => n * (n - 1)],
  ["softmax_divide", "n²", (n) => n * n],
  ["av_multiply", "n² d", (n, d) => n * n * d],
  ["av_add", "n (n − 1) d", (n, d) => n * (n - 1) * d],
];

/** What each count is in words. */
export const MEANINGS = {
  qk_multiply: "Q Kᵀ: multiply",
  qk_add: "Q Kᵀ: add",
  scale_divide: "scale: divide by √d",
  softmax_compare: "softmax: compare, for the row's largest",
  softmax_subtract: "softmax: subtract the largest",
  softmax_exp: "softmax: exp",
  softmax_add: "softmax: add, for the row's sum",
  softmax_divide: "softmax: divide by the sum",
  av_multiply: "weights V: multiply",
  av_add: "weights V: add",
};

/** @param {number} n @param {number} d @returns {Record<string, number>} */
export const ledger = (n, d) =>
  Object.fromEntries(COUNTS.map(([name, , count]) => [name, count(n, d)]));

/** @param {Record<string, number>} counts */
export const total = (counts) => Object.values(counts).reduce((sum, count) => sum + count, 0);

const short = (x) => String(Number(x.toFixed(4)));
const joined = (list) => list.map(short).join(", ");

/**
 * The walkthrough: for each query its dot products, then scale, max, shift, exp, sum, divide and
 * output: thirty steps for three tokens. Each says what it adds to the ledger, and which cells it
 * reads and writes, as [matrix, row or null, column or null].
 * @param {import("./kernel.js").Example} example
 */
export function walkthrough(example) {
  const { rows, key, value } = traceOf(example).heads[0];
  const n = key.length;
  const d = key[0].length;
  return rows.flatMap((row, i) => {
    const name = quoted(example.tokens[i]);
    const { row_max: most, shifted, exp, row_sum: sum, weights } = row.softmax;
    const whole = (matrix) => [[matrix, i, null]];
    return [
      ...row.products.map((_, j) => ({
        title: `${name} · ${quoted(example.tokens[j])}: multiply pair by pair, and add`,
        text: `${row.query.map((q, c) => `${short(q)}×${short(key[j][c])}`).join(" + ")} = ${short(row.raw[j])}`,
        counts: { qk_multiply: d, qk_add: d - 1 },
        reads: [["query", i, null], ["key", j, null]],
        writes: [["raw", i, j]],
      })),
      {
        title: `${name}: divide the scores by √${d} = ${short(Math.sqrt(d))}`,
        text: `${joined(row.raw)} → ${joined(row.scaled)}`,
        counts: { scale_divide: n }, reads: whole("raw"), writes: whole("scaled"),
      },
      {
        title: `${name}: find the largest score`,
        text: `max(${joined(row.scaled)}) = ${short(most)}`,
        counts: { softmax_compare: n - 1 }, reads: whole("scaled"), writes: [],
      },
      {
        title: `${name}: subtract the largest`,
        text: `${joined(row.scaled)} → ${joined(shifted)}`,
        counts: { softmax_subtract: n }, reads: whole("scaled"), writes: whole("shifted"),
      },
      {
        title: `${name}: exp of each`,
        text: `${joined(shifted)} → ${joined(exp)}`,
        counts: { softmax_exp: n }, reads: whole("shifted"), writes: whole("exp"),
      },
      {
        title: `${name}: add them`,
        text: `${exp.map(short).join(" + ")} = ${short(sum)}`,
        counts: { softmax_add: n - 1 }, reads: whole("exp"), writes: [],
      },
      {
        title: `${name}: divide each by the sum`,
        text: `${joined(weights)}, which add up to 1`,
        counts: { softmax_divide: n }, reads: whole("exp"), writes: whole("weights"),
      },
      {
        title: `${name}: mix the values by the weights`,
        text: `${weights.map((w, j) => `${short(w)} × [${joined(value[j])}]`).join(" + ")} = [${joined(row.output)}]`,
        counts: { av_multiply: n * value[0].length, av_add: (n - 1) * value[0].length },
        reads: [["weights", i, null], ["value", null, null]], writes: whole("output"),
      },
    ];
  });
}
