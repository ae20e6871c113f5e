// The page's float64 kernel against the numbers of the classical texts, which bind Python too.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { softmax, tilesOf, traceOf } from "../src/examples/kernel.js";
import { ledger, total, walkthrough } from "../src/examples/ledger.js";
import { BUILT_IN } from "../src/examples/examples.js";

const goldens = JSON.parse(readFileSync(new URL("../../tests/golden/goldens.json", import.meta.url)));

const OPTIONS = {
  textbook_3x3: {}, unscaled_cat_sat_mat: {}, exercise_hand_compute: {}, shared_example: {},
  primer_the_cat_sat: {}, shared_example_unscaled: { scaled: false },
  shared_example_causal: { mask: "causal" },
  shared_example_causal_window_2: { mask: "window", left: 1, right: 0 },
  shared_example_causal_window_3: { mask: "window", left: 2, right: 0 },
};

/** Half a unit in the last of the twelve decimals that are printed. */
function near(given, wanted, where) {
  if (Array.isArray(wanted)) {
    assert.equal(given.length, wanted.length, where);
    wanted.forEach((each, i) => near(given[i], each, `${where}[${i}]`));
  } else if (wanted === null) assert.equal(given, -Infinity, where);
  else assert.ok(Math.abs(given - wanted) <= 0.5001e-12, `${where}: ${given} is not ${wanted}`);
}

for (const [name, options] of Object.entries(OPTIONS)) {
  test(`trace of ${name}`, () => {
    const { q, k, v, tokens, scale, exact } = goldens.cases[name];
    const example = { tokens: tokens ?? q.map(String), query: q, key: k, value: v };
    if (typeof scale === "number") example.scale = scale;
    const { rows } = traceOf(example, options).heads[0];
    near(rows.map((row) => row.raw), exact.raw, "raw");
    near(rows.map((row) => row.scores), exact.scaled, "scaled");
    near(rows.map((row) => row.softmax.weights), exact.weights, "weights");
    near(rows.map((row) => row.output), exact.output, "output");
    near(rows.map((row) => row.softmax.lse), exact.lse, "lse");
    near(rows.map((row) => row.softmax.entropy), exact.entropy_nats, "entropy");
    rows.forEach((row, i) => [1, 2, 3, 64].forEach((block) =>
      near(tilesOf(row.scores, v, block).output, exact.output[i], `tiles of ${block}`)));
  });
}

test("the examples of the page are those of the texts", () => {
  const names = { shared: "shared_example", textbook: "textbook_3x3", "cat-sat-mat": "unscaled_cat_sat_mat", primer: "primer_the_cat_sat" };
  for (const [name, golden] of Object.entries(names)) {
    const { query, key, value } = BUILT_IN.find((each) => each.name === name);
    const { q, k, v } = goldens.cases[golden];
    assert.deepEqual([query, key, value], [q, k, v]);
  }
});

test("a printed row", () => {
  const { scores, scale, exact } = goldens.cases.primer_printed_row;
  near(softmax(scores.map((score) => score * scale)).weights, exact.weights, "weights");
});

test("a row without keys is zero, and its lse -inf", () => {
  const [row] = traceOf(BUILT_IN[0], { mask: "padding", keys: 0 }).heads[0].rows;
  assert.deepEqual(row.softmax.weights, [0, 0, 0, 0, 0]);
  assert.deepEqual(row.output, [0, 0, 0, 0]);
  assert.equal(row.softmax.lse, -Infinity);
  assert.equal(row.softmax.entropy, 0);
  assert.deepEqual(tilesOf(row.scores, BUILT_IN[0].value, 2).output, [0, 0, 0, 0]);
});

test("weights that underflow have no NaN", () => {
  const { weights, entropy } = softmax([1000, 0, -Infinity]);
  assert.deepEqual(weights, [1, 0, 0]);
  assert.equal(entropy, 0);
});

test("the ledger of three tokens, step by step and in closed form", () => {
  const { total: wanted, ...counts } = goldens.operation_ledger.example_3x3;
  assert.deepEqual(ledger(3, 3), counts);
  assert.equal(total(ledger(3, 3)), wanted);
  const steps = walkthrough(BUILT_IN.find(({ name }) => name === "three"));
  assert.equal(steps.length, 30);
  const added = {};
  steps.forEach((step) => Object.entries(step.counts).forEach(([name, count]) => { added[name] = (added[name] ?? 0) + count; }));
  assert.deepEqual(added, counts);
});

test("the ledger of the shared example", () => {
  const { total: wanted, ...counts } = goldens.operation_ledger.shared_example;
  assert.deepEqual(ledger(5, 4), counts);
  assert.equal(total(ledger(5, 4)), wanted);
});
