// The readable code beside its trace: each line says what it does and shows its values.

import { html, useAsk, useLab, inside } from "../parts/lab.js";
import { ExampleBar, useRow } from "../parts/example.js";
import { Choice, Copy, Failure, Num, Quoted, Select, Vector, Waiting } from "../parts/basics.js";
import { pythonParts } from "../drawing/python.js";

/** What a variable of scaled dot-product attention is for the chosen query of any example. */
const VALUES = {
  Q: ({ row }) => html`q = <${Vector} of=${row.query} kind="q" />`,
  d_k: ({ trace }) => html`<${Num} x=${trace.problem.head_dim} />`,
  scores: ({ row }) => html`<${Vector} of=${row.raw} />`,
  scaled: ({ row }) => html`<${Vector} of=${row.scaled} />`,
  largest: ({ row }) => html`<${Num} x=${row.softmax.row_max} />`,
  exps: ({ row }) => html`<${Vector} of=${row.softmax.exp} />`,
  row_sum: ({ row }) => html`<${Num} x=${row.softmax.row_sum} />`,
  weights: ({ row }) => html`<${Vector} of=${row.softmax.weights} />`,
  output: ({ row }) => html`<${Vector} of=${row.output} kind="o" />`,
};

const OWN_NAME = "scaled-dot-product";
const SHARED = "shared";

export function Code() {
  const { view, set, client } = useLab();
  const all = useRow({ masked: false });
  const { result: known, error: unknown } = useAsk("code");
  const listed = known?.listings ?? {};
  const hasClass = (name) => client.host !== "export" || client.has("code", { mechanism: name });
  const names = [OWN_NAME, ...(known?.mechanisms ?? []).filter((name) => name !== OWN_NAME && (listed[name] || hasClass(name)))];
  // The list of all may not be there yet.
  if (!names.includes(view.code) && client.host !== "export") names.push(view.code);
  const name = names.includes(view.code) ? view.code : OWN_NAME;
  const listing = listed[name];
  const libraries = [...(listing ? [["numpy", "NumPy"], ["torch", "torch"]] : []), ...(hasClass(name) ? [["class", "qkv's class"]] : [])];
  const library = libraries.some(([id]) => id === view.lib) ? view.lib : libraries[0]?.[0] ?? "numpy";
  const isClass = known && library === "class";
  const asked = useAsk("code", isClass ? { mechanism: name } : {});
  const error = unknown ?? asked.error;
  const own = name === OWN_NAME && !isClass;
  const shared = all.example.name === SHARED;
  const valuesOf = isClass ? asked.result?.values : listing?.values;
  // The numbers of the page are those of any example; those of the other listings were computed in Python.
  const valueOf = (i) => own ? VALUES[listing.shows[i]]?.(all) : shared ? valuesOf?.[i]?.[all.index] : undefined;
  const lines = isClass
    ? (asked.result?.lines ?? []).map((text, i) => ({ text, value: valueOf(i) }))
    : (listing?.[library] ?? []).map((text, i) => ({ text, note: listing.note[i], value: valueOf(i) })).filter(({ text }) => text !== null);
  const parts = pythonParts(lines.map(({ text }) => text));
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
    <${ExampleBar} withMask=${false} withScale=${own} />
    <div class="row">${libraries.length > 1 && html`<${Choice} label="Written" value=${library} onChange=${(lib) => set({ lib, line: 0 })} options=${libraries} />`}
      ${names.length > 1 && html`<${Select} label="Mechanism" value=${name} onChange=${(code) => set({ code, line: 0 })} options=${names.map((each) => [each, each])} />`}
      <${Copy} text=${() => lines.map(({ text }) => text).join("\n")} what="code" /></div>
    ${error ? html`<${Failure} error=${error} />` : !lines.length ? html`<${Waiting} what="the code" />` : html`
    <div class="code" role="listbox" aria-label=${`Code of ${name}, ${library}`} data-keys onKeyDown=${move}>${lines.map(({ text, note, value }, i) => html`<div key=${i} role="option" aria-selected=${i === at} tabindex=${i === at ? 0 : -1} class=${i === at ? "now" : ""} onFocus=${() => i !== at && set({ line: i })} onClick=${(event) => event.currentTarget.focus()}>
      <code>${text ? parts[i].map(([kind, part]) => kind ? html`<span class=${`py-${kind}`}>${part}</span>` : part) : " "}</code>${(note || value) && html`<span class="side">${value && html`<span class="values" data-line=${i}>${value}</span>`}${note && html`<span class="note">${note}</span>`}</span>`}</div>`)}</div>
    ${isClass && html`<p class="faint">The same code takes arrays of NumPy, torch and JAX.</p>`}
    ${isClass && !valuesOf?.some(Boolean) ? null : own || shared ? html`<p class="faint">Values of <${Quoted} text=${all.name} />${own ? (all.fixed ? `, computed with ${all.trace.problem.summary}` : ", without a mask") : isClass && ", with the weights of the example of this mechanism"}.</p>`
      : html`<p class="faint">This code shows its values for <button type="button" onClick=${() => set({ ex: SHARED, token: 0, key: 0 })}>the shared example</button>.</p>`}`}`;
}
