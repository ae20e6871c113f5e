// Attention in float64 for small examples, step by step. The result has the form of docs/trace.md,
// so that panels draw a trace of Python and one of the page in the same way.

/** @typedef {number[][]} Matrix */
/**
 * @typedef {object} Example
 * @property {string[]} tokens
 * @property {Matrix} query
 * @property {Matrix} key
 * @property {Matrix} value
 * @property {number} [scale] 1/sqrt(head_dim) if absent
 * @property {Matrix} [x]
 * @property {Matrix} [w_q]
 * @property {Matrix} [w_k]
 * @property {Matrix} [w_v]
 * @property {object} [trace] a trace of Python, which is drawn as it is
 */
/**
 * @typedef {object} Options
 * @property {"none"|"causal"|"padding"|"window"} [mask]
 * @property {number} [left] keys before the query's own that a window allows
 * @property {number} [right] keys after it
 * @property {number} [keys] real keys; those after them are padding
 * @property {boolean} [scaled] false leaves the division out
 */

/** The page computes examples of at most so many tokens. */
export const LONGEST = 64;

/** @param {Matrix} a @param {Matrix} b @returns {Matrix} */
export const product = (a, b) =>
  a.map((row) => b[0].map((_, column) => row.reduce((sum, x, i) => sum + x * b[i][column], 0)));

/** Whether query i may attend to key j. @param {Options} options */
function allows(options, i, j) {
  switch (options.mask) {
    case "causal":
      return j <= i;
    case "padding":
      return j < (options.keys ?? Infinity);
    case "window":
      return i - (options.left ?? 1) <= j && j <= i + (options.right ?? 0);
    default:
      return true;
  }
}

/** Softmax as texts do it by hand: max, shift, exp, sum, divide. @param {number[]} scores */
export function softmax(scores) {
  const rowMax = Math.max(...scores);
  // Where all are -inf, a difference would be NaN.
  const shifted = rowMax === -Infinity ? scores : scores.map((score) => score - rowMax);
  const exp = shifted.map(Math.exp);
  const rowSum = exp.reduce((sum, e) => sum + e, 0);
  const weights = exp.map((e) => (rowSum === 0 ? 0 : e / rowSum));
  // -sum w log w, with log w = shifted - log(sum), so that the smallest weights have a logarithm too.
  const logSum = Math.log(rowSum);
  const entropy = weights.reduce(
    (sum, w, j) => (w === 0 ? sum : sum + w * (logSum - shifted[j])), 0,
  );
  return {
    row_max: rowMax, shifted, exp, sink: null, sink_exp: null, row_sum: rowSum, weights, entropy,
    lse: rowMax + logSum,
  };
}

const scaleOf = (example, options = {}) =>
  options.scaled === false ? 1 : (example.scale ?? 1 / Math.sqrt(example.query[0].length));

const LABELS = {
  causal: () => "Causal()",
  padding: ({ keys }) => `KeyLengths(${keys})`,
  window: ({ left = 1, right = 0 }) => `SlidingWindow(${left}, ${right})`,
};

function rowOf(example, options, scale, index) {
  const query = example.query[index];
  const products = example.key.map((key) => key.map((k, d) => query[d] * k));
  const raw = products.map((row) => row.reduce((sum, p) => sum + p, 0));
  const scaled = raw.map((score) => score * scale);
  const allowed = scaled.map((_, j) => allows(options, index, j));
  const scores = scaled.map((score, j) => (allowed[j] ? score : -Infinity));
  const steps = softmax(scores);
  const contributions = example.value.map((value, j) =>
    value.map((v) => (allowed[j] ? steps.weights[j] * v : 0)));
  const label = LABELS[options.mask];
  return {
    q_index: index, q_pos: index, query, rotated_query: null, products, raw, scaled, stages: [],
    masks: label ? [{ label: label(options), allowed }] : [], allowed, scores, softmax: steps,
    factors: null, contributions,
    output: example.value[0].map((_, d) => contributions.reduce((sum, row) => sum + row[d], 0)),
    back: null,
  };
}

/**
 * Every number between query, key, value and output.
 * @param {Example} example @param {Options} [options]
 */
export function traceOf(example, options = {}) {
  const scale = scaleOf(example, options);
  const n = example.query.length;
  return {
    schema: "qkv-trace", version: 1,
    problem: {
      summary: LABELS[options.mask]?.(options) ?? "no variants", dtype: "float64", batch_shape: [],
      num_heads: 1, num_kv_heads: 1, q_len: n, kv_len: example.key.length,
      head_dim: example.query[0].length, v_head_dim: example.value[0].length, scale,
      rotation: null, dropout: null,
    },
    tokens: example.tokens, kv_tokens: example.tokens,
    heads: [{
      batch: 0, head: 0, kv_head: 0, kv_pos: example.key.map((_, j) => j),
      key: example.key, rotated_key: null, value: example.value,
      rows: example.query.map((_, i) => rowOf(example, options, scale, i)),
    }],
    gradient: null,
  };
}

/**
 * The states of the streaming algorithm for one query row, one for each block of keys. With a sink it
 * begins with the maximum `sink` and the sum 1; dropout multiplies what is added of each value.
 * @param {number[]} scores @param {Matrix} value @param {number} block keys in a block
 * @param {{sink?: number|null, factors?: number[]|null}} [others]
 */
export function tilesOf(scores, value, block, { sink = null, factors = null } = {}) {
  let rowMax = sink ?? -Infinity;
  let rowSum = sink === null ? 0 : 1;
  let accumulator = value[0].map(() => 0);
  const states = [];
  for (let start = 0; start < scores.length; start += block) {
    const stop = Math.min(start + block, scores.length);
    const some = scores.slice(start, stop);
    const before = { row_max: rowMax, row_sum: rowSum, accumulator };
    const blockMax = Math.max(...some);
    rowMax = Math.max(rowMax, blockMax);
    // Nothing was there to rescale before the first key that is allowed.
    const rescale = before.row_max === -Infinity ? 0 : Math.exp(before.row_max - rowMax);
    const exp = some.map((score) => (rowMax === -Infinity ? 0 : Math.exp(score - rowMax)));
    rowSum = rescale * rowSum + exp.reduce((sum, e) => sum + e, 0);
    accumulator = accumulator.map((a, d) =>
      exp.reduce((sum, e, j) => (e > 0 ? sum + e * (factors?.[start + j] ?? 1) * value[start + j][d] : sum), rescale * a));
    states.push({
      start, stop, scores: some, block_max: blockMax, exp, rescale, row_max: rowMax,
      row_sum: rowSum, accumulator,
    });
  }
  return { states, output: accumulator.map((a) => (rowSum === 0 ? 0 : a / rowSum)) };
}
