// Maps from numbers to colours, even in perceived lightness: computed in OKLab, whose L is lightness.

function srgb(lightness, chroma, hue) {
  const angle = (hue * Math.PI) / 180;
  const a = chroma * Math.cos(angle);
  const b = chroma * Math.sin(angle);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((x) => {
    const bounded = Math.min(1, Math.max(0, x));
    const encoded = bounded <= 0.0031308 ? 12.92 * bounded : 1.055 * bounded ** (1 / 2.4) - 0.055;
    return Math.round(encoded * 255);
  });
}

const STEPS = 256;
const bounded = (t) => Math.min(1, Math.max(0, t));

// Lightness falls evenly from paper in the light theme and rises from it in the dark one. Blue and
// orange are told apart with every usual kind of colour blindness, and lightness alone suffices.
const RAMPS = {
  light: (t, hue) => srgb(0.975 - 0.6 * t, 0.012 + 0.13 * Math.sin(Math.min(1, t * 1.15) * Math.PI * 0.62), hue),
  dark: (t, hue) => srgb(0.24 + 0.66 * t, 0.015 + 0.115 * Math.sin(Math.min(1, t * 1.1) * Math.PI * 0.62), hue),
};
const HUES = { positive: 255, negative: 55 };

const tables = {};

/** 256 colours as [r, g, b]. @param {"light"|"dark"} theme @param {"positive"|"negative"} sign */
export function table(theme, sign = "positive") {
  return (tables[theme + sign] ??= Array.from({ length: STEPS }, (_, i) =>
    RAMPS[theme](i / (STEPS - 1), HUES[sign])));
}

const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;

/** Background and text colour for a share from 0 to 1, or -1 to 1. */
export function paint(t, theme) {
  const share = bounded(Math.abs(t));
  const colour = table(theme, t < 0 ? "negative" : "positive")[Math.round(share * (STEPS - 1))];
  const [r, g, b] = colour.map((c) => (c <= 10 ? c / 3294 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  const light = 0.2126 * r + 0.7152 * g + 0.0722 * b;
  // Black from here on, and white below, have a contrast of 4.5 or more.
  return { background: css(colour), color: light > 0.179 ? "#000000" : "#ffffff" };
}

/** The colours of a share, none where it is null or not finite. */
export const painted = (share, theme) => (Number.isFinite(share) ? paint(share, theme) : undefined);
