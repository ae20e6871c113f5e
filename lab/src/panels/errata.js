// What the classical texts print wrongly, beside what is right.

import { html, useAsk } from "../parts/lab.js";
import { Copy, Failure, Waiting } from "../parts/basics.js";

export function Errata() {
  const { result, error } = useAsk("errata");
  if (error) return html`<${Failure} error=${error} />`;
  if (!result) return html`<${Waiting} what="the list" />`;
  const { errata } = result;
  const rows = () => [["text", "what", "printed, wrong", "right", "why"], ...errata.map((each) => [each.text, each.what, each.printed, each.right, each.why])];
  return html`<p class="lead">Numbers and sentences of the classical texts that their own inputs contradict, each with what is right. A text is named by its kind, section and example, since more is not recorded of it. <${Copy} rows=${rows} what="errata" /></p>
    <ul class="errata">${errata.map((each) => html`<li key=${each.name} data-name=${each.name}>
      <h3>${each.text}: ${each.what}</h3>
      <div class="versus"><p class="wrong"><span class="verdict">✗ printed</span> <del>${each.printed}</del></p><p class="right"><span class="verdict">✓ right</span> <ins>${each.right}</ins></p></div>
      <p>${each.why}</p>
      <details><summary>Code that shows it</summary><pre tabindex="0"><code>${each.shown_by}</code></pre></details></li>`)}</ul>`;
}
