// Arrays from safetensors and npz files, read in the page. Nothing that a file says about itself is
// believed before it is checked against its bytes.

const MOST_BYTES = 64 * 2 ** 20;

/** @typedef {{shape: number[], values: Float64Array}} Named */

/** @param {File} file @returns {Promise<{arrays: Record<string, Named>, tokens?: string[]}>} */
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
  F64: [8, (view, at) => view.getFloat64(at, true)],
  F32: [4, (view, at) => view.getFloat32(at, true)],
  F16: [2, (view, at) => half(view.getUint16(at, true))],
  BF16: [2, (view, at) => brain(view.getUint16(at, true))],
};

function numbers(buffer, start, length, type, shape) {
  const reader = READERS[type];
  if (!reader) throw new Error(`its numbers are of type ${type}; float16, bfloat16, float32 and float64 are read.`);
  const [size, read] = reader;
  const count = shape.reduce((all, each) => all * each, 1);
  if (!shape.every((each) => Number.isInteger(each) && each >= 0) || count * size !== length) {
    throw new Error(`it says ${shape.join(" x ")} numbers of ${size} bytes and has ${length} bytes.`);
  }
  const view = new DataView(buffer, start, length);
  return { shape, values: Float64Array.from({ length: count }, (_, i) => read(view, i * size)) };
}

function safetensors(buffer) {
  if (buffer.byteLength < 8) throw new Error("it is too short for a safetensors file.");
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  if (length > buffer.byteLength - 8) throw new Error("it is not a safetensors file, or not all of it.");
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const arrays = {};
  for (const [name, { dtype, shape, data_offsets: offsets }] of Object.entries(header)) {
    if (name === "__metadata__" || !READERS[dtype]) continue;
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
  return { arrays, tokens: Array.isArray(tokens) ? tokens.map(String) : undefined };
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
    const array = npy(method === 8 ? await inflated(bytes) : bytes);
    if (array) arrays[name.replace(/\.npy$/, "")] = array;
    at += 46 + nameLength + view.getUint16(at + 30, true) + view.getUint16(at + 32, true);
  }
  return { arrays };
}

const NPY_TYPES = { "<f8": "F64", "<f4": "F32", "<f2": "F16" };

function npy(buffer) {
  const view = new DataView(buffer);
  if (view.getUint32(0) !== 0x934e554d) throw new Error("it holds something else than arrays.");
  const wide = view.getUint8(6) > 1;
  const length = wide ? view.getUint32(8, true) : view.getUint16(8, true);
  const start = (wide ? 12 : 10) + length;
  const header = new TextDecoder().decode(new Uint8Array(buffer, wide ? 12 : 10, length));
  const type = NPY_TYPES[/'descr': *'([^']+)'/.exec(header)?.[1]];
  if (!type || /'fortran_order': *True/.test(header)) return null;
  const shape = (/'shape': *\(([^)]*)\)/.exec(header)?.[1] ?? "").split(",").map((x) => x.trim()).filter(Boolean).map(Number);
  return numbers(buffer, start, buffer.byteLength - start, type, shape);
}

/** The first matrix of an array of any dimensions. @param {Named} array */
function matrix({ shape, values }, name) {
  if (shape.length < 2) throw new Error(`${name} has ${shape.length} dimensions; a matrix has 2 or more.`);
  const [rows, columns] = shape.slice(-2);
  return Array.from({ length: rows }, (_, i) => [...values.subarray(i * columns, (i + 1) * columns)]);
}

/** What a file holds as an example. */
export function exampleOf({ arrays, tokens }) {
  const [query, key, value] = [["q", "query"], ["k", "key"], ["v", "value"]].map(([short, long]) => {
    const array = arrays[short] ?? arrays[long];
    if (!array) throw new Error(`it has no array ${short}; it has ${Object.keys(arrays).join(", ") || "none"}.`);
    return matrix(array, short);
  });
  const names = tokens?.length === query.length ? tokens : query.map((_, i) => `token ${i}`);
  return { tokens: names, query, key, value };
}
