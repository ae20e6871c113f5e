// What is right in each exercise, computed here, for a page without Python.

import { BUILT_IN } from "./examples.js";
import { softmax, traceOf } from "./kernel.js";

export { answerOf } from "./written.js";

const NEAR = 0.0051;

const shared = BUILT_IN.find(({ name }) => name === "shared");
const eye = (n) => Array.from({ length: n }, (_, i) => Array.from({ length: n }, (__, j) => Number(i === j)));
const sameRows = [[1, 0], [0, 1], [0.6, 0.8]];
const rowsOf = (example, options) => traceOf(example, options).heads[0].rows;
const weightsOf = (example, options) => rowsOf(example, options).map((row) => row.softmax.weights);
const small = (query, key) => ({ tokens: query.map(String), query, key, value: key });

const flat = (x) => (Array.isArray(x) ? x.flat(Infinity) : [x]);
const shape = (x) => (Array.isArray(x) ? [x.length, ...(x.length ? shape(x[0]) : [])] : []);

function compared(answer, wanted, why, near = NEAR) {
  const given = flat(answer);
  const right = flat(wanted);
  if (String(shape(answer)) !== String(shape(wanted)) || given.length !== right.length) {
    return { right: false, why: `the answer has shape (${shape(answer).join(", ")}); (${shape(wanted).join(", ")}) is asked for.` };
  }
  if (given.some((x) => !Number.isFinite(x))) return { right: false, why: "the answer holds something that is not a number." };
  const off = given.filter((x, i) => Math.abs(x - right[i]) > near).length;
  return off ? { right: false, why: right.length === 1 ? `${given[0]} is too ${given[0] < right[0] ? "small" : "large"}.` : `${off} of ${right.length} numbers are off.` } : { right: true, why };
}

const CHECKS = {
  "003.1": (answer) => compared(answer, rowsOf(small(eye(2), [[1, 1], [1, 0]]), { scaled: false }).map((row) => row.output), "the first token mixes both values equally."),
  "003.2": (answer) => compared(answer, weightsOf(shared)[2], "“cat” and “sat” have the largest scores and get equal weights."),
  "003.3": (answer) => compared(answer, weightsOf(shared), "each row adds up to 1."),
  "003.4": (answer) => {
    if (String(shape(answer)) !== "2,5" || flat(answer).some((x) => !Number.isFinite(x))) return { right: false, why: "two rows of five scores are asked for." };
    const [high, low] = answer.map((row) => softmax(row).entropy);
    const right = high >= 0.99 * Math.log(5) && low < 0.01;
    return { right, why: `the entropies are ${high.toFixed(3)} and ${low.toFixed(3)} nats; the first must be at least 1.593 and the second below 0.01.` };
  },
  "003.5": (answer) => {
    if (!Array.isArray(answer) || answer.length !== 2 || answer.some((each) => typeof each !== "boolean")) return { right: false, why: "write two of true and false." };
    const right = answer[0] && !answer[1];
    return { right, why: "q_i · q_j is symmetric, and each row of weights is divided by its own sum." };
  },
  "003.6": (answer) => compared(answer, weightsOf(shared, { scaled: false }), "without the divisor every row is sharper."),
  "003.7": (answer) => compared(answer, weightsOf(small(sameRows, sameRows)), "rows of equal length score highest with themselves."),
  "003.8": (answer) => compared(answer, 2 * Math.log((3 * 0.99) / 0.01), "exp(c / 2) = 0.99 (exp(c / 2) + 3)."),
  "003.9": (answer) => compared(answer, Math.sqrt(64) * 4, "a dot product has variance d_k σ⁴."),
  "003.10": (answer) => compared(answer, 4 * 1000 ** 2 * 512, "two products of n² d multiply-adds each.", 0.5),
  "003.11": (answer) => {
    const row = rowsOf(shared)[1];
    return compared(answer, [shared.value[row.scores.indexOf(Math.max(...row.scores))], row.output], "the best key is that of “The”; attention returns a mixture.");
  },
};

/** @param {string} name @returns {{right: boolean, why: string}} */
export function check(name, answer) {
  const each = CHECKS[name];
  if (!each) return { right: false, why: "this exercise is checked by Python: run qkv lab." };
  return each(answer);
}
