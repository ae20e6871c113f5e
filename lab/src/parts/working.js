// What Python computes at the moment, how far it is, and the button that stops it.

import { html, useEffect, useState } from "./lab.js";
import { jobs } from "../host/host.js";

const EVERY = 500;
const WORDS = {
  head: "the best keys of a head",
  intervene: "the model with changed heads",
  mechanisms: "all mechanisms",
  model: "the scores of all heads",
  scaling: "the scaling curve",
  thumbnails: "the pictures of all heads",
  tile: "a map of weights",
};

/** Asks what runs while an answer of the server is waited for. @param {{client: import("../host/host.js").Client}} given */
export function Working({ client }) {
  const [running, setRunning] = useState(null);
  useEffect(() => {
    if (client.host !== "server") return undefined;
    let open = true;
    const look = async () => {
      const state = client.waiting.size || client.bringing ? await jobs() : null;
      // A job that is done before it is looked at a second time is not shown.
      if (open) setRunning(state?.running.find(({ seconds }) => seconds * 1000 >= EVERY) ?? null);
    };
    const timer = setInterval(look, EVERY);
    return () => { open = false; clearInterval(timer); };
  }, [client]);
  if (!running) return null;
  const { number, name, done, total, seconds } = running;
  const words = `Python computes ${WORDS[name] ?? name}`;
  const share = total ? `${Math.floor((100 * done) / total)} %` : "";
  return html`<div class="working" role="group" aria-label="What Python computes">
    <span>${words}, ${Math.round(seconds)} s ${share}</span>
    <progress aria-label=${words} ...${total ? { max: total, value: done } : {}}></progress>
    <button type="button" class="small" onClick=${() => jobs(number)}>Stop</button>
  </div>`;
}
