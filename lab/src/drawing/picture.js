// Pictures of the page as files: SVG that stands by itself, and PNG of it. Both look as the page does.

import { painted } from "./colours.js";
import { cut, shown, written } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const INKS = { light: ["#fbfaf6", "#1e1c19", "#625d55"], dark: ["#14151a", "#ecebe6", "#aaa79f"] };
const INLINED = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-opacity", "opacity", "font-family", "font-size", "font-weight", "text-anchor"];
const PIXELS = 2;

const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const text = (x, y, words, { size = 11, fill, anchor = "middle", weight = 400, turn = 0 }) =>
  `<text x="${x}" y="${y}" font-family="sans-serif" font-size="${size}" font-weight="${weight}" fill="${fill}" text-anchor="${anchor}"${turn ? ` transform="rotate(${turn} ${x} ${y})"` : ""}>${escaped(words)}</text>`;
const document_ = (width, height, title, theme, parts) =>
  `<svg xmlns="${SVG}" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" role="img"><title>${escaped(title)}</title><rect width="${width}" height="${height}" fill="${INKS[theme][0]}"/>${parts.join("")}</svg>`;

const longest = (names) => Math.min(18, Math.max(1, ...names.map((name) => shown(name).length)));
const label = (name) => cut(shown(name), 18);

/**
 * A matrix as coloured squares, with its numbers where there is room for them.
 * @param {{title: string, values: (number|undefined)[][], rows: string[], columns: string[], share: Function, theme: "light"|"dark"}} matrix
 */
export function matrixSvg({ title, values, rows, columns, share, theme }) {
  const [, ink, faint] = INKS[theme];
  const [high, wide] = [values.length, columns.length];
  const cell = Math.max(5, Math.min(52, 720 / Math.max(high, wide)));
  const down = Math.min(cell, 34);
  const named = cell >= 11;
  const numbered = cell >= 40;
  const turned = longest(columns) * 6.2 > cell;
  const left = named ? 14 + longest(rows) * 6.6 : 14;
  const top = 34 + (named ? (turned ? longest(columns) * 6.2 : 16) : 0);
  const parts = [text(14, 20, title, { fill: ink, size: 13, weight: 600, anchor: "start" })];
  if (named) {
    rows.forEach((name, i) => parts.push(text(left - 6, top + (i + 0.5) * down + 4, label(name), { fill: faint, anchor: "end" })));
    columns.forEach((name, j) => {
      const x = left + (j + 0.5) * cell;
      parts.push(text(turned ? x + 4 : x, top - 7, label(name), { fill: faint, anchor: turned ? "start" : "middle", turn: turned ? -90 : 0 }));
    });
  }
  values.forEach((row, i) => row.forEach((x, j) => {
    const { background, color } = painted(share(x, i, j), theme) ?? { background: "none", color: faint };
    const [x0, y0] = [left + j * cell, top + i * down];
    parts.push(`<rect x="${x0 + 0.5}" y="${y0 + 0.5}" width="${cell - 1}" height="${down - 1}" fill="${background}"${background === "none" ? ` stroke="${faint}" stroke-opacity="0.35" stroke-dasharray="2 2"` : ""}/>`);
    if (numbered && x !== undefined) parts.push(text(x0 + cell / 2, y0 + down / 2 + 4, written(x), { fill: color }));
  }));
  const width = Math.ceil(Math.max(left + wide * cell, 28 + title.length * 7.4) + 14);
  return document_(width, Math.ceil(top + high * down + 14), title, theme, parts);
}

/** What a canvas shows, with the names of its axes. */
export function canvasSvg({ title, canvas, theme, across, down }) {
  const [, ink, faint] = INKS[theme];
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const parts = [
    text(34, 20, title, { fill: ink, size: 13, weight: 600, anchor: "start" }),
    `<image x="34" y="34" width="${width}" height="${height}" href="${canvas.toDataURL("image/png")}"/>`,
    text(34 + width / 2, height + 54, across, { fill: faint }),
    text(22, 34 + height / 2, down, { fill: faint, turn: -90 }),
  ];
  return document_(Math.max(width + 48, 62 + title.length * 7.4), height + 68, title, theme, parts);
}

/** An SVG of the page with its styles written into it. @param {SVGElement} element */
export function drawnSvg(element, title, theme) {
  const copy = element.cloneNode(true);
  const originals = element.querySelectorAll("*");
  copy.querySelectorAll("*").forEach((each, i) => {
    const style = getComputedStyle(originals[i]);
    INLINED.forEach((name) => each.setAttribute(name, style.getPropertyValue(name)));
    if (style.transform !== "none") each.setAttribute("transform", style.transform);
    each.removeAttribute("class");
    each.removeAttribute("style");
  });
  const { width, height } = element.viewBox.baseVal;
  const scale = 1.6;
  const inner = new XMLSerializer().serializeToString(copy).replace(/^<svg[^>]*>|<\/svg>$/g, "");
  const caption = text(14, 22, title, { fill: INKS[theme][1], size: 13, weight: 600, anchor: "start" });
  return document_(Math.round(width * scale), Math.round(height * scale + 34), title, theme,
    [caption, `<g transform="translate(0 34) scale(${scale})">${inner}</g>`]);
}

/** The picture in pixels. @param {string} svg @returns {Promise<Blob>} */
async function pngOf(svg) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = image.naturalWidth * PIXELS;
  canvas.height = image.naturalHeight * PIXELS;
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

const fileName = (title) => title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60) || "picture";

/** Hand something to the browser as a file. @param {Blob} blob */
export function handOut(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** Hand a picture to the browser as a file. @param {"svg"|"png"} kind */
export async function save(svg, title, kind) {
  handOut(kind === "svg" ? new Blob([svg], { type: "image/svg+xml" }) : await pngOf(svg), `qkv-${fileName(title)}.${kind}`);
}
