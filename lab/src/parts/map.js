// The zoomable map of one head's weights: buttons, drag, pinch or keys; the exact weight under the
// pointer, or of the point that was chosen by a click.

import { failed, html, useEffect, useLab, useLayoutEffect, useMemo, useRef, useState } from "./lab.js";
import { Choice, Failure, Num, Save } from "./basics.js";
import { canvasSvg } from "../drawing/picture.js";
import { Tiles, drawMap } from "../drawing/map.js";
import { cut, shown } from "../drawing/format.js";
import { numbersOfJson } from "../host/numbers.js";

const bounded = (x, least, most) => Math.min(Math.max(x, least), most);

const SPACE = 58;

/** Every so many positions a label, so that labels do not touch. @param {number} scale pixels for one */
function stepOf(scale, room) {
  const least = Math.max(1, room / scale);
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= least);
}

const placesOf = (first, size, scale, length, room) => {
  const step = stepOf(scale, room);
  const places = [];
  for (let at = Math.ceil(first / step) * step; at < Math.min(length, first + size / scale); at += step) places.push(at);
  return places;
};

/** Names of the queries down and of the keys across, as many as there is room for. */
function Axes({ sight: { x, y, scale, width, height }, qLen, kvLen, queryNames, keyNames }) {
  const across = placesOf(x, width, scale, kvLen, keyNames ? 44 : 48);
  const down = placesOf(y, height, scale, qLen, 16);
  const label = (names, index, most) => (names?.[index] === undefined ? String(index) : cut(shown(names[index]), most));
  return html`<svg class="axis" width=${width} height="34" aria-hidden="true"><text x="0" y="11" class="axis-title">keys →</text>
      ${across.map((at) => html`<text key=${at} x=${(at + 0.5 - x) * scale} y="29" text-anchor="middle">${label(keyNames, at, Math.max(5, Math.floor((stepOf(scale, 44) * scale) / 8)))}</text>`)}</svg>
    <svg class="axis down" width=${SPACE} height=${height} aria-hidden="true"><text class="axis-title" text-anchor="end" transform="translate(11 4) rotate(-90)">← queries</text>
      ${down.map((at) => html`<text key=${at} x=${SPACE - 5} y=${(at + 0.5 - y) * scale} dy="0.35em" text-anchor="end">${label(queryNames, at, 6)}</text>`)}</svg>`;
}

export function WeightMap({ name: headName, layer, head, query, chosenKey: key, qLen, kvLen, levels, tokens, queryTokens, onOpen }) {
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
  // What the pointer is over is read out, and what was chosen stays chosen.
  const [over, setOver] = useState(null);
  const [readQuery, readKey] = over ?? [query, key];
  const sight = useRef({});
  Object.assign(sight.current, { x, y, scale, width, height });

  useEffect(() => {
    const holder = canvas.current.parentElement;
    const fitted = () => {
      const across = Math.round(holder.clientWidth) - SPACE;
      if (across <= 0) return;  // It is not laid out.
      const down = Math.round(Math.min(across, Math.max(260, innerHeight * 0.7), Math.max(260, (across * qLen) / kvLen)));
      setSize([Math.min(across, Math.max(260, Math.round((down * kvLen) / qLen))), down]);
    };
    const observer = new ResizeObserver(fitted);
    observer.observe(holder);
    fitted();
    return () => observer.disconnect();
  }, [qLen, kvLen]);

  const drawn = useRef({});
  useLayoutEffect(() => {
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
    element.dataset.marker = `${query},${key}`;
  });

  useEffect(() => {
    // A link or the text may choose what is out of sight.
    const now = sight.current;
    const [wide, high] = [now.width / now.scale, now.height / now.scale];
    const next = {};
    if (key < now.x || key >= now.x + wide) next.x = Math.max(0, key - wide / 2);
    if (query < now.y || query >= now.y + high) next.y = Math.max(0, query - high / 2);
    if (Object.keys(next).length) set(next);
  }, [query, key]);

  // The exact weight, asked for when the pointer rests.
  useEffect(() => {
    let open = true;
    const at = { layer, head, query: readQuery, key: readKey };
    const timer = setTimeout(() => {
      client.ask("weight", at, { opening: tiles.opening }).then(
        (result) => open && setExact({ ...at, ...result }),
        () => {
          const tile = tiles.get({ layer, head, reduce: "max", level: 0, row: Math.floor(readQuery / 256), column: Math.floor(readKey / 256) }, { ask: false });
          if (open) setExact(tile ? { ...at, weight: tile.values[(readQuery % 256) * tile.shape[1] + (readKey % 256)] } : null);
        });
    }, 90);
    return () => { open = false; clearTimeout(timer); };
  }, [layer, head, readQuery, readKey]);

  const name = (index, names = tokens) => (names?.[index] === undefined ? String(index) : `${shown(names[index])} ${index}`);
  const queryName = (index) => name(index, queryTokens);
  const isExact = exact && exact.query === readQuery && exact.key === readKey && exact.layer === layer && exact.head === head;
  useEffect(() => {
    if (isExact && document.activeElement === canvas.current) announce(`query ${queryName(query)}, key ${name(key)}: ${numbersOfJson(exact.weight).toPrecision(4)}`);
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
  const at = ([px, py]) => [bounded(Math.floor(y + py / scale), 0, qLen - 1), bounded(Math.floor(x + px / scale), 0, kvLen - 1)];
  const choose = ([row, column]) => set({ query: row, kkey: column });

  const pointers = useRef(new Map());
  const pinch = useRef(null);
  const onPointerDown = (event) => {
    canvas.current.setPointerCapture(event.pointerId);
    pointers.current.set(event.pointerId, place(event));
    pinch.current = null;
    pressed.current = pointers.current.size === 1 ? place(event) : null;
  };
  const onPointerMove = (event) => {
    const to = place(event);
    const held = pointers.current;
    if (!held.has(event.pointerId)) return setOver(at(to));
    const [px, py] = held.get(event.pointerId);
    held.set(event.pointerId, to);
    if (held.size === 1) {
      set({ zoom: Math.log2(scale), x: bounded(x - (to[0] - px) / scale, 0, kvLen), y: bounded(y - (to[1] - py) / scale, 0, qLen) });
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
    const to = place(event);
    if (event.type === "pointerup" && pointers.current.size === 1 && from && Math.hypot(to[0] - from[0], to[1] - from[1]) < 5) {
      choose(at(to));
      onOpen?.(false);
    }
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
      setOver(null);
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
    // The wheel alone scrolls the page. Preact's wheel listeners are passive in some browsers, and
    // with Ctrl, as trackpads send when pinched, the page would grow.
    const element = canvas.current;
    const wheel = (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
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
      <${Save} title=${`Weights of ${headName}`} svg=${() => canvasSvg({ title: `Weights of ${headName}`, canvas: canvas.current, theme, across: `keys, ${kvLen}`, down: `queries, ${qLen}` })} /></div>
    <div class="mapholder"><${Axes} sight=${{ x, y, scale, width, height }} qLen=${qLen} kvLen=${kvLen} queryNames=${scale >= 14 && qLen === kvLen ? tokens : null} keyNames=${scale >= 40 ? tokens : null} />
      <canvas ref=${canvas} tabindex="0" data-keys style=${{ width: `${width}px`, height: `${height}px`, touchAction: scale > fit * 1.001 ? "none" : "pan-x pan-y" }}
      role="application" aria-roledescription="map of weights" aria-label=${`Weights of ${headName}: ${qLen} queries down, ${kvLen} keys across. Arrow keys move, plus and minus zoom, 0 shows all, Enter goes to the text.`}
      onPointerDown=${onPointerDown} onPointerMove=${onPointerMove} onPointerLeave=${() => setOver(null)} onPointerUp=${letGo} onPointerCancel=${letGo} onKeyDown=${onKeyDown}></canvas></div>
    ${tiles.error && html`<${Failure} error=${failed(client, tiles.error, () => tiles.again())} />`}
    <p class="faint">Click to choose a point, drag to move, Ctrl and the wheel or + and − to zoom.</p>
    <p class="readout" data-over=${over ? "pointer" : "chosen"}><span>query <b class="token" data-name="query">${queryName(readQuery)}</b></span> <span>key <b class="token" data-name="key">${name(readKey)}</b></span>
      <span>weight <b data-name="weight">${isExact ? html`<${Num} x=${exact.weight} digits=${8} />` : "…"}</b></span></p>
    ${isExact && html`<details class="faint"><summary>How it comes about</summary><dl class="sums">${Object.entries(exact).filter(([each]) => !["query", "key", "layer", "head", "weight"].includes(each)).map(([each, value]) => html`<div key=${each}><dt>${each.replaceAll("_", " ")}</dt><dd>${Array.isArray(value) ? html`[${value.map((v, i) => html`${i ? ", " : ""}<${Num} x=${v} />`)}]` : typeof value === "boolean" ? String(value) : html`<${Num} x=${value} digits=${8} />`}</dd></div>`)}</dl></details>`}
  </div>`;
}
