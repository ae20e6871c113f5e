// The zoomable map of one head's weights: wheel, drag, pinch or keys; the exact weight under the pointer.

import { html, useEffect, useLab, useMemo, useRef, useState } from "./lab.js";
import { Choice, Num, Save } from "./basics.js";
import { canvasSvg } from "../picture.js";
import { Tiles, drawMap } from "../map.js";
import { shown } from "../format.js";

const bounded = (x, least, most) => Math.min(Math.max(x, least), most);

export function WeightMap({ layer, head, qLen, kvLen, levels, tokens, onOpen }) {
  const { view, set, client, theme, announce } = useLab();
  const canvas = useRef(null);
  const [size, setSize] = useState([640, 480]);
  const [, redraw] = useState(0);
  const [exact, setExact] = useState(null);
  const tiles = useMemo(() => new Tiles(client, () => redraw((count) => count + 1)), [client]);
  const [width, height] = size;
  const fit = Math.min(width / kvLen, height / qLen);
  const scale = view.zoom === -99 ? fit : bounded(2 ** view.zoom, Math.min(fit, 1) / 2, 64);
  const x = bounded(view.x, 0, Math.max(0, kvLen - width / scale));
  const y = bounded(view.y, 0, Math.max(0, qLen - height / scale));
  const query = bounded(view.query, 0, qLen - 1);
  const key = bounded(view.kkey, 0, kvLen - 1);
  const sight = useRef({});
  Object.assign(sight.current, { x, y, scale, width, height });

  useEffect(() => {
    const holder = canvas.current.parentElement;
    const fitted = () => {
      const across = Math.round(holder.clientWidth);
      const down = Math.round(Math.min(across, Math.max(260, innerHeight * 0.7), Math.max(260, (across * qLen) / kvLen)));
      setSize([Math.min(across, Math.max(260, Math.round((down * kvLen) / qLen))), down]);
    };
    const observer = new ResizeObserver(fitted);
    observer.observe(holder);
    fitted();
    return () => observer.disconnect();
  }, [qLen, kvLen]);

  const drawn = useRef({});
  useEffect(() => {
    const ratio = devicePixelRatio || 1;
    const element = canvas.current;
    if (element.width !== Math.round(width * ratio)) element.width = Math.round(width * ratio);
    if (element.height !== Math.round(height * ratio)) element.height = Math.round(height * ratio);
    const context = element.getContext("2d");
    drawn.current = drawMap(context, tiles, {
      x, y, scale: scale * ratio, width: element.width, height: element.height, qLen, kvLen, levels, theme,
      ramp: view.ramp, params: { layer, head, reduce: view.reduce },
    });
    element.dataset.missing = String(drawn.current.missing);
    element.dataset.level = String(drawn.current.level);
    const side = Math.max(5, scale * ratio);
    context.lineWidth = 2 * ratio;
    context.strokeStyle = theme === "dark" ? "#ffd166" : "#b3261e";
    context.strokeRect((key + 0.5 - x) * scale * ratio - side / 2, (query + 0.5 - y) * scale * ratio - side / 2, side, side);
  });

  // The exact weight, asked for when the pointer rests.
  useEffect(() => {
    let open = true;
    const timer = setTimeout(() => {
      client.ask("weight", { layer, head, query, key }).then(
        (result) => open && setExact({ query, key, layer, head, ...result }),
        () => {
          const tile = tiles.get({ layer, head, reduce: "max", level: 0, row: Math.floor(query / 256), column: Math.floor(key / 256) }, { ask: false });
          if (open) setExact(tile ? { query, key, layer, head, weight: tile.values[(query % 256) * tile.shape[1] + (key % 256)] } : null);
        });
    }, 90);
    return () => { open = false; clearTimeout(timer); };
  }, [layer, head, query, key]);

  const name = (index, names = tokens) => (names?.[index] === undefined ? String(index) : `${shown(names[index])} ${index}`);
  // Tokens are those of the keys.
  const queryName = (index) => name(index, qLen === kvLen ? tokens : null);
  const isExact = exact && exact.query === query && exact.key === key && exact.layer === layer && exact.head === head;
  useEffect(() => {
    if (isExact && document.activeElement === canvas.current) announce(`query ${queryName(query)}, key ${name(key)}: ${exact.weight?.toPrecision(4)}`);
  }, [isExact]);

  const zoomAt = (factor, px, py) => {
    const now = sight.current;
    const next = bounded(now.scale * factor, Math.min(fit, 1) / 1, 48);
    set({ zoom: Math.log2(next), x: Math.max(0, now.x + px / now.scale - px / next), y: Math.max(0, now.y + py / now.scale - py / next) });
  };
  const place = (event) => {
    const box = canvas.current.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const pointAt = ([px, py]) => set({ query: bounded(Math.floor(y + py / scale), 0, qLen - 1), kkey: bounded(Math.floor(x + px / scale), 0, kvLen - 1) });

  const pointers = useRef(new Map());
  const pinch = useRef(null);
  const onPointerDown = (event) => {
    canvas.current.setPointerCapture(event.pointerId);
    pointers.current.set(event.pointerId, place(event));
    pinch.current = null;
    pressed.current = pointers.current.size === 1 ? place(event) : null;
    pointAt(place(event));
  };
  const onPointerMove = (event) => {
    const at = place(event);
    const held = pointers.current;
    if (!held.has(event.pointerId)) return pointAt(at);
    const [px, py] = held.get(event.pointerId);
    held.set(event.pointerId, at);
    if (held.size === 1) {
      set({ zoom: Math.log2(scale), x: bounded(x - (at[0] - px) / scale, 0, kvLen), y: bounded(y - (at[1] - py) / scale, 0, qLen) });
    } else if (held.size === 2) {
      const [a, b] = [...held.values()];
      const distance = Math.hypot(a[0] - b[0], a[1] - b[1]);
      if (pinch.current) zoomAt(distance / pinch.current, (a[0] + b[0]) / 2, (a[1] + b[1]) / 2);
      pinch.current = distance;
    }
    return undefined;
  };
  const pressed = useRef(null);
  const letGo = (event) => {
    const from = pressed.current;
    const at = place(event);
    if (event.type === "pointerup" && pointers.current.size === 1 && from && Math.hypot(at[0] - from[0], at[1] - from[1]) < 5) onOpen?.(false);
    pressed.current = null;
    pointers.current.delete(event.pointerId);
    pinch.current = null;
  };
  const onKeyDown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const step = Math.max(1, Math.round(1 / scale)) * (event.shiftKey ? 16 : 1);
    const moves = { ArrowUp: [-step, 0], ArrowDown: [step, 0], ArrowLeft: [0, -step], ArrowRight: [0, step] };
    const [px, py] = [(key + 0.5 - x) * scale, (query + 0.5 - y) * scale];
    if (event.key in moves) {
      const next = { query: bounded(query + moves[event.key][0], 0, qLen - 1), kkey: bounded(key + moves[event.key][1], 0, kvLen - 1) };
      // The map follows the cursor out of sight.
      if (next.kkey < x || next.kkey >= x + width / scale) next.x = Math.max(0, next.kkey - width / scale / 2);
      if (next.query < y || next.query >= y + height / scale) next.y = Math.max(0, next.query - height / scale / 2);
      set(next);
    } else if (event.key === "Enter") onOpen?.(true);
    else if (event.key === "+" || event.key === "=") zoomAt(2, px, py);
    else if (event.key === "-") zoomAt(0.5, px, py);
    else if (event.key === "0") set({ zoom: -99, x: 0, y: 0 });
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  useEffect(() => {
    // Preact's wheel listeners are passive in some browsers, and the page would scroll.
    const element = canvas.current;
    const wheel = (event) => {
      event.preventDefault();
      zoomAt(2 ** (-event.deltaY / 240), ...place(event));
    };
    element.addEventListener("wheel", wheel, { passive: false });
    return () => element.removeEventListener("wheel", wheel);
  }, [fit]);

  return html`<div class="mapblock">
    <div class="row"><${Choice} label="Blocks show" value=${view.reduce} onChange=${(reduce) => set({ reduce })} options=${[["max", "largest weight"], ["mean", "mean weight"]]} />
      <${Choice} label="Colours" value=${view.ramp} onChange=${(ramp) => set({ ramp })} options=${[["root", "fourth root"], ["linear", "linear"]]} />
      <span class="presets" role="group" aria-label="Zoom"><button type="button" class="small" onClick=${() => zoomAt(2, width / 2, height / 2)} aria-label="Zoom in">+</button>
      <button type="button" class="small" onClick=${() => zoomAt(0.5, width / 2, height / 2)} aria-label="Zoom out">−</button>
      <button type="button" class="small" onClick=${() => set({ zoom: -99, x: 0, y: 0 })}>All</button></span>
      <${Save} title=${`Weights of layer ${layer}, head ${head}`} svg=${() => canvasSvg({ title: `Weights of layer ${layer}, head ${head}`, canvas: canvas.current, theme, across: `keys, ${kvLen}`, down: `queries, ${qLen}` })} /></div>
    <div class="mapholder"><canvas ref=${canvas} tabindex="0" data-keys style=${{ width: `${width}px`, height: `${height}px` }}
      role="application" aria-roledescription="map of weights" aria-label=${`Weights of layer ${layer}, head ${head}: ${qLen} queries down, ${kvLen} keys across. Arrow keys move, plus and minus zoom, 0 shows all, Enter goes to the text.`}
      onPointerDown=${onPointerDown} onPointerMove=${onPointerMove} onPointerUp=${letGo} onPointerCancel=${letGo} onKeyDown=${onKeyDown}></canvas></div>
    ${tiles.error && html`<p class="failure" role="alert">${tiles.error.message} ${tiles.error.action ?? ""}</p>`}
    <p class="readout"><span>query <b class="token" data-name="query">${queryName(query)}</b></span> <span>key <b class="token" data-name="key">${name(key)}</b></span>
      <span>weight <b data-name="weight">${isExact ? html`<${Num} x=${exact.weight} digits=${8} />` : "…"}</b></span></p>
    ${isExact && html`<details class="faint"><summary>How it comes about</summary><dl class="sums">${Object.entries(exact).filter(([each]) => !["query", "key", "layer", "head", "weight", "query_token", "key_token"].includes(each)).map(([each, value]) => html`<div key=${each}><dt>${each.replaceAll("_", " ")}</dt><dd>${Array.isArray(value) ? html`[${value.map((v, i) => html`${i ? ", " : ""}<${Num} x=${v} />`)}]` : typeof value === "boolean" ? String(value) : html`<${Num} x=${value ?? NaN} digits=${8} />`}</dd></div>`)}</dl></details>`}
  </div>`;
}
