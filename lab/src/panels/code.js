// The readable code beside its trace: each line says what it does and shows its values.

import { html, useAsk, useLab, inside } from "../parts/lab.js";
import { ExampleBar, useRow } from "../parts/example.js";
import { Block, Choice, Copy, Failure, Num, Select, Vector, Waiting } from "../parts/basics.js";

const vector = (list) => html`<${Vector} of=${list} />`;
const output = ({ row }) => vector(row.output);
const weights = ({ row }) => vector(row.softmax.weights);

/** Lines of code, what each does, and its value for the chosen query. */
const OWN = {
  numpy: [
    ["import numpy as np"],
    [""],
    ["class ScaledDotProductAttention:"],
    ["    def __init__(self, d_k):", "Rows of Q and K have d_k numbers.", ({ trace }) => html`d_k = ${trace.problem.head_dim}`],
    ["        self.scale = np.sqrt(d_k)", "Scores will be divided by this.", ({ trace }) => html`<${Num} x=${1 / trace.problem.scale} />`],
    [""],
    ["    def forward(self, Q, K, V, allowed=True):", "One row for each token; allowed is the mask.", ({ row }) => html`q = <${Vector} of=${row.query} kind="q" />`],
    ["        scores = Q @ K.T", "Each query with each key: products, added.", ({ row }) => vector(row.raw)],
    ["        scaled = scores / self.scale", "An even size, whatever d_k is.", ({ row }) => vector(row.scaled)],
    ["        masked = np.where(allowed, scaled, -np.inf)", "What is forbidden gets the score −∞.", ({ row }) => vector(row.scores)],
    ["        largest = masked.max(axis=-1, keepdims=True)", "The largest score of each row.", ({ row }) => html`<${Num} x=${row.softmax.row_max} />`],
    ["        exp = np.exp(masked - largest)", "At most e^0 = 1, so nothing overflows.", ({ row }) => vector(row.softmax.exp)],
    ["        weights = exp / exp.sum(axis=-1, keepdims=True)", "Shares that add up to 1.", weights],
    ["        return weights, weights @ V", "The values, mixed by the weights.", output],
  ],
  torch: [
    ["import math"],
    ["import torch"],
    ["from torch.nn import functional as F"],
    [""],
    ["def attention(query, key, value, allowed=None):", "Tensors (..., length, head_dim); allowed is the mask.", ({ row }) => html`q = <${Vector} of=${row.query} kind="q" />`],
    ["    scale = 1 / math.sqrt(query.shape[-1])", "Scores will be multiplied by this.", ({ trace }) => html`<${Num} x=${trace.problem.scale} />`],
    ["    scores = query @ key.transpose(-2, -1) * scale", "Products, added and scaled.", ({ row }) => vector(row.scaled)],
    ["    if allowed is not None:"],
    ["        scores = scores.masked_fill(~allowed, -torch.inf)", "What is forbidden gets the score −∞.", ({ row }) => vector(row.scores)],
    ["    weights = scores.softmax(dim=-1)", "Max, shift, exp, sum and divide in one.", weights],
    ["    return weights @ value", "The values, mixed by the weights.", output],
    [""],
    ["# The same in one call, without the matrix of weights:"],
    ["F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)", "Fused, and its weights are never stored.", output],
  ],
};

const OWN_NAME = "scaled-dot-product";

export function Code() {
  const { view, set, client } = useLab();
  const all = useRow();
  const compared = useAsk("mechanisms").result?.mechanisms ?? [];
  const names = [OWN_NAME, ...compared.map(({ mechanism }) => mechanism).filter((name) => name !== OWN_NAME &&
    (client.host !== "export" || client.has("code", { mechanism: name })))];
  const name = names.includes(view.code) ? view.code : OWN_NAME;
  const own = name === OWN_NAME;
  const { result, error } = useAsk(own ? null : "code", { mechanism: name });
  const library = view.lib === "torch" ? "torch" : "numpy";
  const lines = own
    ? OWN[library].map(([text, note, value]) => ({ text, note, value: value?.(all) }))
    : (result?.[library] ?? []).map((text, i) => {
      const values = library === "numpy" ? result.values?.[i] : undefined;
      const tokens = Object.keys(values ?? {});
      const token = tokens.includes(all.name) ? all.name : tokens.includes(String(all.index)) ? String(all.index) : tokens[inside(all.index, tokens.length || 1)];
      return { text, note: result.notes?.[i], value: values?.[token] };
    });
  const at = inside(view.line, lines.length || 1);
  const move = (event) => {
    const to = { ArrowUp: at - 1, ArrowDown: at + 1, Home: 0, End: lines.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    set({ line: inside(to, lines.length) });
    event.currentTarget.querySelectorAll('[role="option"]')[inside(to, lines.length)].focus();
  };
  return html`<p class="lead">The same steps as code. Every line says what it does and shows what it makes for the chosen query.</p>
    <${ExampleBar} />
    <div class="row"><${Choice} label="Library" value=${library} onChange=${(lib) => set({ lib, line: 0 })} options=${[["numpy", "NumPy"], ["torch", "torch"]]} />
      ${names.length > 1 && html`<${Select} label="Mechanism" value=${name} onChange=${(code) => set({ code, line: 0 })} options=${names.map((each) => [each, each])} />`}
      <${Copy} rows=${() => lines.map(({ text }) => [text])} what="code" /></div>
    ${!own && error ? html`<${Failure} error=${error} />` : !own && !result ? html`<${Waiting} what="the code" />` : html`
    <div class="code" role="listbox" aria-label=${`Code of ${name}, ${library}`} data-keys onKeyDown=${move}>${lines.map(({ text, note, value }, i) => html`<div key=${i} role="option" aria-selected=${i === at} tabindex=${i === at ? 0 : -1} class=${i === at ? "now" : ""} onFocus=${() => i !== at && set({ line: i })} onClick=${(event) => event.currentTarget.focus()}>
      <code>${text || " "}</code>${(note || value) && html`<span class="side">${value && html`<span class="values" data-line=${i}>${value}</span>`}${note && html`<span class="note">${note}</span>`}</span>`}</div>`)}</div>
    ${!own && html`<p class="faint">Values of the five tokens of the shared example.</p>`}`}`;
}
