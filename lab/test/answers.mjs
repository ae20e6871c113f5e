// Verdicts on texts that come as JSON on standard input, for tests in Python.

import { readFileSync } from "node:fs";
import { check } from "../src/exercises/answers.js";

const { exercises, texts } = JSON.parse(readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(exercises.map((exercise) => texts.map((text) => check(exercise, text)))));
