// The tour: one sentence, from its tokens to the next token, in thirteen steps that play by themselves.

import { html, inside, useAsk, useEffect, useKeys, useLab, useLayoutEffect, useMemo, useRef, useState } from "../parts/lab.js";
import { DataTable, Failure, Full, Stepper, Unknown, Waiting } from "../parts/basics.js";
import { Figure } from "../parts/chart.js";
import { saidOf } from "../parts/narration.js";
import { paint } from "../drawing/colours.js";
import { quoted } from "../drawing/format.js";
import { fromBase64 } from "../language/language.js";
import { DRAWN, HEIGHT, STEPS, WIDTH, numbersOf, sceneOf } from "../language/tour.js";

/** Milliseconds for a step: what it takes to read its letters, and to look. */
const PER_LETTER = 55;
const TO_LOOK = 2500;
/** Characters of the sentence. */
const LONGEST = 200;

function Strip({ values, width, height, of = [values], theme }) {
  const most = Math.max(1e-300, ...of.flatMap((row) => [...row].slice(0, DRAWN).map(Math.abs)));
  const side = width / values.length;
  return html`${values.map((x, i) => html`<rect key=${i} x=${i * side} width=${side + 0.05} height=${height} style=${{ fill: paint(x / most, theme).background }} />`)}<rect class="frame" width=${width} height=${height} rx="2" />`;
}

/** One thing of a picture. Where it stands moves by a transition, and new things come from `from`. */
function Thing({ kind, x, y, from, delay = 0, ...thing }) {
  const { theme } = useLab();
  const place = { transform: `translate(${x}px, ${y}px)` };
  const coming = { animationDelay: `${delay}s`, ...(from ? { "--from-x": `${from[0]}px`, "--from-y": `${from[1]}px` } : {}) };
  const inner = () => {
    switch (kind) {
      case "token": return html`<rect class="box" width=${thing.width} height="20" y="-2" rx="5" /><text x=${thing.width / 2} y="12" text-anchor="middle" class="tokentext">${thing.words}</text>`;
      case "strip": return html`<g style=${thing.faded === undefined ? undefined : { opacity: 0.12 + 0.88 * thing.faded }}><${Strip} ...${thing} theme=${theme} /></g>`;
      case "bar": return html`<rect class="bar" width=${thing.width} height="16" rx="3" />`;
      case "cell": return html`<rect width=${thing.width} height=${thing.height} rx="2" class=${thing.share === null ? "hatched" : ""} style=${thing.share === null ? undefined : { fill: paint(thing.share, theme).background }} />`;
      case "flow": return html`<path class="draw" d=${thing.path} pathLength="1" style=${{ strokeWidth: `${thing.wide}px`, animationDelay: `${delay}s` }} />`;
      default: return html`<text text-anchor=${thing.anchor}>${thing.words}</text>`;
    }
  };
  return html`<g class=${`thing ${kind} ${thing.class ?? ""} ${thing.here ? "here" : ""}`} style=${place}><g class=${from ? "come" : "appear"} style=${coming}>${inner()}</g></g>`;
}

export function Tour() {
  const { result, error } = useAsk("language");
  const model = useMemo(() => result && fromBase64(result.file), [result]);
  if (error) return html`<${Failure} error=${error} />`;
  if (!model) return html`<${Waiting} what="the model" />`;
  return html`<${Steps} model=${model} />`;
}

function Steps({ model }) {
  const { view, set, shown, announce } = useLab();
  const numbers = useMemo(() => numbersOf(model, view.sentence), [view.sentence]);
  const [playing, setPlaying] = useState(false);
  const [bar, words] = [useRef(null), useRef(null)];
  const at = inside(view.tour, STEPS.length);
  const isLast = at === STEPS.length - 1;
  const go = (changes) => {
    setPlaying(false);
    set(changes);
  };
  const play = () => {
    if (!playing && isLast) set({ tour: 0 });
    setPlaying(!playing);
    announce(playing ? "paused" : "playing");
  };
  useKeys({ p: play });
  useEffect(() => {
    if (!playing || !numbers) return undefined;
    const timer = setTimeout(() => (isLast ? setPlaying(false) : set({ tour: at + 1 })), TO_LOOK + PER_LETTER * words.current.textContent.length);
    return () => clearTimeout(timer);
  }, [playing, at, numbers]);
  const wasAt = useRef(at);
  useLayoutEffect(() => {
    if (wasAt.current === at) return;
    wasAt.current = at;
    // The picture, and what is said of it, in one sight.
    const boxes = [words.current, words.current.parentElement.querySelector("svg")].map((each) => each.getBoundingClientRect());
    if (boxes.some(({ top, bottom }) => top < 0 || bottom > innerHeight)) bar.current.scrollIntoView({ block: "start" });
  }, [at]);
  const again = () => {
    go({ sentence: view.sentence + numbers.next[0].token, tour: 0 });
    // The button that was pressed goes away.
    bar.current.querySelector("button").focus();
  };
  const openModel = (event) => {
    event.preventDefault();
    set({ panel: "language", text: view.sentence });
  };
  const step = STEPS[at];
  return html`<p class="lead">One sentence through a language model, from its tokens to the next token. All numbers are computed in this page, by a small model that comes with it.${shown.includes("language") && html` <a href="#language" onClick=${openModel}>All of its heads</a>`}</p>
    <label class="field own-text"><span>The sentence; its last 8 tokens are read</span><input value=${view.sentence} maxlength=${LONGEST} spellcheck=${false} onInput=${(event) => go({ sentence: event.currentTarget.value })} /></label>
    <${Full} text=${view.sentence} most=${LONGEST} />
    ${numbers && html`<${Unknown} ids=${numbers.ids} />`}
    ${numbers ? html`<div class="tourbar" ref=${bar}><button type="button" onClick=${play}>${playing ? "Pause" : "Play"} <kbd>p</kbd></button><${Stepper} at=${at} length=${STEPS.length} onStep=${(tour) => go({ tour })} /></div>
    <${Step} step=${step} numbers=${numbers} words=${words} onAgain=${again} />`
    : html`<p class="faint">Write a word or more, and the tour shows what becomes of it.</p>`}`;
}

function Step({ step, numbers, words, onAgain }) {
  const { title, said, columns, rows } = saidOf(step, numbers);
  return html`<div class="tour"><div class="explained" aria-live="polite" data-step=${step} ref=${words}><h3>${title}</h3><p>${said}</p></div>
    <${Figure} title=${title} quiet=${true}><svg class="tourpicture" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${`${title}; the table has its numbers`}>${sceneOf(step, numbers).map((thing) => html`<${Thing} key=${thing.key} ...${thing} />`)}</svg></${Figure}>
    <div>${step === STEPS.at(-1) && html`<button type="button" class="main" onClick=${onAgain}>Add ${quoted(numbers.next[0].token)} and begin again</button>`}
      <${DataTable} title="In numbers" columns=${columns} rows=${rows.map((cells, i) => ({ key: i, cells }))} /></div></div>`;
}
