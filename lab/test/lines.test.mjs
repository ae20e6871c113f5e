// Which lines between tokens are drawn.

import assert from "node:assert/strict";
import { test } from "node:test";
import { linesOf } from "../src/drawing/lines.js";

test("a short text has all its tokens, and the lines that can be seen", () => {
  const weights = [[1], [0.03, 0.97], [0.5, 0.1, 0.4]];
  const found = linesOf({ query: 2, first: 0, stop: 3, kvLen: 3, read: (i) => [...weights[i].entries()] });
  assert.deepEqual(found.queries, [0, 1, 2]);
  assert.deepEqual(found.keys, [0, 1, 2]);
  assert.deepEqual(found.lines.map(({ query, key }) => `${query}.${key}`), ["0.0", "1.1", "2.0", "2.1", "2.2"]);
  assert.equal(found.lines[3].weight, 0.1);
});

test("of a long text the queries around one, with the strongest keys, its own first", () => {
  const read = (i) => (i === 500 ? [[3, 0.05], [499, 0.9], [-1, 0]] : [[i, 0.6], [1000 + i, 0.4]]);
  const { queries, keys, lines } = linesOf({ query: 500, first: 256, stop: 768, kvLen: 2000, read });
  assert.deepEqual([queries[0], queries.at(-1), queries.length], [488, 511, 24]);
  assert.equal(keys.length, 24);
  assert.deepEqual(keys, [...keys].sort((a, b) => a - b));
  // However weak, the chosen query's lines are there; then those of 0.6, then none of 0.4 has room.
  assert.ok(keys.includes(3) && keys.includes(499));
  assert.ok(keys.every((key) => key < 1000));
  assert.ok(lines.every(({ key }) => keys.includes(key)));
  assert.equal(lines.filter(({ query }) => query === 500).length, 2);
});

test("the window stays inside of the queries that are known", () => {
  const read = (i) => [[i, 1]];
  for (const [query, begin] of [[256, 256], [767, 744], [260, 256]]) {
    const { queries } = linesOf({ query, first: 256, stop: 768, kvLen: 800, read });
    assert.deepEqual([queries[0], queries.length], [begin, 24]);
  }
  assert.deepEqual(linesOf({ query: 0, first: 0, stop: 1, kvLen: 1, read }).queries, [0]);
});
