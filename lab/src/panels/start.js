// The example: which one, its numbers as editable cells, and four figures that say what attention is.

import { html, useLab, useExample, useLayoutEffect, useRef, useState, edited, inside } from "../parts/lab.js";
import { ExampleBar } from "../parts/example.js";
import { Block } from "../parts/basics.js";
import { Grid, weightShare } from "../parts/grid.js";
import { Figures } from "../parts/figures.js";
import { complaint, matrixOf } from "../examples/examples.js";
import { arraysOf, exampleOf } from "../examples/files.js";
import { opened } from "../host/host.js";
import { NOTHING_CHOSEN } from "../host/view.js";
import { LONGEST } from "../examples/kernel.js";
import { shown } from "../drawing/format.js";

/** Bytes beyond which a file holds more than the page shows number by number. */
const SMALL = 2 ** 17;

const MATRICES = [["query", "Q"], ["key", "K"], ["value", "V"]];

function plainCopy({ tokens, query, key, value, scale }) {
  const rows = (matrix) => matrix.map((row) => [...row]);
  const usual = scale === undefined || Math.abs(scale * Math.sqrt(query[0].length) - 1) < 1e-12;
  return { tokens: [...tokens], query: rows(query), key: rows(key), value: rows(value), ...(usual ? {} : { scale }) };
}

/** Why numbers were refused, at the place where they were given, which may be at the end of the page. */
function Refusal({ text }) {
  const place = useRef(null);
  useLayoutEffect(() => place.current.scrollIntoView({ block: "nearest" }), [text]);
  return html`<p class="failure" role="alert" ref=${place}>${text}</p>`;
}

function Paste({ onGiven }) {
  const [open, setOpen] = useState(false);
  const [texts, setTexts] = useState({ query: "", key: "", value: "" });
  if (!open) return html`<button type="button" onClick=${() => setOpen(true)}>Paste Q, K and V</button>`;
  return html`<form class="paste" onSubmit=${(event) => {
    event.preventDefault();
    const [query, key, value] = MATRICES.map(([role]) => matrixOf(texts[role]));
    if (onGiven({ tokens: query.map((_, i) => `token ${i}`), query, key, value })) setOpen(false);
  }}>${MATRICES.map(([role, name]) => html`<label class="field"><span>${name}, a line for each token</span>
      <textarea rows="4" spellcheck=${false} value=${texts[role]} placeholder="1 0 1 0" onInput=${(event) => setTexts({ ...texts, [role]: event.currentTarget.value })}></textarea></label>`)}
    <p class="row"><button class="main">Use these</button> <button type="button" onClick=${() => setOpen(false)}>Leave</button></p></form>`;
}

export function Start() {
  const { view, set, announce, client, show, shown: panels } = useLab();
  const { example, rows, fixed, trace } = useExample();
  const rowName = (row) => example.tokens[row.q_index] ?? String(row.q_index);
  const [error, setError] = useState(null);
  const file = useRef(null);
  const n = example.tokens.length;

  const refuse = (at, text) => setError({ at, text });
  /** Takes an example if the page can compute it; says why not where it was given. */
  const use = (next, at) => {
    const reason = complaint(next);
    setError(null);
    if (reason) {
      refuse(at, reason);
      return false;
    }
    set({ ...edited(next), token: inside(view.token, next.tokens.length) });
    return true;
  };
  const change = (alter) => {
    const next = plainCopy(example);
    alter(next);
    return use(next, "cells");
  };
  const resize = (by) => {
    if (change((next) => {
      for (const list of [next.query, next.key, next.value]) {
        if (by > 0) list.push(list[0].map((_, c) => (c === (list.length % list[0].length) ? 1 : 0)));
        else list.pop();
      }
      if (by > 0) next.tokens.push(`token ${n}`);
      else next.tokens.pop();
    })) announce(`${n + by} tokens`);
  };
  const read = async (event) => {
    const [given] = event.currentTarget.files;
    if (!given) return;
    try {
      if (client.host === "server") {
        await show(() => opened(given));
        set({ ex: "file", panel: given.size > SMALL ? "inspect" : "start", token: 0, ...NOTHING_CHOSEN });
      } else use(exampleOf(await arraysOf(given)), "own");
    } catch (reason) {
      refuse("own", [`${given.name}: ${reason.message}`, reason.action].filter(Boolean).join(" "));
    }
    file.current.value = "";
  };

  return html`<p class="lead">Attention lets every token look at the others and take from each what it needs. Here is one small case of it, with every number; change any of them, and all panels follow.</p>
    <p class="headline" aria-label="output = softmax of Q K transposed over root d, times V">output = softmax(<i class="q">Q</i> <i class="k">K</i><sup>T</sup> ÷ √d) <i class="v">V</i></p>
    ${panels.includes("tour") && html`<p><button type="button" class="main" onClick=${() => set({ panel: "tour", tour: 0 })}>Take the tour</button> <span class="faint">thirteen steps from a sentence to its next token</span></p>`}
    ${!panels.includes("inspect") && html`<p class="faint" data-name="absent">Not in this page: the panel <a href="#inspect">Inspect</a>, every head of a model on a text of yours, since no model was named when the page was written.</p>`}
    <${Figures} />
    <h3 class="part">The example</h3>
    <${ExampleBar} />
    ${error?.at === "cells" && html`<${Refusal} text=${error.text} />`}
    ${!fixed && html`<div class="tokens-edit" role="group" aria-label="Tokens">${example.tokens.map((token, i) => html`<label key=${i}><span class="unseen">Token ${i}</span>
      <input value=${token} size=${Math.max(3, Math.min(12, shown(token).length))} maxlength="40"
        onChange=${(event) => change((next) => { next.tokens[i] = event.currentTarget.value; })} /></label>`)}
      <button type="button" class="small" disabled=${n >= LONGEST} onClick=${() => resize(1)} aria-label="Add a token">+</button>
      <button type="button" class="small" disabled=${n <= 1} onClick=${() => resize(-1)} aria-label="Remove the last token">−</button></div>`}
    <div class="matrices">${MATRICES.map(([role, name]) => html`<${Grid} key=${role} title=${name} kind=${name.toLowerCase()} values=${example[role]} rows=${role === "query" ? rows.map(rowName) : trace.kv_tokens ?? example.tokens}
      onEdit=${fixed ? undefined : (i, j, x) => change((next) => { next[role][i][j] = x; })}
      onPaste=${fixed ? undefined : (text) => change((next) => { next[role] = matrixOf(text); if (next[role].length !== next.tokens.length) next.tokens = next[role].map((_, i) => `token ${i}`); })} />`)}</div>
    <div class="matrices">
      <${Grid} title="Weights" kind="heat" values=${rows.map((row) => row.softmax.weights)} rows=${rows.map(rowName)} columns=${trace.kv_tokens ?? example.tokens} share=${weightShare} selected=${[inside(view.token, rows.length), null]} onSelect=${(token) => set({ token })} />
      <${Grid} title="Output" kind="output" values=${rows.map((row) => row.output)} rows=${rows.map(rowName)} selected=${[inside(view.token, rows.length), null]} onSelect=${(token) => set({ token })} />
    </div>
    <${Block} title="Your own" class="own"><p>Edit the cells of Q, K and V, paste numbers into one of them, or bring a file. The address of this page holds what you typed: send it as a link.</p>
      <div class="row"><${Paste} onGiven=${(next) => use(next, "own")} />
        <label class="button">Read a safetensors or npz file<input ref=${file} type="file" accept=".safetensors,.npz" onChange=${read} /></label></div>
      ${error?.at === "own" && html`<${Refusal} text=${error.text} />`}
      <p class="faint">${client.host === "server"
      ? html`A file holds q, k and v. Up to ${LONGEST} tokens are shown number by number; longer ones in the panel Inspect.`
      : html`A file holds q, k and v of at most ${LONGEST} tokens; of more dimensions the first is taken. It is read in this page and goes nowhere. For longer ones: <code>qkv lab FILE</code>.`}</p></${Block}>`;
}
