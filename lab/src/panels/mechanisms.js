// Every mechanism of the family on the same five tokens.

import { html, useAsk, useLab, useLayoutEffect, useMemo, useRef, inside } from "../parts/lab.js";
import { Block, Choice, DataTable, Failure, Num, Waiting } from "../parts/basics.js";
import { Grid } from "../parts/grid.js";
import { paint } from "../drawing/colours.js";
import formulas from "./formulas.json";

/** Some mechanisms mix with signs and beyond 1; all pictures share one scale up to 1, of roots, so that small shares are seen. */
const share = (x) => (x === null ? null : Math.sign(x) * Math.sqrt(Math.min(1, Math.abs(x))));

function Small({ matrix, theme }) {
  const [height, width] = [matrix.length, matrix[0].length];
  return html`<svg class="smallmap" viewBox=${`0 0 ${width * 10} ${height * 10}`} aria-hidden="true">${matrix.map((row, i) => row.map((x, j) =>
    html`<rect x=${j * 10 + 0.4} y=${i * 10 + 0.4} width="9.2" height="9.2" rx="1.2" style=${{ fill: x === null ? "transparent" : paint(share(x), theme).background }} />`))}</svg>`;
}

/** The formula as mathematics, or as text for a mechanism that has none here. */
const Formula = ({ name, text }) => name in formulas
  ? html`<div class="formula set" tabindex="0" role="group" aria-label="Formula" dangerouslySetInnerHTML=${{ __html: formulas[name].mathml }} />`
  : html`<p class="formula">${text}</p>`;

/** Where it comes from, with a link to the first of the papers. */
function Paper({ name, text }) {
  const { arxiv } = formulas[name] ?? {};
  return arxiv ? html`${text} (<a href=${`https://arxiv.org/abs/${arxiv}`} rel="noreferrer" target="_blank">arXiv:${arxiv}</a>)` : text;
}

/** A sentence of a docstring, with its code. */
const Sentences = ({ of }) => of.map((text, i) => html`<p key=${i}>${text.split("`").map((part, j) => j % 2 ? html`<code>${part}</code>` : part)}</p>`);

/** What the colours say; a mechanism may mix with signs. */
const Legend = ({ has }) => html`<p class="legend faint"><span class=${`ramp ${has ? "scores" : "weights"}`} aria-hidden="true"></span>
  ${has ? "−1 to 1: orange is negative, blue positive" : "0 to 1"}; colours follow the root, so that small shares are seen</p>`;

/** How far a mechanism is from full attention, and whether its causal mask is all that differs. */
function differenceOf(each, all) {
  if (each.difference_from_full_attention < 1e-12) return "the same as full attention";
  const { output } = all.find(({ mechanism }) => mechanism === "causal");
  const isCausal = each.mechanism !== "causal" && output.every((row, i) => row.every((x, j) => Math.abs(x - each.output[i][j]) < 1e-12));
  if (isCausal) return html`the same as causal attention, which differs by <${Num} x=${each.difference_from_full_attention} digits=${3} />`;
  return html`${each.causal ? "causal: " : ""}differs by <${Num} x=${each.difference_from_full_attention} digits=${3} />`;
}

/** One mechanism at large. */
function Detail({ chosen, tokens }) {
  const { view, set } = useLab();
  const heads = chosen.token_mixing.length;
  const head = inside(view.mhead, heads);
  const matrix = chosen.token_mixing[head];
  const columns = matrix[0].length === tokens.length ? tokens : matrix[0].map((_, j) => String(j));
  return html`<${Block} title=${chosen.mechanism} class="chosen-mechanism">
    <${Formula} name=${chosen.mechanism} text=${chosen.formula} />
    <div class="sentences"><${Sentences} of=${chosen.about} /></div>
    <p class="faint"><${Paper} name=${chosen.mechanism} text=${chosen.paper} />. Largest difference of an output from full attention: <${Num} x=${chosen.difference_from_full_attention} />.${chosen.causal && " Here no token reads a later one, and in full attention all do."}</p>
    ${heads > 1 && html`<${Choice} label="Head" value=${head} onChange=${(to) => set({ mhead: to })} options=${chosen.token_mixing.map((_, i) => [i, i])} />`}
    <div class="pair"><${Grid} title=${heads > 1 ? `Token mixing, head ${head}` : "Token mixing"} kind="heat" values=${matrix} rows=${tokens} columns=${columns} share=${share} />
      <${Grid} title="Output" kind="output" values=${chosen.output} rows=${tokens} /></div>
    <${Legend} has=${matrix.flat().some((x) => x < 0)} /></${Block}>`;
}

export function Mechanisms() {
  const { view, set, theme, client } = useLab();
  const list = useRef(null);
  const { result, error } = useAsk("mechanisms");
  const chosenName = view.mech || "scaled-dot-product";
  const all = result?.mechanisms;
  const chosen = all?.find(({ mechanism }) => mechanism === chosenName) ?? all?.[0];
  // A link leads to its mechanism; a notebook that is opened again stays where it is.
  const wasShown = useRef(client.host === "widget" ? view.mech : "");
  useLayoutEffect(() => {
    // The detail stands in the list, under the row of its card. Where both do not fit, the card stays.
    if (!chosen || wasShown.current === view.mech) return;
    wasShown.current = view.mech;
    list.current.querySelector(".detail").scrollIntoView({ block: "nearest" });
    list.current.querySelector('[aria-pressed="true"]').scrollIntoView({ block: "nearest" });
  }, [chosen]);
  const cards = useMemo(() => {
    const card = (each) => html`<li key=${each.mechanism}><button type="button" aria-pressed=${each === chosen} onClick=${() => set({ mech: each.mechanism, mhead: 0 })}>
      <${Small} matrix=${each.token_mixing[0]} theme=${theme} />
      <b>${each.mechanism}</b>
      <span class="faint">${differenceOf(each, all)}</span></button></li>
      ${each === chosen && html`<li class="detail" key="detail"><${Detail} chosen=${chosen} tokens=${result.tokens} /></li>`}`;
    return Object.entries(result?.families ?? {}).map(([family, about]) => html`<section key=${family} class="family">
      <h3>${family[0].toUpperCase() + family.slice(1)}</h3><p class="faint">${about}</p>
      <ul class="multiples" aria-label=${`Mechanisms: ${family}`}>${all.filter((each) => each.family === family).map(card)}</ul></section>`);
  }, [all, chosen, theme, view.digits]);
  if (error) return html`<${Failure} error=${error} />`;
  if (!all) return html`<${Waiting} what="all mechanisms" />`;
  return html`<p class="lead">The whole family on the same five tokens. Each square is how much a query (down) takes of a key (across); the number says how far the output is from that of full attention.</p>
    <div ref=${list}>${cards}</div>
    <${DataTable} title="All of them" class="texts" columns=${["mechanism", "difference", "formula", "paper"]} rows=${all.map((each) => ({ key: each.mechanism, class: each === chosen ? "here" : "", cells: [each.mechanism, { x: each.difference_from_full_attention }, each.formula, each.paper] }))} />`;
}
