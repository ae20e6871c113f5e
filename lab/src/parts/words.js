// A text as its tokens, of which one is the query.

import { html, inside, useLayoutEffect, useRef } from "./lab.js";
import { shown } from "../drawing/format.js";

const AROUND = 250;

/** The text as its tokens; each is shaded by the weight that the chosen query puts on it, which is one of them if it can be chosen. */
export function Words({ tokens, query, strength, onChoose }) {
  const list = useRef(null);
  useLayoutEffect(() => {
    // The query comes into sight in its list, without moving the page.
    const here = list.current.querySelector(".here");
    if (!here) return;
    const [box, word] = [list.current, here].map((each) => each.getBoundingClientRect());
    if (word.top < box.top || word.bottom > box.bottom) list.current.scrollTop += word.top - box.top - (box.height - word.height) / 2;
  }, [query, tokens]);
  // A query of another text has no place in this one; its best key has.
  const middle = onChoose ? query : [...strength.keys()][0] ?? 0;
  const [low, high] = tokens.length <= 2 * AROUND ? [0, tokens.length] : [Math.max(0, middle - AROUND), Math.min(tokens.length, middle + AROUND + 1)];
  const move = (event) => {
    const to = { ArrowLeft: query - 1, ArrowRight: query + 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (to === undefined || !onChoose) return;
    event.preventDefault();
    event.stopPropagation();
    onChoose(inside(to, tokens.length));
  };
  return html`<p class="words" ref=${list} role="group" tabindex="0" data-keys aria-label="The text; left and right choose the query" onKeyDown=${move} onClick=${(event) => {
    const index = event.target.dataset?.index;
    if (index !== undefined && onChoose) onChoose(Number(index));
  }}>${low > 0 && "… "}${tokens.slice(low, high).map((token, i) => {
    const weight = strength.get(low + i) ?? 0;
    return html`<span key=${low + i} data-index=${low + i} class=${onChoose && low + i === query ? "here" : ""} style=${weight >= 0.005 ? { "--weight": String(Math.sqrt(weight)) } : undefined}>${shown(token)}</span><wbr />`;
  })}${high < tokens.length && " …"}</p>`;
}
