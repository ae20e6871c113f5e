// Lines from tokens to the tokens that they read, in two columns.

import { html, useLab, useRef, useState } from "./lab.js";
import { Block } from "./basics.js";
import { paint } from "../drawing/colours.js";
import { cut, shown } from "../drawing/format.js";
import { linesOf } from "../drawing/lines.js";
import { drawnSvg } from "../drawing/picture.js";

const [ROW, TOP, LEFT, RIGHT, WIDTH] = [20, 30, 134, 232, 366];
const LETTERS = 15;
const TITLE = "Lines between tokens";

/**
 * @param {object} props
 * @param {(query: number) => [number, number][]} props.read keys and weights of a query
 * @param {number} props.first of the queries that `read` knows
 * @param {number} props.stop
 * @param {string[]|null} props.queryTokens null where they are not known
 * @param {string[]|null} props.keyTokens
 * @param {(query: number) => void} props.onChoose
 */
export function Lines({ read, first, stop, kvLen, query, queryTokens, keyTokens, onChoose, note }) {
  const { theme } = useLab();
  const holder = useRef(null);
  const [over, setOver] = useState(null);
  const { queries, keys, lines } = linesOf({ query, first, stop, kvLen, read });
  const name = (tokens, index) => (tokens?.[index] === undefined ? String(index) : shown(tokens[index]));
  // A number beside a token says where it stands, where not all are drawn.
  const numbered = keys.length < kvLen;
  const label = (tokens, index) => (numbered && tokens ? cut(name(tokens, index), LETTERS - 1 - String(index).length) : cut(name(tokens, index), LETTERS));
  const y = (place) => TOP + ROW * place;
  const down = new Map(queries.map((each, i) => [each, y(i)]));
  const across = new Map(keys.map((each, i) => [each, y(i)]));
  const isStrong = (line) => (over ? line[over.side] === over.index : line.query === query);
  const colour = paint(0.8, theme).background;
  const token = (side, index, place, tokens) => {
    const [x, anchor] = side === "query" ? [LEFT - 6, "end"] : [RIGHT + 6, "start"];
    const number = numbered && tokens ? html`<tspan class="number">${side === "query" ? `${index} ` : ` ${index}`}</tspan>` : "";
    return html`<text key=${`${side}${index}`} x=${x} y=${place + 4} text-anchor=${anchor} class=${side === "query" ? `from ${index === query ? "here" : ""}` : "to"} data-index=${index}
      onMouseEnter=${() => setOver({ side, index })} onMouseLeave=${() => setOver(null)} onClick=${side === "query" ? () => onChoose(index) : undefined}>${side === "query" && number}${label(tokens, index)}${side === "key" && number}</text>`;
  };
  return html`<div ref=${holder}><${Block} title=${TITLE} level=${4} svg=${() => drawnSvg(holder.current.querySelector("svg"), TITLE, theme)}
    rows=${() => [["query", "token", "key", "token", "weight"], ...lines.map((line) => [line.query, queryTokens?.[line.query] ?? "", line.key, keyTokens?.[line.key] ?? "", line.weight])]}>
    <svg class="lines" viewBox=${`0 0 ${WIDTH} ${y(Math.max(queries.length, keys.length)) - 6}`} role="img" aria-label=${`Lines from ${queries.length} queries on the left to the keys that they read on the right; those of query ${query}, ${name(queryTokens, query)}, are drawn strongest`}>
      <text class="side-title" x=${LEFT - 6} y="12" text-anchor="end">query</text><text class="side-title" x=${RIGHT + 6} y="12">reads</text>
      ${[...lines].sort((a, b) => isStrong(a) - isStrong(b) || a.weight - b.weight).map((line) => html`<line key=${`${line.query}.${line.key}`} data-line=${`${line.query}.${line.key}`} x1=${LEFT} y1=${down.get(line.query)} x2=${RIGHT} y2=${across.get(line.key)}
        style=${{ stroke: colour, strokeWidth: 0.5 + 4 * line.weight, opacity: isStrong(line) ? 1 : over ? 0.08 : 0.12 + 0.33 * line.weight }} />`)}
      ${queries.map((each) => token("query", each, down.get(each), queryTokens))}
      ${keys.map((each, i) => html`${i > 0 && keys[i - 1] + 1 < each && html`<line class="gap" x1=${RIGHT + 4} x2=${WIDTH - 4} y1=${across.get(each) - ROW / 2} y2=${across.get(each) - ROW / 2} />`}${token("key", each, across.get(each), keyTokens)}`)}</svg>
    <p class="faint">The wider a line, the larger the weight. ${note} ${numbered && `Of ${kvLen.toLocaleString("en-US")} keys stand here those with the strongest lines; a dotted rule says that some between them do not. `}Point at a token for its lines alone, or click a query.</p></${Block}></div>`;
}
