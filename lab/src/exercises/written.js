// An answer as a person writes it: numbers, rows of them, sums to be worked out, yes and no.
// qkv.exercises.written reads the same in Python.

const FUNCTIONS = { sqrt: Math.sqrt, log: Math.log, ln: Math.log, exp: Math.exp, log2: Math.log2, log10: Math.log10 };
const CONSTANTS = { pi: Math.PI, e: Math.E };
const PIECES = /( *)(\d+\.?\d*(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?|log(?:2|10)(?=\()|[a-z]+(?:_[a-z]+)*|\*\*|[-+*/^%()[\],;\n])/gy;
const SIGNS = [
  [/[−–‐‑‒﹣－]/g, "-"], [/[×·⋅∙∗]/g, "*"], [/[÷∕⁄]/g, "/"], [/√/g, "sqrt "], [/π/g, "pi"], [/[σς]/g, " sigma"], [/[≈~]/g, "="], [/、/g, ","],
  [/[^\S\n]/g, " "], [/per ?cent\b/g, "%"], [/(?<=[\d.)%]) *x *(?=[\d.(])/g, "*"],
];
const RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻";
const LOWERED = "0123456789+-";
/** Digits and signs as keyboards for Chinese and Japanese write them. */
const WIDE = /[！-～]/g;
/** What libraries print around numbers and truth values, such as np.float64(0.5) and np.True_. */
const PRINTED = /\b(?:np|numpy|math|torch|jnp)\.|\b(?:array|asarray|matrix|tensor|b?float[0-9]*|int[0-9]*)(?= *\()|, *(?:dtype|device|requires_grad|grad_fn) *=[^,)]*|(?<=e)_\b/g;
const WITH_THOUSANDS = /^[-+]?[1-9]\d{0,2}(?:(?:,\d{3})+|(?:'\d{3})+|(?: \d{3})+)(?:\.\d+)?$|^[-+]?[1-9]\d{0,2}(?:\.\d{3}){2,}$/;
const THOUSANDS_COMMAS = /(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d)/g;
const DECIMAL_COMMA = /(\d),(?=\d)/g;
const WORDS = /^(?:yes|no|y|n|true|false|t|f|not|symmetric|scores?|weights?|is|are|the|matrix|and|but|they|it|of)$/;
const YES = /^(?:yes|y|true|t|symmetric)$/;
const NO = /^(?:no|n|not|false|f)$/;

/** Brackets, functions and signs inside of one another. */
const DEEPEST = 40;

const unclear = () => new Error("this could not be read as a number or a list of numbers; write it like 2 * 3^2, or like 0.5, 0.25.");
const endless = () => new Error("not everything in this has a value that is a finite number.");

/**
 * What a text may mean, the likeliest first: numbers, truth values, or lists of them. A comma may
 * stand between numbers, before thousands, or before decimals.
 * @param {string} text
 * @param {Record<string, number>} letters what the letters of the question stand for, such as n in "4 n^2"
 * @param {string[]} before words or signs that may stand before the number, such as "divide by"
 * @returns {any[]}
 */
export function readings(text, letters = {}, before = []) {
  const lowered = text.toLowerCase().replace(/[⁰¹²³⁴-⁹⁺⁻]+/g, (all) => `^(${[...all].map((each) => LOWERED[RAISED.indexOf(each)]).join("")})`)
    .replace(WIDE, (each) => String.fromCharCode(each.charCodeAt(0) - 0xfee0));
  let written = SIGNS.reduce((all, [sign, plain]) => all.replace(sign, plain), lowered).trim();
  if (!written) throw new Error("nothing is written.");
  written = written.slice(Math.max(0, ...before.filter((word) => written.startsWith(word)).map((word) => word.length)));
  written = written.replace(PRINTED, "");
  // Where letters have values, n is one of them and not a short no.
  const said = Object.keys(letters).length ? null : truths(written);
  if (said) return [said];
  const plain = written.replace(/(\d)_(?=\d)/g, "$1").split(/([\n;,])/).map(unnamed).join("").trim();
  const found = [];
  if (WITH_THOUSANDS.test(plain)) {
    const apart = /^[-+]?\d+(?:\.\d{3}){2}/.test(plain) ? /\./g : /[,' ]/g;
    found.push(Number(plain.replace(apart, "")));
  }
  let reason = null;
  const mayBe = [plain];
  if (!/\d\.\d/.test(plain)) mayBe.push(plain.replace(DECIMAL_COMMA, "$1."));
  if (!found.length) mayBe.push(plain.replace(THOUSANDS_COMMAS, (all) => all.replaceAll(",", "")));
  for (const each of new Set(mayBe)) {
    try {
      found.push(valueOf(each, letters));
    } catch (error) {
      reason ??= error;
    }
  }
  if (!found.length) throw reason;
  return found;
}

/** A part without what it is called, as in "c = 11.39" or "row 1: 0.5 0.5". */
const unnamed = (part) => part.slice(1 + Math.max(part.lastIndexOf("="), part.lastIndexOf(":")));

/** The truth values of words such as "yes no", or "weights: no, scores: yes"; null of other texts. */
function truths(text) {
  const plain = text.replace(/n['’]t\b/g, " not");
  const words = plain.match(/[a-z]+/g) ?? [];
  if (!words.length || /\d/.test(plain) || words.some((word) => !WORDS.test(word))) return null;
  const clauses = plain.split(/[,;\n.]|\band\b|\bbut\b/).map((each) => each.match(/[a-z]+/g) ?? []).filter((each) => each.length);
  const truth = (clause) => (clause.some((word) => NO.test(word)) ? false : clause.some((word) => YES.test(word)) ? true : null);
  const said = clauses.map(truth);
  const labels = clauses.map((clause) => clause.find((word) => /^(?:score|weight)/.test(word))?.[0] ?? "");
  if (labels.length === 2 && labels.includes("s") && labels.includes("w")) {
    return labels[0] === "s" ? said : [said[1], said[0]];
  }
  if (clauses.length > 1) return said;
  return words.filter((word) => word !== "symmetric" && (YES.test(word) || NO.test(word))).map((word) => YES.test(word));
}

/** The value of a sum such as 2 * log(297), or of rows of them. */
function valueOf(text, letters) {
  const matches = [...text.matchAll(PIECES)];
  if (!matches.length || matches.map(([whole]) => whole).join("") !== text) throw unclear();
  /** The letters of a product such as nd; other pieces as they are. */
  const lettersOf = (piece) => (!Object.hasOwn(letters, piece) && [...piece].every((each) => Object.hasOwn(letters, each)) ? [...piece] : [piece]);
  const pieces = matches.flatMap(([, spaces, piece]) => lettersOf(piece).map((each, i) => ({ piece: each, apart: i === 0 && spaces !== "" })));
  let at = 0;
  let depth = 0;
  let percents = 0;
  /** Whether there are numbers of a list with %, and such without. */
  let kinds = new Set();
  const here = () => pieces[at]?.piece;
  const takes = (...wanted) => (wanted.includes(here()) ? pieces[at++].piece : undefined);
  const isNumber = (piece) => /^[\d.]/.test(piece ?? "");
  const isName = (piece) => /^[a-z]/.test(piece ?? "");
  const number = (value) => {
    if (typeof value !== "number") throw unclear();
    if (!Number.isFinite(value)) throw endless();
    return value;
  };
  const nested = (part, ...given) => {
    depth += 1;
    if (depth > DEEPEST) throw unclear();
    const found = part(...given);
    depth -= 1;
    return found;
  };
  /** "1 -2" are two numbers, "1 - 2" and "1-2" are one. */
  const isSigned = () => pieces[at].apart && !pieces[at + 1]?.apart && here() !== undefined;
  const begins = () => isNumber(here()) ? pieces[at].apart : isName(here()) || ["(", "["].includes(here()) || (["-", "+"].includes(here()) && isSigned());

  /** Rows of items up to a bracket or the end: numbers and lists, of which single ones stand alone. */
  const rows = (end) => {
    const lines = [[[]]];
    for (;;) {
      if (takes(",")) continue;
      if (takes(";")) lines.at(-1).push([]);
      else if (takes("\n")) {
        if (end === undefined) lines.push([[]]);
      } else if (here() === end) break;
      else {
        const row = lines.at(-1).at(-1);
        // Between two items stands something, a blank at least.
        if (row.length && ![",", "\n"].includes(pieces[at - 1].piece) && !begins()) throw unclear();
        row.push(item());
      }
    }
    at += 1;
    const full = lines.map((line) => line.filter((row) => row.length)).filter((line) => line.length);
    const all = full.length > 1 ? full.map((line) => line.flat()) : full.flat();
    if (!all.length) throw unclear();
    return all.length > 1 && all.some((row) => row.length > 1) ? all : all.flat();
  };
  const item = () => {
    const before = percents;
    const found = sum();
    if (typeof found === "number") kinds.add(percents > before);
    return found;
  };
  const primary = () => {
    const { piece } = pieces[at] ?? {};
    at += 1;
    if (piece === "(" || piece === "[") {
      const kept = new Set(kinds);
      const found = nested(rows, piece === "(" ? ")" : "]");
      if (piece === "[" || found.length > 1) return found;
      if (typeof found[0] === "number") kinds = kept; // A part of a number, and none of a list.
      return found[0];
    }
    if (Object.hasOwn(FUNCTIONS, piece ?? "")) return number(FUNCTIONS[piece](number(nested(primary))));
    if (Object.hasOwn(CONSTANTS, piece ?? "")) return CONSTANTS[piece];
    if (Object.hasOwn(letters, piece ?? "")) return letters[piece];
    if (isName(piece)) throw new Error(`"${piece.slice(0, 20)}" has no value here; write its number.`);
    if (!isNumber(piece)) throw unclear();
    return number(Number(piece));
  };
  const power = () => {
    let value = primary();
    if (takes("^", "**")) value = number(number(value) ** number(nested(signed)));
    if (takes("%")) {
      percents += 1;
      value = number(number(value) / 100);
    }
    return value;
  };
  const signed = () => (takes("-") ? -number(nested(signed)) : takes("+") ? number(nested(signed)) : power());
  const product = () => {
    let value = signed();
    for (;;) {
      const sign = takes("*", "/");
      if (sign) value = number(sign === "*" ? number(value) * number(signed()) : number(value) / number(signed()));
      else if (typeof value === "number" && (isName(here()) || here() === "(")) value = number(value * number(power()));
      else return value;
    }
  };
  const sum = () => {
    let value = product();
    while (["-", "+"].includes(here()) && !isSigned()) {
      value = takes("+") ? number(value) + number(product()) : (at += 1, number(value) - number(product()));
      value = number(value);
    }
    return value;
  };
  const found = rows(undefined);
  if (at !== pieces.length + 1) throw unclear();
  if (kinds.size > 1) throw new Error("some of the numbers have % and others have not; write all of them in one way.");
  return found.length > 1 ? found : found[0];
}
