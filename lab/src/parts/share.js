// The button that hands on what is shown.

import { html, useExample, useLab, useRef, useState } from "./lab.js";
import { Failure, copied } from "./basics.js";
import { handOut } from "../drawing/picture.js";
import { sharedAddress, sharedPage } from "../host/share.js";

export function Share({ id }) {
  const { view, client, announce } = useLab();
  const { example } = useExample();
  const dialog = useRef(null);
  const [said, setSaid] = useState("");
  const [error, setError] = useState(null);
  const part = sharedAddress(view, example);
  const open = /^https?:/.test(location.protocol) && client.host === "export";
  const say = (words) => { setSaid(words); announce(words); };
  const copy = async (text, what) => {
    await copied(text, dialog.current);
    say(`${what} copied`);
  };
  const save = async () => {
    setError(null);
    setSaid(client.host === "server" ? "Python writes the page …" : "");
    try {
      handOut(new Blob([await sharedPage(client, view)], { type: "text/html" }), `qkv-${view.panel}.html`);
      say("page saved");
    } catch (failed) {
      setSaid("");
      setError(failed);
    }
  };
  const show = () => {
    setSaid("");
    setError(null);
    dialog.current.showModal();
  };
  return html`<button type="button" class="small" onClick=${show}>Share</button>
    <dialog ref=${dialog} aria-labelledby=${id} onClick=${(event) => event.target === dialog.current && dialog.current.close()}>
      <h2 id=${id}>Share this view</h2>
      ${client.host !== "widget" && html`<p>As a file: one page that opens here, with its numbers. It needs no network and no Python.</p>
        <p><button type="button" class="main" onClick=${save}>Save the page</button></p>`}
      ${client.host === "widget" && html`<p>As a file: <code>record.to_html()</code> in Python writes a page with what is shown.</p>`}
      <p>${open ? "As a link: it opens this page at this view." : "As the end of an address: any page of the lab opens this view with it. Numbers that you typed are in it; those of a model are not."}</p>
      <p class="sharedpart"><code tabindex="0" aria-label="End of the address">${part.length > 300 ? `${part.slice(0, 300)}…` : part}</code></p>
      <p><button type="button" onClick=${() => copy(open ? location.href.replace(/#.*$/, "") + part : part, open ? "link" : "end of the address")}>Copy</button> <span role="status" class="faint">${said}</span></p>
      ${error && html`<${Failure} error=${error} />`}
      <form method="dialog"><button>Close</button></form>
    </dialog>`;
}
