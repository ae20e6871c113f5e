// The streaming algorithm over one query: block by block, with a running max, sum and accumulator.

import { html, useLab, inside } from "../parts/lab.js";
import { Figure } from "../parts/chart.js";
import { ExampleBar, useRow } from "../parts/example.js";
import { Block, DataTable, Num, Stepper, Token, Vector, Whole } from "../parts/basics.js";
import { quoted } from "../drawing/format.js";
import { painted } from "../drawing/colours.js";
import { tilesOf } from "../examples/kernel.js";

const KINDS = { full: "no mask needed", partial: "the mask is evaluated", skipped: "never read" };

/** Which blocks of queries and keys are read at all, under the mask. */
function Schedule({ rows, block, index, tile }) {
  const starts = (length) => Array.from({ length: Math.ceil(length / block) }, (_, i) => i * block);
  const kinds = starts(rows.length).map((i) => starts(rows[0].allowed.length).map((j) => {
    const pairs = rows.slice(i, i + block).flatMap((row) => row.allowed.slice(j, j + block));
    return pairs.every(Boolean) ? "full" : pairs.some(Boolean) ? "partial" : "skipped";
  }));
  const count = (kind) => kinds.flat().filter((each) => each === kind).length;
  const side = Math.min(40, 320 / Math.max(kinds.length, kinds[0].length));
  const title = `Tiles of ${block} × ${block}`;
  const said = Object.entries(KINDS).map(([kind, words]) => `${count(kind)} ${kind}: ${words}`);
  return html`<${Figure} title=${title}>
    <svg class="schedule" viewBox=${`0 0 ${Math.max(360, 40 + side * kinds[0].length)} ${side * kinds.length + 62}`} role="img" aria-label=${`${title}: ${said.join("; ")}`}>
      ${kinds.map((row, i) => row.map((kind, j) => html`<rect key=${`${i}.${j}`} class=${kind} x=${24 + j * side} y=${i * side} width=${side - 2} height=${side - 2} rx="2" />`))}
      <rect class="now" x=${24 + tile * side - 1} y=${Math.floor(index / block) * side - 1 + 1} width=${side} height=${side - 1} rx="3" />
      <text x="14" y=${(side * kinds.length) / 2} text-anchor="middle" transform=${`rotate(-90 14 ${(side * kinds.length) / 2})`}>queries</text>
      <text x="24" y=${side * kinds.length + 14}>keys</text>
      ${Object.keys(KINDS).map((kind, i) => html`<g key=${kind}><rect class=${kind} x=${24 + i * 108} y=${side * kinds.length + 34} width="14" height="14" rx="2" /><text x=${44 + i * 108} y=${side * kinds.length + 45}>${count(kind)} ${kind}</text></g>`)}</svg>
    <p class="faint">${said.join("; ")}.</p></${Figure}>`;
}

export function Tiles() {
  const { view, set, theme } = useLab();
  const { row, rows, index, trace, name, keyNames } = useRow();
  const n = row.scores.length;
  const block = Math.min(Math.max(1, view.block), n);
  const { states, output } = tilesOf(row.scores, trace.heads[0].value, block, { sink: row.softmax.sink, factors: row.factors });
  const at = inside(view.tile, states.length);
  const state = states[at];
  const { sink } = row.softmax;
  const before = states[at - 1] ?? (sink === null ? undefined : { row_max: sink, row_sum: 1 });
  const digits = (list) => list.map((x) => x.toPrecision(12)).join(" ");
  const same = digits(output) === digits(row.output);
  const weights = (j, last) => (last.row_max === -Infinity ? 0 : Math.exp(row.scores[j] - last.row_max));

  return html`<p class="lead">Softmax seems to need the whole row: its largest score and its sum. It does not. Read a block of keys at a time, and when a larger score comes, shrink what was added so far.</p>
    <${ExampleBar} />
    <div class="row"><${Whole} label=${`Keys in a block, 1 to ${n}`} value=${block} least=${1} most=${n} onChange=${(to) => set({ block: to, tile: 0 })} />
      ${view.block > n && html`<p class="faint" data-name="too-long">Blocks of ${view.block} keys were chosen; there are ${n} keys here, so ${n} are taken.</p>`}</div>
    <${Stepper} at=${at} length=${states.length} what="block" onStep=${(tile) => set({ tile })} />
    <div class="strip" role="img" aria-label=${`Keys ${state.start} to ${state.stop - 1} of ${n} are read now`}>${row.scores.map((score, j) => {
      const read = j < state.stop;
      const now = j >= state.start && read;
      return html`<span key=${j} class=${`keycell ${now ? "now" : ""} ${j % block === 0 ? "first" : ""}`}
        style=${read && score !== -Infinity ? painted(weights(j, state), theme) : undefined}><b>${keyNames[j]}</b><span>${read ? html`<${Num} x=${score} digits=${4} />` : "?"}</span></span>`;
    })}</div>
    <div class="explained" aria-live="polite">
      <p>Block ${at + 1} has scores <${Vector} of=${state.scores} />; its largest is <b><${Num} x=${state.block_max} /></b>.</p>
      ${at === 0 && sink !== null && html`<p>A learned sink is there before the first key: the running max is its <${Num} x=${sink} />, and the sum e^0 = 1.</p>`}
      <p>${!before || before.row_max === -Infinity
        ? html`There is nothing yet to rescale: the running max becomes <${Num} x=${state.row_max} />.`
        : before.row_max === state.row_max
          ? html`The running max stays <${Num} x=${state.row_max} />, so what was added so far stays too: the factor is e^0 = <${Num} x=${state.rescale} />.`
          : html`The running max grows from <${Num} x=${before.row_max} /> to <${Num} x=${state.row_max} />, so what was added so far shrinks by e^(<${Num} x=${before.row_max} /> − <${Num} x=${state.row_max} />) = <${Num} x=${state.rescale} />.`}</p>
      <p>sum: ${before ? html`<${Num} x=${state.rescale} /> × <${Num} x=${before.row_sum} /> + ` : ""}${state.exp.map((e, i) => html`${i ? " + " : ""}<${Num} x=${e} />`)} = <b><${Num} x=${state.row_sum} /></b></p>
      ${row.factors && html`<p>Dropout: the values of this block are multiplied by <${Vector} of=${row.factors.slice(state.start, state.stop)} /> besides.</p>`}
    </div>
    <${DataTable} title=${`States for ${quoted(name)}`} columns=${["keys", "block max", "running max", "rescale", "running sum", "accumulator"]}
      rows=${states.map((each, i) => ({ key: i, class: i === at ? "here" : i > at ? "later" : "", cells: [
        each.stop - each.start === 1 ? String(each.start) : `${each.start}–${each.stop - 1}`, { x: each.block_max }, { x: each.row_max }, { x: each.rescale }, { x: each.row_sum },
        html`<${Vector} of=${each.accumulator} text=${each.accumulator.join(" ")} />`] }))} />
    <${Schedule} rows=${rows} block=${block} index=${index} tile=${at} />
    <${Block} title="The end: accumulator ÷ sum" rows=${() => [["block by block", ...output], ["the whole row", ...row.output]]}>
      <dl class="sums"><div><dt>block by block</dt><dd data-name="tiled">${output.map((x, i) => html`${i ? ", " : ""}<${Num} x=${x} digits=${12} />`)}</dd></div>
        <div><dt>the whole row</dt><dd data-name="whole">${row.output.map((x, i) => html`${i ? ", " : ""}<${Num} x=${x} digits=${12} />`)}</dd></div>
        <div><dt>query</dt><dd><${Token} text=${name} />: ${same ? html`<span class="verdict right">✓ the same 12 digits</span>` : "equal to rounding"}</dd></div></dl></${Block}>`;
}
