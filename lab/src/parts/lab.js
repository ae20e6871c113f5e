// What every part shares: html, the context, and hooks over view and client.

import { createContext, h } from "preact";
import { useContext, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import htm from "htm";
import { BUILT_IN, decode, encode } from "../examples/examples.js";
import { traceOf } from "../examples/kernel.js";
import { exampleOfJson } from "../host/numbers.js";

export { useEffect, useLayoutEffect, useMemo, useRef, useState };
export const html = htm.bind(h);
export const Lab = createContext(null);

/** @returns {{view: typeof import("../host/view.js").DEFAULTS, set: Function, client: import("../host/host.js").Client, theme: "light"|"dark", announce: (text: string) => void, keys: Map<string, Function>, kept: Map<string, any>}} */
export const useLab = () => useContext(Lab);

/** What went wrong, and a function that asks again where Python could answer. */
export const failed = ({ host }, { message, action }, again) => ({ message, action, again: host === "export" ? undefined : again });

/**
 * The result of a method of the host, undefined until it is there, or what went wrong.
 * @param {string|null} method null asks nothing
 */
export function useAsk(method, params = {}) {
  const { client } = useLab();
  const text = JSON.stringify([client.opening, method, params]);
  const [state, setState] = useState({});
  const [tries, setTries] = useState(0);
  const now = method ? client.given(method, params) : undefined;
  useEffect(() => {
    if (!method || now !== undefined) return undefined;
    let open = true;
    client.ask(method, params).then(
      (result) => open && setState({ for: text, result }),
      (error) => open && setState({ for: text, error }),
    );
    return () => { open = false; };
  }, [text, tries]);
  if (now !== undefined) return { result: now };
  if (state.for !== text) return { pending: Boolean(method) };
  const again = () => {
    setState({});
    setTries(tries + 1);
  };
  return state.error ? { error: failed(client, state.error, again) } : state;
}

/** Keys of the panel that is shown, beside those of the page. @param {Record<string, Function>} handlers */
export function useKeys(handlers) {
  const { keys } = useLab();
  // Before the next key, which may come before the next picture.
  useLayoutEffect(() => {
    Object.entries(handlers).forEach(([key, each]) => keys.set(key, each));
    return () => Object.entries(handlers).forEach(([key, each]) => {
      if (keys.get(key) === each) keys.delete(key);
    });
  });
}

/** As useState, of something that a reader typed: it is still there after another panel was shown. */
export function useKept(name, first) {
  const { kept } = useLab();
  const [value, setValue] = useState(kept.has(name) ? kept.get(name) : first);
  return [value, (next) => {
    kept.set(name, next);
    setValue(next);
  }];
}

/** The examples of the host, then those of the page that it does not have. */
export function examplesOf(client) {
  const given = (client.given("example")?.examples ?? []).map(exampleOfJson);
  return [...given, ...BUILT_IN.filter(({ name }) => !given.some((other) => other.name === name))];
}

/** The example, the options that apply to it, and its trace. */
export function useExample({ masked = true } = {}) {
  const { view, client } = useLab();
  const { ex, own, left, right, keys, scaled } = view;
  const mask = masked ? view.mask : "none";
  return useMemo(() => {
    const all = examplesOf(client);
    const edited = ex === "own" && own ? decode(own) : null;
    // A trace of Python is what its page was made for.
    const first = all.find((each) => each.trace) ?? all[0];
    const example = edited ?? all.find(({ name }) => name === ex) ?? first;
    const options = { mask, left, right, keys, scaled: scaled !== 0 };
    const fixed = Boolean(example.trace);
    const trace = fixed ? example.trace : traceOf(example, options);
    const isLost = ex === "own" && own !== "" && !edited;
    return { example, options, trace, fixed, isLost, rows: trace.heads[0].rows, name: example.name ?? "own" };
  }, [client.data, client.given("example"), ex, own, mask, left, right, keys, scaled]);
}

/** The view of an edited example. */
export const edited = (example) => ({ ex: "own", own: encode(example) });

/** An index that stays inside a length. */
export const inside = (index, length) => Math.min(Math.max(0, Math.trunc(index)), length - 1);
