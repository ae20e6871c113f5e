// The exercises of the classical texts, whose answers are checked in the page.

import { html, useAsk, useEffect, useKept, useLab, useState } from "../parts/lab.js";
import { Failure, Waiting } from "../parts/basics.js";
import { check } from "../exercises/answers.js";

const DONE = "qkv-exercises-done";

/** The names of the exercises that this browser has seen solved. */
function remembered() {
  try {
    const names = JSON.parse(localStorage.getItem(DONE) ?? "[]");
    return Array.isArray(names) ? names : [];
  } catch {
    return []; // Storage may be forbidden, as in some pages from disk.
  }
}

function remember(names) {
  try {
    localStorage.setItem(DONE, JSON.stringify(names));
  } catch {
    // Progress is then kept as long as the page is open.
  }
}

const SIGNS = { right: "✓", wrong: "✗", "not checked": "?" };
const verdictOf = ({ right, checked }) => (right ? "right" : checked ? "wrong" : "not checked");

function Exercise({ name, title, question, answer: form, hint, solution, solved, numbers, done, onSolved }) {
  const { announce } = useLab();
  // Exercises are worked out with other panels; what was written here is still there afterwards.
  const [text, setText] = useKept(`answer ${name}`, "");
  const [verdict, setVerdict] = useKept(`verdict ${name}`, null);
  const [help, setHelp] = useKept(`help ${name}`, 0);
  const submit = (event) => {
    event.preventDefault();
    const next = check({ name, numbers }, text);
    setVerdict(next);
    if (next.right) onSolved(name);
    announce(`${verdictOf(next)}: ${next.why}`);
  };
  const show = () => {
    setHelp(help + 1);
    announce(help ? `${solution} ${solved}` : hint);
  };
  return html`<li class="exercise" data-name=${name}><h3><span class="faint">${name}</span> ${title}${done && html` <span class="done">✓ done</span>`}</h3><p>${question}</p>
    <form onSubmit=${submit}><label class="field"><span>Answer: ${form}</span>
      <textarea rows="2" spellcheck=${false} value=${text} onInput=${(event) => setText(event.currentTarget.value)}></textarea></label>
      <button class="main" disabled=${!text.trim()}>Check</button>
      ${help < 2 && html` <button type="button" onClick=${show}>${help ? "Solution" : "Hint"}</button>`}</form>
    ${verdict && html`<p class=${`answer ${verdictOf(verdict).replace(" ", "-")}`}><span class="verdict">${SIGNS[verdictOf(verdict)]} ${verdictOf(verdict)}</span> ${verdict.why}</p>`}
    ${help > 0 && html`<p class="hint"><b>Hint.</b> ${hint}</p>`}
    ${help > 1 && html`<p class="solution"><b>Solution.</b> ${solution} Answer: <code>${solved}</code></p>`}</li>`;
}

export function Exercises() {
  const { set } = useLab();
  const { result, error } = useAsk("exercises");
  const [done, setDone] = useState(remembered);
  useEffect(() => {
    // Another tab of this browser may solve an exercise, or forget all of them.
    const follow = ({ key }) => key === DONE && setDone(remembered());
    addEventListener("storage", follow);
    return () => removeEventListener("storage", follow);
  }, []);
  if (error) return html`<${Failure} error=${error} />`;
  if (!result) return html`<${Waiting} what="the exercises" />`;
  const { exercises } = result;
  const onSolved = (name) => {
    const names = [...new Set([...done, name])];
    setDone(names);
    remember(names);
  };
  const count = exercises.filter(({ name }) => done.includes(name)).length;
  const again = () => {
    setDone([]);
    remember([]);
  };
  const open = (event) => {
    event.preventDefault();
    set({ panel: "start", ex: "shared" });
  };
  return html`<p class="lead">Work them out by hand, or with the other panels. Two correct decimals are enough. Write a number or a sum such as <code>3 sqrt(2)</code>, also with letters of the question such as <code>n</code>, a row such as <code>0.5, 0.25</code>, rows on lines of their own, with <code>;</code> between them or in brackets such as <code>[[1, 0], [0, 1]]</code>, or <code>yes</code> and <code>no</code>.</p>
    <p>The shared example is <a href="#start&ex=shared" onClick=${open}>Five tokens</a> of the panel Start, with its Q, K and V. Its rows are counted from 0.</p>
    <p class="progress">${count} of ${exercises.length} done.${count > 0 && html` <button type="button" onClick=${again}>Start again</button>`}</p>
    <ol class="exercises">${exercises.map((each) => html`<${Exercise} key=${each.name} ...${each} done=${done.includes(each.name)} onSolved=${onSolved} />`)}</ol>`;
}
