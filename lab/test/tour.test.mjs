// The tour: its numbers add up, and its pictures have room for them.

import { readFileSync } from "node:fs";
import assert from "node:assert/strict";
import { test } from "node:test";
import { LanguageModel } from "../src/language/language.js";
import { HEAD, HEIGHT, STEPS, WIDTH, numbersOf, sceneOf } from "../src/language/tour.js";

const model = new LanguageModel(readFileSync(new URL("../../src/qkv/samples/language.safetensors", import.meta.url)));
const SENTENCES = ["He was a very pleasant young", "I", "zzz ???", "It is a truth universally acknowledged, that a single man in possession", "extraordinary acquaintance understanding immediately"];
const close = (a, b) => assert.ok(Math.abs(a - b) < 1e-9 * Math.max(1, Math.abs(a)), `${a} and ${b}`);

test("the numbers of the steps come from one another", () => {
  for (const sentence of SENTENCES) {
    const all = numbersOf(model, sentence);
    const { logits, weights } = model.run(all.ids);
    assert.ok(all.tokens.length <= 8 && sentence.endsWith(all.tokens.join("")));
    all.weights.forEach((w, i) => {
      close(w, all.exp[i] / all.rowSum);
      close(w, weights[0][HEAD][all.last][i]);
      close(all.scaled[all.last][i] * Math.sqrt(all.size), all.raw[i]);
      close(all.exp[i], Math.exp(all.scaled[all.last][i] - all.rowMax));
    });
    all.outputs[HEAD].forEach((x, d) => close(x, all.value.reduce((sum, row, i) => sum + all.weights[i] * row[d], 0)));
    all.states[1].forEach((x, d) => close(x, all.states[0][d] + all.mixed[d] + all.transformed[d]));
    assert.equal(all.states.length, model.layers.length + 1);
    model.scores(all.states.at(-1)).forEach((x, id) => close(x, logits[all.last][id]));
    assert.deepEqual(all.guesses.at(-1), all.next[0]);
  }
  assert.equal(numbersOf(model, ""), null);
});

const times = ({ rows, columns, values }, row) => Array.from({ length: rows }, (_, i) => row.reduce((sum, x, j) => sum + values[i * columns + j] * x, 0));
const meanSquare = (row) => row.reduce((sum, x) => sum + x * x, 0) / row.length;

test("with the divisors that are said, the rows are those that are read", () => {
  for (const sentence of SENTENCES) {
    const all = numbersOf(model, sentence);
    const { last, size } = all;
    const [layer] = model.layers;
    all.learned.forEach((row, i) => {
      close(all.divisors[i] ** 2, meanSquare(row) + 1e-6);
      row.forEach((x, d) => {
        close(x, model.embedding.values[all.ids[i] * row.length + d]);
        close(all.rows[i][d], x / all.divisors[i]);
      });
    });
    // Values are not turned by their position.
    const read = all.states[0].map((x) => x / all.before.heads);
    times(layer.v, read).slice(HEAD * size, (HEAD + 1) * size).forEach((x, d) => close(all.value[last][d], x));
    const wide = times(layer.up, all.states[0].map((x, d) => (x + all.mixed[d]) / all.before.transformed)).map((x) => Math.max(x, 0) ** 2);
    times(layer.down, wide).forEach((x, d) => close(all.transformed[d], x));
    const logits = times(model.embedding, all.states.at(-1).map((x) => x / all.before.end));
    const exp = logits.map((x) => Math.exp(x - Math.max(...logits)));
    close(all.next[0].p, 1 / exp.reduce((sum, x) => sum + x, 0));
  }
});

/** The corners of a thing of a picture, as wide as letters of 7.3 make it. */
function box({ kind, x, y, width, height, words, anchor, path }) {
  if (kind === "text") {
    const wide = 7.3 * words.length;
    const left = anchor === "middle" ? x - wide / 2 : anchor === "end" ? x - wide : x;
    return [left, y - 10, left + wide, y + 3];
  }
  if (path) {
    const places = path.match(/-?[\d.]+/g).map(Number);
    return [Math.min(...places), Math.min(...places), Math.max(...places.filter((_, i) => i % 2 === 0)), Math.max(...places.filter((_, i) => i % 2))];
  }
  return [x, y - 2, x + width, y + (height ?? 18)];
}

test("everything is inside of its picture, once", () => {
  assert.equal(STEPS.length, 13);
  for (const sentence of SENTENCES) {
    const all = numbersOf(model, sentence);
    for (const step of STEPS) {
      const scene = sceneOf(step, all);
      assert.equal(new Set(scene.map(({ key }) => key)).size, scene.length, step);
      for (const thing of scene) {
        const [left, top, right, bottom] = box(thing);
        assert.ok(left >= 0 && top >= 0 && right <= WIDTH && bottom <= HEIGHT, `${sentence}, ${step}, ${thing.key}: ${[left, top, right, bottom]}`);
      }
    }
  }
});

test("each step but the one after the heads keeps something of the step before", () => {
  const all = numbersOf(model, SENTENCES[0]);
  const keys = STEPS.map((step) => new Set(sceneOf(step, all).map(({ key }) => key)));
  keys.slice(1).forEach((now, i) => {
    const kept = [...now].filter((key) => keys[i].has(key) && !key.startsWith("head-"));
    if (!["added", "next"].includes(STEPS[i + 1])) assert.ok(kept.length > 0, STEPS[i + 1]);
  });
});
