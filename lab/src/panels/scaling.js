// Why scores are divided by sqrt(d_k).

import { html, useAsk, useLab } from "../parts/lab.js";
import { Block, DataTable, Failure, Num, Waiting, WholeField } from "../parts/basics.js";
import { Bars, Chart, Figure, between } from "../parts/chart.js";
import { softmax } from "../examples/kernel.js";
import { written } from "../drawing/format.js";

const LARGEST = 1024;
const MEASURES = [
  ["max_weight", "Largest weight", [0, 1], [[0, "0"], [0.5, "0.5"], [1, "1"]]],
  ["entropy_nats", "Entropy, nats", [0, 1.75], [[0, "0"], [Math.log(5), "log 5"], [1, "1"]]],
  ["jacobian_trace", "Gradient: Σ p (1 − p)", [0, 0.8], [[0, "0"], [0.4, "0.4"], [0.8, "0.8"]]],
];
const D_TICKS = [[1, "1"], [4, "4"], [16, "16"], [64, "64"], [256, "256"], [1024, "1024"]];

const near = (x, printed, digits) => Math.abs(x - printed) <= 0.5 * 10 ** -digits + 1e-12;

/** What texts say, with a computation that decides. `at` reads the curve without the divisor. */
function claims({ plain, scaled }) {
  const at = (name, d) => between(plain.map((point) => [point.d_k, point[name]]), d);
  const forty = softmax([40, 0, 0, 0, 0]).weights;
  const ten = softmax([10, 0]).weights[1];
  const largest = scaled.map((point) => point.max_weight);
  const deviations = [64, 128, 512].map(Math.sqrt);
  const measured = [64, 128, 512].map((d) => Math.sqrt(at("score_variance", d)));
  return [
    ["Scores of rows of 64, 128 and 512 unit-normal numbers have standard deviations 8, 11.3 and 22.6.",
      near(deviations[0], 8, 1) && near(deviations[1], 11.3, 1) && near(deviations[2], 22.6, 1) &&
        measured.every((x, i) => Math.abs(x / deviations[i] - 1) < 0.05),
      `√64 = 8, √128 = ${written(deviations[1])}, √512 = ${written(deviations[2])}; measured ${measured.map((x) => x.toFixed(2)).join(", ")}`],
    ["softmax of [40, 0, 0, 0, 0] is [1, 0, 0, 0, 0] for all practical purposes.",
      forty[0] > 1 - 1e-12 && forty[1] < 1e-12,
      `the others get ${forty[1].toExponential(2)} each; the gradient is as small`],
    ["A key whose score is 10 below the largest still gets a gradient of 4.5e-05.",
      near(ten * (1 - ten) * 1e5, 4.5, 1), `p (1 − p) = ${(ten * (1 - ten)).toExponential(4)}`],
    ["Without the divisor, five keys at d_k = 64 leave 90 % of the weight to one of them.",
      near(at("max_weight", 64), 0.9, 2), `mean largest weight ${at("max_weight", 64).toFixed(4)}`],
    ["With the divisor, the softmax is as sharp at every d_k.",
      Math.max(...largest) - Math.min(...largest) < 0.003,
      `mean largest weight ${[1, 4, 64, 1024].map((d) => `${between(scaled.map((point) => [point.d_k, point.max_weight]), d).toFixed(3)} at ${d}`).join(", ")}: from some 64 on it hardly changes, and below that queries of few numbers are often short`],
    ["The largest score is subtracted because exp(500) overflows.",
      !Number.isFinite(Math.exp(500)), `exp(500) = ${Math.exp(500).toExponential(1)} in float64, which overflows above exp(709.78); float32 does above exp(88.72), float16 above exp(11.09)`],
  ];
}

function DrawBars({ title, weights, scores, kind }) {
  return html`<${Block} title=${title} class=${kind} rows=${() => [["key", "score", "weight"], ...weights.map((w, i) => [i + 1, scores[i], w])]}>
    <${Bars} kind=${kind} label=${title} bars=${weights.map((w, i) => ({
      name: html`<span class="faint">score</span> <${Num} x=${scores[i]} digits=${2} />`, value: w, note: html`<${Num} x=${w} />`,
    }))} /></${Block}>`;
}

export function Scaling() {
  const { view, set } = useLab();
  const { result, error } = useAsk("scaling");
  if (error) return html`<${Failure} error=${error} />`;
  if (!result) return html`<${Waiting} what="the curve" />`;
  const { curve, draw: { query, keys } } = result;
  const [plain, scaled] = [false, true].map((is) => curve.points.filter((point) => point.scaled === is));
  const d = Math.min(LARGEST, Math.max(1, Math.round(view.dk)));
  const choose = (value) => set({ dk: Math.min(LARGEST, Math.max(1, Math.round(value) || 1)) });
  const products = keys.map((key) => key.slice(0, d).reduce((sum, k, i) => sum + query[i] * k, 0));
  const divided = products.map((x) => x / Math.sqrt(d));
  const [sharp, even] = [softmax(products), softmax(divided)];
  const trace = (weights) => weights.reduce((sum, p) => sum + p * (1 - p), 0);
  const value = (points, name) => between(points.map((point) => [point.d_k, point[name]]), d);
  const isPoint = plain.some((point) => point.d_k === d);

  return html`<p class="lead">A dot product of d_k random numbers grows like √d_k. Softmax of large scores chooses one key and lets no gradient through to the others; dividing by √d_k keeps it as it was.</p>
    <div class="slider" data-keys><label for="dk">d_k</label>
      <input id="dk" type="range" min="0" max="10" step="0.001" value=${Math.log2(d)} aria-valuetext=${`d_k ${d}`} aria-label="d_k, 1 to 1024"
        onKeyDown=${(event) => {
          const by = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: d, PageDown: -d / 2 }[event.key];
          if (by === undefined) return;
          event.preventDefault();
          choose(d + by);
        }}
        onInput=${(event) => choose(2 ** Number(event.currentTarget.value))} />
      <${WholeField} value=${d} least=${1} most=${LARGEST} aria-label="d_k as a number" onChange=${choose} />
      <span class="faint">scores have standard deviation √${d} = <${Num} x=${Math.sqrt(d)} /></span></div>
    <p class="faint">One query and five keys of normal numbers, drawn once: of each row the first d_k numbers are taken.</p>
    <div class="pair">
      <${DrawBars} title="q · k, not divided" kind="plain" weights=${sharp.weights} scores=${products} />
      <${DrawBars} title="q · k ÷ √d_k" kind="even" weights=${even.weights} scores=${divided} /></div>
    <${DataTable} title="This draw" columns=${["", "not divided", "÷ √d_k"]} rows=${[
      { cells: ["largest weight", { x: Math.max(...sharp.weights) }, { x: Math.max(...even.weights) }] },
      { cells: ["entropy, nats", { x: sharp.entropy }, { x: even.entropy }] },
      { cells: ["Σ p (1 − p)", { x: trace(sharp.weights) }, { x: trace(even.weights) }] }]} note="Entropy is in nats, units of the natural logarithm: 0 where one key has all the weight, log 5 = 1.609 where five have as much. p (1 − p) is how fast the weight p of a key changes with its score: where the sum over the keys is near 0, no gradient reaches the scores." />
    <h3 class="part">Means of ${curve.draws.toLocaleString("en-US")} such draws</h3>
    <p class="key"><span class="swatch plain"></span> not divided <span class="swatch even"></span> divided by √d_k</p>
    <div class="charts">${MEASURES.map(([name, title, [min, max], ticks]) => html`<${Figure} key=${name} title=${title}>
      <${Chart} title=${`${title} by d_k: at ${d}, ${value(plain, name).toFixed(3)} not divided and ${value(scaled, name).toFixed(3)} divided`} at=${d}
        x=${{ label: "d_k", min: 1, max: LARGEST, log: true, ticks: D_TICKS }} y=${{ label: title, min, max, ticks }}
        lines=${[["not divided", plain, "plain"], ["divided", scaled, "even"]].map(([line, points, kind]) => ({ name: line, kind, points: points.map((point) => [point.d_k, point[name]]) }))} />
      <p class="reading">at d_k = ${d}${isPoint ? "" : ", between points"}: <span class="plain"><${Num} x=${value(plain, name)} /></span> and <span class="even"><${Num} x=${value(scaled, name)} /></span></p></${Figure}>`)}</div>
    <${DataTable} title="The curves in numbers" columns=${["d_k", "variance", "largest", "entropy", "Σ p (1 − p)", "÷√: variance", "÷√: largest", "÷√: entropy", "÷√: Σ p (1 − p)"]}
      rows=${plain.map((point, i) => ({ key: point.d_k, class: point.d_k === d ? "here" : "", cells: [point.d_k, ...[point, scaled[i]].flatMap((each) => [{ x: each.score_variance }, { x: each.max_weight }, { x: each.entropy_nats }, { x: each.jacobian_trace }])] }))} />
    <${Claims} list=${claims({ plain, scaled })} />`;
}

function Claims({ list }) {
  return html`<${Block} title="What texts say" rows=${() => [["claim", "verdict", "computed"], ...list.map(([claim, holds, why]) => [claim, holds ? "right" : "wrong", why])]}>
    <ul class="claims">${list.map(([claim, holds, why]) => html`<li class=${holds ? "right" : "wrong"} key=${claim}>
      <span class="verdict">${holds ? "✓ right" : "✗ wrong"}</span><p>${holds ? claim : html`<s>${claim}</s>`}</p><p class="faint">${why}</p></li>`)}</ul></${Block}>`;
}
