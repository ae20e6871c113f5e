// All heads of all layers as small pictures of their weights: one tab stop, arrow keys.

import { failed, html, inside, useEffect, useLab, useLayoutEffect, useRef, useState } from "./lab.js";
import { table } from "../drawing/colours.js";

/** Heads of a layer up to which there is room for words under each picture. */
const WITH_WORDS = 8;

/** @typedef {{shape: [number, number], values: Uint8Array}} Picture 255 times the root of a weight, for each query and key */

/** Weights of one head, by query, as a picture. @param {ArrayLike<number>[]} weights @returns {Picture} */
export function pictureOf(weights) {
  const n = weights.length;
  const values = new Uint8Array(n * n);
  weights.forEach((row, i) => Array.from(row).forEach((weight, j) => { values[i * n + j] = Math.round(255 * Math.sqrt(Math.min(1, weight))); }));
  return { shape: [n, n], values };
}

/** @param {{picture: Picture}} props */
function HeadPicture({ picture: { shape: [height, width], values } }) {
  const { theme } = useLab();
  const canvas = useRef(null);
  useLayoutEffect(() => {
    if (!values.length) return;
    Object.assign(canvas.current, { width, height });
    const context = canvas.current.getContext("2d");
    const image = context.createImageData(width, height);
    const colours = table(theme);
    // Where nothing is read, the paper is seen.
    values.forEach((value, i) => { if (value) image.data.set([...colours[value], 255], 4 * i); });
    context.putImageData(image, 0, 0);
  }, [values, theme]);
  return html`<canvas ref=${canvas} aria-hidden="true"></canvas>`;
}

/**
 * @param {object} props
 * @param {{name: string, heads: {name: string, note?: string, picture?: Picture, off?: boolean}[]}[]} props.layers
 * @param {[number, number]} props.chosen places of a layer and of a head in it
 * @param {(layer: number, head: number) => void} props.onChoose
 * @param {(byKey: boolean) => void} [props.onOpen] click or Enter
 * @param {(layer: number, head: number) => any} [props.below] what stands under a picture
 */
export function HeadPictures({ layers, chosen: [row, column], onChoose, onOpen, below }) {
  const grid = useRef(null);
  const most = Math.max(...layers.map(({ heads }) => heads.length));
  const dense = most > WITH_WORDS;
  const move = (event) => {
    if (event.target.tagName !== "BUTTON" || event.ctrlKey || event.metaKey || event.altKey) return;
    const to = { ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1], Home: [row, 0], End: [row, most - 1] }[event.key];
    if (!to) return;
    event.preventDefault();
    event.stopPropagation();
    const layer = inside(to[0], layers.length);
    const head = inside(to[1], layers[layer].heads.length);
    onChoose(layer, head);
    grid.current.querySelector(`[data-place="${layer}.${head}"]`).focus();
  };
  return html`<div class="wide"><div class=${`smallheads ${dense ? "dense" : ""}`} style=${{ "--heads": most }} ref=${grid} role="group" aria-label="Every head as a picture; arrow keys choose" onKeyDown=${move}>
    ${dense && html`<span class="corner"></span>${Array.from({ length: most }, (_, j) => html`<span key=${`head${j}`} class="name" aria-hidden="true">${j}</span>`)}`}
    ${layers.map(({ name: layerName, heads }, i) => html`${dense && html`<span key=${`layer${i}`} class="name" aria-hidden="true">${layerName}</span>`}${Array.from({ length: most }, (_, j) => {
      if (!heads[j]) return html`<span key=${`${i}.${j}`}></span>`;
      const { name, note, picture, off } = heads[j];
      const isChosen = i === row && j === column;
      return html`<div key=${`${i}.${j}`} class=${off ? "off" : ""}><button type="button" data-place=${`${i}.${j}`} tabindex=${isChosen ? 0 : -1} aria-pressed=${isChosen} aria-label=${`Head ${name} ${note ?? ""}`.trim()} title=${dense ? `${name}${note ? `: ${note}` : ""}` : undefined}
        onClick=${(event) => { onChoose(i, j); onOpen?.(event.detail === 0); }}>${picture ? html`<${HeadPicture} picture=${picture} />` : html`<span class="nopicture"></span>`}${!dense && html`<span>${name} <small>${note ?? ""}</small></span>`}</button>${below?.(i, j)}</div>`;
    })}`)}</div></div>`;
}

/**
 * The pictures of a model's layers, as far as they have come: they are asked for one layer after
 * another, since a server computes one thing at a time.
 * @param {{index: number}[]} layers
 * @returns {{pictures: Picture[][], queries: number[], error?: Error}}
 */
export function usePictures(layers) {
  const { client } = useLab();
  const [state, setState] = useState({});
  const [tries, setTries] = useState(0);
  useEffect(() => {
    let open = true;
    const found = { layers, pictures: [], queries: [] };
    const { opening } = client;
    const askAll = async () => {
      for (const { index } of layers) {
        const { shape: [heads, ...shape], values, queries } = await client.ask("thumbnails", { layer: index }, { opening });
        if (!open) return;
        const size = shape[0] * shape[1];
        found.pictures.push(Array.from({ length: heads }, (_, i) => ({ shape, values: values.subarray(i * size, (i + 1) * size) })));
        found.queries.push(queries);
        setState({ ...found });
      }
    };
    const again = () => {
      setState({ ...found });
      setTries(tries + 1);
    };
    askAll().catch((error) => open && setState({ ...found, error: failed(client, error, again) }));
    return () => { open = false; };
  }, [layers, tries]);
  return state.layers === layers ? state : { pictures: [], queries: [] };
}
