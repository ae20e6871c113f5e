// Traces of problems that come as JSON on standard input, for tests in Python.

import { tilesOf, traceOf } from "../src/examples/kernel.js";

let text = "";
for await (const chunk of process.stdin) text += chunk;
const answers = JSON.parse(text).map(({ example, options, block }) => {
  const trace = traceOf(example, options);
  const { rows, value } = trace.heads[0];
  return { trace, tiles: rows.map((row) => tilesOf(row.scores, value, block)) };
});
process.stdout.write(JSON.stringify(answers, (_, x) => (x === -Infinity ? null : x)));
