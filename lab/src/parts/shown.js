// What the panel Inspect shows, and how to show something else: what comes with qkv, a file, a text.

import { html, useKept, useLab, useState } from "./lab.js";
import { Failure, Full, Select } from "./basics.js";
import { opened } from "../host/host.js";
import { NOTHING_CHOSEN } from "../host/view.js";

/** Characters of a text, which the server takes too. */
const LONGEST = 4096;

export function Shown({ model }) {
  const { client, show, set, announce } = useLab();
  const [text, setText] = useKept("text for Inspect", model.text ?? "");
  const [state, setState] = useState({});
  const choose = async (bring) => {
    setState({ pending: true });
    try {
      await show(bring);
      set(NOTHING_CHOSEN);
      setState({});
      announce("The heads are those of what you chose.");
    } catch (error) {
      setState({ error });
    }
  };
  const open = (params) => choose(async () => (await client.ask("open", { ...params, host: client.host }, { keep: false })).data);
  const file = async (event) => {
    const field = event.currentTarget;
    const [given] = field.files;
    if (!given) return;
    await choose(() => opened(given));
    field.value = "";
  };
  const read = (event) => {
    event.preventDefault();
    open({ text });
  };
  return html`<div class="shown"><div class="examplebar" role="group" aria-label="What is shown">
    <${Select} label="Show something else" value="" onChange=${(what) => what && open({ what })} options=${[["", "choose …"], ...model.others.map(({ what, title }) => [what, title])]} />
    ${client.host === "server" && html`<label class="button">A safetensors or npz file<input type="file" accept=".safetensors,.npz" onChange=${file} /></label>`}
    <details><summary>A model of yours</summary><p>Start the page with it: <code>qkv lab --model NAME</code>, where NAME is a folder or a model on this machine, and <code>--text "a sentence"</code> is what it reads.</p></details>
    ${state.pending && html`<p class="faint" role="status">Python reads it …</p>`}</div>
    ${model.can_read && html`<form class="row" onSubmit=${read}><label class="field own-text"><span>Your own text for this model</span>
      <textarea rows="2" maxlength=${LONGEST} spellcheck=${false} value=${text} onInput=${(event) => setText(event.currentTarget.value)}></textarea></label>
      <${Full} text=${text} most=${LONGEST} />
      <button class="main" disabled=${!text.trim() || state.pending}>Read it</button></form>`}
    ${state.error && html`<${Failure} error=${state.error} />`}</div>`;
}
