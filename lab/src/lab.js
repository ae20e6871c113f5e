// The page of qkv lab, in the form of an anywidget. A page that carries its data mounts itself.
//
// shell.js, lab.css  what is around the panels, and how all of it looks
// panels/     one file for each panel
// parts/      what panels are made of: grids, charts, pictures of heads
// host/       the Python that answers; what is shown, as an address; a view for somebody else
// examples/   attention of a few tokens: the examples, files of arrays, the arithmetic and its counts
// language/   the small language model, computed in the page; kinds of its heads; the tour
// exercises/  answers: how they are read, and whether they are right
// drawing/    how numbers, weights, maps and code look

import { render as draw } from "preact";
import { Client, pageModel } from "./host/host.js";
import { View } from "./host/view.js";
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
