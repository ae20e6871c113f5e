// The whole matrix at one stage, and all arithmetic of one of its cells.

import { html, useLab, useRef } from "../parts/lab.js";
import { ExampleBar, useRow } from "../parts/example.js";
import { Block, Choice, Num, Token, Vector } from "../parts/basics.js";
import { Grid, scoreShare, weightShare } from "../parts/grid.js";
import { quoted, shown } from "../drawing/format.js";

const STAGES = [["raw", "raw"], ["scaled", "scaled"], ["masked", "masked"], ["weights", "weights"]];

const stageOf = (rows, stage) => rows.map((row) => ({
  raw: row.raw, scaled: row.scaled, masked: row.scores, weights: row.softmax.weights,
})[stage] ?? row.softmax.weights);

function Arithmetic({ row, trace, index, j, name, keyName }) {
  const head = trace.heads[0];
  const query = row.rotated_query ?? row.query;
  const key = (head.rotated_key ?? head.key)[j];
  const { softmax } = row;
  const { scale, head_dim: d } = trace.problem;
  const root = Math.sqrt(d);
  const allowed = row.allowed[j];
  const byRoot = Math.abs(scale * root - 1) < 1e-12;
  return html`<${Block} class="arithmetic" title=${`${quoted(name)} reads ${quoted(keyName)}`} rows=${() => [
      ["query", ...query], ["key", ...key], ["products", ...row.products[j]], ["raw", row.raw[j]], ["scaled", row.scaled[j]],
      ["score", row.scores[j]], ["row max", softmax.row_max], ["exp", softmax.exp[j]], ...(softmax.sink === null ? [] : [["sink", softmax.sink], ["exp of sink", softmax.sink_exp]]), ["row sum", softmax.row_sum],
      ["weight", softmax.weights[j]], ...(row.factors ? [["factor", row.factors[j]]] : []), ["share of output", ...row.contributions[j]], ["output", ...row.output]]}>
    <dl class="sums" data-cell=${`${index},${j}`}>
      <div><dt>query</dt><dd><${Vector} of=${query} kind="q" /></dd></div>
      <div><dt>key</dt><dd><${Vector} of=${key} kind="k" /></dd></div>
      <div><dt>products</dt><dd>${row.products[j].map((p, c) => html`${c ? " + " : ""}<span class="product"><span class="q"><${Num} x=${query[c]} /></span>×<span class="k"><${Num} x=${key[c]} /></span></span>`)}
        ${" = "}<b data-name="raw"><${Num} x=${row.raw[j]} /></b></dd></div>
      <div><dt>${byRoot ? "division" : "scale"}</dt><dd><${Num} x=${row.raw[j]} /> ${byRoot ? html`÷ √${d}` : html`× <${Num} x=${scale} />`} = <b data-name="scaled"><${Num} x=${row.scaled[j]} /></b></dd></div>
      ${row.stages.map(({ label, scores }) => html`<div><dt>variant</dt><dd><code>${label}</code> → <${Num} x=${scores[j]} /></dd></div>`)}
      ${allowed ? html`
        <div><dt>exp</dt><dd>e^(<${Num} x=${row.scores[j]} /> − <${Num} x=${softmax.row_max} />) = <b data-name="exp"><${Num} x=${softmax.exp[j]} /></b></dd></div>
        ${softmax.sink !== null && html`<div><dt>sink</dt><dd>e^(<${Num} x=${softmax.sink} /> − <${Num} x=${softmax.row_max} />) = <${Num} x=${softmax.sink_exp} /></dd></div>`}
        <div><dt>row sum</dt><dd>${softmax.exp.length <= 8 ? html`${softmax.exp.map((e, c) => html`${c ? " + " : ""}<${Num} x=${e} />`)}${softmax.sink !== null && html` + <${Num} x=${softmax.sink_exp} /> of the sink`} = ` : ""}<b data-name="row_sum"><${Num} x=${softmax.row_sum} /></b></dd></div>
        <div><dt>weight</dt><dd><${Num} x=${softmax.exp[j]} /> ÷ <${Num} x=${softmax.row_sum} /> = <b data-name="weight"><${Num} x=${softmax.weights[j]} /></b></dd></div>`
      : html`<div><dt>mask</dt><dd>forbidden: the score is −∞, its exp 0, and the weight <b data-name="weight"><${Num} x=${0} /></b></dd></div>`}
      <div><dt>share of the output</dt><dd><${Num} x=${softmax.weights[j]} /> × ${row.factors && html`<${Num} x=${row.factors[j]} /> of dropout × `}<${Vector} of=${head.value[j]} kind="v" /> = <${Vector} of=${row.contributions[j]} kind="v" /></dd></div>
      <div><dt>output</dt><dd>the sum of all shares: <${Vector} of=${row.output} kind="o" /></dd></div>
    </dl>
  </${Block}>`;
}

export function Heatmap() {
  const { view, set, announce } = useLab();
  const { rows, row, index, key, trace, example, keyNames, name } = useRow();
  const stage = STAGES.some(([each]) => each === view.stage) ? view.stage : "weights";
  const values = stageOf(rows, stage);
  const sums = useRef(null);
  const bring = () => {
    // On a phone the arithmetic stands under the matrix, out of sight.
    if (sums.current.getBoundingClientRect().top > 0.8 * innerHeight) sums.current.scrollIntoView({ block: "nearest" });
  };
  const names = rows.map(({ q_index: i }) => shown(example.tokens[i] ?? String(i)));
  const select = (i, j) => {
    if (i === index && j === key) return;
    set({ token: i, key: j });
    announce(`${quoted(names[i])} reads ${quoted(keyNames[j])}: ${values[i][j] === -Infinity ? "forbidden" : values[i][j].toFixed(4)}`);
  };
  return html`<p class="lead">Queries go down and keys across; each row is one query's choice. Point at a cell, or walk there with the arrow keys, for all of its arithmetic.</p>
    <${ExampleBar} withToken=${false} />
    <${Choice} label="Stage" value=${stage} onChange=${(to) => set({ stage: to })} options=${STAGES} />
    <div class="two sums-beside"><div onClick=${(event) => event.target.closest("td") && bring()}>
      <${Grid} title=${`${stage} matrix`} kind="heat" values=${values} rows=${names} columns=${keyNames} axes="query ↓ key →"
        share=${stage === "weights" ? weightShare : scoreShare(values)} selected=${[index, key]} onSelect=${select} />
      <${Legend} stage=${stage} /></div>
    <div class="beside" ref=${sums}><${Arithmetic} row=${row} trace=${trace} index=${index} j=${key} name=${name} keyName=${keyNames[key]} /></div>
    <div><${Grid} title="Output" kind="output" values=${rows.map((each) => each.output)} rows=${names} selected=${[index, null]} onSelect=${(i) => set({ token: i })} />
      <${RowTable} rows=${rows} names=${names} /></div></div>`;
}

const Legend = ({ stage }) => html`<p class="legend faint"><span class=${`ramp ${stage === "weights" ? "weights" : "scores"}`} aria-hidden="true"></span>
  ${stage === "weights" ? "0 to 1: lightness is even, so twice as far is twice as much" : "blue is positive, orange negative; hatched is forbidden"}</p>`;

function RowTable({ rows, names }) {
  return html`<${Block} title="Rows in numbers" rows=${() => [["query", "largest weight", "entropy, nats", "lse"], ...rows.map(({ softmax }, i) => [names[i], Math.max(...softmax.weights), softmax.entropy, softmax.lse])]}>
    <div class="wide" tabindex="0" role="group" aria-label="Rows in numbers"><table class="data"><thead><tr><th scope="col">query</th><th scope="col" class="right">largest</th><th scope="col" class="right">entropy</th><th scope="col" class="right">lse</th></tr></thead>
    <tbody>${rows.map(({ softmax }, i) => html`<tr key=${i}><th scope="row"><${Token} text=${names[i]} /></th><td class="right"><${Num} x=${Math.max(...softmax.weights)} /></td><td class="right" data-name="entropy"><${Num} x=${softmax.entropy} /></td><td class="right" data-name="lse"><${Num} x=${softmax.lse} /></td></tr>`)}</tbody></table></div>
    <p class="faint">Entropy is −Σ w log w of the weights of a row, in nats, units of the natural logarithm: 0 where one key has all. lse is log Σ e^score, “log-sum-exp”, the number of a row by which e^(score − lse) is its weight.${rows[0].softmax.sink !== null && " The sum has e^sink too: a learned sink takes its share beside the keys, and the weights of a row add up to less than 1."}</p></${Block}>`;
}
