// The bar above the panels that show an example: which one, which mask, which query.

import { html, examplesOf, useExample, useKeys, useLab, inside } from "./lab.js";
import { Choice, Select, Whole } from "./basics.js";
import { quoted, shown } from "../drawing/format.js";

export function ExampleBar({ withMask = true, withScale = true, withToken = true }) {
  const { view, set, client, announce } = useLab();
  const { example, fixed, isLost, rows, name } = useExample();
  const index = inside(view.token, rows.length);
  const nameOf = (row) => shown(example.tokens[row.q_index] ?? String(row.q_index));
  const go = (to) => {
    const next = inside(to, rows.length);
    set({ token: next });
    announce(`query ${quoted(nameOf(rows[next]))}`);
  };
  useKeys({ j: () => go(index + 1), k: () => go(index - 1) });
  const names = examplesOf(client).map(({ name, title }) => [name, title ?? name]);
  if (name === "own") names.push(["own", "your own numbers"]);
  return html`${isLost && html`<p class="failure" role="alert">The numbers in this address cannot be read, and the first example is shown. Copy the whole address: its end may be missing.</p>`}
  <div class="examplebar">
    <${Select} label="Example" options=${names} value=${name} onChange=${(ex) => set({ ex, token: 0, key: 0 })} />
    ${withMask && !fixed && html`
      <${Choice} label="Mask" value=${view.mask} onChange=${(mask) => set({ mask })}
        options=${[["none", "none"], ["causal", "causal"], ["padding", "padding"], ["window", "window"]]} />
      ${view.mask === "padding" && html`<${Whole} label="Real keys" value=${Math.min(view.keys, rows.length)} least=${0} most=${rows.length} onChange=${(keys) => set({ keys })} />`}
      ${view.mask === "window" && html`<${Whole} label="Keys before" value=${view.left} least=${0} most=${63} onChange=${(left) => set({ left })} />
        <${Whole} label="Keys after" value=${view.right} least=${0} most=${63} onChange=${(right) => set({ right })} />`}
      `}${withScale && !fixed && html`<${Choice} label="Scores" value=${view.scaled ? 1 : 0} onChange=${(scaled) => set({ scaled })} options=${[[1, "÷ √d"], [0, "not divided"]]} />`}
    ${fixed && html`<p class="faint">A trace of Python: ${example.trace.problem.summary}.${example.trace.heads.length > 1 && ` Of its ${example.trace.heads.length} heads the first is shown.`}</p>`}
    ${withToken && html`<${Choice} label="Query" class="tokens" value=${index} onChange=${(token) => set({ token })}
      options=${rows.map((row, i) => [i, nameOf(row)])} />`}
  </div>`;
}

/** The row of the query that is chosen, and the names of its keys. */
export function useRow(options) {
  const { view } = useLab();
  const all = useExample(options);
  const index = inside(view.token, all.rows.length);
  const keyNames = (all.trace.kv_tokens ?? all.example.tokens).map(shown);
  const row = all.rows[index];
  return { ...all, index, row, name: shown(all.example.tokens[row.q_index] ?? String(row.q_index)), keyNames, key: inside(view.key, row.raw.length) };
}
