// What the page computes of texts that come as JSON on standard input, for tests in Python.

import { readFileSync } from "node:fs";
import { kindOf, scoresOf } from "../src/language/kinds.js";
import { LanguageModel, losses, probabilities } from "../src/language/language.js";

const model = new LanguageModel(readFileSync(new URL("../../src/qkv/samples/language.safetensors", import.meta.url)));
const answers = JSON.parse(readFileSync(0, "utf8")).map(({ text, off, temperature, threshold }) => {
  const ids = model.encode(text);
  const { logits, weights } = model.run(ids, new Set(off));
  return {
    ids, logits: logits.map((row) => [...row]), losses: losses(logits, ids), weights: weights.map((layer) => layer.map((head) => head.map((row) => [...row]))),
    kinds: weights.map((layer) => layer.map((head) => kindOf(scoresOf(head, ids).means, threshold))),
    counts: ids.length ? scoresOf(weights[0][0], ids).counts : {},
    next: logits.length ? [...probabilities(logits.at(-1), temperature)] : [],
  };
});
process.stdout.write(JSON.stringify(answers));
