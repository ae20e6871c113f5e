// A matrix of numbers: one tab stop, arrow keys, cells that can be edited and coloured.

import { html, useLayoutEffect, useLab, useRef, useState, inside } from "./lab.js";
import { Block, Num } from "./basics.js";
import { painted } from "../drawing/colours.js";
import { LARGEST, numberOf } from "../examples/examples.js";
import { shown } from "../drawing/format.js";
import { matrixSvg } from "../drawing/picture.js";

/**
 * @param {object} props
 * @param {string} props.title
 * @param {number[][]} props.values
 * @param {string[]} props.rows names of the rows
 * @param {string[]} [props.columns] names of the columns, their numbers if absent
 * @param {(x: number, i: number, j: number) => number|null} [props.share] -1 to 1, for colours; null for none
 * @param {[number|null, number|null]} [props.selected] a cell, or a row or column with null for the other
 * @param {(i: number, j: number) => void} [props.onSelect] focus, or hover where a click opens nothing
 * @param {(i: number, j: number) => void} [props.onOpen] click or Enter, where nothing is edited
 * @param {(i: number, j: number, x: number) => void} [props.onEdit]
 * @param {(text: string) => void} [props.onPaste]
 * @param {(i: number, j: number) => string} [props.mark] a class for a cell
 */
export function Grid({
  title, values, rows, columns, share, selected, onSelect, onOpen, onEdit, onPaste, mark, kind = "",
  axes, plain = false,
}) {
  const { theme, announce } = useLab();
  const height = values.length;
  const width = values[0].length;
  const [at, setAt] = useState([selected?.[0] ?? 0, selected?.[1] ?? 0]);
  const [editing, setEditing] = useState(null);
  const [refused, setRefused] = useState("");
  const table = useRef(null);
  const takeFocus = useRef(false);
  const isOpen = useRef(false);
  const here = [inside(at[0], height), inside(at[1], width)];
  const names = columns ?? values[0].map((_, j) => String(j));

  useLayoutEffect(() => {
    if (!takeFocus.current) return;
    takeFocus.current = false;
    const cell = table.current.querySelector(editing ? "td input" : 'td[tabindex="0"]');
    cell?.focus();
    // What was there is replaced by the first key; what was typed goes on.
    if (editing) cell?.setSelectionRange(editing.typed ? cell.value.length : 0, cell.value.length);
  });

  const go = (i, j) => {
    const next = [inside(i, height), inside(j, width)];
    takeFocus.current = true;
    setAt(next);
    onSelect?.(...next);
  };
  const open = (i, j, text, typed = false) => {
    takeFocus.current = true;
    isOpen.current = true;
    setRefused("");
    setAt([i, j]);
    setEditing({ i, j, text, typed });
  };
  const take = (i, j, given) => {
    const x = numberOf(given.replace(/,/g, "."));
    if (given !== "" && Math.abs(x) <= LARGEST) {
      if (x !== values[i][j]) onEdit(i, j, x);
      return;
    }
    const what = given === "" ? "An empty cell is not a number" : `“${given.slice(0, 40)}” is not a number${Number.isNaN(x) ? "" : " that a cell can hold, from -1e100 to 1e100"}`;
    const reason = `${what}: ${rows[i]}, column ${names[j]} stays ${values[i][j]}. Write one such as 0.5 or 1/3.`;
    setRefused(reason);
    announce(reason);
  };
  /** Takes what was typed; null leaves the cell as it was. */
  const close = (text, move) => {
    // An input that goes away loses the focus, which is not a second answer.
    if (!isOpen.current) return;
    isOpen.current = false;
    const { i, j } = editing;
    takeFocus.current = move !== null;
    setEditing(null);
    if (text !== null) take(i, j, text.trim());
    if (move) setAt([inside(i + move[0], height), inside(j + move[1], width)]);
  };
  const onKeyDown = (event) => {
    if (editing) return;
    const [i, j] = here;
    const moves = {
      ArrowUp: [i - 1, j], ArrowDown: [i + 1, j], ArrowLeft: [i, j - 1], ArrowRight: [i, j + 1],
      Home: event.ctrlKey ? [0, 0] : [i, 0], End: event.ctrlKey ? [height - 1, width - 1] : [i, width - 1],
      PageUp: [0, j], PageDown: [height - 1, j],
    };
    if (event.key in moves && !event.altKey && !event.metaKey) go(...moves[event.key]);
    else if (onOpen && event.key === "Enter") onOpen(i, j, true);
    else if (onEdit && (event.key === "Enter" || event.key === "F2")) open(i, j, String(values[i][j]));
    else if (onEdit && /^[-\d.]$/.test(event.key) && !event.ctrlKey && !event.metaKey && !event.altKey) open(i, j, event.key, true);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const pasted = (event) => {
    if (!onPaste || editing) return;
    event.preventDefault();
    onPaste(event.clipboardData.getData("text/plain"));
  };

  // A cell that comes to lie under a mouse at rest is entered too; only a mouse that moves chooses.
  const cell = (x, i, j) => {
    const part = share?.(x, i, j);
    const chosen = selected && (selected[0] === i || selected[0] === null) &&
      (selected[1] === j || selected[1] === null) && (selected[0] !== null || selected[1] !== null);
    const isHere = here[0] === i && here[1] === j;
    const classes = [
      chosen ? "chosen" : "", x === -Infinity ? "forbidden" : "", mark?.(i, j) ?? "",
      onEdit ? "editable" : "",
    ].join(" ");
    const style = painted(part, theme);
    if (editing?.i === i && editing?.j === j) {
      return html`<td key=${j} class=${classes} role="gridcell"><input aria-label=${`${title}, ${rows[i]}, ${names[j]}`}
        defaultValue=${editing.text} inputmode="decimal"
        onKeyDown=${(event) => {
          event.stopPropagation();
          if (event.key === "Enter") close(event.currentTarget.value, [1, 0]);
          else if (event.key === "Escape") close(null, [0, 0]);
        }}
        onBlur=${(event) => close(event.currentTarget.value, null)} /></td>`;
    }
    return html`<td key=${j} role="gridcell" class=${classes} style=${style} tabindex=${isHere ? 0 : -1}
      data-row=${i} data-column=${j} aria-selected=${onSelect ? Boolean(chosen) : undefined}
      aria-readonly=${onEdit ? "false" : undefined}
      onFocus=${() => { if (!isHere) setAt([i, j]); onSelect?.(i, j); }}
      onMouseMove=${onSelect && !onEdit && !onOpen && !chosen ? () => onSelect(i, j) : undefined}
      onClick=${(event) => (onEdit ? open(i, j, String(values[i][j])) : (event.currentTarget.focus(), onOpen?.(i, j, false)))}
    ><${Num} x=${x} digits=${onEdit ? 12 : undefined} /></td>`;
  };

  const body = html`<div class="wide">
    <table class=${`grid ${kind}`} role="grid" aria-label=${title} aria-readonly=${onEdit ? undefined : "true"} ref=${table} onKeyDown=${onKeyDown} onPaste=${pasted}>
      <thead><tr role="row"><td class="corner">${axes ? html`<span>${axes}</span>` : ""}</td>${names.map((name) =>
        html`<th scope="col" role="columnheader">${shown(name)}</th>`)}</tr></thead>
      <tbody>${values.map((row, i) => html`<tr role="row" key=${i}><th scope="row" role="rowheader">${shown(rows[i])}</th>${row.map((x, j) => cell(x, i, j))}</tr>`)}</tbody>
    </table></div>${refused && html`<p class="failure">${refused}</p>`}`;
  if (plain) return body;
  return html`<${Block} title=${title} class="gridblock" svg=${share && (() => matrixSvg({ title, values, rows, columns: names, share, theme }))} rows=${() => [["", ...names], ...values.map((row, i) => [rows[i], ...row])]}>${body}</${Block}>`;
}

/** How strong a score is against the largest of its matrix, with its sign. */
export function scoreShare(matrix) {
  const most = Math.max(1e-300, ...matrix.flat().filter(Number.isFinite).map(Math.abs));
  return (x) => x / most;
}

/** A weight is its own share. */
export const weightShare = (x) => x;
