// Tiles of a map of weights: asked for as they come into sight, kept while there is room, drawn at
// any size. The map itself is never held.

import { table } from "./colours.js";

const TILE = 256;
const KEPT = 96;
const AT_ONCE = 2;

/** How a weight becomes a share of the colours. */
export const RAMPS = { linear: (w) => w, root: (w) => Math.sqrt(Math.sqrt(w)) };

const headOf = ({ layer, head }) => `${layer}.${head}`;

export class Tiles {
  /**
   * @param {import("../host/host.js").Client} client
   * @param {() => void} redraw called when a tile has come
   */
  constructor(client, redraw) {
    this.client = client;
    this.opening = client.opening;
    this.redraw = redraw;
    this.kept = new Map();
    this.wanted = [];
    this.running = 0;
    this.error = null;
    /** The head of the tile that failed. */
    this.failed = "";
  }

  /**
   * A tile {shape, values}, or undefined while it is not there; then it is asked for. What failed or
   * was stopped would fail again at once: then nothing of the same head is asked for until `again`.
   */
  get(params, { ask = true } = {}) {
    // A single weight is its own largest and its own mean.
    const asked = params.level === 0 ? { ...params, reduce: "max" } : params;
    const key = JSON.stringify(asked);
    const tile = this.kept.get(key);
    if (tile) {
      this.kept.delete(key);
      this.kept.set(key, tile);
      return tile.shape ? tile : undefined;
    }
    if (ask && this.failed !== headOf(params)) this.error = null;
    if (ask && !this.error && !this.wanted.some((each) => each.key === key)) this.wanted.push({ key, params: asked });
    return undefined;
  }

  /** Starts what was asked for since `forget`, the last first. */
  async pump() {
    while (this.running < AT_ONCE && this.wanted.length) {
      const { key, params } = this.wanted.shift();
      if (this.kept.has(key)) continue;
      this.running += 1;
      this.kept.set(key, {});
      this.client.ask("tile", params, { keep: false, opening: this.opening }).then(
        (tile) => {
          this.kept.set(key, { shape: tile.shape, values: tile.values });
        },
        (error) => {
          this.kept.delete(key);
          this.error = error;
          this.failed = headOf(params);
          this.wanted = [];
        },
      ).finally(() => {
        this.running -= 1;
        while (this.kept.size > KEPT) this.kept.delete(this.kept.keys().next().value);
        this.redraw();
        this.pump();
      });
    }
  }

  /** Asks for what failed once more. */
  again() {
    this.error = null;
    this.redraw();
  }

  /** What went out of sight needs not be computed. */
  forget() {
    this.wanted = [];
  }
}

/** A tile as a small canvas. */
export function pictureOf(tile, theme, ramp) {
  const name = theme + ramp;
  if (tile.pictures?.[name]) return tile.pictures[name];
  const [height, width] = tile.shape;
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const image = new ImageData(width, height);
  const colours = table(theme);
  const share = RAMPS[ramp] ?? RAMPS.root;
  for (let i = 0; i < width * height; i += 1) {
    const weight = tile.values[i];
    const [r, g, b] = colours[Math.round(255 * Math.min(1, Math.max(0, share(weight || 0))))];
    image.data.set([r, g, b, 255], 4 * i);
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  tile.pictures = { [name]: canvas };
  return canvas;
}

/**
 * Draws what is in sight: tiles of the level that fits, and coarser ones where they are not there yet.
 * @param {CanvasRenderingContext2D} context @param {Tiles} tiles
 * @param {{x: number, y: number, scale: number, width: number, height: number, qLen: number, kvLen: number, levels: number, theme: "light"|"dark", ramp: string, params: object}} sight
 * x and y are the key and query in the corner, scale is pixels for one weight.
 */
export function drawMap(context, tiles, { x, y, scale, width, height, qLen, kvLen, levels, theme, ramp, params }) {
  context.imageSmoothingEnabled = false;
  context.clearRect(0, 0, width, height);
  const fitting = Math.min(levels - 1, Math.max(0, Math.floor(-Math.log2(scale))));
  tiles.forget();
  let missing = 0;
  for (let level = Math.min(levels - 1, fitting + 3); level >= fitting; level -= 1) {
    const side = TILE * 2 ** level;
    const [firstRow, lastRow] = [Math.floor(Math.max(0, y) / side), Math.floor(Math.min(qLen - 1, y + height / scale) / side)];
    const [firstColumn, lastColumn] = [Math.floor(Math.max(0, x) / side), Math.floor(Math.min(kvLen - 1, x + width / scale) / side)];
    for (let row = firstRow; row <= lastRow; row += 1) {
      for (let column = firstColumn; column <= lastColumn; column += 1) {
        const tile = tiles.get({ ...params, level, row, column }, { ask: level === fitting });
        if (!tile) {
          missing += level === fitting ? 1 : 0;
          continue;
        }
        const picture = pictureOf(tile, theme, ramp);
        const block = 2 ** level;
        const [left, top] = [Math.round((column * side - x) * scale), Math.round((row * side - y) * scale)];
        const right = Math.round((column * side + picture.width * block - x) * scale);
        const bottom = Math.round((row * side + picture.height * block - y) * scale);
        context.drawImage(picture, left, top, right - left, bottom - top);
      }
    }
  }
  tiles.pump();
  return { level: fitting, missing };
}
