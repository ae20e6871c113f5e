// What is shown, as one flat object of strings and numbers. In a page it is the part of the address
// after #, so that a view can be sent as a link; in a notebook it is the trait `view`.

/** Of a layer, head, query or key: none was chosen, and the panel shows one that is worth seeing. */
export const UNCHOSEN = -1;

export const DEFAULTS = {
  panel: "start", ex: "", own: "", mask: "none", left: 1, right: 0, keys: 3, scaled: 1,
  digits: 4, token: 0, key: 0, stage: "weights", step: 0, dk: 64, count: 0, n: 1024, d: 64,
  block: 2, tile: 0, mech: "", mhead: 0, layer: UNCHOSEN, head: UNCHOSEN, score: "entropy", query: UNCHOSEN,
  kkey: UNCHOSEN, zoom: -99, reduce: "max", ramp: "root", x: 0, y: 0, lib: "numpy", line: 0, code: "scaled-dot-product",
  theme: "", text: "Elizabeth could not help smiling at her", temperature: 1, sentence: "He was a very pleasant young", tour: 0, off: "", llayer: 1, lhead: 1, lquery: UNCHOSEN,
};

/** Stands in an address for any page: what it leaves out is as in DEFAULTS, and not as this page opens. */
export const SHARED = "shared";

/** The view of heads that were just opened. */
export const NOTHING_CHOSEN = { layer: UNCHOSEN, head: UNCHOSEN, query: UNCHOSEN, kkey: UNCHOSEN, zoom: -99, x: 0, y: 0 };

/** The least and the largest of numbers that have no others, and those that need not be whole. */
const LIMITS = { n: [1, 1e7], d: [1, 65536], block: [1, Infinity], temperature: [0.1, 3] };
const FRACTIONS = ["temperature", "zoom", "x", "y"];

export const MASKS = ["none", "causal", "padding", "window"];
export const THEMES = ["", "light", "dark"];

/** The words of what can be no others. */
const WORDS = { mask: MASKS, theme: THEMES, reduce: ["max", "mean"], ramp: ["root", "linear"] };

const numeric = (name) => typeof DEFAULTS[name] === "number";

/**
 * @param {string} hash such as "#heatmap&mask=causal&token=2"
 * @param {typeof DEFAULTS} first what the page opens with
 */
export function parsed(hash, first = DEFAULTS) {
  const [panel, ...rest] = hash.replace(/^#/, "").split("&");
  const given = new URLSearchParams(rest.join("&"));
  const view = given.has(SHARED) ? { ...DEFAULTS, theme: first.theme } : { ...first };
  if (/^[a-z]+$/.test(panel)) view.panel = panel;
  for (const [name, value] of given) {
    if (!Object.hasOwn(DEFAULTS, name) || name === "panel" || (WORDS[name] && !WORDS[name].includes(value))) continue;
    if (!numeric(name)) view[name] = value;
    else if (name === "digits") view.digits = Number(value) > 4 ? 12 : 4; // Numbers are shown with 4 digits or 12.
    else if (Number.isFinite(Number(value))) {
      const [least, most] = LIMITS[name] ?? [-Infinity, Infinity];
      const given = FRACTIONS.includes(name) ? Number(value) : Math.trunc(Number(value));
      view[name] = Math.min(most, Math.max(least, given));
    }
  }
  return view;
}

/** The address of a view: only what is not as at first. */
export function address(view, first = DEFAULTS) {
  const said = new URLSearchParams();
  for (const [name, value] of Object.entries(view)) {
    if (name !== "panel" && name in DEFAULTS && value !== first[name]) said.set(name, String(value));
  }
  const text = said.toString();
  return `#${view.panel}${text && "&"}${text}`;
}

/** Keeps the view, tells who listens, and writes it to the address or to the trait. */
export class View {
  constructor(model, { inAddress }) {
    this.model = model;
    this.inAddress = inAddress;
    this.listeners = new Set();
    const first = this.first = { ...DEFAULTS, ...(model.get("data")?.view ?? {}) };
    this.values = inAddress ? parsed(location.hash, first) : { ...first, ...(model.get("view") ?? {}) };
    /** What the address was when a view was changed that is not written into it yet. */
    this.there = null;
    this.read = () => {
      clearTimeout(this.later);
      this.there = null;
      if (address(this.values, first) === location.hash) return;
      this.values = parsed(location.hash, first);
      this.tell();
    };
    this.follow = () => {
      const given = { ...first, ...(model.get("view") ?? {}) };
      if (address(given) === address(this.values)) return;
      this.values = given;
      this.tell();
    };
    if (inAddress) addEventListener("hashchange", this.read);
    else model.on("change:view", this.follow);
  }

  close() {
    if (this.inAddress) removeEventListener("hashchange", this.read);
    else this.model.off?.("change:view", this.follow);
  }

  /** Writes what was changed into the address. A link that was followed since then stays, which a busy page may not have read yet. */
  write() {
    clearTimeout(this.later);
    if (this.there === location.hash) history.replaceState(null, "", address(this.values, this.first));
    this.there = null;
  }

  /** @param {Partial<typeof DEFAULTS>} changes */
  set(changes) {
    // A new panel is a place to come back to; a new cell is not, and sliders make many of them, more
    // than browsers let a page write.
    const isNewPlace = this.inAddress && (changes.panel ?? this.values.panel) !== this.values.panel;
    if (isNewPlace) this.write();
    this.values = { ...this.values, ...changes };
    if (isNewPlace) history.pushState(null, "", address(this.values, this.first));
    else if (this.inAddress) {
      clearTimeout(this.later);
      this.there = location.hash;
      this.later = setTimeout(() => this.write(), 120);
    }
    const changed = Object.fromEntries(
      Object.entries(this.values).filter(([name, value]) => value !== this.first[name]));
    this.model.set("view", changed);
    this.model.save_changes();
    this.tell();
  }

  tell() {
    this.listeners.forEach((each) => each());
  }
}
