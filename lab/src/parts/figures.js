// The four figures of the texts: look-up, pipeline, causal triangle, growth. Each moves once and
// rests as the finished picture; who wants less motion sees that at once.

import { html, useLab, useState } from "./lab.js";
import { paint } from "../drawing/colours.js";

const after = (seconds) => ({ animationDelay: `${seconds}s` });

/** The weights of "cat" in the shared example. */
const WORDS = [["The", 0.4026], ["cat", 0.0898], ["sat", 0.2442], ["on", 0.1481], ["mat", 0.1153]];

function LookUp({ theme }) {
  return html`<svg viewBox="0 0 320 190" role="img" aria-label="The query of cat meets five keys; each value comes back as much as its key fits: The 0.40, cat 0.09, sat 0.24, on 0.15, mat 0.12">
    <g class="appear"><rect class="box q" x="8" y="78" width="64" height="34" rx="6" /><text x="40" y="92" class="small">query of</text><text x="40" y="106">cat</text></g>
    ${WORDS.map(([word, weight], i) => {
      const y = 21 + 37 * i;
      return html`<g key=${word}><path class="draw" style=${{ ...after(0.5 + 0.3 * i), strokeWidth: `${1 + 16 * weight}px` }} d=${`M72 95 C 105 95, 105 ${y}, 138 ${y}`} pathLength="1" />
        <g class="appear" style=${after(0.3)}><rect class="box k" x="138" y=${y - 13} width="52" height="26" rx="6" /><text x="164" y=${y + 4}>${word}</text></g>
        <g class="appear" style=${after(0.9 + 0.3 * i)}><text x="213" y=${y + 4} class="value">${weight.toFixed(2)}</text>
        <rect x="236" y=${y - 11} width="76" height="22" rx="4" style=${{ fill: paint(weight, theme).background }} class="fill" /><text x="274" y=${y + 4} style=${{ fill: paint(weight, theme).color }}>value</text></g></g>`;
    })}</svg>`;
}

function Flow() {
  const boxes = ["Q Kᵀ", "÷ √d", "mask", "softmax", "× V"];
  return html`<svg viewBox="0 0 320 190" role="img" aria-label="Scores of Q and K, divided by the root of d, masked, softmax, times V">
    ${boxes.map((text, i) => html`<g key=${text} class="appear" style=${after(0.5 * i)}>
      <rect class=${`box ${["q", "", "", "k", "v"][i]}`} x=${6 + 63 * i} y="74" width="55" height="42" rx="6" /><text x=${33.5 + 63 * i} y="99">${text}</text>
      ${i > 0 && html`<path class="arrow" d=${`M${-1 + 63 * i} 95 h6 m-3 -3 l3 3 l-3 3`} />`}</g>`)}
    ${[["scores", 33], ["even size", 96], ["who may", 159], ["shares", 222], ["mixture", 285]].map(([text, x], i) => html`<text key=${text} class="small appear" style=${after(0.5 * i + 0.2)} x=${x} y="136">${text}</text>`)}
    <circle class="travel" cx="10" cy="56" r="6" /></svg>`;
}

function Triangle() {
  return html`<svg viewBox="0 0 320 190" role="img" aria-label="A causal mask: each of five queries sees itself and the keys before it, a triangle">
    ${WORDS.map(([word], i) => html`<g key=${word}><text class="end" x="92" y=${27 + 34 * i}>${word}</text>${WORDS.map((_, j) => html`<rect key=${j} x=${104 + 34 * j} y=${8 + 34 * i} width="30" height="30" rx="4"
      class=${j <= i ? "seen appear" : "hatched"} style=${j <= i ? after(0.2 + 0.5 * i + 0.08 * j) : undefined} />`)}</g>`)}</svg>`;
}

function Growth() {
  const sizes = [16, 32, 64, 128];
  return html`<svg viewBox="0 0 320 190" role="img" aria-label="Twice the tokens, four times the scores: squares of 1, 4, 16 and 64 parts">
    ${sizes.map((side, i) => html`<g key=${side} class="grow" style=${after(0.4 + 0.7 * i)}>
      <rect x=${[12, 44, 92, 172][i]} y=${160 - side} width=${side} height=${side} class="seen" rx="3" />
      <text x=${[20, 60, 124, 236][i]} y="178">${["n", "2n", "4n", "8n"][i]}</text>
      ${i > 0 && html`<text class="inner" x=${[20, 60, 124, 236][i]} y=${160 - side / 2 + 5}>${["", "4", "16", "64"][i]}×</text>`}</g>`)}</svg>`;
}

const FIGURES = [
  ["A look-up that mixes", "A dictionary returns the value of the one key that fits. Attention returns all values, each as much as its key fits the query.", LookUp, null],
  ["The pipeline", "Scores, an even size, a mask, shares that add up to one, a mixture.", Flow, "pipeline"],
  ["The causal triangle", "Who writes the next word must not see it: each query sees itself and what came before.", Triangle, "heatmap"],
  ["Growth", "Every token with every token: twice the length is four times the scores.", Growth, "count"],
];

function Figure({ title, text, picture: Picture, panel }) {
  const { theme, set, shown } = useLab();
  const [run, setRun] = useState(0);
  const open = panel && shown.includes(panel);
  return html`<figure class="moving"><${Picture} key=${run} theme=${theme} />
    <figcaption><b>${title}.</b> ${text} <span class="row">
      <button type="button" class="small replay" onClick=${() => setRun(run + 1)} aria-label=${`Play again: ${title}`}>Play again</button>
      ${open && html`<button type="button" class="small" onClick=${() => set(panel === "heatmap" ? { panel, mask: "causal" } : { panel })} aria-label=${`Open: ${title}`}>Open</button>`}</span></figcaption></figure>`;
}

export const Figures = () => html`<div class="figures">${FIGURES.map(([title, text, picture, panel]) => html`<${Figure} key=${title} title=${title} text=${text} picture=${picture} panel=${panel} />`)}</div>`;
