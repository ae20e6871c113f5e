// What is around the kernel: addresses, numbers, files, answers, requests.

import { readFileSync } from "node:fs";
import assert from "node:assert/strict";
import { test } from "node:test";
import { check, general } from "../src/exercises/answers.js";
import { paint } from "../src/drawing/colours.js";
import { BUILT_IN, complaint, decode, encode, matrixOf, numberOf } from "../src/examples/examples.js";
import { arraysOf, exampleOf } from "../src/examples/files.js";
import { cut, exact, shown, size, tsv, written } from "../src/drawing/format.js";
import { matrixSvg } from "../src/drawing/picture.js";
import { Client, keyOf, unpacked } from "../src/host/host.js";
import { exampleOfJson, numbersOfJson } from "../src/host/numbers.js";
import { View, address, parsed } from "../src/host/view.js";
import { readings } from "../src/exercises/written.js";

test("a view survives its address", () => {
  const view = { ...parsed(""), panel: "heatmap", mask: "window", left: 3, own: encode(BUILT_IN[0]), ex: "own" };
  assert.deepEqual(parsed(address(view)), view);
  assert.equal(address(parsed("#tiles")), "#tiles");
});

test("addresses of others change nothing but what they may", () => {
  const view = parsed("#<img>&token=NaN&dk=1e3&__proto__=x&constructor=x&unknown=1&mask=causal&theme=constructor&ramp=blue&reduce=__proto__");
  assert.deepEqual({ ...view, mask: "none", dk: 64 }, parsed(""));
  assert.equal(view.dk, 1000);
});

test("a link that is followed stays, though a change before it was not in the address yet", async () => {
  globalThis.location = { hash: "#heatmap" };
  globalThis.history = { replaceState: (state, title, there) => { location.hash = there; } };
  let read;
  globalThis.addEventListener = (kind, listener) => { read = listener; };
  const view = new View({ get() {}, set() {}, save_changes() {} }, { inAddress: true });
  view.set({ token: 2 });
  await new Promise((done) => setTimeout(done, 200));
  assert.equal(location.hash, "#heatmap&token=2");
  view.set({ token: 3 });
  location.hash = "#start";
  await new Promise((done) => setTimeout(done, 200)); // A busy page tells of the link late.
  read();
  assert.equal(location.hash, "#start");
  assert.equal(view.values.panel, "start");
});

test("an edited example survives its address", () => {
  for (const example of BUILT_IN) {
    const { tokens, query, key, value } = decode(encode(example));
    assert.deepEqual([tokens, query, key, value], [example.tokens, example.query, example.key, example.value]);
  }
  assert.equal(decode("[1"), null);
  assert.equal(decode('[["a"],"1 x","1 2","1"]'), null);
  assert.equal(decode('[["a"],"1 2","1","1"]'), null);
  assert.notEqual(decode('[["a"],"1e100 1","1e100 1","1"]'), null);
  assert.equal(decode('[["a"],"1e101 1","1 1","1"]'), null); // Scores beyond float64 break the page.
});

test("what is pasted", () => {
  const rows = [[1, 0], [0, 2.5]];
  for (const text of ["1 0\n0 2.5", "1,0;0,2.5", "1\t0\r\n0\t2.5", "[[1, 0], [0, 2.5]]", "array([[1. , 0. ],\n [0. , 2.5]])"]) {
    assert.deepEqual(matrixOf(text), rows);
  }
  const [example] = BUILT_IN;
  assert.match(complaint({ ...example, query: [[1, 2], [3]] }), /differ in length/);
  assert.match(complaint({ ...example, value: [[1]] }), /K has 5 rows and V 1/);
  for (const text of ["0,5\t−1,25\n2\t1,0", "0,5 -1,25; 2 1,0e0"]) assert.deepEqual(matrixOf(text), [[0.5, -1.25], [2, 1]]);
  for (const text of ["1, 2, 3", "1,2,3", "1 ,2 ,3", "[1,2,3]"]) assert.deepEqual(matrixOf(text), [[1, 2, 3]]);
  assert.deepEqual(matrixOf("1/4 −3/4; 0 1e1/2"), [[0.25, -0.75], [0, 5]]);
  for (const text of ["", " ", "/", "1/", "/2", "1/2/3", "a"]) assert.ok(Number.isNaN(numberOf(text)), text);
  assert.equal(numberOf("1/0"), Infinity);
  assert.match(complaint({ ...example, query: matrixOf("a b") }), /not a number/);
});

test("numbers for reading", () => {
  assert.deepEqual([0.109496351547, 1, -0.5, null, 1e-9, 0.00004, 123456789.5].map((x) => written(x)),
    ["0.1095", "1", "−0.5000", "−∞", "1.00e−9", "4.00e−5", "1.23e+8"]);
  assert.equal(written(0.10949635154667202, 12), "0.109496351547");
  assert.equal(written(-0.0041, 2), "0.00"); // No number is less than 0 and written as 0.
  assert.equal(size(4 * 131072 ** 2), "64 GiB");
  assert.equal(shown("a\n\u202eb\u0000"), "a⏎�b�");
  // A Persian word, a family and a person of a skin colour at work, a word of Hindi; joiners alone.
  for (const text of ["\u0645\u06cc\u200c\u062e", "\u{1f469}\u200d\u{1f467}", "\u{1f469}\u{1f3fd}\u200d\u{1f4bb}", "\u2764\ufe0f\u200d\u{1f525}", "\u0915\u094d\u200d\u0937"]) assert.equal(shown(text), text);
  for (const [text, seen] of [["\u200d", "�"], ["a\u200c", "a�"], ["\u200db", "�b"], ["a\u200d\u200db", "a��b"], ["a\u200d\u202eb", "a��b"]]) assert.equal(shown(text), seen);
  assert.equal(tsv([["a\tb", null], [1, 0.5]]), "a b\t-inf\n1\t0.5");
  // A token that begins with a quote would take the cells after it into its own.
  assert.equal(tsv([['"', 1], ['"So', 2], ['5" x', 3]]), '""""\t1\n"""So"\t2\n5" x\t3');
});

test("a long token is cut between its characters, and a picture of it can be saved", () => {
  assert.deepEqual([cut("x".repeat(18), 18), cut("x".repeat(19), 18)], ["x".repeat(18), `${"x".repeat(17)}…`]);
  for (const token of ["😀".repeat(20), `x${"😀".repeat(20)}`, "half \ud83d", "\ude00"]) {
    const svg = matrixSvg({ title: "weights", values: [[1]], rows: [token], columns: [token], share: (x) => x, theme: "light" });
    assert.ok(svg.isWellFormed(), token);
    assert.ok(cut(shown(token), 12).isWellFormed(), token);
  }
});

test("numbers that JSON has not", () => {
  const [json, numbers] = [[null, "nan", "inf", 0.5], [-Infinity, NaN, Infinity, 0.5]];
  assert.deepEqual(numbersOfJson([json, 1]), [numbers, 1]);
  for (const row of [json, numbers]) {
    assert.deepEqual(row.map((x) => written(x)), ["−∞", "NaN", "∞", "0.5000"]);
    assert.deepEqual(row.map(exact), ["-inf", "nan", "inf", "0.5"]);
    assert.equal(tsv([row]), "-inf\tnan\tinf\t0.5");
  }
  assert.deepEqual([written(undefined), exact(undefined)], ["–", ""]);
});

test("numbers of an address that no panel can show are replaced by those that it can", () => {
  const { digits, block, n, d, temperature, token, zoom } = parsed("#tiles&digits=200&block=2.5&n=0&d=-1&temperature=0&token=1.5&zoom=1.5");
  assert.deepEqual({ digits, block, n, d, temperature, token, zoom }, { digits: 12, block: 2, n: 1, d: 1, temperature: 0.1, token: 1, zoom: 1.5 });
  assert.equal(parsed("#heatmap&digits=-1").digits, 4);
});

test("a trace of Python has numbers, and what it leaves out is not one", () => {
  const softmax = { row_max: null, sink: null, weights: ["nan", 0], lse: "nan" };
  const row = { rotated_query: null, scores: [null, "inf"], allowed: [false, true], softmax };
  const given = { tokens: ["nan", "inf"], query: [["nan", null]], trace: { tokens: ["nan"], heads: [{ rotated_key: null, rows: [row] }] } };
  const { tokens, query, trace } = exampleOfJson(given);
  assert.deepEqual([tokens, query, trace.tokens], [["nan", "inf"], [[NaN, -Infinity]], ["nan"]]);
  assert.deepEqual(trace.heads, [{ rotated_key: null, rows: [{
    rotated_query: null, scores: [-Infinity, Infinity], allowed: [false, true],
    softmax: { row_max: -Infinity, sink: null, weights: [NaN, 0], lse: NaN },
  }] }]);
  assert.equal(exampleOfJson(given), exampleOfJson(given));
});

test("text on every colour can be read", () => {
  const lightness = (rgb) => rgb.map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  for (const theme of ["light", "dark"]) for (let t = -1; t <= 1; t += 1 / 256) {
    const { background, color } = paint(t, theme);
    const [a, b] = [lightness(background.match(/\d+/g).map(Number)), color === "#ffffff" ? 1 : 0].sort((x, y) => y - x);
    assert.ok((a + 0.05) / (b + 0.05) >= 4.5, `${theme} ${t}`);
  }
});

test("keys of results are those of Python", () => {
  assert.equal(keyOf("trace", { name: "shared", mask: "none" }), 'trace:{"mask":"none","name":"shared"}');
  assert.equal(keyOf("scaling", {}), "scaling");
});

test("answers with arrays", () => {
  const header = new TextEncoder().encode(JSON.stringify({ id: 1, ok: true, result: { level: 0 }, buffers: [{ dtype: "float32", shape: [1, 2] }] }));
  const bytes = new Uint8Array(4 + header.length + 8);
  new DataView(bytes.buffer).setUint32(0, header.length, true);
  bytes.set(header, 4);
  bytes.set(new Uint8Array(new Float32Array([0.25, 0.75]).buffer), 4 + header.length);
  const [content, [view]] = unpacked(bytes.buffer);
  assert.equal(content.id, 1);
  assert.equal(view.getFloat32(4, true), 0.75);
});

test("a client asks once, and hands on what Python says", async () => {
  const sent = [];
  let receive;
  const client = new Client({
    get: () => ({ host: "widget", results: { errata: [1] } }), on: (_, each) => { receive = each; }, off() {}, send: (request) => sent.push(request),
  });
  assert.deepEqual(await client.ask("errata"), [1]);
  const both = [client.ask("model"), client.ask("model")];
  assert.equal(sent.length, 1);
  receive({ id: sent[0].id, ok: true, result: { q_len: 5 } });
  assert.deepEqual(await Promise.all(both), [{ q_len: 5 }, { q_len: 5 }]);
  const failing = client.ask("head", { layer: 9 });
  receive({ id: sent[1].id, ok: false, error: { message: "there is no layer 9.", action: "Choose from 0 to 1." } });
  await assert.rejects(failing, { message: "there is no layer 9.", action: "Choose from 0 to 1." });
  const tile = client.ask("tile", { layer: 0 });
  receive({ id: sent[2].id, ok: true, result: { level: 1 }, buffers: [{ dtype: "float32", shape: [2] }] }, [new DataView(new Float32Array([1, 2]).buffer)]);
  assert.deepEqual((await tile).values, new Float32Array([1, 2]));
});

test("questions wait while something else is brought, and are not asked about it", async () => {
  const sent = [];
  let receive;
  const client = new Client({
    get: () => ({ host: "server", shown: 1, results: {} }), on: (_, each) => { receive = each; }, off() {}, send: (request) => sent.push(request),
  });
  const asked = () => sent.map(({ method, shown }) => [method, shown]);
  const answer = (place) => receive({ id: sent[place].id, ok: true, result: {} });
  const settled = () => new Promise((resolve) => setTimeout(resolve));
  client.ask("head");
  let arrive;
  const opened = () => new Promise((resolve, reject) => { arrive = { resolve, reject }; });
  const failed = assert.rejects(client.bring(opened), /no file/);
  const late = client.ask("tile", {}, { keep: false });
  await settled();
  // What was asked before is answered first, and only then something else is opened.
  assert.equal(arrive, undefined);
  answer(0);
  await settled();
  arrive.reject(new Error("no file"));
  await failed;
  assert.deepEqual(asked(), [["head", 1], ["tile", 1]]);
  answer(1);
  assert.deepEqual(await late, {});

  const brought = client.bring(async () => (await client.ask("open", {}, { keep: false })).data);
  const lost = assert.rejects(client.ask("head", { layer: 1 }), /Something else is shown/);
  await settled();
  receive({ id: sent[2].id, ok: true, result: { data: { host: "server", shown: 2, results: {} } } });
  await brought;
  await lost;
  // What is still drawn of the one before asks for nothing of the new one.
  await assert.rejects(client.ask("tile", { row: 9 }, { opening: 0 }), /Something else is shown/);
  client.ask("head", { layer: 1 });
  assert.deepEqual(asked().slice(2), [["open", 1], ["head", 2]]);
});

function safetensors(header, floats) {
  const text = new TextEncoder().encode(JSON.stringify(header));
  const bytes = new Uint8Array(8 + text.length + 4 * floats.length);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(text.length), true);
  bytes.set(text, 8);
  bytes.set(new Uint8Array(new Float32Array(floats).buffer), 8 + text.length);
  return new File([bytes], "a.safetensors");
}

test("a safetensors file, and ones that lie", async () => {
  const part = (place) => ({ dtype: "F32", shape: [1, 1, 2], data_offsets: [8 * place, 8 * place + 8] });
  const header = { q: part(0), k: part(1), v: part(2), __metadata__: { tokens: '["<b>"]' } };
  const example = exampleOf(await arraysOf(safetensors(header, [1, 2, 3, 4, 5, 6])));
  assert.deepEqual(example, { tokens: ["<b>"], query: [[1, 2]], key: [[3, 4]], value: [[5, 6]] });
  await assert.rejects(arraysOf(safetensors({ q: { ...part(0), shape: [9e9, 9e9] } }, [1, 2])), /it says/);
  await assert.rejects(arraysOf(safetensors({ q: part(7) }, [1, 2])), /outside the file/);
  await assert.rejects(arraysOf(new File(["short"], "a.safetensors")), /too short/);
  for (const header of [null, 5, [1], { q: null }, { q: { dtype: "F32", data_offsets: [0, 8] } }, { q: { dtype: "F32", shape: [1, 1] } }]) {
    await assert.rejects(arraysOf(safetensors(header, [1, 2])), /its header is not that of a safetensors file/);
  }
  await assert.rejects(arraysOf(new File(["no archive at all, but long enough"], "a.npz")), /not an npz file/);
});

const WRITTEN = JSON.parse(readFileSync(new URL("../../tests/teaching/written_answers.json", import.meta.url), "utf8"));

/** Lists with numbers that are near, and truth values. */
function alike(given, wanted, text) {
  if (Array.isArray(wanted)) {
    assert.ok(Array.isArray(given) && given.length === wanted.length, `${text}: ${JSON.stringify(given)}`);
    wanted.forEach((each, i) => alike(given[i], each, text));
  } else if (typeof wanted === "boolean") assert.equal(given, wanted, text);
  else assert.ok(typeof given === "number" && Math.abs(given - wanted) <= 1e-12 * Math.max(1, Math.abs(wanted)), `${text}: ${given}`);
}

test("answers are read as people write them", () => {
  for (const [text, wanted] of WRITTEN.read) alike(readings(text), wanted, text);
  for (const text of WRITTEN.unclear) assert.throws(() => readings(text), /could not be read as a number or a list/, text);
  for (const text of WRITTEN.mixed) assert.throws(() => readings(text), /some of the numbers have %/, text);
  for (const [text, name] of Object.entries(WRITTEN.nameless)) assert.throws(() => readings(text), { message: `"${name}" has no value here; write its number.` }, text);
  assert.deepEqual(readings("8 σ²", { sigma: 2 }), [32]);
  assert.deepEqual(readings("4 N² D", { n: 10, d: 3 }), [1200]);
  assert.deepEqual(readings("4dn²", { n: 10, d: 3 }), [1200]);
  assert.deepEqual(readings("Divided by 32", {}, ["by", "divided by"]), [32]);
  for (const text of WRITTEN.endless) assert.throws(() => readings(text), /a finite number/, text);
  for (const text of ["", " \n"]) assert.throws(() => readings(text), /nothing is written/);
  assert.throws(() => readings(`${"(".repeat(10000)}1${")".repeat(10000)}`), /could not be read/);
  assert.throws(() => readings(`${"-".repeat(100000)}1`), /could not be read/);
});

test("of what a text may mean, the right one counts, then one of the form that is asked for", () => {
  const numbers = { right: [{ why: "so it is.", numbers: [0.25, 0.75] }], mistakes: [{ why: "the other way round.", numbers: [0.75, 0.25] }], near: 0.0051 };
  const said = (text) => check({ name: "003.2", numbers }, text);
  assert.deepEqual(said("0,25; 0,75"), { right: true, why: "so it is.", checked: true });
  assert.deepEqual(said("0,75 0,25"), { right: false, why: "the other way round.", checked: true });
  assert.deepEqual(said("0,2 0,8"), { right: false, why: "2 of 2 numbers are off; the furthest is 0.8 at index 1.", checked: true });
  assert.deepEqual(said("0.25"), { right: false, why: "one number is given; 2 numbers are asked for.", checked: false });
  assert.deepEqual(said("1e400, 1"), { right: false, why: "not everything in this has a value that is a finite number.", checked: false });
  const one = { right: [{ why: "so it is.", numbers: 32 }], mistakes: [], near: 0.0051 };
  assert.equal(check({ name: "003.9", numbers: one }, "[32]").right, true);
  assert.equal(check({ name: "003.9", numbers: one }, "[32, 1]").why, "2 numbers are given; one number is asked for.");
  assert.match(said("yes, no").why, /yes and no are given; 2 numbers/);
  assert.equal(check({ name: "003.5", numbers: null }, "y n").right, true);
  assert.equal(check({ name: "003.5", numbers: null }, "n, n").right, false);
  assert.equal(check({ name: "003.4", numbers: null }, "1 1 1 1 1\n12 0 0 0 0").right, true);
});

test("numbers in reasons are those of Python", () => {
  const said = [[31, 6, "31"], [0.2, 4, "0.2"], [1234567, 6, "1.23457e+06"], [0.00001234, 4, "1.234e-05"], [-0.5, 4, "-0.5"], [999999.9, 6, "1e+06"], [0, 4, "0"], [123.456, 4, "123.5"], [1e-4, 4, "0.0001"]];
  for (const [x, digits, text] of said) assert.equal(general(x, digits), text);
});
