// Numbers of JSON, which has none that are not finite: docs/trace.md says what stands for them.

const NOT_FINITE = new Map([[null, -Infinity], ["nan", NaN], ["inf", Infinity]]);
/** Fields of a trace that are null for -inf; others are null where something is left out. */
const NEVER_LEFT_OUT = ["row_max", "lse"];

/** A number out of JSON, or lists of numbers; anything else stays as it is. */
export function numbersOfJson(given) {
  if (Array.isArray(given)) return given.map(numbersOfJson);
  return NOT_FINITE.has(given) ? NOT_FINITE.get(given) : given;
}

/** Objects of a trace. */
function objectsOfJson(given) {
  if (Array.isArray(given)) return given.map(objectsOfJson);
  if (given === null || typeof given !== "object") return numbersOfJson(given);
  return Object.fromEntries(Object.entries(given).map(([name, value]) =>
    [name, value === null && !NEVER_LEFT_OUT.includes(name) ? null : objectsOfJson(value)]));
}

const MATRICES = ["query", "key", "value", "x", "w_q", "w_k", "w_v"];
const read = new WeakMap();

/** An example of the host, with its trace if it has one; each is read once. @param {object} given */
export function exampleOfJson(given) {
  if (!read.has(given)) {
    const matrices = MATRICES.filter((name) => given[name]).map((name) => [name, numbersOfJson(given[name])]);
    const trace = given.trace && {
      ...given.trace, heads: objectsOfJson(given.trace.heads),
      kv_tokens: given.trace.kv_tokens ?? given.key?.map((_, j) => String(j)), // Keys may be other tokens than queries are.
    };
    read.set(given, { ...given, ...Object.fromEntries(matrices), ...(trace && { trace }) });
  }
  return read.get(given);
}
