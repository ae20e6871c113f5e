// How numbers are written.

import { numbersOfJson } from "../host/numbers.js";

/** A number for reading, also one of JSON. @param {number|null|string|undefined} given @param {number} digits */
export function written(given, digits = 4) {
  const x = numbersOfJson(given);
  if (x === undefined) return "–";
  if (typeof x !== "number") return String(x);
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x < 0 ? "−∞" : "∞";
  const minus = (text) => text.replace("-", "−");
  if (digits > 4) return minus(String(Number(x.toPrecision(digits))));
  if (Number.isInteger(x) && Math.abs(x) < 1e7) return minus(String(x));
  const size = Math.abs(x);
  if (size !== 0 && (size < 5e-5 || size >= 1e7)) return minus(x.toExponential(2));
  const text = x.toFixed(digits);
  return minus(Number(text) === 0 ? text.replace("-", "") : text);
}

/** A number with all its digits, also one of JSON; not finite ones as NumPy writes them. */
export function exact(given) {
  const x = numbersOfJson(given);
  if (typeof x !== "number" || Number.isFinite(x)) return String(x ?? "");
  return Number.isNaN(x) ? "nan" : x < 0 ? "-inf" : "inf";
}

/** An integer with its thousands apart. @param {number} x */
export const grouped = (x) =>
  Math.abs(x) < 1e15 ? x.toLocaleString("en-US", { maximumFractionDigits: 0 }) : x.toExponential(3);

/** @param {number} bytes */
export function size(bytes) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let place = 0;
  while (bytes >= 1024 && place < units.length - 1) {
    bytes /= 1024;
    place += 1;
  }
  return `${Number(bytes.toPrecision(3))} ${units[place]}`;
}

/** Control characters of tokens, halves of characters, and the blanks at their ends, made visible. Joiners stay between
 * letters and parts of emoji, where they are a part of how these are written. @param {string} token */
export const shown = (token) =>
  String(token).replace(/[\u0000-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff]|(?<![\p{L}\p{M}\p{Extended_Pictographic}\p{Emoji_Modifier}])[\u200c\u200d]|[\u200c\u200d](?![\p{L}\p{M}\p{Extended_Pictographic}])/gu, (c) =>
    c === "\n" ? "⏎" : c === "\t" ? "⇥" : "�").replace(/^ +| +$/g, (blanks) => "␣".repeat(blanks.length)) || "∅";

/** A text, or its beginning where it has more characters; none is cut in two. @param {string} text @param {number} most */
export function cut(text, most) {
  const characters = Array.from(text);
  return characters.length > most ? `${characters.slice(0, most - 1).join("")}…` : text;
}

/** A token inside of a sentence. @param {string} token */
export const quoted = (token) => `“${shown(token)}”`;

/** A cell of tab-separated text. What begins with a quote would go on to the next quote, over cells and rows. */
const cellOf = (text) => (text.startsWith('"') ? `"${text.replaceAll('"', '""')}"` : text);

/** Rows as tab-separated text, for spreadsheets. @param {unknown[][]} rows */
export const tsv = (rows) =>
  rows.map((row) => row.map((cell) => cellOf(exact(cell).replace(/[\t\r\n]+/g, " "))).join("\t")).join("\n");
