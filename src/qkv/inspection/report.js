"use strict";
document.documentElement.classList.add("scripted");

// The table of heads: a click on a column's name sorts by it, largest first, then the other way.
const table = document.querySelector(".heads");
const columns = [...table.querySelectorAll("thead th")];

function sortBy(column) {
  const falling = columns[column].getAttribute("aria-sort") !== "descending";
  const value = (row) => {
    const text = row.cells[column].textContent;
    return text === "-" ? -Infinity : Number.isNaN(Number(text)) ? text : Number(text);
  };
  const order = (a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0);
  const rows = [...table.tBodies[0].rows].sort((a, b) => (falling ? order(b, a) : order(a, b)));
  table.tBodies[0].append(...rows);
  columns.forEach((th) => th.removeAttribute("aria-sort"));
  columns[column].setAttribute("aria-sort", falling ? "descending" : "ascending");
}

columns.forEach((th, column) =>
  th.querySelector("button").addEventListener("click", () => sortBy(column)),
);

// The text: where one head looks from one token.
const data = JSON.parse(document.getElementById("data").textContent);
const words = document.getElementById("words");
const choice = document.getElementById("head");
const looks = document.getElementById("looks");
const spans = data.tokens.map((token, index) => {
  const span = document.createElement("span");
  span.textContent = token;
  span.addEventListener("click", () => show(index));
  return span;
});
words.append(...spans);
let here = 0;

function show(index) {
  here = Math.min(Math.max(index, 0), spans.length - 1);
  const head = data.heads[choice.selectedIndex];
  spans.forEach((span) => (span.className = ""));
  spans[here].className = "here";
  const seen = head.keys[here]
    .map((key, place) => [key, head.weights[here][place]])
    .filter(([key, weight]) => key >= 0 && weight >= 0.005);
  seen.forEach(([key, weight]) => {
    if (key < spans.length) spans[key].classList.add("w" + Math.min(4, 1 + Math.floor(weight * 4)));
  });
  const name = (key) => "“" + (data.tokens[key] ?? "…") + "” " + key;
  looks.textContent =
    name(here) + " looks at " + (seen.length ? "" : "nothing in particular") +
    seen.map(([key, weight]) => name(key) + ": " + weight.toFixed(2)).join(", ");
  const [top, bottom] = [words.scrollTop, words.scrollTop + words.clientHeight];
  const place = spans[here].offsetTop - words.offsetTop;
  if (place < top || place + spans[here].offsetHeight > bottom) {
    words.scrollTop = place - words.clientHeight / 2;
  }
}

if (spans.length && data.heads.length) {
  const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 };
  words.addEventListener("keydown", (event) => {
    const ends = { Home: 0, End: spans.length - 1 };
    const next = event.key in steps ? here + steps[event.key] : ends[event.key];
    if (next === undefined) return;
    event.preventDefault();
    show(next);
  });
  choice.addEventListener("change", () => show(here));
  show(spans.length - 1);
}
