// A small chart of lines, in SVG.

import { html, useLab, useRef } from "./lab.js";
import { Save } from "./basics.js";
import { drawnSvg } from "../drawing/picture.js";

/** A figure whose SVG can be saved; a quiet one does not show its title. */
export function Figure({ title, quiet = false, children }) {
  const { theme } = useLab();
  const figure = useRef(null);
  return html`<figure ref=${figure}><figcaption><span class=${quiet ? "unseen" : undefined}>${title}</span> <${Save} title=${title} svg=${() => drawnSvg(figure.current.querySelector("svg"), title, theme)} /></figcaption>${children}</figure>`;
}

/**
 * @param {object} props
 * @param {string} props.title what a screen reader says
 * @param {{name: string, points: [number, number][], kind: string}[]} props.lines
 * @param {{label: string, min: number, max: number, log?: boolean, ticks: [number, string][]}} props.x
 * @param {{label: string, min: number, max: number, log?: boolean, ticks: [number, string][]}} props.y
 * @param {number} [props.at] a place on x to mark
 */
export function Chart({ title, lines, x, y, at }) {
  const [width, height, left, bottom, top, right] = [340, 210, 46, 34, 14, 12];
  const place = ({ min, max, log }, from, to) => (value) => {
    const f = log ? Math.log2 : (v) => v;
    return from + ((f(value) - f(min)) / (f(max) - f(min))) * (to - from);
  };
  const across = place(x, left, width - right);
  const down = place(y, height - bottom, top);
  return html`<svg class="chart" viewBox=${`0 0 ${width} ${height}`} role="img" aria-label=${title}>
    ${y.ticks.map(([value, text]) => html`<g key=${text}><line class="rule" x1=${left} x2=${width - right} y1=${down(value)} y2=${down(value)} />
      <text class="tick" x=${left - 6} y=${down(value) + 3.5} text-anchor="end">${text}</text></g>`)}
    ${x.ticks.map(([value, text]) => html`<text class="tick" x=${across(value)} y=${height - bottom + 15} text-anchor="middle">${text}</text>`)}
    <text class="axis" x=${(left + width - right) / 2} y=${height - 4} text-anchor="middle">${x.label}</text>
    ${at !== undefined && html`<line class="at" x1=${across(at)} x2=${across(at)} y1=${top} y2=${height - bottom} />`}
    ${lines.map(({ name, points, kind }) => html`<g key=${name} class=${`line ${kind}`}>
      <polyline points=${points.map(([a, b]) => `${across(a).toFixed(2)},${down(b).toFixed(2)}`).join(" ")} />
      ${at !== undefined && html`<circle r="4" cx=${across(at)} cy=${down(between(points, at))} />`}</g>`)}
  </svg>`;
}

/** The value of a curve between its points, straight in log2 of x. @param {[number, number][]} points */
export function between(points, x) {
  const after = points.findIndex(([a]) => a >= x);
  if (after === -1) return points[points.length - 1][1];
  const [b, bValue] = points[after];
  if (after === 0 || b === x) return bValue;
  const [a, aValue] = points[after - 1];
  return aValue + (bValue - aValue) * (Math.log2(x / a) / Math.log2(b / a));
}

/** Horizontal bars from 0 to 1. @param {{bars: {name: string, value: number, note?: any}[], kind?: string}} props */
export function Bars({ bars, kind = "", label }) {
  return html`<dl class=${`bars ${kind}`} aria-label=${label}>${bars.map(({ name, value, note }, i) => html`<div key=${i}>
    <dt>${name}</dt><dd><span class="bar" aria-hidden="true"><span style=${{ width: `${100 * value}%` }}></span></span>${note}</dd></div>`)}</dl>`;
}
