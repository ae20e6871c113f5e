// The page of qkv lab, in the form of an anywidget. A page that carries its data mounts itself.

import { render as draw } from "preact";
import { Client, pageModel } from "./host.js";
import { View } from "./view.js";
import { html } from "./parts/lab.js";
import { Shell } from "./shell.js";

function render({ model, el }) {
  const client = new Client(model);
  const inNotebook = client.host === "widget";
  const view = new View(model, { inAddress: !inNotebook });
  el.classList.add("qkv-lab", inNotebook ? "in-notebook" : "in-page");
  // Keys that are pressed in the lab are its own: in JupyterLab, d twice would delete the cell.
  if (inNotebook) el.addEventListener("focusin", (event) => { event.target.dataset.lmSuppressShortcuts = "true"; });
  draw(html`<${Shell} client=${client} store=${view} root=${el} />`, el);
  return () => {
    draw(null, el);
    view.close();
    client.close();
  };
}

export default { initialize() {}, render };

const carried = globalThis.document?.getElementById("qkv-data");
if (carried) {
  const el = document.getElementById("qkv-lab") ?? document.body.appendChild(document.createElement("div"));
  render({ model: pageModel(JSON.parse(carried.textContent)), el });
}
