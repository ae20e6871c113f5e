// What the tour says in each step, and the numbers of it as a table.

import { html } from "./lab.js";
import { Num, Quoted } from "./basics.js";
import { quoted, written } from "../drawing/format.js";
import { HEAD, lengthOf } from "../language/tour.js";

const FIRST = 4;
const places = Array.from({ length: FIRST }, (_, i) => String(i));
const begin = (row) => [...row].slice(0, FIRST).map((x) => ({ x }));
const largestOf = (row) => [...row].reduce((a, b) => Math.max(a, b), -Infinity);

const WORDS = {
  tokens: ({ tokens, ids, vocabulary }) => ({
    title: "Tokens",
    said: html`A model reads pieces of text, its tokens. Here it reads ${tokens.length === 1 ? "one" : tokens.length}: some are words, some are parts of words, and ␣ is the blank before a word. Each has a number, one of ${vocabulary.toLocaleString("en-US")}.`,
    columns: ["token", "number"],
    rows: ids.map((id, i) => [quoted(tokens[i]), id]),
  }),
  rows: ({ tokens, learned }) => ({
    title: "A row of numbers for each token",
    said: html`A table has a row of ${learned[0].length} numbers for each token, which was learned. The model looks up the rows of the sentence; from here on it knows nothing else of a token. Blue numbers are positive, orange ones negative.`,
    columns: ["token", ...places],
    rows: learned.map((row, i) => [quoted(tokens[i]), ...begin(row)]),
  }),
  normed: ({ tokens, divisors, rows }) => ({
    title: "Rows are normalised",
    said: html`Each row is divided by the root of the mean of its squares plus 0.000001, which is there so that nothing is divided by 0. This is RMS normalisation, a layer normalisation without a mean. To these rows the layers will add; whatever reads them normalises them so once more: heads, feed-forward layers, and the end.`,
    columns: ["token", "divided by", ...places],
    rows: rows.map((row, i) => [quoted(tokens[i]), { x: divisors[i] }, ...begin(row)]),
  }),
  roles: ({ tokens, last, rows, size, before, ...all }) => ({
    title: "Query, key and value",
    said: html`A head makes three shorter rows of each row (normalised once more: that of <${Quoted} text=${tokens[last]} /> is divided by <${Num} x=${before.heads} digits=${8} />), with three matrices of ${rows[0].length} × ${size} that were learned. A <b class="q">query</b> says what a token looks for, a <b class="k">key</b> by what it can be found, a <b class="v">value</b> what it gives. Query and key are turned by angles that grow with the position, so that their product depends on the distance. This is head ${HEAD} of layer 0.`,
    columns: [`of ${quoted(tokens[last])}`, ...places],
    rows: ["query", "key", "value"].map((role) => [role, ...begin(all[role][last])]),
  }),
  scores: ({ tokens, last, raw, size }) => ({
    title: "The query meets the keys",
    said: html`The query of <${Quoted} text=${tokens[last]} /> is multiplied with each key, number by number, and the ${size} products are added: one score for each token. The largest, <${Num} x=${largestOf(raw)} />, is that of <${Quoted} text=${tokens[raw.indexOf(largestOf(raw))]} />.`,
    columns: ["key", "score"],
    rows: raw.map((x, i) => [quoted(tokens[i]), { x }]),
  }),
  scaled: ({ tokens, last, raw, scaled, size }) => ({
    title: "Scale",
    said: html`Sums of more products are larger. So that their number does not decide how sharp the choice is, each score is divided by √${size} = <${Num} x=${Math.sqrt(size)} />: a query has ${size} numbers.`,
    columns: ["key", "score", "scaled score"],
    rows: raw.map((x, i) => [quoted(tokens[i]), { x }, { x: scaled[last][i] }]),
  }),
  mask: ({ tokens, last, scaled }) => ({
    title: "No token reads what comes after it",
    said: html`The model makes such scores for all tokens at once: queries go down, keys across. A token that is to predict the next one must not see it, so all scores above the diagonal become −∞. <${Quoted} text=${tokens[last]} /> is the last one and may read all.`,
    columns: ["query", ...tokens.map(quoted)],
    rows: scaled.map((row, i) => [quoted(tokens[i]), ...row.map((x, j) => ({ x: j <= i ? x : -Infinity }))]),
  }),
  weights: ({ tokens, last, scaled, weights, rowMax, rowSum, exp }) => ({
    title: "Softmax makes shares of scores",
    said: html`The largest score, <${Num} x=${rowMax} />, is subtracted from each, e is raised to what is left, and that is divided by the sum of all, <${Num} x=${rowSum} />. These are the weights: all positive, and 1 together. Most, <${Num} x=${largestOf(weights)} />, is for <${Quoted} text=${tokens[weights.indexOf(largestOf(weights))]} />.`,
    columns: ["key", "scaled score", "e^(score − max)", "weight"],
    rows: [...weights].map((x, i) => [quoted(tokens[i]), { x: scaled[last][i] }, { x: exp[i] }, { x }]),
  }),
  values: ({ tokens, last, weights, value, outputs }) => ({
    title: "Values are mixed by the weights",
    said: html`Each value is multiplied by its weight, and all are added. The sum is the output of this head for <${Quoted} text=${tokens[last]} />: a row of ${outputs[HEAD].length} numbers, a mixture, to which each token gives as much as its weight says.`,
    columns: ["weight × value of", ...places],
    rows: [...[...weights].map((w, i) => [`${written(w)} × ${quoted(tokens[i])}`, ...begin(value[i].map((x) => w * x))]), ["output", ...begin(outputs[HEAD])]],
  }),
  heads: ({ tokens, last, size, outputs, allWeights }) => ({
    title: "Heads side by side",
    said: html`${outputs.length} heads do this at once, each with matrices of its own, so each reads elsewhere: the small pictures show their weights, queries down and keys across. Their outputs are put end to end, ${outputs.length} × ${size} = ${outputs.length * size} numbers, and one more matrix mixes them.`,
    columns: [`weights of ${quoted(tokens[last])}`, ...tokens.map(quoted)],
    rows: allWeights.map((rows, head) => [`head ${head}`, ...[...rows[last]].map((x) => ({ x }))]),
  }),
  added: ({ tokens, last, states, mixed, transformed, before }) => ({
    title: "What is found is added to the row",
    said: html`The row of <${Quoted} text=${tokens[last]} /> stays, and what the heads write is added to it. Then the feed-forward layer makes something of this row alone: it divides it by <${Num} x=${before.transformed} />, the root of the mean of its squares, and goes on with a matrix, max(x, 0)² of each number, and a matrix back. That is added too${lengthOf(transformed) > lengthOf(mixed) ? ", and here it is the larger part" : ""}.`,
    columns: ["row", "length", ...places],
    rows: [["before", states[0]], ["of the heads", mixed], ["of the feed-forward layer", transformed], ["after layer 0", states[1]]].map(([name, row]) => [name, { x: lengthOf(row) }, ...begin(row)]),
  }),
  layers: ({ states, guesses }) => ({
    title: `${states.length - 1} layers, one after another`,
    said: html`The same is done ${states.length - 2} more times, each time with other matrices, and each layer reads what those before it have added. Beside each row stands the token that the model would predict if it ended there.`,
    columns: ["after", "would come next", "probability"],
    rows: guesses.map(({ token, p }, i) => [i ? `layer ${i - 1}` : "the table", quoted(token), { x: p }]),
  }),
  next: ({ next, vocabulary, before }) => ({
    title: "The next token",
    said: html`The last row is normalised, divided by <${Num} x=${before.end} />, and multiplied with the rows of all ${vocabulary.toLocaleString("en-US")} tokens in the table, and softmax makes probabilities of these scores. <${Quoted} text=${next[0].token} /> gets <${Num} x=${next[0].p} /> and is put at the end. Then all of it is done again with one token more: that is how a model writes.`,
    columns: ["next token", "probability"],
    rows: next.map(({ token, p }) => [quoted(token), { x: p }]),
  }),
};

/** @param {string} step @param {NonNullable<ReturnType<typeof import("../language/tour.js").numbersOf>>} numbers */
export const saidOf = (step, numbers) => WORDS[step](numbers);
