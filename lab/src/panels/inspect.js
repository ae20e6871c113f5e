// A model, or captured arrays: every head by its scores, one head's keys and its map, and what if.

import { html, useAsk, useLab, useRef, useState, inside } from "../parts/lab.js";
import { Block, Choice, DataTable, Failure, Num, Select, Token, Waiting, Whole } from "../parts/basics.js";
import { Grid } from "../parts/grid.js";
import { Bars } from "../parts/chart.js";
import { WeightMap } from "../parts/map.js";
import { HeadPictures, usePictures } from "../parts/heads.js";
import { Lines } from "../parts/lines.js";
import { Shown } from "../parts/shown.js";
import { Words } from "../parts/words.js";
import { withSuchAKey } from "../language/kinds.js";
import { UNCHOSEN } from "../host/view.js";
import { numbersOfJson } from "../host/numbers.js";
import { shown, written } from "../drawing/format.js";

const PAGE = 512;
/** The name of the model that the page computes itself. */
const SHIPPED = "language";
const worded = (name) => name.replaceAll("_", " ");
/** A head; of a single layer, whose number says nothing beside the name of what is shown, without it. */
const nameOf = (layers, layer, head) => (layers.length > 1 ? `layer ${layer}, head ${head}` : `head ${head}`);

/** What scores are that are not a weight on one kind of key. */
const SCORES = {
  entropy: "Entropy, −Σ w log w of the weights w of a query, in nats: how widely it reads, 0 where one key has all",
  max_weight: "The largest weight of a query: near 1 where it reads one key alone",
  learned_sink: "Weight on a learned sink, a number of the model that takes its share beside the keys",
  distance: "How many tokens lie between a query and the keys that it reads, the mean by their weights",
  max_logit: "The largest score that a query gives a key, before the softmax",
};

/** What a score of a head is, as a sentence. */
const aboutOf = (score, meanings) => SCORES[score] ?? `Weight on ${meanings[score]}`;

/** Over how many queries the mean of a score goes, in words. */
function meanOf(score, { counted, q_len: length }) {
  const count = counted[score];
  if (score === "max_logit") return "The largest of all queries";
  if (count === length) return length === 1 ? "That of the one query" : `Mean of all ${length} queries`;
  return `Mean of ${withSuchAKey(count, "query", "queries")}`;
}

function HeadGrid({ layers, score, layer, head, onOpen }) {
  const { set, announce } = useLab();
  const most = Math.max(...layers.map(({ heads }) => heads.length));
  const numbers = layers.flatMap(({ heads }) => heads.map((each) => each[score])).filter(Number.isFinite);
  const largest = Math.max(1e-12, ...numbers);
  const values = layers.map(({ heads }) => Array.from({ length: most }, (_, i) => numbersOfJson(heads[i]?.[score])));
  const group = ({ heads, num_kv_heads: kv }) => (kv && kv < heads.length ? heads.length / kv : 1);
  const place = layers.findIndex(({ index }) => index === layer);
  const select = (i, j) => {
    if (!layers[i].heads[j] || (layers[i].index === layer && j === head)) return;
    set({ layer: layers[i].index, head: j, kkey: UNCHOSEN });
    announce(`${nameOf(layers, layers[i].index, j)}: ${score} ${written(layers[i].heads[j][score], 3)}${layers[i].heads[j].kind ? `, ${layers[i].heads[j].kind}` : ""}`);
  };
  const grouped = layers.some((each) => group(each) > 1);
  const isOne = layers.length === 1;
  return html`<${Grid} title=${isOne ? `${score} of each head` : `${score}: layers down, heads across`} kind="heat heads" values=${values} rows=${isOne ? [score === "max_logit" ? "largest" : "mean"] : layers.map(({ index }) => `layer ${index}`)} columns=${Array.from({ length: most }, (_, i) => String(i))}
      share=${(x) => x / largest} selected=${[place, head]} onSelect=${select} onOpen=${(i, j, byKey) => { select(i, j); onOpen(byKey); }} axes=${isOne ? "head →" : "layer ↓ head →"}
      mark=${(i, j) => { const each = group(layers[i]); return each === 1 ? "" : `grouped ${j % each === 0 ? "first" : ""} ${j % each === each - 1 ? "last" : ""}`; }} />
    ${grouped && html`<p class="faint">Heads under one bracket read the same keys and values.</p>`}`;
}

/** All heads at a glance. */
function Glance({ layers, layer, head, onOpen }) {
  const { set } = useLab();
  const { pictures, queries, error } = usePictures(layers);
  const { q_len: qLen, has_weights: hasWeights } = layers[0];
  const shownLayers = layers.map(({ index, heads }, i) => ({
    name: layers.length > 1 ? `layer ${index}` : "",
    heads: heads.map(({ kind }, j) => ({ name: layers.length > 1 ? `${index}.${j}` : String(j), note: kind, picture: pictures[i]?.[j] })),
  }));
  return html`<${Block} title="Every head as a picture" class="glance">
    <p class="faint">A row for each query, and the stronger a colour, the more it reads of a key. ${queries[0] < qLen && `Of ${qLen.toLocaleString("en-US")} queries ${queries[0].toLocaleString("en-US")}, evenly spaced, are drawn. `}${!hasWeights && "Weights were not kept: the best keys of each query are drawn. "}</p>
    ${error && html`<${Failure} error=${error} />`}
    <${HeadPictures} layers=${shownLayers} chosen=${[layers.findIndex(({ index }) => index === layer), head]} onOpen=${onOpen}
      onChoose=${(i, j) => set({ layer: layers[i].index, head: j, kkey: UNCHOSEN })} /></${Block}>`;
}

function HowToRead() {
  const { set, shown: panels } = useLab();
  const open = (event) => {
    event.preventDefault();
    set({ panel: "pipeline" });
  };
  return html`<details class="howto"><summary>How to read this page</summary>
    <p>A square of the grid is one head, coloured by the score that is chosen above it. Choose one to open that head.</p>
    <p>In the map, each row is a query and each column a key; the colour is the weight that this query gives to this key. A row adds to one, or to less where the model has a learned sink: a number that takes its share beside the keys. A column of strong colour is a key that many queries read, a line along the diagonal a head that reads at a fixed distance.</p>
    <p>Colours follow the fourth root of the weight, so that small weights are seen too; “linear” shows them as they are.</p>
    <p>Choose a point of the map, or a word of the text, and the keys of that query are listed. Entropy, −Σ w log w of its weights, says how widely it reads: 0 where one key has all. It is in nats, units of the natural logarithm.</p>
    ${panels.includes("pipeline") && html`<p><a href="#pipeline" onClick=${open}>Where a weight comes from, step by step</a></p>`}</details>`;
}

/** The best keys of the queries around one, as they are asked for together. */
function useBestKeys({ layer, head, query, qLen }) {
  const first = Math.floor(query / PAGE) * PAGE;
  return useAsk(query === undefined ? null : "head", qLen > PAGE ? { layer, head, first, count: PAGE } : { layer, head });
}

function TopKeys({ best: { result, error }, query, tokens, queryTokens, qLen }) {
  const { set } = useLab();
  if (error) return html`<${Failure} error=${error} />`;
  if (!result) return html`<${Waiting} what="the best keys" />`;
  const at = query - result.first;
  const isThere = at < result.count;
  const name = (index) => (tokens ? tokens[index] ?? "…" : "");
  const rows = isThere ? result.top_keys[at].map((key, i) => [key, result.top_weights[at][i]]).filter(([key]) => key >= 0) : [];
  const rest = Math.max(0, 1 - rows.reduce((sum, [, weight]) => sum + weight, 0));
  return html`<${Block} title="Where one query looks" rows=${() => [["key", "token", "weight"], ...rows.map(([key, weight]) => [key, name(key), weight])]}>
    <div class="row"><${Whole} label=${`Query, 0 to ${qLen - 1}`} value=${query} least=${0} most=${qLen - 1} onChange=${(to) => set({ query: to, kkey: UNCHOSEN })} />
      ${queryTokens && queryTokens !== tokens && html`<p data-name="query-token">query <${Token} text=${queryTokens[query]} /></p>`}
      ${isThere && html`<p>entropy <b data-name="head-entropy"><${Num} x=${result.entropy[at]} /></b> nats</p>`}</div>
    ${tokens && html`<${Words} tokens=${tokens} query=${query} strength=${new Map(rows)} onChoose=${queryTokens === tokens ? (to) => set({ query: to, kkey: UNCHOSEN }) : undefined} />`}
    ${!isThere && html`<${Failure} error=${{ message: `Of each head the first ${result.first + result.count} of ${qLen} queries are in this page.`, action: "The others need Python: run qkv lab." }} />`}
    ${rows.length > 0 && html`<${Bars} label="Best keys" bars=${rows.map(([key, weight]) => ({ name: html`<span class="faint">${key}</span> ${tokens && html`<${Token} text=${name(key)} />`}`, value: weight, note: html`<${Num} x=${weight} />` }))} />
    <p class="faint">Weights of this one query; all other keys, and a learned sink if there is one, share <${Num} x=${rest} />.</p>`}</${Block}>`;
}

/** Lines to the best keys of the queries around one. */
function BestLines({ best: { result }, query, tokens, queryTokens, kvLen }) {
  const { set } = useLab();
  if (!result || query >= result.first + result.count) return null;
  const { first, count, top_keys: keys, top_weights: weights } = result;
  return html`<${Lines} first=${first} stop=${first + count} kvLen=${kvLen} query=${query} queryTokens=${queryTokens} keyTokens=${tokens}
    read=${(each) => keys[each - first].map((key, i) => [key, weights[each - first][i]])} onChoose=${(to) => set({ query: to, kkey: UNCHOSEN })}
    note=${`Of each query the ${keys[0]?.length ?? 0} best keys have lines.`} />`;
}

const WHATS = [["off", "off"], ["uniform", "uniform"], ["copy", "as for another prompt"]];

function Losses({ before, after, tokens }) {
  // The first token has no loss: nothing predicted it.
  return html`<${DataTable} title="Loss of each token" columns=${["token", "text", "before", "after"]} rows=${before.map((x, i) => ({ key: i, class: Math.abs(x - after[i]) > 0.5 ? "here" : "", cells: [i, shown(tokens[i]), ...[x, after[i]].map((loss) => ({ x: i ? loss : undefined }))] }))} />`;
}

function WhatIf({ layers, layer, head }) {
  const { client } = useLab();
  const [changes, setChanges] = useState([]);
  const [what, setWhat] = useState("off");
  const [source, setSource] = useState("");
  const [answer, setAnswer] = useState({});
  const add = (list) => setChanges([...changes.filter((old) => !list.some((each) => each.layer === old.layer && each.head === old.head)), ...list]);
  const kinds = [...new Set(layers.flatMap(({ heads }) => heads.map(({ kind }) => kind)).filter(Boolean))];
  const run = async () => {
    setAnswer({ pending: true });
    try {
      const params = { changes, ...(source && changes.some((each) => each.what === "copy") ? { source } : {}) };
      setAnswer({ result: await client.ask("intervene", params) });
    } catch (error) {
      setAnswer({ error });
    }
  };
  const { result } = answer;
  return html`<${Block} title="What if" class="whatif">
    <p>Where a head reads is not why. Change heads, and see what the model then predicts after the text above.</p>
    <div class="row"><${Choice} label=${`Layer ${layer}, head ${head} becomes`} value=${what} onChange=${setWhat} options=${WHATS} />
      <button type="button" onClick=${() => add([{ layer, head, what }])}>Add this head</button>
      ${kinds.includes("induction") && html`<button type="button" onClick=${() => add(layers.flatMap(({ index, heads }) => heads.filter(({ kind }) => kind === "induction").map((each) => ({ layer: index, head: each.head, what }))))}>Add all induction heads</button>`}</div>
    <ul class="chips" aria-label="Changes">${changes.map((each, i) => html`<li key=${`${each.layer}.${each.head}`}>layer ${each.layer}, head ${each.head}: ${each.what} <button type="button" class="small" aria-label=${`Take back layer ${each.layer}, head ${each.head}`} onClick=${() => setChanges(changes.filter((_, j) => j !== i))}>×</button></li>`)}</ul>
    ${changes.some((each) => each.what === "copy") && html`<label class="field"><span>The prompt to copy weights from</span><textarea rows="2" value=${source} onInput=${(event) => setSource(event.currentTarget.value)}></textarea></label>`}
    <button type="button" class="main" disabled=${!changes.length || answer.pending} onClick=${run}>${answer.pending ? "The model runs …" : "Run the model"}</button>
    ${answer.error && html`<${Failure} error=${answer.error} />`}
    ${result && html`<div data-name="intervened"><${DataTable} title="Loss" columns=${["", "before", "after"]} rows=${[{ cells: ["loss, nats for each token", { x: result.before.loss }, { x: result.after.loss }] }]} />
      <div class="pair">${["before", "after"].map((side) => html`<${Block} key=${side} title=${`Predicted next, ${side}`} rows=${() => result[side].prediction.map(({ token, probability }) => [token, probability])}>
        <${Bars} label=${`Predicted next, ${side}`} bars=${result[side].prediction.map(({ token, probability }) => ({ name: html`<${Token} text=${token} />`, value: probability, note: html`<${Num} x=${probability} />` }))} /></${Block}>`)}</div>
      <${Losses} tokens=${result.tokens} before=${result.before.losses} after=${result.after.losses} /></div>`}</${Block}>`;
}

/** Where heads can be switched off, in a page that has no model to run. */
function NoWhatIf({ model }) {
  const { set, shown: panels } = useLab();
  const open = (event) => {
    event.preventDefault();
    set({ panel: "language" });
  };
  const panel = html`the panel <a href="#language" onClick=${open}>Language model</a>`;
  const has = panels.includes("language");
  return html`<p class="faint" data-name="no-what-if">${has && model === SHIPPED ? html`Heads of this model can be switched off in ${panel}, which also reads a text of yours.`
    : html`Switching off heads of this model, and another text for it, need Python, <code>qkv lab --model NAME</code>${has && html`; those of ${panel} can be switched off here, and it reads a text of yours`}.`}</p>`;
}

export function Inspect() {
  const { view, set, client } = useLab();
  const { result: model, error } = useAsk("model");
  const text = useRef(null);
  const { layers = [], notable = {} } = model ?? {};
  const chosen = (name) => (view[name] === UNCHOSEN ? notable[name] ?? 0 : view[name]);
  const current = layers.find(({ index }) => index === chosen("layer")) ?? layers[0];
  const head = current && inside(chosen("head"), current.heads.length);
  const query = current && inside(chosen("query"), current.q_len);
  const isEmpty = layers.every(({ q_len: queries, kv_len: keys }) => !queries || !keys);
  const best = useBestKeys({ layer: current?.index, head, query: isEmpty ? undefined : query, qLen: current?.q_len });
  if (error) return html`<p class="lead">Every head of a real model, and the map of its weights at any length.</p><${Failure} error=${error} />`;
  if (!model) return html`<${Waiting} what="the record" />`;
  // Layers of another sequence than the text, as in a decoder, have tokens of their own, or none.
  const { index: layer, q_len: qLen, kv_len: kvLen, tokens = model.tokens } = current;
  const queryTokens = "q_tokens" in current ? current.q_tokens : qLen === kvLen ? tokens : null;
  // Where no key was chosen, the query's best.
  const key = inside(view.kkey !== UNCHOSEN ? view.kkey : best.result?.top_keys[query - best.result.first]?.[0] ?? 0, kvLen);
  const scores = model.scores.filter((name) => layers.some(({ heads }) => heads.some((each) => Number.isFinite(each[name]))));
  const score = scores.includes(view.score) ? view.score : scores[0];
  const kind = current.heads[head]?.kind;
  const hasMap = current.has_weights && (client.host !== "export" || client.has("tile", { layer, head, level: 0, row: 0, column: 0, reduce: "max" }));
  const read = (byKey) => {
    text.current.scrollIntoView({ block: "nearest" });
    if (byKey) (text.current.querySelector(".words") ?? text.current.querySelector("input"))?.focus();
  };
  const about = html`<p class="lead"><b class="token">${model.model}</b>: ${layers.length} ${layers.length === 1 ? "layer" : "layers"}, ${qLen.toLocaleString("en-US")} queries, ${kvLen.toLocaleString("en-US")} keys${model.kind === "model" ? "" : html`, computed by the backend <code>${model.backend}</code>`}.
      ${" "}${model.about}</p>`;
  const others = client.host !== "export" && html`<${Shown} model=${model} />`;
  if (isEmpty) return html`${about}${others}<p data-name="empty">Without ${qLen ? "keys" : "queries"} there are no weights to show.</p>`;
  if (!scores.length) return html`${about}${others}<p data-name="empty">There are no weights to show: masks or scores of −∞ forbid all pairs, or scores are not numbers.</p>`;
  return html`${about}<p>${model.note}</p><${HowToRead} />
    ${others}
    <${Choice} label="Heads coloured by" value=${score} onChange=${(to) => set({ score: to })} options=${scores.map((name) => [name, worded(name)])} />
    <p class="faint" data-name="about-score">${aboutOf(score, model.meanings)}. ${meanOf(score, current)}.</p>
    <${HeadGrid} layers=${layers} score=${score} layer=${layer} head=${head} onOpen=${read} />
    <${Glance} layers=${layers} layer=${layer} head=${head} onOpen=${read} />
    <h3 class="part">${layers.length > 1 ? `Layer ${layer}, head ${head}` : `Head ${head}`}${kind ? html` <span class="kind">${kind}</span>` : ""}</h3>
    <div class="row">${layers.length > 1 && html`<${Select} label="Layer" value=${layer} onChange=${(to) => set({ layer: Number(to), kkey: UNCHOSEN })} options=${layers.map(({ index, name }) => [index, name ? `${index}: ${name}` : String(index)])} />`}
      <${Select} label="Head" value=${head} onChange=${(to) => set({ head: Number(to), kkey: UNCHOSEN })} options=${current.heads.map((each, i) => [i, each.kind ? `${i}: ${each.kind}` : String(i)])} /></div>
    ${kind && html`<p class="faint">On average over ${withSuchAKey(current.counted[kind], "query", "queries")}, it puts ${model.threshold} or more of its weight on ${model.meanings[kind]}, which is what the word says and no more.</p>`}
    <div class="two">
      ${hasMap ? html`<${WeightMap} key=${client.opening} name=${nameOf(layers, layer, head)} layer=${layer} head=${head} query=${query} chosenKey=${key} qLen=${qLen} kvLen=${kvLen} levels=${current.levels} tokens=${tokens} queryTokens=${queryTokens} onOpen=${read} />` : html`<p class="faint">The map of weights is not in this page; it needs Python: <code>qkv lab</code>.</p>`}
      <div ref=${text}><${TopKeys} best=${best} query=${query} tokens=${tokens} queryTokens=${queryTokens} qLen=${qLen} />
        <${BestLines} best=${best} query=${query} tokens=${tokens} queryTokens=${queryTokens} kvLen=${kvLen} /></div></div>
    <${DataTable} title="All heads in numbers" sortable=${true} columns=${["head", "kind", ...scores.map(worded)]} under=${["", "", ...scores.map((name) => (name === "max_logit" ? "largest" : `of ${current.counted[name]}`))]}
      rows=${layers.flatMap((each) => each.heads.map((one, i) => ({ key: `${each.index}.${i}`, class: each.index === layer && i === head ? "here" : "", cells: [layers.length > 1 ? `${each.index}.${i}` : i, one.kind ?? "", ...scores.map((name) => ({ x: one[name] }))] })))}
      note="Each column is a mean over the queries that have such a key; under its name stands how many they are. The columns of a row are means over different queries, so they are not parts of one whole." />
    ${!model.can_intervene && model.kind === "model" && html`<${NoWhatIf} model=${model.model} />`}
    ${model.can_intervene && client.host !== "export" && html`<${WhatIf} layers=${layers} layer=${layer} head=${head} />`}`;
}
