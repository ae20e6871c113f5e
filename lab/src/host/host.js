// The three hosts behind one model of the anywidget form: get, set, save_changes, on, off, send.

/** The key under which a result is kept, as Python writes it. */
export function keyOf(method, params = {}) {
  const sorted = Object.fromEntries(Object.entries(params).sort(([a], [b]) => (a < b ? -1 : 1)));
  return Object.keys(sorted).length ? `${method}:${JSON.stringify(sorted)}` : method;
}

/** A model over data that lies in the page; `send` posts to the server that gave it, if there is one. */
export function pageModel(data) {
  const values = { data, view: {} };
  const listeners = new Map();
  const emit = (event, ...given) => (listeners.get(event) ?? []).forEach((each) => each(...given));
  return {
    get: (name) => values[name],
    set(name, value) {
      values[name] = value;
      emit(`change:${name}`);
    },
    save_changes() {},
    on: (event, each) => listeners.set(event, [...(listeners.get(event) ?? []), each]),
    off: (event, each) =>
      listeners.set(event, (listeners.get(event) ?? []).filter((other) => other !== each)),
    send: async (request) => {
      const [content, buffers] = await post(request);
      emit("msg:custom", content, buffers);
    },
  };
}

/** The answer of the server, as JSON and the buffers that come with it; an error is one too. */
export async function answerOf(path, type, body) {
  const failed = (message, action) => [{ ok: false, error: { message, action } }, []];
  try {
    const answer = await fetch(path, { method: "POST", headers: { "Content-Type": type }, body });
    const given = answer.headers.get("Content-Type") ?? "";
    if (given.startsWith("application/octet-stream")) return unpacked(await answer.arrayBuffer());
    if (given.startsWith("application/json")) return [await answer.json(), []];
    if (given.startsWith("text/html")) return [{ ok: true, result: await answer.text() }, []];
    if (answer.status === 401) return failed("qkv lab was started again since this page was opened.", "Open the address that it printed.");
    return failed(`The server answered ${answer.status}.`, "Look at what it printed.");
  } catch {
    return failed("The server does not answer.", "Start qkv lab again and open the address that it prints.");
  }
}

async function post(request) {
  const [answer, buffers] = await answerOf("/call", "application/json", JSON.stringify(request));
  return [{ ...answer, id: request.id }, buffers];
}

/** What the server computes; a number stops that job first. @returns {Promise<{running: object[], waiting: number}|null>} */
export async function jobs(stop = null) {
  const [{ result }] = await answerOf("/job", "application/json", JSON.stringify({ stop }));
  return result ?? null;
}

/** Four bytes of length, a header of JSON, arrays one after another. @param {ArrayBuffer} bytes */
export function unpacked(bytes) {
  const length = new DataView(bytes).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length)));
  let start = 4 + length;
  const buffers = (header.buffers ?? []).map(({ dtype, shape }) => {
    const count = shape.reduce((all, each) => all * each, 1) * ITEM_SIZES[dtype];
    const part = bytes.slice(start, start + count);
    start += count;
    return new DataView(part);
  });
  return [header, buffers];
}

/** A result that carries its arrays as base64. */
function withArrays(result) {
  const [buffer] = result?.buffers ?? [];
  if (!buffer?.base64) return result;
  const bytes = Uint8Array.from(atob(buffer.base64), (character) => character.charCodeAt(0));
  return { ...result, shape: buffer.shape, values: new ARRAYS[buffer.dtype](bytes.buffer) };
}

/** The data of a page about a file, which the server reads. @param {File} file */
export async function opened(file) {
  const [{ ok, result, error }] = await answerOf("/file", "application/octet-stream", file);
  if (!ok) throw new HostError(error);
  return result.data;
}

const ITEM_SIZES = { uint8: 1, float32: 4, float64: 8 };
const ARRAYS = { uint8: Uint8Array, float32: Float32Array, float64: Float64Array };

/** An error in the words of the Python side. */
export class HostError extends Error {
  constructor({ message, action }) {
    super(message);
    this.action = action;
  }
}

const replaced = () => new HostError({ message: "Something else is shown by now.", action: "Ask once more." });

/** Asks the host's Python, and remembers what it answered. */
export class Client {
  /** @param {{get: Function, on: Function, off: Function, send: Function}} model */
  constructor(model) {
    this.model = model;
    this.data = model.get("data") ?? { version: 1, host: "export", panels: [], results: {} };
    this.waiting = new Map();
    this.known = new Map();
    /** How many things are on their way to be shown, the last of them, and questions that wait for it. */
    this.bringing = 0;
    this.brought = Promise.resolve();
    this.held = [];
    /** How often something else was opened: what was drawn before is of the one before. */
    this.opening = 0;
    // Ids of two pages on one kernel must not meet.
    this.next = Math.floor(Math.random() * 2 ** 30) * 2 ** 16;
    this.receive = this.receive.bind(this);
    model.on("msg:custom", this.receive);
  }

  get host() {
    return this.data.host;
  }

  close() {
    this.model.off?.("msg:custom", this.receive);
  }

  has(method, params) {
    return keyOf(method, params) in (this.data.results ?? {});
  }

  /** The result if it is there already. */
  given(method, params) {
    const key = keyOf(method, params);
    return this.data.results?.[key] ?? this.known.get(key)?.result;
  }

  /**
   * What was drawn before something else was opened may still ask until the page is drawn again: it
   * gives the `opening` that it is of, and its question is not sent.
   * @returns {Promise<any>} the result; arrays come as {shape, values}.
   */
  ask(method, params = {}, { keep = true, opening = this.opening } = {}) {
    if (opening !== this.opening) return Promise.reject(replaced());
    const key = keyOf(method, params);
    if (this.has(method, params)) return Promise.resolve(withArrays(this.data.results[key]));
    if (this.known.has(key)) return this.known.get(key).promise;
    if (this.host === "export") {
      return Promise.reject(new HostError({
        message: "This page was exported, and what you ask for is not in it.",
        action: "It needs Python: run qkv lab.",
      }));
    }
    const id = this.next++;
    const entry = {};
    const asked = { request: { id, method, params, shown: this.data.shown } };
    entry.promise = asked.promise = new Promise((resolve, reject) => Object.assign(asked, { resolve, reject }));
    if (keep) {
      this.known.set(key, entry);
      entry.promise.then((result) => (entry.result = result), () => this.known.get(key) === entry && this.known.delete(key));
    }
    if (this.bringing && method !== "open") this.held.push(asked);
    else this.send(asked);
    return entry.promise;
  }

  send(asked) {
    this.waiting.set(asked.request.id, asked);
    this.model.send(asked.request);
  }

  /**
   * Show something else. Python would answer a question about what is shown now with what comes, so
   * the questions that were sent are answered first, and others wait.
   * @param {() => Promise<object>} bring gives the data of a page
   */
  bring(bring) {
    this.bringing += 1;
    const brought = this.brought.then(async () => {
      await Promise.allSettled([...this.waiting.values()].map(({ promise }) => promise));
      try {
        this.replace(await bring());
      } finally {
        this.bringing -= 1;
        if (!this.bringing) this.held.splice(0).forEach((asked) => this.send(asked));
      }
    });
    this.brought = brought.catch(() => {});
    return brought;
  }

  /** Something else was opened: what was known, and what waits, is of the one before. */
  replace(data) {
    this.data = data;
    this.opening += 1;
    this.known.clear();
    this.held.splice(0).forEach(({ reject }) => reject(replaced()));
  }

  receive(content, buffers = []) {
    const waiting = this.waiting.get(content?.id);
    if (!waiting) return;
    this.waiting.delete(content.id);
    if (!content.ok) return waiting.reject(new HostError(content.error));
    const arrays = (content.buffers ?? []).map(({ dtype, shape }, i) => {
      const view = buffers[i];
      // A copy starts where a typed array may start.
      const bytes = view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
      return { shape, values: new ARRAYS[dtype](bytes) };
    });
    return waiting.resolve(arrays.length === 1 ? { ...content.result, ...arrays[0] } : content.result);
  }
}
