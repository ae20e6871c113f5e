// The exercises of the classical texts; answers are checked here, or by Python where it is there.

import { html, useAsk, useLab, useState } from "../parts/lab.js";
import { Failure, Waiting } from "../parts/basics.js";
import { answerOf, check } from "../answers.js";

function Exercise({ name, title, question, answer: form }) {
  const { client, announce } = useLab();
  const [text, setText] = useState("");
  const [verdict, setVerdict] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    let next;
    try {
      const answer = answerOf(text);
      next = client.host === "export"
        ? check(name, answer)
        : await client.ask("check", { id: name, answer }).then(({ right, reason, why }) => ({ right, why: reason ?? why }));
    } catch (error) {
      next = { right: false, why: `${error.message} ${error.action ?? ""}`.trim() };
    }
    setVerdict(next);
    announce(`${next.right ? "right" : "wrong"}: ${next.why}`);
  };
  return html`<li class="exercise" data-name=${name}><h3><span class="faint">${name}</span> ${title}</h3><p>${question}</p>
    <form onSubmit=${submit}><label class="field"><span>Answer: ${form}</span>
      <textarea rows="2" spellcheck=${false} value=${text} onInput=${(event) => setText(event.currentTarget.value)}></textarea></label>
      <button class="main" disabled=${!text.trim()}>Check</button></form>
    ${verdict && html`<p class=${`answer ${verdict.right ? "right" : "wrong"}`}><span class="verdict">${verdict.right ? "✓ right" : "✗ wrong"}</span> ${verdict.why}</p>`}</li>`;
}

export function Exercises() {
  const { result, error } = useAsk("exercises");
  if (error) return html`<${Failure} error=${error} />`;
  if (!result) return html`<${Waiting} what="the exercises" />`;
  return html`<p class="lead">Work them out by hand, or with the other panels. Two correct decimals are enough. Write a number, a row such as <code>0.5, 0.25</code>, rows in brackets such as <code>[[1, 0], [0, 1]]</code>, or <code>true, false</code>.</p>
    <ol class="exercises">${(result.exercises ?? result).map((each) => html`<${Exercise} key=${each.name} ...${each} />`)}</ol>`;
}
