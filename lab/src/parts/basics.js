// Small parts: numbers, copy buttons, titled blocks, tables, choices, steppers.

import { html, useLab, useKeys, useRef, useState } from "./lab.js";
import { shown, tsv, written } from "../format.js";

/** A number for reading, with all its digits in `value`. */
export function Num({ x, digits }) {
  const { view } = useLab();
  return html`<data class="num" value=${x === null ? "-inf" : String(x)}>${written(x, digits ?? view.digits)}</data>`;
}

/** Numbers of a vector in brackets. */
export function Vector({ of, kind }) {
  return html`<span class=${`vector ${kind ?? ""}`}>[${of.map((x, i) =>
    html`${i ? ", " : ""}<${Num} x=${x} />`)}]</span>`;
}

/** A token of somebody's text, as text. */
export const Token = ({ text }) => html`<span class="token">${shown(text)}</span>`;

async function copied(text, holder) {
  try {
    await navigator.clipboard.writeText(text);
    return;
  } catch {
    // A page from disk or in a frame may have no clipboard; a selection works everywhere.
    const area = document.createElement("textarea");
    area.value = text;
    holder.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

/** Copies rows as tab-separated text. @param {{rows: () => unknown[][], what: string}} props */
export function Copy({ rows, what }) {
  const { announce } = useLab();
  const [done, setDone] = useState(false);
  const holder = useRef(null);
  const copy = async () => {
    await copied(tsv(rows()), holder.current);
    holder.current.querySelector("button").focus();
    announce(`${what} copied`);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<span class="copy" ref=${holder}>
    <button type="button" class="small" onClick=${copy} aria-label=${`Copy ${what}`}>${done ? "Copied" : "Copy"}</button>
  </span>`;
}

/** A titled block; `rows` makes it copyable. */
export function Block({ title, rows, children, class: kind = "", level = 3 }) {
  const Heading = `h${level}`;
  return html`<section class=${`block ${kind}`}>
    <header><${Heading}>${title}</${Heading}>${rows && html`<${Copy} rows=${rows} what=${title} />`}</header>
    ${children}
  </section>`;
}

/** A table that can be copied. Cells are strings, numbers or {x: number} for all digits. */
export function DataTable({ title, columns, rows, note, plain }) {
  const cell = (value) =>
    value !== null && typeof value === "object" && "x" in value ? html`<${Num} x=${value.x} />` : value;
  const raw = (value) => (value !== null && typeof value === "object" && "x" in value ? value.x : value);
  const table = html`<div class="wide" tabindex="0" role="group" aria-label=${title}><table class="data">
    <caption class="unseen">${title}</caption>
    <thead><tr>${columns.map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
    <tbody>${rows.map(({ cells, class: kind, key }) => html`<tr key=${key} class=${kind ?? ""}>
      ${cells.map((value, i) => (i === 0
        ? html`<th scope="row">${cell(value)}</th>`
        : html`<td class=${typeof raw(value) === "number" || /^[\d,.−e+]+$/.test(String(raw(value))) ? "right" : ""}>${cell(value)}</td>`))}
    </tr>`)}</tbody></table></div>${note && html`<p class="faint">${note}</p>`}`;
  if (plain) return table;
  return html`<${Block} title=${title} rows=${() => [columns, ...rows.map(({ cells }) => cells.map((value) =>
    (typeof value === "object" && value?.type ? value.props?.text ?? "" : raw(value))))]}>${table}</${Block}>`;
}

let names = 0;

/** One of a few, as radio buttons: one tab stop, arrow keys. @param {{options: [any, any][]}} props */
export function Choice({ label, options, value, onChange, class: kind = "" }) {
  const [name] = useState(() => `choice-${names++}`);
  return html`<fieldset class=${`choice ${kind}`}><legend>${label}</legend><div>
    ${options.map(([each, text]) => html`<label key=${each}>
      <input type="radio" name=${name} checked=${each === value} onChange=${() => onChange(each)} /><span>${text}</span>
    </label>`)}</div></fieldset>`;
}

/** One of many. */
export function Select({ label, options, value, onChange }) {
  return html`<label class="field"><span>${label}</span>
    <select value=${value} onChange=${(event) => onChange(event.currentTarget.value)}>
      ${options.map(([each, text]) => html`<option value=${each} selected=${String(each) === String(value)}>${text}</option>`)}
    </select></label>`;
}

/** A whole number. */
export function Whole({ label, value, least, most, onChange }) {
  const change = (event) => {
    const given = Math.round(Number(event.currentTarget.value));
    if (event.currentTarget.value !== "" && Number.isFinite(given)) {
      onChange(Math.min(most, Math.max(least, given)));
    }
  };
  return html`<label class="field"><span>${label}</span>
    <input type="number" inputmode="numeric" min=${least} max=${most} step="1" value=${value} onChange=${change} /></label>`;
}

/** Back and forth through steps, also with the left and right keys. */
export function Stepper({ at, length, onStep, what = "step" }) {
  const to = (step) => onStep(Math.min(Math.max(0, step), length - 1));
  useKeys({ ArrowLeft: () => to(at - 1), ArrowRight: () => to(at + 1), Home: () => to(0), End: () => to(length - 1) });
  return html`<div class="stepper" role="group" aria-label=${`Choose a ${what}`}>
    <button type="button" onClick=${() => to(at - 1)} disabled=${at === 0}><span aria-hidden="true">← </span>Back</button>
    <span class="place">${what} <b>${at + 1}</b> of ${length}</span>
    <button type="button" class="main" onClick=${() => to(at + 1)} disabled=${at === length - 1}>Next<span aria-hidden="true"> →</span></button>
    <progress max=${length} value=${at + 1} aria-label=${`${what} ${at + 1} of ${length}`}></progress>
  </div>`;
}

/** What went wrong, and what to do. */
export const Failure = ({ error }) => html`<div class="failure" role="alert">
  <p>${error.message}</p>${error.action && html`<p class="faint">${error.action}</p>`}</div>`;

export const Waiting = ({ what }) => html`<p class="faint waiting" role="status">Python computes ${what} …</p>`;
