// What is around the panels: their list, the theme, the keys, the live region.

import { options } from "preact";
import { html, Lab, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./parts/lab.js";
import { MASKS, THEMES } from "./host/view.js";
import { Share } from "./parts/share.js";
import { Working } from "./parts/working.js";
import { Start } from "./panels/start.js";
import { Tour } from "./panels/tour.js";
import { Scaling } from "./panels/scaling.js";
import { Pipeline } from "./panels/pipeline.js";
import { Heatmap } from "./panels/heatmap.js";
import { Count } from "./panels/count.js";
import { Tiles } from "./panels/tiles.js";
import { Mechanisms } from "./panels/mechanisms.js";
import { Inspect } from "./panels/inspect.js";
import { Language } from "./panels/language.js";
import { Code } from "./panels/code.js";
import { Errata } from "./panels/errata.js";
import { Exercises } from "./panels/exercises.js";
import { Absent } from "./panels/absent.js";

/** Name in the address, title, component, and the results without which there is nothing to show. */
const PANELS = [
  ["start", "Start", Start],
  ["tour", "Tour", Tour],
  ["scaling", "Scaling", Scaling],
  ["pipeline", "Pipeline", Pipeline],
  ["heatmap", "Heatmap", Heatmap],
  ["count", "Count the work", Count],
  ["tiles", "Tiles", Tiles],
  ["mechanisms", "Mechanisms", Mechanisms],
  ["inspect", "Inspect", Inspect],
  ["language", "Language model", Language],
  ["code", "Code", Code],
  ["errata", "Errata", Errata],
  ["exercises", "Exercises", Exercises],
];

const KEYS = [
  ["[ and ]", "the panel before, and the next"],
  ["← and →", "a step back, and on; in a grid, the next cell"],
  ["↑ and ↓, Home, End", "in a grid: other rows; ends of a row, with Ctrl of the grid"],
  ["Enter or a digit", "in Q, K and V: edit the cell; Esc leaves it as it was"],
  ["j and k", "the next query, and the one before"],
  ["p", "in the tour: play, and pause"],
  ["m", "the next mask"],
  ["s", "with and without the division by √d"],
  ["d", "4 or 12 digits"],
  ["t", "light, dark, or as the system"],
  ["?", "this list"],
];

const THEME_NAMES = { "": "system", light: "light", dark: "dark" };
const next = (list, value) => list[(list.indexOf(value) + 1) % list.length];

const darkSystem = () => matchMedia("(prefers-color-scheme: dark)");

/** Draws what `change` changes before it returns. The browser prints the page as it is then. */
function drawnAtOnce(change) {
  const before = options.debounceRendering;
  options.debounceRendering = (draw) => draw();
  change();
  options.debounceRendering = before;
}

/** Whether an element uses a key itself: a text field uses all, others those with names, as arrows. */
function usesKey(target, key) {
  if (target.closest?.('input:not([type="checkbox"], [type="radio"], [type="range"]), select, textarea, [contenteditable]')) return true;
  return key.length > 1 && target.closest?.('[type="radio"], [type="range"], [data-keys], [role="gridcell"]');
}

export function Shell({ client, store, root }) {
  const [, redraw] = useState(0);
  const [systemIsDark, setSystemIsDark] = useState(darkSystem().matches);
  const [text, setText] = useState("");
  const help = useRef(null);
  const main = useRef(null);
  const keys = useMemo(() => new Map(), []);
  const kept = useMemo(() => new Map(), []);
  // A notebook may show the lab more than once, and an id names one element of a document.
  const own = useMemo(() => (client.host === "widget" ? `-${crypto.getRandomValues(new Uint32Array(1))[0]}` : ""), []);
  const view = store.values;

  const shown = PANELS.filter(([name]) => {
    const named = client.data.panels ?? [];
    return client.host !== "export" || !named.length || named.includes(name);
  });
  const known = PANELS.find(([name]) => name === view.panel) ?? shown[0];
  const panel = useMemo(() => (shown.some(([name]) => name === known[0]) ? known : [known[0], known[1], Absent]), [known, client.data]);
  const set = (changes) => store.set(changes);
  const go = (by) => {
    const place = shown.indexOf(panel) + by;
    if (place < 0 || place >= shown.length) return;
    set({ panel: shown[place][0] });
    announce(shown[place][1]);
  };

  // Before the effects of the panel, which may change the view.
  useLayoutEffect(() => {
    const tell = () => redraw((count) => count + 1);
    store.listeners.add(tell);
    return () => store.listeners.delete(tell);
  }, []);

  useEffect(() => {
    const media = darkSystem();
    const follow = () => setSystemIsDark(media.matches);
    media.addEventListener("change", follow);
    return () => media.removeEventListener("change", follow);
  }, []);

  const show = async (bring) => {
    await client.bring(bring);
    redraw((count) => count + 1);
  };

  useEffect(() => {
    // What was opened may have an example of its own; until it is there, those of the page serve.
    if (client.host === "export") return;
    client.ask("example").then(() => redraw((count) => count + 1), () => {});
  }, [client.data]);

  // Paper is white: what is printed is light, whatever the theme of the screen.
  const [isPrinted, setIsPrinted] = useState(false);
  useEffect(() => {
    const begin = () => drawnAtOnce(() => setIsPrinted(true));
    const end = () => setIsPrinted(false);
    addEventListener("beforeprint", begin);
    addEventListener("afterprint", end);
    return () => {
      removeEventListener("beforeprint", begin);
      removeEventListener("afterprint", end);
    };
  }, []);

  const theme = isPrinted ? "light" : view.theme || (systemIsDark ? "dark" : "light");
  useLayoutEffect(() => {
    root.dataset.theme = theme;
    if (client.host !== "widget") document.documentElement.dataset.qkvTheme = theme;
  }, [theme]);

  const isFirst = useRef(true);
  useLayoutEffect(() => {
    if (isFirst.current) isFirst.current = false;
    else if (client.host !== "widget") scrollTo(0, 0);
    else if (root.getBoundingClientRect().top < 0) root.scrollIntoView();
  }, [panel]);

  const list = useRef(null);
  useEffect(() => {
    // On a narrow page the list is a strip that scrolls by itself.
    const link = list.current.querySelector("[aria-current]");
    const strip = list.current.parentElement;
    if (link && strip.scrollWidth > strip.clientWidth) strip.scrollLeft = link.offsetLeft - strip.clientWidth / 2 + link.clientWidth / 2;
    if (client.host !== "widget") document.title = `${panel[1]} · qkv lab`;
  }, [panel]);

  const announce = useMemo(() => {
    let later;
    // The same text twice is said twice only if it was gone in between.
    return (words) => {
      clearTimeout(later);
      setText("");
      later = setTimeout(() => setText(words), 50);
    };
  }, []);

  useLayoutEffect(() => {
    const common = {
      "[": () => go(-1),
      "]": () => go(1),
      "?": () => help.current.showModal(),
      m: () => { set({ mask: next(MASKS, view.mask) }); announce(`mask ${next(MASKS, view.mask)}`); },
      s: () => { set({ scaled: view.scaled ? 0 : 1 }); announce(view.scaled ? "not scaled" : "scaled"); },
      d: () => { set({ digits: view.digits === 4 ? 12 : 4 }); announce(view.digits === 4 ? "12 digits" : "4 digits"); },
      t: () => { set({ theme: next(THEMES, view.theme) }); announce(`theme ${THEME_NAMES[next(THEMES, view.theme)]}`); },
    };
    const pressed = (event) => {
      // Many keyboards have brackets with Alt alone.
      const isBracket = ["[", "]"].includes(event.key);
      if (event.defaultPrevented || event.ctrlKey || event.metaKey || (event.altKey && !isBracket)) return;
      if (usesKey(event.target, event.key) || root.querySelector("dialog[open]")) return;
      const each = keys.get(event.key) ?? common[event.key];
      if (!each) return;
      event.preventDefault();
      event.stopPropagation();
      each();
    };
    // In a notebook the keys belong to the notebook unless the focus is in the lab.
    const holder = client.host === "widget" ? root : document;
    holder.addEventListener("keydown", pressed);
    return () => holder.removeEventListener("keydown", pressed);
  });

  const [name, title, Panel] = panel;
  const link = (event, to) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    set({ panel: to });
  };
  return html`<${Lab.Provider} value=${{ view, set, client, theme, announce, keys, kept, show, data: client.data, shown: shown.map(([each]) => each) }}>
    <header class="top">
      <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); main.current.focus(); }}>To the panel</a>
      <h1 class="brand"><b>qkv</b> lab</h1>
      <div class="tools">
        <button type="button" class="small" aria-pressed=${view.digits === 12} onClick=${() => set({ digits: view.digits === 4 ? 12 : 4 })}>12 digits</button>
        <button type="button" class="small" onClick=${() => set({ theme: next(THEMES, view.theme) })} aria-label=${`Theme: ${THEME_NAMES[view.theme]}; change`}>
          <span aria-hidden="true">${theme === "dark" ? "☾" : "☀"}</span> ${THEME_NAMES[view.theme]}</button>
        <${Share} id=${`share-title${own}`} />
        <button type="button" class="small" onClick=${() => help.current.showModal()}>Keys <kbd>?</kbd></button>
      </div>
    </header>
    <nav aria-label="Panels"><ol ref=${list}>${shown.map(([each, words]) => html`<li key=${each}>
      <a href=${`#${each}`} aria-current=${each === name ? "page" : undefined} onClick=${(event) => link(event, each)}>${words}</a></li>`)}</ol></nav>
    <main tabindex="-1" ref=${main} aria-labelledby=${`panel-title${own}`} data-panel=${name}>
      <h2 id=${`panel-title${own}`}>${title}</h2>
      <${Panel} key=${name} />
    </main>
    <${Working} client=${client} />
    <p class="unseen" role="status" aria-live="polite">${text}</p>
    <dialog ref=${help} aria-labelledby=${`keys-title${own}`} onClick=${(event) => event.target === help.current && help.current.close()}>
      <h2 id=${`keys-title${own}`}>Keys</h2>
      <dl class="keys">${KEYS.map(([key, words]) => html`<div><dt><kbd>${key}</kbd></dt><dd>${words}</dd></div>`)}</dl>
      <form method="dialog"><button class="main">Close</button></form>
    </dialog>
  </${Lab.Provider}>`;
}
