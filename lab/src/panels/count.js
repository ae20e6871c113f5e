// Every multiply and add of three tokens, one step at a time, and the same ledger for any size.

import { html, useLab, useLayoutEffect, useRef, inside, examplesOf } from "../parts/lab.js";
import { DataTable, Stepper, Unbroken, Whole } from "../parts/basics.js";
import { Chart, Figure } from "../parts/chart.js";
import { Grid } from "../parts/grid.js";
import { COUNTS, MEANINGS, ledger, total, walkthrough } from "../examples/ledger.js";
import { traceOf } from "../examples/kernel.js";
import { grouped, size } from "../drawing/format.js";

const BLOCK = 128;

/** Layers, heads, numbers of a head, tokens. */
const MODELS = [
  ["GPT-3 175B", 96, 96, 128, 2048],
  ["LLaMA-2 70B", 80, 64, 128, 4096],
  ["ViT-Large", 24, 16, 64, 197],
  ["AlphaFold2", 48, 8, 32, 500],
  ["shared example", 1, 1, 4, 5],
];

const bytes = (count) => `${size(count)}: ${grouped(count)} bytes`;

const added = (steps) => {
  const counts = Object.fromEntries(COUNTS.map(([name]) => [name, 0]));
  steps.forEach((step) => Object.entries(step.counts).forEach(([name, count]) => { counts[name] += count; }));
  return counts;
};

function Board({ example, steps, at }) {
  const { rows } = traceOf(example).heads[0];
  const matrices = {
    query: example.query, key: example.key, value: example.value, raw: rows.map((row) => row.raw),
    scaled: rows.map((row) => row.scaled), shifted: rows.map((row) => row.softmax.shifted),
    exp: rows.map((row) => row.softmax.exp), weights: rows.map((row) => row.softmax.weights),
    output: rows.map((row) => row.output),
  };
  const covers = (list, name, i, j) => list.some(([matrix, row, column]) =>
    matrix === name && (row === null || row === i) && (column === null || column === j));
  const known = (name, i, j) => ["query", "key", "value"].includes(name) ||
    steps.slice(0, at + 1).some((step) => covers(step.writes, name, i, j));
  const { reads, writes } = steps[at];
  const titles = { query: "Q", key: "K", value: "V", raw: "scores", scaled: "scaled", shifted: "shifted", exp: "exp", weights: "weights", output: "output" };
  return html`<div class="board">${Object.entries(matrices).map(([name, values]) => html`<div key=${name} class="small-matrix" data-name=${name}>
    <p>${titles[name]}</p><${Grid} plain=${true} title=${titles[name]} values=${values} rows=${example.tokens} kind="tiny"
      mark=${(i, j) => (covers(writes, name, i, j) ? "written" : covers(reads, name, i, j) ? "read" : known(name, i, j) ? "" : "unknown")} /></div>`)}</div>`;
}

function Ledger({ counts, step }) {
  const all = ledger(3, 3);
  return html`<${DataTable} title="Ledger" columns=${["operation", "so far", "of"]} rows=${[
    ...COUNTS.map(([name]) => ({ key: name, class: step.counts[name] ? "here" : "", cells: [MEANINGS[name], counts[name], all[name]] })),
    { key: "total", class: "total", cells: ["all", total(counts), total(all)] }]} />`;
}

export function Count() {
  const { view, set, client } = useLab();
  const example = examplesOf(client).find(({ name, query }) => name === "three" && query.length === 3 && query[0].length === 3);
  const steps = walkthrough(example);
  const at = inside(view.count, steps.length);
  const step = steps[at];
  const counts = added(steps.slice(0, at + 1));
  const { n, d } = view;
  const big = ledger(n, d);
  const walk = useRef(null);
  useLayoutEffect(() => {
    // What is written stays in sight below the step, which stays at the top.
    const [head] = walk.current.children;
    const top = parseFloat(getComputedStyle(head).top) + head.offsetHeight;
    walk.current.style.setProperty("--step-ends", `${top}px`);
    if (at === 0) return;
    const cell = walk.current.querySelector("td.written") ?? walk.current.querySelector("td.read");
    cell?.closest(".small-matrix").scrollIntoView({ block: "nearest" });
  }, [at]);
  const lengths = [256, 1024, 4096, 16384, 65536, 262144, 1048576];

  return html`<p class="lead">How much work is attention? Count it: three tokens of three numbers, ${steps.length} steps, every multiply and every add.</p>
    <div class="walk" ref=${walk}><div class="walk-step"><${Stepper} at=${at} length=${steps.length} onStep=${(count) => set({ count })} />
    <div class="explained" aria-live="polite"><p class="formula">${step.title}</p><p class="mono">${step.text}</p>
      <p class="faint">${Object.entries(step.counts).map(([name, count]) => `${count} × ${MEANINGS[name]}`).join("; ")}</p>
      <p class="faint" data-name="so-far"><b>${total(counts)}</b> of ${total(ledger(3, 3))} operations</p></div></div>
    <div class="two wide-left"><${Board} example=${example} steps=${steps} at=${at} /><${Ledger} counts=${counts} step=${step} /></div></div>
    <h3 class="part">The same ledger for any size</h3>
    <div class="row"><${Whole} label="Tokens n" value=${n} least=${1} most=${10000000} onChange=${(to) => set({ n: to })} />
      <${Whole} label="Numbers of a row d" value=${d} least=${1} most=${65536} onChange=${(to) => set({ d: to })} />
      <span class="presets" role="group" aria-label="Lengths">${[5, 1000, 8192, 100000].map((to) => html`<button type="button" class="small" onClick=${() => set({ n: to })}>n = ${grouped(to)}</button>`)}</span></div>
    <div class="pair">
      <${DataTable} title="Operations" columns=${["operation", "formula", "count"]} rows=${[
        ...COUNTS.map(([name, formula]) => ({ key: name, cells: [MEANINGS[name], html`<${Unbroken} text=${formula} />`, grouped(big[name])] })),
        { key: "all", class: "total", cells: ["all", "", grouped(total(big))] },
        { key: "products", cells: ["both products, a multiply-add as two", "4 n² d", grouped(4 * n * n * d)] }]} />
      <div><${DataTable} title="Memory" columns=${["what", "formula", "size"]} rows=${[
        { cells: ["scores", "n²", grouped(n * n)] },
        { cells: ["scores in float16", "2 n²", bytes(2 * n * n)] },
        { cells: ["scores in float32", "4 n²", bytes(4 * n * n)] },
        { cells: ["Q, K, V and output in float32", "16 n d", size(16 * n * d)] },
        { class: "here", cells: [`one tile of ${BLOCK} × ${BLOCK} in float32`, `4 × ${BLOCK}²`, size(4 * Math.min(n, BLOCK) ** 2)] },
        { class: "here", cells: ["largest, sum of each row in float32", "8 n", size(8 * n)] }]}
        note="Tiling does the same operations, and a rescaling for each tile; it never holds the scores, so memory grows with n and not with n²." />
      <${Figure} title="The quadratic wall"><${Chart} title=${`Bytes by tokens: at ${n} tokens the scores take ${size(4 * n * n)}, and without them ${size(16 * n * d)}`}
        at=${Math.min(1048576, Math.max(256, n))}
        x=${{ label: "tokens n", min: 256, max: 1048576, log: true, ticks: [[1024, "1 Ki"], [16384, "16 Ki"], [131072, "128 Ki"], [1048576, "1 Mi"]] }}
        y=${{ label: "bytes", min: 2 ** 10, max: 2 ** 43, log: true, ticks: [[2 ** 10, "1 KiB"], [2 ** 20, "1 MiB"], [2 ** 30, "1 GiB"], [2 ** 40, "1 TiB"]] }}
        lines=${[{ name: "scores", kind: "plain", points: lengths.map((x) => [x, 4 * x * x]) }, { name: "tiled", kind: "even", points: lengths.map((x) => [x, Math.min(2 ** 43, 16 * x * d)]) }]} />
        <p class="key"><span class="swatch plain"></span> all scores <span class="swatch even"></span> Q, K, V and output alone</p></${Figure}></div></div>
    <${DataTable} title="Real models" columns=${["model", "layers", "heads", "d", "tokens", "scores", "multiply-adds of Q Kᵀ"]} note="Scores: layers × heads × n². Multiply-adds are d times as many; a text that calls the scores multiply-adds is listed in the errata."
      rows=${MODELS.map(([model, layers, heads, width, tokens]) => ({ cells: [model, layers, heads, width, grouped(tokens), grouped(layers * heads * tokens ** 2), grouped(layers * heads * tokens ** 2 * width)] }))} />`;
}
