// The examples that every host has, and how an edited one is written into the address.

import { LONGEST, product } from "./kernel.js";

const projected = ({ x, w_q: q, w_k: k, w_v: v }) => ({
  x, w_q: q, w_k: k, w_v: v, query: product(x, q), key: product(x, k), value: product(x, v),
});

/** @type {(import("./kernel.js").Example & {name: string, title: string})[]} */
export const BUILT_IN = [
  {
    name: "shared",
    title: "Five tokens",
    tokens: ["The", "cat", "sat", "on", "mat"],
    query: [[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]],
    key: [[0, 1, 0, 1], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0.5, 0.5]],
    value: [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0.5, 0.5, 0.5, 0.5]],
  },
  {
    name: "three",
    title: "Three tokens",
    tokens: ["the", "cat", "sat"],
    ...projected({
      x: [[1, 0, 1], [0, 2, 0], [1, 1, 1]],
      w_q: [[1, 0, 1], [0, 1, 0], [0, 1, 1]],
      w_k: [[0, 1, 0], [1, 0, 1], [1, 0, 0]],
      w_v: [[1, 0, 0], [0, 0.5, 0.5], [0, 1, 2]],
    }),
  },
  {
    name: "textbook",
    title: "Three tokens, Q = K",
    tokens: ["a", "b", "c"],
    query: [[1, 0], [0, 1], [1, 1]],
    key: [[1, 0], [0, 1], [1, 1]],
    value: [[1, 0], [0, 1], [0, 0]],
  },
  {
    name: "cat-sat-mat",
    title: "cat sat mat, no divisor",
    tokens: ["cat", "sat", "mat"],
    scale: 1,
    query: [[1, 0], [0, 1], [1, 1]],
    key: [[1, 0], [0, 1], [1, 1]],
    value: [[1, 0], [0, 1], [1, 1]],
  },
  {
    name: "primer",
    title: "the cat sat",
    tokens: ["the", "cat", "sat"],
    query: [[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1]],
    key: [[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 1]],
    value: [[0.1, 0.4, 0.2, 0.5], [0.5, 0.6, 0.3, 0.1], [0.7, 0.2, 0.4, 0.8]],
  },
];

/** Numbers up to this have scores that are finite. */
export const LARGEST = 1e100;

const rows = (matrix) => matrix.map((row) => row.join(" ")).join(",");
const unrowed = (text) => text.split(",").map((row) => row.split(" ").map(Number));

/** An example as one value of the address. @param {import("./kernel.js").Example} example */
export const encode = ({ tokens, query, key, value, scale }) =>
  JSON.stringify([tokens, rows(query), rows(key), rows(value), ...(scale === undefined ? [] : [scale])]);

/** What `encode` wrote, or null if it is not one. @param {string} text */
export function decode(text) {
  try {
    const [tokens, ...rest] = JSON.parse(text);
    const [query, key, value] = rest.slice(0, 3).map(unrowed);
    const example = { tokens: tokens.map(String), query, key, value };
    if (Number.isFinite(rest[3])) example.scale = rest[3];
    return complaint(example) === null ? example : null;
  } catch {
    return null;
  }
}

/** A number as it is typed: 0.5, −2, 1e3, or a fraction such as 1/3; NaN of another text. @param {string} text */
export function numberOf(text) {
  const parts = text.replace(/−/g, "-").split("/").map((part) => (part.trim() ? Number(part) : NaN));
  const [above, below = 1] = parts;
  return parts.length > 2 ? NaN : above / below;
}

/** Whether commas of a line stand before decimals, as in spreadsheets of many languages: 0,5 1,25. */
function hasDecimalCommas(line) {
  const pieces = line.trim().split(/\s+/);
  return pieces.length > 1 && line.includes(",") && pieces.every((piece) => /^[-−+]?\d+(,\d+)?(e[-+]?\d+)?$/i.test(piece));
}

/**
 * Rows of numbers from text: lines or `;` separate rows, blanks, commas or tabs numbers; also JSON
 * lists, and what NumPy prints. Fractions have no blanks in them. Where blanks or tabs separate all
 * numbers, commas stand before decimals.
 * @param {string} text @returns {number[][]}
 */
export function matrixOf(text) {
  const lines = text.includes("[")
    ? [...text.matchAll(/\[([^[\]]*)\]/g)].map((match) => match[1])
    : text.split(/[\n;]+/);
  return lines.map((line) => (hasDecimalCommas(line) ? line.replaceAll(",", ".") : line)).map((line) => line.split(/[\s,]+/).filter(Boolean).map(numberOf))
    .filter((row) => row.length);
}

/** Why an example cannot be computed here, or null. @param {import("./kernel.js").Example} example */
export function complaint({ tokens, query, key, value }) {
  const matrices = { Q: query, K: key, V: value };
  for (const [name, matrix] of Object.entries(matrices)) {
    if (!matrix.length || !matrix[0].length) return `${name} is empty.`;
    if (matrix.some((row) => row.length !== matrix[0].length)) return `The rows of ${name} differ in length.`;
    if (matrix.flat().some((x) => !Number.isFinite(x))) return `${name} holds something that is not a number.`;
    if (matrix.flat().some((x) => Math.abs(x) > LARGEST)) return `${name} holds a number beyond ±1e100, whose scores would be infinite.`;
  }
  if (query[0].length !== key[0].length) {
    return `Rows of Q have ${query[0].length} numbers and rows of K ${key[0].length}; they must be as long.`;
  }
  if (key.length !== value.length) return `K has ${key.length} rows and V ${value.length}.`;
  if (query.length !== key.length) return `Q has ${query.length} rows and K ${key.length}; the page shows one sequence.`;
  if (tokens.length !== query.length) return `There are ${tokens.length} tokens and ${query.length} rows of Q.`;
  if (query.length > LONGEST) return `${query.length} tokens are more than the ${LONGEST} that the page computes; run qkv lab FILE.`;
  return null;
}
