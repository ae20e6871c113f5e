// The readable code beside its trace: each line says what it does and shows its values.

import { html, useAsk, useLab, inside } from "../parts/lab.js";
import { ExampleBar, useRow } from "../parts/example.js";
import { Choice, Copy, Failure, Num, Quoted, Select, Vector, Waiting } from "../parts/basics.js";

/** What a line of the code of scaled dot-product attention makes for the chosen query. */
const VALUES = {
  query: ({ row }) => html`q = <${Vector} of=${row.query} kind="q" />`,
  d_k: ({ trace }) => html`<${Num} x=${trace.problem.head_dim} />`,
  raw: ({ row }) => html`<${Vector} of=${row.raw} />`,
  scaled: ({ row }) => html`<${Vector} of=${row.scaled} />`,
  row_max: ({ row }) => html`<${Num} x=${row.softmax.row_max} />`,
  exp: ({ row }) => html`<${Vector} of=${row.softmax.exp} />`,
  row_sum: ({ row }) => html`<${Num} x=${row.softmax.row_sum} />`,
  weights: ({ row }) => html`<${Vector} of=${row.softmax.weights} />`,
  output: ({ row }) => html`<${Vector} of=${row.output} kind="o" />`,
};

const OWN_NAME = "scaled-dot-product";

export function Code() {
  const { view, set, client } = useLab();
  const all = useRow({ masked: false });
  const family = useAsk("code").result?.mechanisms ?? [];
  const names = [OWN_NAME, ...family.filter((name) => name !== OWN_NAME &&
    (client.host !== "export" || client.has("code", { mechanism: name })))];
  // The list of all may not be there yet.
  if (!names.includes(view.code) && client.host !== "export") names.push(view.code);
  const name = names.includes(view.code) ? view.code : OWN_NAME;
  // The others are shown as Python has them; this one with the numbers of the example.
  const own = name === OWN_NAME;
  const { result, error } = useAsk("code", own ? {} : { mechanism: name });
  const library = view.lib === "torch" ? "torch" : "numpy";
  const lines = (result?.[library] ?? []).map((text, i) => ({
    text, note: result.notes?.[i], value: own ? VALUES[result.shows?.[i]]?.(all) ?? result.values?.[i]?.[all.index] : undefined,
  }));
  // The classes of the family take arrays of either library.
  const same = result && String(result.numpy) === String(result.torch);
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
    <${ExampleBar} withMask=${false} />
    <div class="row">${(own || !same) && html`<${Choice} label="Library" value=${library} onChange=${(lib) => set({ lib, line: 0 })} options=${[["numpy", "NumPy"], ["torch", "torch"]]} />`}
      ${names.length > 1 && html`<${Select} label="Mechanism" value=${name} onChange=${(code) => set({ code, line: 0 })} options=${names.map((each) => [each, each])} />`}
      <${Copy} rows=${() => lines.map(({ text }) => [text])} what="code" /></div>
    ${error ? html`<${Failure} error=${error} />` : !result ? html`<${Waiting} what="the code" />` : html`
    <div class="code" role="listbox" aria-label=${`Code of ${name}, ${library}`} data-keys onKeyDown=${move}>${lines.map(({ text, note, value }, i) => html`<div key=${i} role="option" aria-selected=${i === at} tabindex=${i === at ? 0 : -1} class=${i === at ? "now" : ""} onFocus=${() => i !== at && set({ line: i })} onClick=${(event) => event.currentTarget.focus()}>
      <code>${text || " "}</code>${(note || value) && html`<span class="side">${value && html`<span class="values" data-line=${i}>${value}</span>`}${note && html`<span class="note">${note}</span>`}</span>`}</div>`)}</div>
    ${same && html`<p class="faint">The same code takes arrays of NumPy, torch and JAX.</p>`}
    ${own && html`<p class="faint">Values of <${Quoted} text=${all.name} />, without a mask.</p>`}`}`;
}
