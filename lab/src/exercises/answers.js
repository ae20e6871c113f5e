// Whether answers to exercises are right, and why not: as qkv.exercises.check says it, with the numbers
// that Python gives for each exercise.

import { softmax } from "../examples/kernel.js";
import { readings } from "./written.js";

/** An answer of another form than was asked for. */
class FormError extends Error {}

const flat = (x) => (Array.isArray(x) ? x.flat(Infinity) : [x]);
/** The lengths of nested lists, null where rows differ. */
function shape(x) {
  if (!Array.isArray(x)) return [];
  const [first, ...others] = x.map(shape);
  return first && others.every((each) => String(each) === String(first)) ? [x.length, ...first] : null;
}

/** How many numbers lists of such lengths have, as the beginning of a sentence. @param {number[]} sizes */
function inWords(sizes) {
  if (!sizes.length) return "one number is";
  if (sizes.length > 2) return `an array of shape (${sizes.join(", ")}) is`;
  const units = sizes.length > 1 ? ["row", "number"] : ["number"];
  const counts = sizes.map((count, i) => `${count} ${units[i]}${count === 1 ? "" : "s"}`);
  return `${counts.join(" of ")} ${sizes[0] === 1 ? "is" : "are"}`;
}

/** A number as Python's format(x, ".4g") writes it. */
export function general(x, digits) {
  if (x === 0) return "0";
  const [mantissa, exponent] = x.toExponential(digits - 1).split("e");
  const short = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);
  if (Number(exponent) >= -4 && Number(exponent) < digits) return short(x.toFixed(digits - 1 - Number(exponent)));
  return `${short(mantissa)}e${exponent[0]}${exponent.slice(1).padStart(2, "0")}`;
}

/** The numbers of an answer, one after another. @param {number[]} wanted lengths of nested lists */
function numbersOf(answer, wanted) {
  const asked = `${inWords(wanted)} asked for.`;
  const sizes = shape(answer);
  if (sizes === null) throw new FormError(`the rows of the answer differ in length; ${asked}`);
  const given = flat(answer);
  if (given.some((x) => typeof x !== "number")) throw new FormError(`${given.every((x) => typeof x === "boolean") ? "yes and no" : "words"} are given; ${asked}`);
  const around = Math.max(0, sizes.length - wanted.length); // Brackets around the whole answer.
  const isWanted = String(sizes.slice(around)) === String(wanted) && sizes.slice(0, around).every((size) => size === 1);
  if (!isWanted) throw new FormError(`${inWords(sizes)} given; ${asked}`);
  return given;
}

function compared({ right, mistakes, near }, answer) {
  const sizes = shape(right[0].numbers);
  const given = numbersOf(answer, sizes);
  const distances = (numbers) => flat(numbers).map((x, i) => Math.abs(given[i] - x));
  const isNear = ({ numbers }) => Math.max(...distances(numbers)) <= near;
  const found = right.find(isNear);
  if (found) return { right: true, why: found.why };
  const mistake = mistakes.find(isNear);
  if (mistake) return { right: false, why: mistake.why };
  if (!sizes.length) {
    const wanted = right[0].numbers;
    // So near, it is likely a rounded number.
    const more = Math.abs(given[0] - wanted) <= 0.01 * Math.abs(wanted) ? " by less than 1 %; write it with more digits" : "";
    return { right: false, why: `${general(given[0], 6)} is too ${given[0] < wanted ? "small" : "large"}${more}.` };
  }
  const off = distances(right[0].numbers);
  const worst = off.indexOf(Math.max(...off));
  const columns = sizes.at(-1);
  const place = sizes.length === 2 ? `row ${Math.floor(worst / columns)}, column ${worst % columns}` : `index ${worst}`;
  return { right: false, why: `${off.filter((x) => x > near).length} of ${off.length} numbers are off; the furthest is ${general(given[worst], 4)} at ${place}.` };
}

/** Exercises with many right answers, or with truth values. */
const OTHERS = {
  "003.4": (answer) => {
    const scores = numbersOf(answer, [2, 5]);
    const [high, low] = [scores.slice(0, 5), scores.slice(5)].map((row) => softmax(row).entropy);
    const highest = 0.99 * Math.log(5);
    const said = `the entropies are ${high.toFixed(3)} and ${low.toFixed(3)} nats`;
    if (high < highest) return { right: false, why: `${said}; ${low >= highest ? "the rows are in the other order." : "the first must be at least 0.99 log(5) = 1.593: nearly equal scores give it."}` };
    if (low >= 0.01) return { right: false, why: `${said}; the second must be below 0.01: one far larger score gives it.` };
    return { right: true, why: `${said}: equal scores spread, one far above the others chooses.` };
  },
  "003.5": (answer) => {
    if (!Array.isArray(answer) || answer.length !== 2 || answer.some((each) => typeof each !== "boolean")) {
      throw new FormError("two of yes and no are asked for, for the scores and then for the weights; in Python True and False.");
    }
    const [scores, weights] = answer;
    if (!scores) return { right: false, why: "with W_Q = W_K, q_i . k_j = q_i . q_j = q_j . k_i: symmetric." };
    if (weights) return { right: false, why: "each row is divided by its own sum, and the sums differ: not symmetric." };
    return { right: true, why: "q_i . q_j is symmetric; each row of weights is divided by its own sum." };
  },
};

/**
 * Of what a text may mean, what is right, or has the form that is asked for. A text that cannot be
 * read, or has another form, is not checked: it may be meant as a right answer.
 * @param {{name: string, numbers: object|null}} exercise @param {string} text
 * @returns {{right: boolean, why: string, checked: boolean}}
 */
export function check({ name, numbers }, text) {
  const formed = [];
  const others = [];
  const unchecked = ({ message }) => ({ right: false, why: message, checked: false });
  let meanings;
  try {
    meanings = readings(text, numbers?.letters, numbers?.before);
  } catch (error) {
    return unchecked(error);
  }
  for (const each of meanings) {
    try {
      formed.push({ ...(numbers ? compared(numbers, each) : OTHERS[name](each)), checked: true });
    } catch (error) {
      if (!(error instanceof FormError)) throw error;
      others.push(unchecked(error));
    }
  }
  return formed.find(({ right }) => right) ?? [...formed, ...others][0];
}
