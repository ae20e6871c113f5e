// An answer as a person writes it: numbers, rows of them, sums to be worked out, yes and no.

const THOUSANDS = /^[-+]?[1-9]\d{0,2}(?:([,'_])\d{3})(?:\1\d{3})*(?:\.\d+)?$/;
const FUNCTIONS = { sqrt: Math.sqrt, log: Math.log, ln: Math.log, exp: Math.exp, log2: Math.log2, log10: Math.log10 };
const CONSTANTS = { pi: Math.PI, e: Math.E };
const PIECES = /\d+\.?\d*(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?|log(?:2|10)(?=\()|[a-z]+|\*\*|[-+*/^()[\],;]/gy;
const WORDS = /^(?:yes|no|true|false|not|symmetric|scores?|weights?|is|are|the|matrix|and|but|they|it|of|n)$/;

/** What was typed, as numbers, booleans or lists of them. @param {string} text */
export function answerOf(text) {
  const plain = text.trim().toLowerCase().replace(/[−–]/g, "-").replace(/×|·/g, "*").replace(/√/g, "sqrt");
  if (!plain) throw new Error("Nothing is written.");
  if (THOUSANDS.test(plain)) return Number(plain.replace(/[,'_]/g, ""));
  const said = truths(plain);
  if (said) return said;
  const lines = plain.split(/\n+/);
  const row = (line) => `[${line.trim().split(/[\s,;]+/).join(",")}]`;
  const squared = plain.replace(/[()]/g, (bracket) => (bracket === "(" ? "[" : "]"));
  for (const each of [squared, `[${squared}]`, lines.length > 1 ? `[${lines.map(row).join(",")}]` : row(plain)]) {
    try {
      return JSON.parse(each);
    } catch {
      // Another way of writing it may fit.
    }
  }
  return lines.length > 1 ? lines.map(computed) : computed(plain);
}

/** The truth values of words such as "yes no", or "weights: no, scores: yes"; null of other texts. */
function truths(text) {
  const words = text.match(/[a-z]+/g) ?? [];
  if (!words.length || /\d/.test(text) || words.some((word) => !WORDS.test(word))) return null;
  const clauses = text.split(/[,;\n.]|\band\b|\bbut\b/).map((each) => each.match(/[a-z]+/g) ?? []).filter((each) => each.length);
  const truth = (clause) => (clause.some((word) => /^(?:no|not|false)$/.test(word)) ? false : clause.some((word) => /^(?:yes|true|symmetric)$/.test(word)) ? true : null);
  const labels = clauses.map((clause) => clause.findIndex((word) => /^(?:score|weight)/.test(word))).map((at, i) => (at < 0 ? "" : clauses[i][at][0]));
  if (labels.length === 2 && labels.includes("s") && labels.includes("w")) {
    return [truth(clauses[labels.indexOf("s")]), truth(clauses[labels.indexOf("w")])];
  }
  return words.filter((word) => /^(?:yes|no|true|false)$/.test(word)).map((word) => word === "yes" || word === "true");
}

/** The value of a sum such as 2 * log(297), or a list of them. @param {string} text */
function computed(text) {
  const unclear = () => new Error("This is neither a number nor a list of numbers.");
  const pieces = text.replace(/\s+/g, "").match(PIECES) ?? [];
  if (!pieces.length || pieces.join("") !== text.replace(/\s+/g, "")) throw unclear();
  let at = 0;
  const next = () => pieces[at++];
  const takes = (...wanted) => (wanted.includes(pieces[at]) ? next() : undefined);
  const number = (value) => {
    if (typeof value !== "number") throw unclear();
    return value;
  };
  const items = (end) => {
    const found = [sum()];
    while (takes(",", ";")) found.push(sum());
    if (next() !== end) throw unclear();
    return found;
  };
  const primary = () => {
    const piece = next();
    if (piece === "[") return items("]");
    if (piece === "(") {
      const found = items(")");
      return found.length > 1 ? found : found[0];
    }
    if (Object.hasOwn(FUNCTIONS, piece ?? "")) {
      if (takes("(")) {
        const [inside, ...more] = items(")");
        if (more.length) throw unclear();
        return FUNCTIONS[piece](number(inside));
      }
      return FUNCTIONS[piece](number(primary()));
    }
    if (Object.hasOwn(CONSTANTS, piece ?? "")) return CONSTANTS[piece];
    if (!/^[\d.]/.test(piece ?? "")) throw unclear();
    return Number(piece);
  };
  const power = () => {
    const base = primary();
    return takes("^", "**") ? number(base) ** number(signed()) : base;
  };
  const signed = () => (takes("-") ? -number(signed()) : takes("+") ? number(signed()) : power());
  const product = () => {
    let value = signed();
    for (let sign = takes("*", "/"); sign; sign = takes("*", "/")) {
      value = sign === "*" ? number(value) * number(signed()) : number(value) / number(signed());
    }
    return value;
  };
  const sum = () => {
    let value = product();
    for (let sign = takes("+", "-"); sign; sign = takes("+", "-")) {
      value = sign === "+" ? number(value) + number(product()) : number(value) - number(product());
    }
    return value;
  };
  const found = [sum()];
  while (takes(",", ";")) found.push(sum());
  if (at !== pieces.length) throw unclear();
  return found.length > 1 ? found : found[0];
}
