// In the place of Inspect, in a page that was written without a model or arrays.

import { html } from "../parts/lab.js";

export const Absent = () => html`<p class="lead">This page was written without a model, so there are no heads in it to inspect.</p>
  <p>A page that has them is written by</p>
  <ul><li><code>qkv lab --model language --export page.html</code>, for a model that comes with qkv or one of yours,</li>
    <li><code>qkv lab "a sentence of yours" --export page.html</code>, for that model on your own words,</li>
    <li><code>qkv lab FILE --export page.html</code>, for arrays or a saved record.</li></ul>
  <p><code>qkv lab</code> serves a page in which models, files and texts can be opened.</p>`;
