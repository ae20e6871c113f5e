// One query, step by step: a table whose columns appear as they are computed.

import { html, useLab, inside } from "../parts/lab.js";
import { ExampleBar, useRow } from "../parts/example.js";
import { Block, Num, Quoted, Stepper, Token, Vector } from "../parts/basics.js";
import { quoted } from "../drawing/format.js";
import { painted } from "../drawing/colours.js";
import { product, LONGEST } from "../examples/kernel.js";

/** Steps: name, title, formula, the column that it adds. */
const STEPS = [
  ["projections", "Project", "q = x W_Q, k = x W_K, v = x W_V"],
  ["products", "Multiply", "q · k, number by number"],
  ["raw", "Add", "score = Σ q_d k_d"],
  ["scaled", "Scale", "score ÷ √d"],
  ["scores", "Mask", "forbidden scores become −∞"],
  ["max", "Max", "m = largest score"],
  ["shifted", "Shift", "score − m"],
  ["exp", "Exp", "e^(score − m)"],
  ["sum", "Sum", "l = Σ e^(score − m)"],
  ["weights", "Divide", "weight = e^(score − m) ÷ l"],
  ["output", "Mix", "output = Σ weight × value"],
];

/** The formula of a step, with a learned sink and dropout if the row has them. */
function formulaOf(step, formula, { softmax, factors }) {
  if (softmax.sink !== null && step === "max") return "m = largest of the scores and the sink";
  if (softmax.sink !== null && step === "sum") return "l = Σ e^(score − m) + e^(sink − m)";
  return factors && step === "output" ? "output = Σ weight × factor × value" : formula;
}

function sentence(name, { row, trace, name: token, keyNames, example }) {
  const { softmax } = row;
  const scale = trace.problem.scale;
  const root = Math.sqrt(trace.problem.head_dim);
  const n = row.raw.length;
  const forbidden = row.allowed.filter((allowed) => !allowed).length;
  const most = Math.max(...softmax.weights);
  const best = softmax.weights.flatMap((weight, j) => (weight === most ? [j] : []));
  const forbidding = row.masks.filter(({ allowed }) => allowed.includes(false));
  switch (name) {
    case "projections":
      return html`The row x of <${Quoted} text=${token} /> is multiplied by three matrices. Its query asks, the keys are what is asked for, the values are what is returned.`;
    case "products":
      return html`Each number of the query <${Vector} of=${row.rotated_query ?? row.query} kind="q" /> meets the number of the key in the same place.`;
    case "raw":
      return html`The products of each key are added: one score says how well query and key agree. With ${trace.problem.head_dim} numbers it is ${trace.problem.head_dim} multiplies and ${trace.problem.head_dim - 1} adds.`;
    case "scaled":
      return scale === 1
        ? html`Here nothing is divided: the scores stay as they are.`
        : Math.abs(scale * root - 1) < 1e-12
          ? html`All scores are divided by √${trace.problem.head_dim} = <${Num} x=${root} />, because sums of more products are larger. The scaling panel shows what happens without.`
          : html`All scores are multiplied by <${Num} x=${scale} />.`;
    case "scores":
      return forbidden
        ? html`${forbidding.map(({ label }, i) => html`${i ? " and " : ""}<code>${label}</code>`)}${forbidding.length ? "" : "A score of −∞"} ${forbidding.length > 1 ? "forbid" : "forbids"} ${forbidden} of ${n} keys; their score becomes −∞, so that their exp is 0.`
        : html`Nothing is forbidden to <${Quoted} text=${token} />${row.masks.length ? html` by <code>${row.masks.map(({ label }) => label).join(", ")}</code>` : ""}: it sees all ${n} keys.`;
    case "max":
      return softmax.row_max === -Infinity
        ? html`Every key is forbidden, so there is no largest score.`
        : html`${softmax.sink === null ? "The largest score" : html`The largest of the scores and the learned sink, <${Num} x=${softmax.sink} />,`} is <${Num} x=${softmax.row_max} />. ${Number.isFinite(softmax.row_max) ? "Subtracting it changes no weight and keeps exp from overflowing." : "Subtracting it gives NaN."}`;
    case "shifted":
      if (softmax.row_max === -Infinity) return html`There is nothing to subtract: every score is −∞.`;
      if (!Number.isFinite(softmax.row_max)) return html`A difference from <${Num} x=${softmax.row_max} /> is NaN, and all weights will be.`;
      return html`Now the largest is 0, and none is above it${softmax.sink !== null && html`; the sink is at <${Num} x=${softmax.sink - softmax.row_max} />`}.`;
    case "exp":
      return html`exp makes differences of scores into ratios: every number becomes positive${forbidden ? ", and −∞ becomes 0" : ""}.`;
    case "sum":
      return html`They add up to <${Num} x=${softmax.row_sum} />${softmax.sink !== null && html`, with e^(sink − m) = <${Num} x=${softmax.sink_exp} /> among them`}.`;
    case "weights":
      return softmax.row_sum === 0 || row.scores.every((score) => score === -Infinity)
        ? html`A row that may see nothing has weights 0 and output 0, not NaN.`
        : !best.length
        ? html`Where a score is NaN or ∞, the sum is NaN, and so are the weights.`
        : html`Divided by the sum they are shares that add up to 1${softmax.sink !== null && html`, with <${Num} x=${softmax.sink_exp / softmax.row_sum} /> for the sink`}. The most, <${Num} x=${softmax.weights[best]} />, goes to ${best.length > 2 ? `each of ${best.length} keys` : best.map((j, i) => html`${i ? " and to " : ""}<${Quoted} text=${keyNames[j]} />`)}; the entropy, −Σ w log w, is <${Num} x=${softmax.entropy} /> nats (natural logarithms)${softmax.sink === null && html` of at most log ${n - forbidden} = <${Num} x=${Math.log(n - forbidden)} />`}.`;
    default:
      return html`Each value is multiplied by its weight${row.factors && " and by its factor of dropout"}, and all are added: <${Vector} of=${row.output} kind="o" />. ${example.tokens.length <= LONGEST ? "This row is what the next layer reads." : ""}`;
  }
}

function Projections({ example, index, name }) {
  const x = example.x[index];
  return html`<div class="cards">${[["W_Q", "w_q", "query", "q"], ["W_K", "w_k", "key", "k"], ["W_V", "w_v", "value", "v"]].map(([title, weights, role, kind]) => html`
    <${Block} title=${`${role} of ${quoted(name)} = x ${title}`} class=${`project ${kind}`} rows=${() => example[weights]}>
      <p class="mono"><${Vector} of=${x} kind="x" /> × ${title}</p>
      <table class="grid still"><tbody>${example[weights].map((row) => html`<tr>${row.map((w) => html`<td><${Num} x=${w} /></td>`)}</tr>`)}</tbody></table>
      <p class="mono">= <${Vector} of=${product([x], example[weights])[0]} kind=${kind} /></p>
    </${Block}>`)}</div>`;
}

export function Pipeline() {
  const { view, set, theme } = useLab();
  const all = useRow();
  const { example, row, trace, keyNames, name } = all;
  const steps = STEPS.filter(([step]) => step !== "projections" || example.x);
  const at = inside(view.step, steps.length);
  const [step, , formula] = steps[at];
  const place = STEPS.findIndex(([each]) => each === step);
  const reached = (each) => place >= STEPS.findIndex(([other]) => other === each);
  const now = (each) => (each === step ? "now" : "");
  const { softmax } = row;
  const head = trace.heads[0];
  const largest = Math.max(...row.raw.filter(Number.isFinite).map(Math.abs), 1e-300);

  // Numbers are given as {x, part}, where part decides the colour; others as html.
  const columns = [
    ["products", "q × k", (j) => html`<span class="products">${row.products[j].map((p, d) => html`<span class="product" title=${`number ${d}`}>
      <span class="q"><${Num} x=${(row.rotated_query ?? row.query)[d]} /></span>×<span class="k"><${Num} x=${(head.rotated_key ?? head.key)[j][d]} /></span></span>`)}</span>`],
    ["raw", "score", (j) => ({ x: row.raw[j], part: row.raw[j] / largest })],
    ["scaled", "scaled", (j) => ({ x: row.scaled[j], part: row.scaled[j] / largest })],
    ["scores", "masked", (j) => ({ x: row.scores[j] })],
    ["shifted", "− max", (j) => ({ x: softmax.shifted[j] })],
    ["exp", "exp", (j) => ({ x: softmax.exp[j], part: softmax.exp[j] })],
    ["weights", "weight", (j) => ({ x: softmax.weights[j], part: softmax.weights[j] })],
    ["output", row.factors ? "weight × factor × value" : "weight × value", (j) => html`${row.factors && html`factor <${Num} x=${row.factors[j]} />: `}<${Vector} of=${row.contributions[j]} kind="v" />`],
  ].filter(([column]) => reached(column));

  const cell = ([column, , value], j) => {
    const given = value(j);
    if (!("x" in given)) return html`<td class=${now(column)} data-column=${column}>${given}</td>`;
    const { x, part = null } = given;
    const style = painted(part, theme);
    return html`<td class=${`right ${now(column)} ${x === -Infinity ? "forbidden" : ""}`} data-column=${column}>
      <span class="swatch" style=${style}><${Num} x=${x} /></span></td>`;
  };
  const totals = {
    scores: reached("max") && html`max <${Num} x=${softmax.row_max} />`,
    exp: reached("sum") && html`sum <${Num} x=${softmax.row_sum} />`,
    weights: reached("weights") && html`sum <${Num} x=${softmax.weights.reduce((a, b) => a + b, 0)} />`,
    output: reached("output") && html`<${Vector} of=${row.output} kind="o" />`,
  };
  const raw = () => [
    ["key", ...columns.map(([, title]) => title)],
    ...row.raw.map((_, j) => [keyNames[j], ...columns.map(([column]) => ({
      products: row.products[j].join(" "), raw: row.raw[j], scaled: row.scaled[j], scores: row.scores[j],
      shifted: softmax.shifted[j], exp: softmax.exp[j], weights: softmax.weights[j], output: row.contributions[j].join(" "),
    })[column])]),
  ];

  return html`<p class="lead">One query from its row to its output. Pick a token, then go on step by step, also with the keys ← and →.</p>
    <${ExampleBar} />
    <ol class="track" aria-label="Steps of the pipeline">${steps.map(([each, title], i) => html`<li key=${each}>
      <button type="button" class=${i < at ? "done" : ""} aria-current=${i === at ? "step" : undefined} onClick=${() => set({ step: i })}>${title}</button></li>`)}</ol>
    <${Stepper} at=${at} length=${steps.length} onStep=${(to) => set({ step: to })} />
    <div class="explained" aria-live="polite"><p class="formula">${formulaOf(step, formula, row)}</p><p>${sentence(step, all)}</p></div>
    ${step === "projections" && html`<${Projections} example=${example} index=${row.q_index} name=${name} />`}
    ${columns.length > 0 && html`<${Block} title=${`What ${quoted(name)} reads`} rows=${raw}>
      <div class="wide" tabindex="0" role="group" aria-label="Steps of all keys"><table class="data growing"><thead><tr><th scope="col">key</th>${columns.map(([column, title]) => html`<th scope="col" key=${column} class=${`${now(column)} ${["products", "output"].includes(column) ? "" : "right"}`}>${title}</th>`)}</tr></thead>
        <tbody>${row.raw.map((_, j) => html`<tr key=${j} class=${row.allowed[j] || !reached("scores") ? "" : "masked"}><th scope="row"><${Token} text=${keyNames[j]} /></th>${columns.map((column) => cell(column, j))}</tr>`)}</tbody>
        <tfoot><tr><td></td>${columns.map(([column]) => html`<td class=${`right ${column === "scores" && step === "max" ? "now" : ""} ${column === "exp" && step === "sum" ? "now" : ""}`}>${totals[column] || ""}</td>`)}</tr></tfoot></table></div>
    </${Block}>`}`;
}
