// Lines of Python in parts: comments, strings, numbers, keywords and the names of what is defined.

const KEYWORDS = new Set(("and as assert async await break class continue def del elif else except False finally for " +
  "from global if import in is lambda None nonlocal not or pass raise return True try while with yield self").split(" "));
const PARTS = /(#.*$)|([rbf]{0,2}(?:"""|'''))|([rbf]{0,2}(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'))|(\b\d[\d_]*(?:\.\d*)?(?:e[-+]?\d+)?)|([A-Za-z_]\w*)/gi;

/** Of each line its parts, `[kind, text]`; kind is "" for what has none. */
export function pythonParts(lines) {
  let open = null;
  return lines.map((line) => {
    const parts = [];
    let at = 0;
    const add = (kind, to) => { if (to > at) parts.push([kind, line.slice(at, to)]); at = Math.max(at, to); };
    const closes = () => {
      const end = line.indexOf(open, at);
      add("text", end < 0 ? line.length : end + 3);
      if (end >= 0) open = null;
    };
    if (open) closes();
    if (open) return parts;
    PARTS.lastIndex = at;
    let before = "";
    for (let found; (found = PARTS.exec(line)); ) {
      const [all, comment, triple, text, number, word] = found;
      const kind = comment ? "comment" : text ? "text" : number ? "number" : KEYWORDS.has(word) ? "keyword" : before === "def" || before === "class" ? "name" : "";
      add("", found.index);
      if (triple) {
        open = all.slice(-3);
        const end = line.indexOf(open, found.index + all.length);
        add("text", end < 0 ? line.length : end + 3);
        if (end >= 0) open = null;
        if (open) return parts;
        PARTS.lastIndex = at;
      } else add(kind, found.index + all.length);
      before = word ?? "";
    }
    add("", line.length);
    return parts;
  });
}
