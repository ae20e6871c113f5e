// A view for somebody else: as the end of an address, with its numbers, or as a page of its own.

import { BUILT_IN, encode } from "../examples/examples.js";
import { answerOf, HostError } from "./host.js";
import { DEFAULTS, SHARED } from "./view.js";

/**
 * The part of an address after #, for any page of the lab, which may open with another view.
 * @param {typeof DEFAULTS} view
 * @param {object} example what the view shows; its numbers are added if no other page has them
 */
export function sharedAddress(view, example) {
  const known = !example || example.trace || BUILT_IN.some(({ name }) => name === example.name);
  const all = known ? { ...view, ex: view.ex || (example && !example.trace ? example.name ?? "" : "") } : { ...view, ex: "own", own: encode(example) };
  const said = new URLSearchParams({ [SHARED]: 1 });
  for (const name of Object.keys(DEFAULTS)) if (name !== "panel" && name !== "theme" && all[name] !== DEFAULTS[name]) said.set(name, String(all[name]));
  return `#${view.panel}&${said}`;
}

/** The page as one HTML file that opens at a view. @param {import("./host.js").Client} client */
export async function sharedPage(client, view) {
  if (client.host === "export") return thisPage(view);
  const [{ ok, result, error }] = await answerOf("/page", "application/json", JSON.stringify({ view, shown: client.data.shown }));
  if (!ok) throw new HostError(error);
  return result;
}

/** This file once more, with another view in its data; script and style keep their hashes. */
function thisPage(view) {
  const page = document.documentElement.cloneNode(true);
  const place = page.querySelector("#qkv-lab");
  place.replaceWith(Object.assign(document.createElement("div"), { id: "qkv-lab" }));
  delete page.dataset.qkvTheme;
  const data = page.querySelector("#qkv-data");
  // In an element of a page no text may end it.
  data.textContent = JSON.stringify({ ...JSON.parse(data.textContent), view }).replaceAll("<", "\\u003c");
  return `<!doctype html>\n${page.outerHTML}\n`;
}
