// The small language model, computed in the page: the numbers of qkv.samples.language_model, in float64.

/** @typedef {{rows: number, columns: number, values: Float64Array}} Matrix */

const EPSILON = 1e-6;
const BASE = 10000;
/** The id of a character that no piece has. */
export const UNKNOWN = 0;

/** The model of a safetensors file with int8 matrices and a float32 scale for each row. */
export class LanguageModel {
  /** @param {Uint8Array} bytes */
  constructor(bytes) {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    const length = Number(view.getBigUint64(0, true));
    const { __metadata__: said, ...header } = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + length)));
    const start = (name) => 8 + length + header[name].data_offsets[0];
    const matrix = (name) => {
      const [rows, columns] = header[name].shape;
      const values = new Float64Array(rows * columns);
      for (let i = 0; i < rows; i += 1) {
        const scale = view.getFloat32(start(`${name}.scale`) + 4 * i, true);
        for (let j = 0; j < columns; j += 1) values[i * columns + j] = scale * view.getInt8(start(name) + i * columns + j);
      }
      return { rows, columns, values };
    };
    const about = JSON.parse(said.about);
    this.pieces = about.pieces;
    this.numHeads = about.num_heads;
    this.context = about.context;
    this.measured = about.measured;
    this.bytes = bytes.length;
    this.embedding = matrix("embedding.weight");
    this.layers = [];
    while (header[`layers.${this.layers.length}.q_proj.weight`]) {
      const at = `layers.${this.layers.length}`;
      this.layers.push(Object.fromEntries(["q", "k", "v", "out", "up", "down"].map((role) => [role, matrix(`${at}.${role}_proj.weight`)])));
    }
    this.ids = new Map(this.pieces.map((piece, id) => [piece, id]));
    this.longest = Math.max(...this.pieces.map((piece) => piece.length));
  }

  /** The longest piece that fits, from left to right. @param {string} text */
  encode(text) {
    const characters = Array.from(text);
    const found = [];
    let at = 0;
    while (at < characters.length) {
      let length = Math.min(this.longest, characters.length - at);
      while (length > 1 && !this.ids.has(characters.slice(at, at + length).join(""))) length -= 1;
      found.push(this.ids.get(characters.slice(at, at + length).join("")) ?? UNKNOWN);
      at += length;
    }
    return found;
  }

  /**
   * Scores of every token to follow each position, and the weights of every head.
   * @param {number[]} ids @param {Set<string>} [off] heads that write nothing, as "layer.head"
   * @param {(layer: {x: Float64Array[], query: Float64Array[], key: Float64Array[], value: Float64Array[], weights: Float64Array[][], out: Float64Array[], mixed: Float64Array[], transformed: Float64Array[]}) => void} [see]
   * given all of each layer: the rows that it reads, its heads, and what is added to the rows
   * @returns {{logits: Float64Array[], weights: Float64Array[][][]}} by position; by layer, head and query
   */
  run(ids, off = new Set(), see = undefined) {
    const width = this.embedding.columns;
    const rows = ids.map((id) => normed(this.learned(id)));
    const weights = this.layers.map((layer, index) => {
      const read = rows.map(normed);
      const [query, key, value] = ["q", "k", "v"].map((role) => read.map((row) => product(layer[role], row)));
      const size = width / this.numHeads;
      query.forEach((row, i) => turn(row, i, size));
      key.forEach((row, i) => turn(row, i, size));
      const out = rows.map(() => new Float64Array(width));
      const heads = Array.from({ length: this.numHeads }, (_, head) =>
        attend(query, key, value, head * size, size, off.has(`${index}.${head}`) ? null : out));
      const x = see && rows.map((row) => row.slice());
      const mixed = out.map((row) => product(layer.out, row));
      const transformed = rows.map((row, i) => {
        add(row, mixed[i]);
        const wide = product(layer.up, normed(row)).map((each) => (each > 0 ? each * each : 0));
        return product(layer.down, wide);
      });
      rows.forEach((row, i) => add(row, transformed[i]));
      see?.({ x, query, key, value, weights: heads, out, mixed, transformed });
      return heads;
    });
    return { logits: rows.map((row) => this.scores(row)), weights };
  }

  /** The row of a token in the table, as it was learned. @param {number} id */
  learned(id) {
    const { columns, values } = this.embedding;
    return values.subarray(id * columns, (id + 1) * columns);
  }

  /** Scores of every token to follow, of a row. @param {Float64Array} row */
  scores(row) {
    return product(this.embedding, normed(row));
  }
}

/** The model from the base64 in which pages carry it. @param {string} text */
export const fromBase64 = (text) => new LanguageModel(Uint8Array.from(atob(text), (character) => character.charCodeAt(0)));

/** How many tokens the model does not know, as a sentence; null if it knows all. @param {number[]} ids */
export function unknownOf(ids) {
  const count = ids.filter((id) => id === UNKNOWN).length;
  if (!count) return null;
  const [verb, each] = count === 1 ? ["is", "it"] : ["are", "each of them"];
  return `${count} of these ${ids.length} tokens ${verb} unknown to the model, which reads ${each} as “�”.`;
}

/** softmax(logits / temperature). @param {Float64Array} logits */
export function probabilities(logits, temperature = 1) {
  const largest = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const exp = logits.map((x) => Math.exp((x - largest) / temperature));
  const sum = exp.reduce((a, b) => a + b, 0);
  return exp.map((x) => x / sum);
}

/** -log p of each token but the first. @param {Float64Array[]} logits @param {number[]} ids */
export const losses = (logits, ids) => ids.slice(1).map((id, i) => {
  const largest = logits[i].reduce((a, b) => Math.max(a, b), -Infinity);
  return Math.log(logits[i].reduce((sum, x) => sum + Math.exp(x - largest), 0)) + largest - logits[i][id];
});

/** sqrt(mean(x^2) + 1e-6), by which a row is divided before it is read. @param {Float64Array} row */
export const divisorOf = (row) => Math.sqrt(row.reduce((sum, x) => sum + x * x, 0) / row.length + EPSILON);

/** @param {Float64Array} row */
function normed(row) {
  const divisor = divisorOf(row);
  return row.map((x) => x / divisor);
}

/** A matrix times a column. @param {Matrix} matrix @param {Float64Array} row */
function product({ rows, columns, values }, row) {
  const found = new Float64Array(rows);
  for (let i = 0, at = 0; i < rows; i += 1) {
    let sum = 0;
    for (let j = 0; j < columns; j += 1, at += 1) sum += values[at] * row[j];
    found[i] = sum;
  }
  return found;
}

function add(row, other) {
  for (let i = 0; i < row.length; i += 1) row[i] += other[i];
}

/** RoPE: entries i and i + size / 2 of each head turn by position * base^(-2 i / size). */
function turn(row, position, size) {
  const half = size / 2;
  for (let first = 0; first < row.length; first += size) {
    for (let i = 0; i < half; i += 1) {
      const angle = position * BASE ** (-i / half);
      const [cos, sin] = [Math.cos(angle), Math.sin(angle)];
      const [a, b] = [row[first + i], row[first + half + i]];
      row[first + i] = a * cos - b * sin;
      row[first + half + i] = b * cos + a * sin;
    }
  }
}

/** One causal head: its weights by query, and into `out`, unless it is off, what it writes. */
function attend(query, key, value, first, size, out) {
  return query.map((q, i) => {
    const row = new Float64Array(i + 1);
    for (let j = 0; j <= i; j += 1) {
      let sum = 0;
      for (let d = first; d < first + size; d += 1) sum += q[d] * key[j][d];
      row[j] = sum / Math.sqrt(size);
    }
    const weights = probabilities(row);
    if (out) weights.forEach((w, j) => { for (let d = first; d < first + size; d += 1) out[i][d] += w * value[j][d]; });
    return weights;
  });
}
