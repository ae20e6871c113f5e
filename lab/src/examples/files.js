// Arrays from safetensors and npz files, read in the page. Nothing that a file says about itself is
// believed before it is checked against its bytes.

const MOST_BYTES = 64 * 2 ** 20;

/** @typedef {{shape: number[], values: Float64Array}} Named */

/** Arrays by name, tokens, and for arrays that cannot be read why not.
 * @param {File} file
 * @returns {Promise<{arrays: Record<string, Named>, tokens?: string[], unread: Record<string, string>}>} */
export async function arraysOf(file) {
  if (file.size > MOST_BYTES) throw new Error("it is larger than 64 MiB; run qkv lab FILE.");
  const bytes = await file.arrayBuffer();
  return file.name.endsWith(".npz") ? npz(bytes) : safetensors(bytes);
}

function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

const single = new DataView(new ArrayBuffer(4));
function brain(bits) {
  single.setUint32(0, bits << 16);
  return single.getFloat32(0);
}

const READERS = {
  F64: [8, (view, at, little) => view.getFloat64(at, little)],
  F32: [4, (view, at, little) => view.getFloat32(at, little)],
  F16: [2, (view, at, little) => half(view.getUint16(at, little))],
  BF16: [2, (view, at, little) => brain(view.getUint16(at, little))],
};

const ofType = (name, type) => `it holds ${name} as ${type}; float16, bfloat16, float32 and float64 are read.`;

/** The numbers of an array, row by row. @returns {Named} */
function numbers(buffer, start, length, type, shape, { little = true, byColumns = false } = {}) {
  const [size, read] = READERS[type];
  const count = shape.reduce((all, each) => all * each, 1);
  if (!shape.every((each) => Number.isInteger(each) && each >= 0) || count * size !== length) {
    throw new Error(`it says ${shape.join(" x ")} numbers of ${size} bytes and has ${length} bytes.`);
  }
  const view = new DataView(buffer, start, length);
  const place = byColumns ? columnOrder(shape) : (i) => i;
  return { shape, values: Float64Array.from({ length: count }, (_, i) => read(view, place(i) * size, little)) };
}

/** Where the entry i of an array lies whose first index, and not its last, changes fastest. */
function columnOrder(shape) {
  const steps = shape.map((_, axis) => shape.slice(0, axis).reduce((all, each) => all * each, 1));
  return (i) => {
    let at = 0;
    for (let axis = shape.length - 1; axis >= 0; axis -= 1) {
      at += (i % shape[axis]) * steps[axis];
      i = Math.floor(i / shape[axis]);
    }
    return at;
  };
}

/** What a safetensors file says of its arrays. @param {string} text */
function headerOf(text) {
  const isEntry = ([name, said]) => name === "__metadata__" || (typeof said?.dtype === "string" && Array.isArray(said.shape) && Array.isArray(said.data_offsets));
  let header = null;
  try {
    header = JSON.parse(text);
  } catch {
    // The error below says it for headers of other kinds too.
  }
  if (header === null || typeof header !== "object" || !Object.entries(header).every(isEntry)) throw new Error("its header is not that of a safetensors file.");
  return header;
}

/** Whether a file says that it is a record of qkv: its scores have variants too, which are not read here. */
function isRecord(metadata) {
  try {
    return /^qkv-(model-)?record$/.test(JSON.parse(metadata?.qkv ?? "{}")?.schema);
  } catch {
    return false;
  }
}

function safetensors(buffer) {
  if (buffer.byteLength < 8) throw new Error("it is too short for a safetensors file.");
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  if (length > buffer.byteLength - 8) throw new Error("it is not a safetensors file, or not all of it.");
  const header = headerOf(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  if (isRecord(header.__metadata__)) throw new Error("it is a saved record, which holds more than q, k and v; run qkv lab FILE.");
  const arrays = {};
  const unread = {};
  for (const [name, { dtype, shape, data_offsets: offsets }] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    if (!Object.hasOwn(READERS, dtype)) {
      unread[name] = ofType(name, dtype);
      continue;
    }
    const [start, stop] = offsets;
    if (!(start >= 0 && stop >= start && 8 + length + stop <= buffer.byteLength)) {
      throw new Error(`${name} lies outside the file.`);
    }
    arrays[name] = numbers(buffer, 8 + length + start, stop - start, dtype, shape);
  }
  let tokens;
  try {
    tokens = JSON.parse(header.__metadata__?.tokens ?? "null") ?? undefined;
  } catch {
    tokens = undefined;
  }
  return { arrays, tokens: Array.isArray(tokens) ? tokens.map(String) : undefined, unread };
}

async function inflated(bytes) {
  const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw")).getReader();
  const parts = [];
  let length = 0;
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    length += part.value.length;
    if (length > MOST_BYTES) throw new Error("it unpacks to more than 64 MiB.");
    parts.push(part.value);
  }
  return new Blob(parts).arrayBuffer();
}

async function npz(buffer) {
  const view = new DataView(buffer);
  const arrays = {};
  const unread = {};
  let tokens;
  // The end of the archive's directory lies in its last bytes.
  let end = buffer.byteLength - 22;
  while (end >= 0 && view.getUint32(end, true) !== 0x06054b50) end -= 1;
  if (end < 0) throw new Error("it is not an npz file.");
  let at = view.getUint32(end + 16, true);
  for (let left = view.getUint16(end + 10, true); left > 0; left -= 1) {
    const method = view.getUint16(at + 10, true);
    const packed = view.getUint32(at + 20, true);
    const nameLength = view.getUint16(at + 28, true);
    const local = view.getUint32(at + 42, true);
    const name = new TextDecoder().decode(new Uint8Array(buffer, at + 46, nameLength));
    const start = local + 30 + view.getUint16(local + 26, true) + view.getUint16(local + 28, true);
    const bytes = buffer.slice(start, start + packed);
    const plain = name.replace(/\.npy$/, "");
    const found = npy(method === 8 ? await inflated(bytes) : bytes, plain);
    if (found.texts) tokens = plain === "tokens" ? found.texts : tokens;
    else if (found.unread) unread[plain] = found.unread;
    else arrays[plain] = found;
    at += 46 + nameLength + view.getUint16(at + 30, true) + view.getUint16(at + 32, true);
  }
  return { arrays, tokens, unread };
}

const NPY_TYPES = { f8: "F64", f4: "F32", f2: "F16" };

/** One array of an archive: its numbers, its texts, or why it is not read. */
function npy(buffer, name) {
  const view = new DataView(buffer);
  if (view.getUint32(0) !== 0x934e554d) throw new Error("it holds something else than arrays.");
  const wide = view.getUint8(6) > 1;
  const length = wide ? view.getUint32(8, true) : view.getUint16(8, true);
  const start = (wide ? 12 : 10) + length;
  const header = new TextDecoder().decode(new Uint8Array(buffer, wide ? 12 : 10, length));
  const written = /'descr': *'([^']+)'/.exec(header)?.[1] ?? "a table";
  const little = written[0] !== ">";
  const [, kind, size] = /^.([US])(\d+)$/.exec(written) ?? [];
  if (kind) return { texts: texts(buffer.slice(start), kind, Number(size), little) };
  const type = Object.hasOwn(NPY_TYPES, written.slice(1)) && NPY_TYPES[written.slice(1)];
  if (!type) return { unread: ofType(name, written) };
  const byColumns = /'fortran_order': *True/.test(header);
  const shape = (/'shape': *\(([^)]*)\)/.exec(header)?.[1] ?? "").split(",").map((x) => x.trim()).filter(Boolean).map(Number);
  return numbers(buffer, start, buffer.byteLength - start, type, shape, { little, byColumns });
}

/** Strings of one length each, filled up with zeros: of code points (U), or of bytes in UTF-8 (S). */
function texts(buffer, kind, size, little) {
  const width = kind === "U" ? 4 * size : size;
  const view = new DataView(buffer);
  const one = (at) => {
    if (kind === "S") return new TextDecoder().decode(new Uint8Array(buffer, at, width));
    const codes = Array.from({ length: size }, (_, i) => view.getUint32(at + 4 * i, little));
    return String.fromCodePoint(...codes.map((code) => (code > 0x10ffff ? 0xfffd : code)));
  };
  return Array.from({ length: width ? Math.floor(buffer.byteLength / width) : 0 }, (_, i) => one(i * width).replace(/\0+$/, ""));
}

/** The first matrix of an array of any dimensions. @param {Named} array */
function matrix({ shape, values }, name) {
  if (shape.length < 2) throw new Error(`${name} has ${shape.length} dimensions; a matrix has 2 or more.`);
  const [rows, columns] = shape.slice(-2);
  return Array.from({ length: rows }, (_, i) => [...values.subarray(i * columns, (i + 1) * columns)]);
}

/** What a file holds as an example. */
export function exampleOf({ arrays, tokens, unread }) {
  const [query, key, value] = [["q", "query"], ["k", "key"], ["v", "value"]].map(([short, long]) => {
    const array = arrays[short] ?? arrays[long];
    if (!array) throw new Error(unread[short] ?? unread[long] ?? `it has no array ${short}; it has ${Object.keys(arrays).join(", ") || "none"}.`);
    return matrix(array, short);
  });
  const names = tokens?.length === query.length ? tokens : query.map((_, i) => `token ${i}`);
  return { tokens: names, query, key, value };
}
