// Small parts: numbers, copy buttons, titled blocks, tables, choices, steppers.

import { html, useLab, useKeys, useRef, useState } from "./lab.js";
import { exact, quoted, shown, tsv, written } from "../drawing/format.js";
import { unknownOf } from "../language/language.js";
import { save } from "../drawing/picture.js";
import { numbersOfJson } from "../host/numbers.js";

/** A number for reading, with all its digits in `value`. */
export function Num({ x, digits }) {
  const { view } = useLab();
  return html`<data class="num" value=${exact(x)}>${written(x, digits ?? view.digits)}</data>`;
}

/** Numbers of a vector in brackets. */
export function Vector({ of, kind }) {
  return html`<span class=${`vector ${kind ?? ""}`}>[${of.map((x, i) =>
    html`${i ? ", " : ""}<${Num} x=${x} />`)}]</span>`;
}

/** Text on one line, such as a formula in a narrow column. */
export const Unbroken = ({ text }) => html`<span class="unbroken">${text}</span>`;

/** A token of somebody's text, as text. */
export const Token = ({ text }) => html`<span class="token">${shown(text)}</span>`;

/** A token inside of a sentence, in quotes and as text. */
export const Quoted = ({ text }) => html`<span class="token">${quoted(text)}</span>`;

/** That a text is as long as it may be: what was pasted beyond is gone. */
export const Full = ({ text, most }) => text.length >= most && html`<p class="limit" role="status" data-name="full">This field takes the first ${most.toLocaleString("en-US")} characters of a text, and is full.</p>`;

/** How many tokens of a text the small language model does not know. */
export const Unknown = ({ ids }) => unknownOf(ids) && html`<p class="faint" data-name="unknown">${unknownOf(ids)}</p>`;

/** Puts text on the clipboard. @param {Element} holder where a selection may be for a moment */
export async function copied(text, holder) {
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

/** Copies a text, or rows as tab-separated text. @param {{rows?: () => unknown[][], text?: () => string, what: string}} props */
export function Copy({ rows, text = () => tsv(rows()), what }) {
  const { announce } = useLab();
  const [done, setDone] = useState(false);
  const holder = useRef(null);
  const copy = async () => {
    await copied(text(), holder.current);
    holder.current.querySelector("button").focus();
    announce(`${what} copied`);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<span class="copy" ref=${holder}>
    <button type="button" class="small" onClick=${copy} aria-label=${`Copy ${what}`}>${done ? "Copied" : "Copy"}</button>
  </span>`;
}

/** Saves a picture as a file. @param {{title: string, svg: () => string}} props */
export function Save({ title, svg }) {
  const { announce } = useLab();
  const saved = async (kind) => {
    await save(svg(), title, kind);
    announce(`${title} saved as ${kind.toUpperCase()}`);
  };
  return html`<span class="copy">${["svg", "png"].map((kind) => html`<button key=${kind} type="button" class="small" onClick=${() => saved(kind)} aria-label=${`Save ${title} as ${kind.toUpperCase()}`}>${kind.toUpperCase()}</button>`)}</span>`;
}

/** A titled block; `rows` makes it copyable, and `svg` a picture to save. */
export function Block({ title, rows, svg, children, class: kind = "", level = 3 }) {
  const Heading = `h${level}`;
  return html`<section class=${`block ${kind}`}>
    <header><${Heading}>${title}</${Heading}>${(rows || svg) && html`<span class="actions">${svg && html`<${Save} title=${title} svg=${svg} />`}${rows && html`<${Copy} rows=${rows} what=${title} />`}</span>`}</header>
    ${children}
  </section>`;
}

const isCell = (value) => value !== null && typeof value === "object";
const isNumber = (value) => isCell(value) && "x" in value;
const rawOf = (value) => (!isCell(value) ? value : isNumber(value) ? numbersOfJson(value.x) : value.props?.text ?? "");
const isNumeric = (value) => isNumber(value) || typeof rawOf(value) === "number" || /^[\d,.−e+ ]+( [KMGTP]iB| bytes)?$/.test(String(rawOf(value)));

/**
 * A table that can be copied. Cells are strings, numbers, {x: number} for all digits, or html.
 * @param {{title: string, columns: string[], rows: {cells: any[], class?: string, key?: any}[], under?: string[], note?: string, sortable?: boolean, class?: string}} props; `under` stands below the names of columns
 */
export function DataTable({ title, columns, rows, under, note, sortable = false, class: kind = "" }) {
  const [order, setOrder] = useState(null);
  const numeric = columns.map((_, i) => i > 0 && rows.every(({ cells }) => isNumeric(cells[i]) || rawOf(cells[i]) === ""));
  const ordered = order === null ? rows : [...rows].sort((a, b) => {
    const [x, y] = [a, b].map(({ cells }) => rawOf(cells[order.column]));
    const later = typeof x === "number" && typeof y === "number" ? (Number.isNaN(x) ? -1 : x - (Number.isNaN(y) ? -Infinity : y)) : String(x) < String(y) ? -1 : 1;
    return order.falling ? -later : later;
  });
  const sortBy = (column) => setOrder({ column, falling: !(order?.column === column && order.falling) });
  const sorted = (i) => (order?.column === i ? (order.falling ? "descending" : "ascending") : undefined);
  return html`<${Block} title=${title} rows=${() => [columns, ...ordered.map(({ cells }) => cells.map(rawOf))]}>
    <div class="wide" tabindex="0" role="group" aria-label=${title}><table class=${`data ${kind}`}>
    <thead><tr>${columns.map((name, i) => html`<th scope="col" class=${numeric[i] ? "right" : ""} aria-sort=${sorted(i)}>${
      sortable ? html`<button type="button" onClick=${() => sortBy(i)}>${name}</button>` : name}${under?.[i] && html`<br /><small>${under[i]}</small>`}</th>`)}</tr></thead>
    <tbody>${ordered.map(({ cells, class: mark, key }) => html`<tr key=${key} class=${mark ?? ""}>${cells.map((value, i) => {
      const shownCell = isNumber(value) ? html`<${Num} x=${value.x} />` : value;
      return i === 0 ? html`<th scope="row">${shownCell}</th>` : html`<td class=${numeric[i] ? "right" : ""}>${shownCell}</td>`;
    })}</tr>`)}</tbody></table></div>${note && html`<p class="faint">${note}</p>`}</${Block}>`;
}

/** Of this page: each widget of a notebook is one, and radio buttons of one name are one choice. */
const page = crypto.getRandomValues(new Uint32Array(2)).join("-");
let names = 0;

/** One of a few, as radio buttons: one tab stop, arrow keys. @param {{options: [any, any][]}} props */
export function Choice({ label, options, value, onChange, class: kind = "" }) {
  const [name] = useState(() => `choice-${page}-${names++}`);
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

/** What is said of a number that cannot be taken as it was given. */
const limited = (given, taken, least, most) => {
  const grouped = (x) => x.toLocaleString("en-US", { maximumFractionDigits: 12 });
  const reason = given > most ? `more than ${grouped(most)}, the largest number here` : given < least ? `less than ${grouped(least)}, the smallest number here` : "not a whole number";
  return `${grouped(given)} is ${reason}; ${grouped(taken)} is taken.`;
};

/**
 * A field for a whole number, which is given on Enter or when the field is left. What is being typed
 * stays as it is until then, also when the page is drawn again in between. Of a number that cannot
 * be taken the nearest one is, and that is said until another is typed or comes from elsewhere.
 */
export function WholeField({ value, least, most, onChange, ...others }) {
  const { announce } = useLab();
  const [typed, setTyped] = useState(null);
  const [said, setSaid] = useState(null);
  const give = (event) => {
    const text = event.currentTarget.value;
    const given = Number(text);
    setTyped(null);
    if (text === "" || !Number.isFinite(given)) return;
    const taken = Math.min(most, Math.max(least, Math.round(given)));
    if (taken !== given) {
      const words = limited(given, taken, least, most);
      setSaid({ words, taken });
      announce(words);
    }
    onChange(taken);
  };
  const type = (event) => {
    setSaid(null);
    setTyped(event.currentTarget.value);
  };
  return html`<input type="number" inputmode="numeric" min=${least} max=${most} step="1" value=${typed ?? value}
    onInput=${type} onChange=${give} onBlur=${() => setTyped(null)}
    onKeyDown=${(event) => event.key === "Enter" && give(event)} ...${others} />
    ${said?.taken === value && html`<span class="limit">${said.words}</span>`}`;
}

/** A whole number with its name. */
export function Whole({ label, ...field }) {
  return html`<label class="field"><span>${label}</span>
    <${WholeField} aria-label=${label} ...${field} /></label>`;
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

/** What went wrong, and what to do; its `again` asks for the same once more. */
export const Failure = ({ error }) => html`<div class="failure" role="alert">
  <p>${error.message}</p>${error.action && html`<p class="faint">${error.action}</p>`}
  ${error.again && html`<p><button type="button" onClick=${error.again}>Compute it again</button></p>`}</div>`;

export const Waiting = ({ what }) => html`<p class="faint waiting" role="status">Python computes ${what} …</p>`;
