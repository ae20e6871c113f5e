"""The text of a model's record: which kind of head each head is, as a map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from qkv.inspection.heads.head_scores import KINDS, LETTERS, MEANINGS, THRESHOLD
from qkv.inspection.heads.score_rows import SCORES
from qkv.inspection.rendering.counts import counted, words_of_tokens
from qkv.inspection.summaries.heads_text import CAUTION
from qkv.inspection.summaries.terminal import Page

if TYPE_CHECKING:
    from qkv.inspection.heads.head_table import HeadTable
    from qkv.inspection.models.layer_record import LayerRecord

__all__ = ["beside_threshold", "summary_of_model"]

_STYLES = {
    "induction": "bold black on magenta",
    "duplicate": "bold black on blue",
    "previous": "bold black on green",
    "own": "bold black on cyan",
    "sink": "bold black on yellow",
}


def summary_of_model(
    model: str,
    tokens: Any,
    notes: Sequence[str],
    layers: Sequence[LayerRecord],
    table: HeadTable,
    written: str,
) -> str:
    """A map of the heads of a model, and what the letters in it stand for.

    Parameters
    ----------
    model : str
        Its name.
    tokens : array (batch, length) or None
    notes : sequence of str
        Sentences about the text.
    layers : sequence of LayerRecord
    table : HeadTable
        One row for each head.
    written : str
        A line to end with.
    """
    page = Page()
    number = 1 + max((row["layer"] for row in table), default=-1)
    sizes = [page.token(model, 200), counted(number, "layer"), counted(len(table), "head")]
    parts: list[Any] = [Text(", ".join([*sizes, words_of_tokens(tokens)]))]
    parts += [Text(page.token(note, 500), style="bold") for note in notes]
    parts.append(Text())
    parts += _map(page, number, table)
    parts += [Text(), _legend(page, layers, table), Text()]
    meaning = (
        f"A head is of a kind if its mean weight is {THRESHOLD} or more over those queries that "
        "have such a key; the last column counts them. A head of several kinds counts in the row "
        f"of each, and has the letter of the largest, {LETTERS['sink']} only if it has no other."
    )
    parts.append(Text(meaning, style="dim"))
    if written:
        parts.append(Text(written, no_wrap=True))
    parts.append(Text(CAUTION, style="dim"))
    return page.render(*parts)


def _map(page: Page, number: int, table: HeadTable) -> Iterator[Text]:
    """One line for each layer, one letter for each head."""
    widest = 1 + max((row["head"] for row in table), default=-1)
    label = len(f"layer {number - 1}") + 2
    gap = " " if label + 2 * widest <= page.width else ""
    column = len(gap + "x")
    # The smallest step between numbered heads at which a space stays between the numbers.
    every = next(n for n in (1, 2, 4, 8, 16) if n * column > len(str(widest - 1)))
    numbers = "".join(str(head).ljust(every * column) for head in range(0, widest, every))
    yield Text("head".ljust(label) + numbers.rstrip(), style="dim", no_wrap=True)
    for layer in range(number):
        line = Text(f"layer {layer}".ljust(label), no_wrap=True)
        for row in (row for row in table if row["layer"] == layer):
            line.append(*_letter(page, row["kind"]))
            line.append(gap)
        yield line


def beside_threshold(weight: float) -> str:
    """Two digits, and more where they would say that it is, or is not, of a kind."""
    for digits in range(2, 6):
        text = f"{weight:.{digits}f}"
        if (float(text) >= THRESHOLD) == (weight >= THRESHOLD):
            break
    return text


def _letter(page: Page, kind: str | None) -> tuple[str, str]:
    if kind is None:
        return ("." if page.ascii else "·"), "dim"
    return LETTERS[kind], _STYLES[kind]


def _legend(page: Page, layers: Sequence[LayerRecord], heads: HeadTable) -> Table:
    """Each kind: its letter, where its weight goes, how many heads, and the strongest.

    A mean over few queries says little, so how many there are stands beside it.
    """
    columns = ("", "kind", "most weight on", ">heads", "strongest", ">weight", ">queries")
    table = page.table(*columns)
    at = {kind: SCORES.index(kind) for kind in KINDS}
    counts = [layer.scores.sums()[1] for layer in layers]
    for kind in KINDS:
        best = heads.best(kind)
        strongest = f"layer {best['layer']} head {best['head']}" if best else "-"
        table.add_row(
            Text(*_letter(page, kind)),
            kind,
            MEANINGS[kind],
            str(sum(row[kind] >= THRESHOLD for row in heads)),
            strongest,
            beside_threshold(best[kind]) if best else "-",
            str(counts[best["layer"]][at[kind]] if best else 0),
        )
    return table
