// A small language model that runs in the page: type, see what comes next, and switch heads off.

import { html, inside, useAsk, useLab, useMemo } from "../parts/lab.js";
import { Block, DataTable, Failure, Full, Num, Quoted, Token, Unknown, Waiting } from "../parts/basics.js";
import { Bars } from "../parts/chart.js";
import { HeadPictures, pictureOf } from "../parts/heads.js";
import { Lines } from "../parts/lines.js";
import { Words } from "../parts/words.js";
import { quoted, size } from "../drawing/format.js";
import { kindOf, scoresOf, withSuchAKey } from "../language/kinds.js";
import { fromBase64, losses, probabilities } from "../language/language.js";
import { UNCHOSEN } from "../host/view.js";

/** Tokens whose mean is more than chance. */
const ENOUGH = 3;
const BEST = 8;
/** Characters of a text. */
const LONGEST = 4096;
const HOTTEST = 3;
const mean = (list) => list.reduce((sum, x) => sum + x, 0) / list.length;

export function Language() {
  const { result, error } = useAsk("language");
  const model = useMemo(() => result && fromBase64(result.file), [result]);
  if (error) return html`<${Failure} error=${error} />`;
  if (!model) return html`<${Waiting} what="the model" />`;
  return html`<${Reader} model=${model} meanings=${result.meanings} threshold=${result.threshold} />`;
}

/** The heads that are off, as "layer.head", of a view's text. */
const offOf = (text) => new Set(text.split(" ").filter(Boolean));

function timed(compute) {
  const start = performance.now();
  return { ...compute(), took: performance.now() - start };
}

function Reader({ model, meanings, threshold }) {
  const { view, set, announce } = useLab();
  const { text, temperature } = view;
  const all = useMemo(() => model.encode(text), [text]);
  const ids = all.slice(-model.context);
  const off = offOf(view.off);
  const plain = useMemo(() => timed(() => model.run(ids)), [text]);
  const run = useMemo(() => (off.size ? model.run(ids, off) : plain), [text, view.off]);
  const heads = useMemo(() => run.weights.map((layer) => layer.map((weights) => {
    const { means, counts } = scoresOf(weights, ids);
    const kind = kindOf(means, threshold);
    return { weights, kind, share: means[kind], count: counts[kind] };
  })), [run]);
  const tokens = ids.map((id) => model.pieces[id]);
  const layer = inside(view.llayer, model.layers.length);
  const head = inside(view.lhead, model.numHeads);
  const query = view.lquery === UNCHOSEN ? tokens.length - 1 : inside(view.lquery, tokens.length);
  const append = (id) => {
    set({ text: text + model.pieces[id], lquery: UNCHOSEN });
    announce(`${quoted(model.pieces[id])} added`);
  };
  return html`<${About} model=${model} took=${plain.took} count=${ids.length} />
    <label class="field own-text"><span>A sentence, for the model to read</span><textarea rows="3" maxlength=${LONGEST} spellcheck=${false} value=${text} onInput=${(event) => set({ text: event.currentTarget.value, lquery: UNCHOSEN })}></textarea></label>
    <${Full} text=${text} most=${LONGEST} />
    ${all.length > ids.length && html`<p class="faint">The model reads the last ${ids.length} of ${all.length} tokens, as many as it was trained on.</p>`}
    <${Unknown} ids=${ids} />
    ${!ids.length && html`<p class="faint">Write something, and the model says what comes next.</p>`}
    ${ids.length > 0 && html`<div class="two wide-left"><${Next} model=${model} logits=${run.logits.at(-1)} before=${off.size ? plain.logits.at(-1) : null} temperature=${temperature} onTake=${append} />
      <${Loss} ids=${ids} plain=${plain} run=${run} off=${off} /></div>
    <${Heads} heads=${heads} meanings=${meanings} threshold=${threshold} off=${off} layer=${layer} head=${head} />
    <${Head} head=${heads[layer][head]} meanings=${meanings} threshold=${threshold} tokens=${tokens} query=${query} more=${model.measured["more without"]?.[layer]?.[head]} title=${`Layer ${layer}, head ${head}${off.has(`${layer}.${head}`) ? " (off)" : ""}`} />`}`;
}

function About({ model, took, count }) {
  const { measured } = model;
  return html`<p class="lead">A language model of ${measured.weights.toLocaleString("en-US")} weights in 8 bits (${size(model.bytes)}), which runs in this page. It was trained on the six novels of Jane Austen and knows nothing else: it continues a sentence as they might, with grammar and names, and without sense beyond a few words.</p>
    <p class="faint" data-name="how-good">On text of the novels that it has not seen it loses <${Num} x=${measured.loss} /> nats for each token: that is −log p, in natural logarithms, of the token that comes. A trigram model, which counts how often a token follows the two before it, loses <${Num} x=${measured["trigram loss"]} />; it is counted on the same text, with Kneser-Ney smoothing, which gives tokens that never followed there a share too. ${count > 0 && html`This text took ${(took / count).toFixed(1)} ms for each token here.`}</p>`;
}

/** The most probable tokens to come next, and those with all heads beside them. */
function Next({ model, logits, before, temperature, onTake }) {
  const { set } = useLab();
  const p = probabilities(logits, temperature);
  const old = before && probabilities(before, temperature);
  const best = [...p.keys()].sort((a, b) => p[b] - p[a]).slice(0, BEST);
  const draw = () => {
    let left = Math.random();
    const drawn = p.findIndex((x) => (left -= x) < 0);
    onTake(drawn < 0 ? best[0] : drawn);
  };
  const rows = () => [["token", "probability", ...(old ? ["with all heads"] : [])], ...best.map((id) => [model.pieces[id], p[id], ...(old ? [old[id]] : [])])];
  return html`<${Block} title="What comes next" rows=${rows}>
    <div class="slider" data-keys><label for="temperature">Temperature</label><input id="temperature" type="range" min="0.1" max=${HOTTEST} step="0.1" value=${temperature} aria-valuetext=${temperature.toFixed(1)} onInput=${(event) => set({ temperature: Number(event.currentTarget.value) })} /><span>${temperature.toFixed(1)}</span></div>
    <div data-name="next"><${Bars} label="Probabilities of the next token" bars=${best.map((id) => ({ name: html`<${Token} text=${model.pieces[id]} />`, value: p[id], note: html`<${Num} x=${p[id]} />` }))} /></div>
    ${old && html`<p class="faint">With all heads: ${best.slice(0, 3).map((id, i) => html`${i ? ", " : ""}<${Quoted} text=${model.pieces[id]} /> <${Num} x=${old[id]} />`)}.</p>`}
    <div class="row"><button type="button" onClick=${() => onTake(best[0])}>Add the most probable</button><button type="button" onClick=${draw}>Draw one and add it</button></div></${Block}>`;
}

function Loss({ ids, plain, run, off }) {
  if (ids.length < 2) return null;
  const [all, now] = [plain, run].map(({ logits }) => mean(losses(logits, ids)));
  const rows = [{ cells: ["all on", { x: all }] }, ...(off.size ? [{ class: "here", cells: [`${off.size} off`, { x: now }], key: "off" }] : [])];
  return html`<div data-name="loss"><${DataTable} title="Loss of this text" columns=${["heads", "nats for each token"]} rows=${rows} note="The mean of −log p over its tokens but the first: low where the model expected what you wrote." /></div>`;
}

function Heads({ heads, meanings, threshold, off, layer, head }) {
  const { set, announce } = useLab();
  const toggle = (name) => {
    const next = new Set(off);
    if (!next.delete(name)) next.add(name);
    set({ off: [...next].sort().join(" ") });
    announce(`head ${name} ${next.has(name) ? "off" : "on"}`);
  };
  const pictures = useMemo(() => heads.map((each) => each.map(({ weights, kind, share, count }) => ({ picture: pictureOf(weights), note: kind ? `${kind} ${share.toFixed(2)}${count < ENOUGH ? `\u00a0of\u00a0${count}` : ""}` : "" }))), [heads]);
  const layers = pictures.map((row, i) => ({ name: `layer ${i}`, heads: row.map((each, j) => ({ ...each, name: `${i}.${j}`, off: off.has(`${i}.${j}`) })) }));
  return html`<${Block} title="Every head: layers down, heads across">
    <p class="faint">Each picture is one head: a row for each token, and the stronger a colour, the more it reads of an earlier one. Choose a head to see it below; switch heads off, and what comes next is computed without them.</p>
    <p class="faint">Under a picture stand the kind of its head, where one has ${threshold} or more of the weight, how much that is, and “of 1” or “of 2” where it is the mean of so few tokens, which say little. The kinds are ${Object.entries(meanings).map(([kind, meaning]) => `${kind}: ${meaning}`).join("; ")}.</p>
    <${HeadPictures} layers=${layers} chosen=${[layer, head]} onChoose=${(i, j) => set({ llayer: i, lhead: j })} below=${(i, j) => {
      const { name } = layers[i].heads[j];
      return html`<label><input type="checkbox" checked=${!off.has(name)} aria-label=${`Head ${name} is on`} onChange=${() => toggle(name)} /> on</label>`;
    }} />
    <div class="row"><button type="button" disabled=${!off.size} onClick=${() => set({ off: "" })}>All heads on</button></div></${Block}>`;
}

function Head({ head: { weights, kind, count }, meanings, threshold, tokens, query, title, more }) {
  const { set } = useLab();
  const row = weights[query];
  const best = [...row.keys()].sort((a, b) => row[b] - row[a]).slice(0, 6);
  return html`<${Block} title=${title} rows=${() => [["query", "key", "weight"], ...weights.flatMap((keys, i) => [...keys].map((weight, j) => [tokens[i], tokens[j], weight]))]}>
    ${kind && html`<p class="faint">Its kind is ${kind}: on average over ${withSuchAKey(count, "token", "tokens")}, it puts ${threshold} or more of its weight on ${meanings[kind]}, which is what the word says and no more.</p>`}
    ${more !== undefined && html`<p class="faint">Without this head alone, the model loses <${Num} x=${more} /> nats more for each token of the text that was held out.</p>`}
    <div class="two wide-left"><div><${Words} tokens=${tokens} query=${query} strength=${new Map(row.entries())} onChoose=${(to) => set({ lquery: to })} />
      <p><${Quoted} text=${tokens[query]} /> reads:</p>
      <div data-name="reads"><${Bars} label="Where the chosen token looks" bars=${best.map((key) => ({ name: html`<span class="faint">${key}</span> <${Token} text=${tokens[key]} />`, value: row[key], note: html`<${Num} x=${row[key]} />` }))} /></div></div>
      <${Lines} read=${(each) => [...weights[each].entries()]} first=${0} stop=${tokens.length} kvLen=${tokens.length} query=${query} queryTokens=${tokens} keyTokens=${tokens} onChoose=${(to) => set({ lquery: to })} /></div></${Block}>`;
}
