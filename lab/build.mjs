// Bundles the page into the two files that the wheel carries. The same versions give the same bytes.
import { build } from "esbuild";

const out = new URL("../src/qkv/lab/static/", import.meta.url).pathname;
const common = { bundle: true, minify: true, charset: "utf8", legalComments: "none", logLevel: "info" };

await build({
  ...common,
  entryPoints: ["src/lab.js"],
  outfile: out + "lab.js",
  format: "esm",
  target: "es2022",
  banner: { js: "/* The page of qkv lab; its source is in lab/. With Preact (MIT) and htm (Apache-2.0). */" },
});
await build({
  ...common,
  entryPoints: ["src/lab.css"],
  outfile: out + "lab.css",
  target: ["chrome120", "firefox121", "safari17"],
});
