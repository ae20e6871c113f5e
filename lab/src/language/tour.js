// The tour: all numbers from a sentence to its next token, and where they stand in each step's picture.

import { divisorOf, probabilities } from "./language.js";
import { cut, quoted, shown } from "../drawing/format.js";

/** Tokens that a picture has room for. */
const MOST = 8;
/** The head of layer 0 that is looked into. */
export const HEAD = 3;
/** Numbers of a longer row that are drawn. */
export const DRAWN = 32;
const BEST = 5;

/** Size of every picture. */
export const [WIDTH, HEIGHT] = [360, 300];

const sum = (list) => list.reduce((a, b) => a + b, 0);
export const lengthOf = (row) => Math.sqrt(sum([...row].map((x) => x * x)));

/**
 * Everything between the last tokens of a text and the token after them, in the order of the steps.
 * @param {import("./language.js").LanguageModel} model @param {string} text
 */
export function numbersOf(model, text) {
  const ids = model.encode(text).slice(-MOST);
  if (!ids.length) return null;
  const layers = [];
  const { logits } = model.run(ids, new Set(), (layer) => layers.push(layer));
  const last = ids.length - 1;
  const [first] = layers;
  const size = first.x[0].length / model.numHeads;
  const partOf = (row, head) => row.subarray(head * size, (head + 1) * size);
  const [query, key, value] = [first.query, first.key, first.value].map((rows) => rows.map((row) => partOf(row, HEAD)));
  const raw = query.map((q) => key.map((k) => sum([...q].map((x, d) => x * k[d]))));
  const scaled = raw.map((row) => row.map((x) => x / Math.sqrt(size)));
  const seen = scaled[last];
  const rowMax = Math.max(...seen);
  const exp = seen.map((x) => Math.exp(x - rowMax));
  const states = [...layers.map(({ x }) => x[last]), layers.at(-1).x[last].map((x, d) => x + layers.at(-1).mixed[last][d] + layers.at(-1).transformed[last][d])];
  const learned = ids.map((id) => model.learned(id));
  const best = (p, count) => [...p.keys()].sort((a, b) => p[b] - p[a]).slice(0, count).map((id) => ({ token: model.pieces[id], p: p[id] }));
  return {
    ids, last, size, query, key, value, raw: raw[last], scaled, rowMax, exp, rowSum: sum(exp),
    tokens: ids.map((id) => model.pieces[id]), vocabulary: model.pieces.length,
    learned, divisors: learned.map(divisorOf), rows: first.x,
    /** By what the last row is divided before the heads of layer 0, its feed-forward layer, and the end read it. */
    before: { heads: divisorOf(states[0]), transformed: divisorOf(states[0].map((x, d) => x + first.mixed[last][d])), end: divisorOf(states.at(-1)) },
    weights: first.weights[HEAD][last], allWeights: first.weights,
    outputs: first.weights.map((_, head) => partOf(first.out[last], head)),
    mixed: first.mixed[last], transformed: first.transformed[last],
    states, guesses: states.map((row) => best(probabilities(model.scores(row)), 1)[0]),
    next: best(probabilities(logits[last]), BEST),
  };
}

// --- pictures --------------------------------------------------------------------------------------

const [TOP, ROW, LEFT] = [42, 30, 96];
const [STRIP, THIN] = [78, 16];
const BOX = 84;
const LETTER = 7.3;
const y = (i) => TOP + ROW * i;
const brief = (token, most) => cut(shown(token), most);
const fixed = (x) => x.toFixed(Math.abs(x) >= 99.995 ? 1 : 2).replace("-", "−");
const widthOf = (text) => 12 + LETTER * text.length;

const text = (key, x, at, words, more = {}) => ({ kind: "text", key, x, y: at, words, ...more });
const strip = (key, x, at, values, more = {}) => ({ kind: "strip", key, x, y: at, values: [...values].slice(0, DRAWN), width: STRIP, height: THIN, ...more });
const bar = (key, x, at, width) => ({ kind: "bar", key, x, y: at, width });

/** The tokens one below the other, at the left. */
const column = ({ tokens, last }) => tokens.map((token, i) => {
  const words = brief(token, 9);
  return { kind: "token", key: `token${i}`, x: BOX - widthOf(words), y: y(i), words, width: widthOf(words), here: i === last };
});

/** Tokens as a line of text, on as many lines as they need. */
function flow(tokens, last, top) {
  let [x, line] = [8, top];
  return tokens.map((token, i) => {
    const words = brief(token, 14);
    const width = widthOf(words);
    if (x + width > WIDTH - 8) [x, line] = [8, line + 44];
    const item = { kind: "token", key: `token${i}`, x, y: line, words, width, here: i === last };
    x += width + 5;
    return item;
  });
}

/** A small triangle of weights, queries down. */
const triangle = (name, weights, x, at, side) => weights.flatMap((row, i) => [...row].map((weight, j) =>
  ({ kind: "cell", key: `${name}.${i}.${j}`, x: x + side * j, y: at + side * i, width: side - 1, height: side - 1, share: Math.sqrt(weight) })));

/** What stands in the picture of each step. Things of one key move from step to step; `from` is where new ones come from, beside their own place. */
const SCENES = {
  tokens: ({ tokens, ids, last }) => {
    const places = flow(tokens, last, 120);
    return [text("sentence", WIDTH / 2, 66, brief(tokens.join(""), 44), { anchor: "middle", class: "serif" }),
      ...places.map((item) => ({ ...item, from: [WIDTH / 2 - item.x - item.width / 2, 60 - item.y] })),
      ...places.map(({ x, y: at, width }, i) => text(`id${i}`, x + width / 2, at + 33, String(ids[i]), { anchor: "middle", class: "faint", delay: 0.6 }))];
  },
  rows: (all) => [...column(all), text("head-x", LEFT, 24, `the first ${DRAWN} of ${all.rows[0].length} numbers`, { class: "faint" }),
    ...all.learned.map((row, i) => strip(`learned${i}`, LEFT, y(i), row, { width: 256, of: all.learned, delay: 0.08 * i }))],
  normed: (all) => [...column(all), text("head-x", LEFT, 24, "row of the table", { class: "faint" }), text("head-normed", 346, 24, "normalised", { anchor: "end", class: "faint" }),
    ...all.learned.map((row, i) => strip(`learned${i}`, LEFT, y(i), row, { of: all.learned })),
    ...all.divisors.map((x, i) => text(`divisor${i}`, 221, y(i) + 12, `÷ ${x.toPrecision(3)} =`, { anchor: "middle", class: "faint" })),
    ...all.rows.map((row, i) => strip(`x${i}`, 268, y(i), row, { of: all.rows, from: [LEFT - 268, 0], delay: 0.08 * i }))],
  roles: (all) => [...column(all),
    ...["query", "key", "value"].flatMap((role, place) => [text(`head-${role}`, LEFT + 88 * place, 24, role, { class: role[0] }),
      ...all[role].map((row, i) => strip(`${role}${i}`, LEFT + 88 * place, y(i), row, { class: role[0], from: [-88 * place, 0], of: all[role] }))])],
  scores: (all) => [...column(all), text("head-query", LEFT, 24, "query", { class: "q" }), text("head-key", LEFT + 104, 24, "key", { class: "k" }), text("head-score", 346, 24, "score", { anchor: "end", class: "faint" }),
    ...all.key.map((row, i) => strip(`key${i}`, LEFT + 104, y(i), row, { class: "k", of: all.key })),
    ...all.key.map((_, i) => strip(i === all.last ? `query${i}` : `copy${i}`, LEFT, y(i), all.query[all.last], { class: "q", of: all.query, from: [0, y(all.last) - y(i)], delay: 0.1 * (all.last - i) })),
    ...all.key.map((_, i) => text(`dot${i}`, LEFT + 91, y(i) + 12, "·", { anchor: "middle" })),
    ...all.raw.map((x, i) => text(`score${i}`, 346, y(i) + 12, fixed(x), { anchor: "end", delay: 0.5 + 0.1 * (all.last - i) }))],
  scaled: (all) => [...column(all), text("head-score", 160, 24, "score", { anchor: "end", class: "faint" }), text("head-scaled", 330, 24, "scaled score", { anchor: "end", class: "faint" }),
    ...all.raw.map((x, i) => text(`score${i}`, 160, y(i) + 12, fixed(x), { anchor: "end" })),
    ...all.raw.map((_, i) => text(`root${i}`, 210, y(i) + 12, `÷ √${all.size}  =`, { anchor: "middle", class: "faint" })),
    ...all.scaled[all.last].map((x, i) => text(`scaled${i}`, 330, y(i) + 12, fixed(x), { anchor: "end", from: [-60, 0], delay: 0.4 }))],
  mask: (all) => {
    const largest = Math.max(...all.scaled.flatMap((row, i) => row.slice(0, i + 1)).map(Math.abs), 1e-300);
    return [...column(all), ...all.tokens.map((token, j) => text(`name${j}`, LEFT + 17 + 31 * j, 30, brief(token.trim(), 5), { anchor: "middle", class: "faint" })),
      ...all.scaled.flatMap((row, i) => row.map((x, j) => ({ kind: "cell", key: `cell${i}.${j}`, x: LEFT + 3 + 31 * j, y: y(i) - 4, width: 28, height: 26, share: j <= i ? x / largest : null,
        ...(i === all.last ? { from: [220 - 31 * j, y(j) - y(i)] } : { delay: 0.5 + 0.08 * i }) })))];
  },
  weights: (all) => [...column(all), text("head-scaled", 160, 24, "scaled score", { anchor: "end", class: "faint" }), text("head-weight", 346, 24, "weight", { anchor: "end", class: "faint" }),
    ...all.scaled[all.last].map((x, i) => text(`scaled${i}`, 160, y(i) + 12, fixed(x), { anchor: "end" })),
    ...[...all.weights].map((w, i) => bar(`bar${i}`, 176, y(i), (120 * w) / Math.max(...all.weights))),
    ...[...all.weights].map((w, i) => text(`weight${i}`, 346, y(i) + 12, fixed(w), { anchor: "end", delay: 0.3 }))],
  values: (all) => {
    const middle = y(all.last / 2);
    return [...column(all), text("head-weight", 130, 24, "weight", { anchor: "end", class: "faint" }), text("head-value", 150, 24, "value", { class: "v" }), text("head-out", 274, middle - 12, "output", { class: "o" }),
      ...[...all.weights].map((w, i) => text(`weight${i}`, 130, y(i) + 12, fixed(w), { anchor: "end" })),
      ...all.value.map((row, i) => strip(`value${i}`, 150, y(i), row, { class: "v", of: all.value, faded: all.weights[i] / Math.max(...all.weights), from: [122, 0] })),
      ...[...all.weights].map((w, i) => ({ kind: "flow", key: `flow${i}`, x: 0, y: 0, path: `M230 ${y(i) + 8} C 252 ${y(i) + 8}, 252 ${middle + 8}, 272 ${middle + 8}`, wide: 0.5 + 12 * w, delay: 0.5 })),
      strip("out", 274, middle, all.outputs[HEAD], { class: "o", delay: 1.1 })];
  },
  heads: (all) => [...all.allWeights.flatMap((weights, head) => [
    text(`which${head}`, 14, 42 + 60 * head, `head ${head}`, { class: head === HEAD ? "o" : "faint" }),
    ...triangle(`small${head}`, weights, 76, 14 + 60 * head, 48 / weights.length),
    strip(head === HEAD ? "out" : `out${head}`, 170, 30 + 60 * head, all.outputs[head], { class: "o", of: all.outputs }),
    strip(`joined${head}`, 24 + STRIP * head, 272, all.outputs[head], { class: "o", of: all.outputs, from: [146 - STRIP * head, 60 * head - 242], delay: 0.5 })]),
    text("join", 262, 42, `${all.size} numbers`, { class: "faint" }), text("joined", WIDTH / 2, 264, `put end to end: ${all.size * all.outputs.length}`, { anchor: "middle", class: "faint", delay: 0.8 })],
  added: (all) => {
    const rows = [["x", `row of ${quoted(all.tokens[all.last])}`, all.states[0]], ["mixed", "+ what the heads write", all.mixed], ["wide", "+ what the feed-forward layer writes", all.transformed], ["after", "= row after layer 0", all.states[1]]];
    return rows.flatMap(([key, words, row], i) => [text(`words-${key}`, 14, 38 + 66 * i, words, { class: i === 3 ? "" : "faint", delay: 0.5 * i }), text(`length-${key}`, 346, 38 + 66 * i, `length ${fixed(lengthOf(row))}`, { anchor: "end", class: "faint", delay: 0.5 * i }),
      strip(key === "x" ? `x${all.last}` : `sum-${key}`, 14, 46 + 66 * i, row, { width: 332, of: rows.map(([, , each]) => each), delay: 0.5 * i, ...(i === 3 ? { from: [0, -66] } : {}) })]);
  },
  layers: (all) => [text("head-guess", 346, 24, "would come next", { anchor: "end", class: "faint" }),
    ...all.states.flatMap((row, i) => [text(`after${i}`, 14, 58 + 50 * i, i ? `layer ${i - 1}` : "before", { class: "faint", delay: 0.5 * i }),
      strip(i === 1 ? "sum-after" : `state${i}`, 84, 46 + 50 * i, row, { width: 130, ...(i ? { from: [0, -50] } : {}), delay: 0.5 * i }),
      text(`guess${i}`, 346, 58 + 50 * i, `${brief(all.guesses[i].token, 10)} ${fixed(all.guesses[i].p)}`, { anchor: "end", delay: 0.5 * i + 0.2 })])],
  next: (all) => {
    const [best] = all.next;
    const places = flow([...all.tokens, best.token], all.tokens.length, 24);
    const added = places.pop();
    const top = Math.max(112, added.y + 46);
    return [...places, { ...added, key: "added", from: [20 - added.x, top - added.y], delay: 0.9 },
      ...all.next.flatMap(({ token, p }, i) => [text(`next${i}`, 110, top + 12 + 30 * i, brief(token, 12), { anchor: "end" }), bar(`chance${i}`, 122, top + 30 * i, (160 * p) / best.p), text(`p${i}`, 346, top + 12 + 30 * i, fixed(p), { anchor: "end" })])];
  },
};

/** The steps, in their order. */
export const STEPS = Object.keys(SCENES);

/** What stands in the picture of a step. @param {string} step @param {NonNullable<ReturnType<typeof numbersOf>>} numbers */
export const sceneOf = (step, numbers) => SCENES[step](numbers);
