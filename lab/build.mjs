// Bundles the page into the two files that the wheel carries. The same versions give the same bytes.
import { readFile } from "node:fs/promises";
import { build } from "esbuild";
import temml from "temml";

const out = new URL("../src/qkv/lab/static/", import.meta.url).pathname;
const common = { bundle: true, minify: true, charset: "utf8", legalComments: "none", logLevel: "info" };

/** LaTeX becomes MathML here, so that the page carries no typesetter. */
const formulas = {
  name: "formulas",
  setup: ({ onLoad }) => onLoad({ filter: /formulas\.json$/ }, async ({ path }) => {
    const written = Object.entries(JSON.parse(await readFile(path, "utf8")));
    // The policy of the page allows no styles in elements; what they would say are fine spaces.
    const typeset = (latex) => temml.renderToString(latex, { displayMode: true, throwOnError: true }).replace(/ (style|class)="[^"]*"/g, "");
    const set = written.map(([name, { latex, arxiv }]) => [name, { arxiv, mathml: typeset(latex) }]);
    return { contents: JSON.stringify(Object.fromEntries(set)), loader: "json" };
  }),
};

await build({
  ...common,
  plugins: [formulas],
  entryPoints: ["src/lab.js"],
  outfile: out + "lab.js",
  format: "esm",
  target: "es2022",
  banner: { js: "/* The page of qkv lab; its source is in lab/. With Preact (MIT) and htm (Apache-2.0); formulas set by Temml (MIT). */" },
});
await build({
  ...common,
  entryPoints: ["src/lab.css"],
  outfile: out + "lab.css",
  target: ["chrome120", "firefox121", "safari17"],
});
