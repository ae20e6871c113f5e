"""One session of the lab: it answers the questions of a page, a widget or an export."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from threading import RLock
from typing import Any, NamedTuple

import numpy as np

from qkv.arguments.declarations import checked, shown
from qkv.errors import ArgumentError, UnsupportedError
from qkv.files.json_numbers import json_data
from qkv.inspection.rendering.tokens import printable
from qkv.lab.messages import Answer, key_of
from qkv.lab.parameters import MissingError, Parameters, StaleError
from qkv.lab.small_examples.examples import examples
from qkv.lab.small_examples.small_methods import SmallMethods
from qkv.lab.sources.heads import HeadLayer, Heads
from qkv.lab.sources.notable import notable_place
from qkv.lab.sources.shipped import sample_source, shipped_source
from qkv.lab.sources.source import Source
from qkv.lab.sources.thumbnails import queries_drawn, thumbnails
from qkv.lab.sources.weight_map import TILE, WeightMaps, levels_of
from qkv.samples.shipped_models import LANGUAGE, SHIPPED_MODELS

__all__ = ["HEAVY", "Session"]

HEAVY = frozenset(
    {"head", "intervene", "mechanisms", "model", "open", "scaling", "thumbnails", "tile"}
)
"""Methods that may take seconds; a host runs one of them at a time."""

_ABOUT_SHOWN = frozenset({"head", "intervene", "model", "thumbnails", "tile", "weight"})
"""Methods whose answers are about the model or the arrays that are shown."""

_SMALL_METHODS = (
    "example", "scaling", "mechanisms", "language", "code", "errata", "exercises",
)  # fmt: skip
"""Methods of `SmallMethods`."""

_MOST_QUERIES = 4096
_LONGEST_READ = 4096
"""The most characters of a text that is typed into the page."""
_LONGEST_SENTENCE = 200
"""The most characters of the sentence of the tour, which reads its last tokens."""


class _Shown(NamedTuple):
    """What a session shows: replaced as a whole, since other threads answer questions about it."""

    number: int
    source: Source | None
    small: SmallMethods
    maps: WeightMaps

    @classmethod
    def of(cls, source: Source | None, number: int) -> _Shown:
        own = () if source is None or source.example is None else (source.example,)
        return cls(number, source, SmallMethods((*own, *examples())), WeightMaps())


@checked
class Session:
    """Answers the methods of the lab.

    Parameters
    ----------
    source : Source, optional
        What is shown beside the examples; see `qkv.lab.open_file`.

    Examples
    --------
    >>> session = Session()
    >>> [example["name"] for example in session.answer("example").result["examples"]]
    ['shared', 'three']
    """

    def __init__(self, source: Source | None = None) -> None:
        self._lock = RLock()
        self._first = source
        self._shown = _Shown.of(source, 1)
        self._methods: dict[str, Callable[[Parameters], Any]] = {
            **{name: partial(self._small_method, name) for name in _SMALL_METHODS},
            "model": self._model,
            "head": self._head,
            "thumbnails": self._thumbnails,
            "tile": self._tile,
            "weight": self._weight,
            "intervene": self._intervene,
            "open": self._open,
        }

    def open(self, source: Source | None) -> None:
        """Show something else beside the examples; without heads, Inspect shows a sample."""
        with self._lock:
            self._shown = _Shown.of(source, self._shown.number + 1)

    def show(self, source: Source | None, host: str) -> dict[str, Any]:
        """Open something; return the data of a page that shows it."""
        with self._lock:
            self.open(source)
            return self.data(host)

    @property
    def source(self) -> Source | None:
        """What is shown beside the examples."""
        return self._shown.source

    def _small_method(self, name: str, given: Parameters) -> Any:
        return getattr(self._shown.small, name)(given)

    def answer(
        self,
        method: str,
        params: Mapping[str, Any] | None = None,
        about: int | None = None,
    ) -> Answer:
        """Answer one question.

        Parameters
        ----------
        method : str
            example, scaling, mechanisms, language, code, errata, exercises; of the model or arrays
            that are shown: model, head, thumbnails, tile, weight, intervene; open shows others.
        params : mapping, optional
            As JSON gives them.
        about : int, optional
            What the page shows, by the number `shown` of its data.

        Returns
        -------
        Answer

        Raises
        ------
        QkvError
            The method or what it names does not exist, a parameter is not what it may be, or
            something else is shown than the question is about.
        """
        if method not in self._methods:
            raise MissingError(
                f"the lab has no method {shown(method)}.",
                [("methods", ", ".join(self._methods))],
                "Use one of these.",
            )
        if method == "open":
            return Answer(self._open(Parameters(params or {}), about))
        if method not in _ABOUT_SHOWN:
            about = None
        self.require_shown(about)
        try:
            answer = self._methods[method](Parameters(params or {}))
        finally:
            # Something else may have been opened meanwhile; an error may come from that.
            self.require_shown(about)
        return answer if isinstance(answer, Answer) else Answer(answer)

    def require_shown(self, number: int | None) -> None:
        """Refuse a question of a page while another page has opened something else."""
        if number is not None and number != self._shown.number:
            raise StaleError(
                "another page of this lab has opened something else.",
                action="Load this page once more to see it.",
            )

    def results(self, *asked: tuple[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Answers to some questions, under the names by which pages look for them."""
        return {key_of(name, params): self.answer(name, params).result for name, params in asked}

    def data(self, host: str, results: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What a page is given at first.

        Parameters
        ----------
        host : "server", "widget" or "export"
        results : mapping, optional
            Answers that the page need not ask for.
        """
        now = self._shown
        return {
            **({} if host == "export" else {"shown": now.number}),
            "host": host,
            "title": _title(now.source),
            "panels": self.panels(host),
            "view": _view(now.source),
            "results": dict(results or {}),
        }

    def panels(self, host: str) -> list[str]:
        """Names of the panels; a file without a model or arrays has no panel Inspect."""
        names = [
            "start", "tour", "scaling", "pipeline", "heatmap", "count", "tiles", "mechanisms",
            "inspect", "language", "code", "errata", "exercises",
        ]  # fmt: skip
        if host == "export" and (self.source is None or self.source.heads is None):
            names.remove("inspect")
        return names

    def heads(self) -> Heads:
        """The layers of the model panel; those of a sample where nothing else has any."""
        if self.source is None or self.source.heads is None:
            heads = _sample().heads
            assert heads is not None
            return heads
        return self.source.heads

    def _model(self, given: Parameters) -> dict[str, Any]:
        heads, source = self.heads(), self.source
        summary = heads.summary(lambda layer: levels_of(layer.q_len, layer.kv_len))
        others = [("sample", _sample().title)]
        others += [(name, shipped.title) for name, shipped in SHIPPED_MODELS.items()]
        if self._first is not None and self._first.heads is not None:
            others.insert(0, ("given", self._first.title))
        return {
            **json_data(summary),
            "can_intervene": source is not None and source.intervene is not None,
            "can_read": source is not None and source.read is not None,
            "text": None if source is None else source.text,
            "notable": notable_place(heads),
            "others": [{"what": what, "title": printable(title, 200)} for what, title in others],
        }

    def _open(self, given: Parameters, about: int | None = None) -> dict[str, Any]:
        """Show something that comes with qkv, what the session began with, or another text."""
        host = given.choice("host", ("server", "widget"), "server")
        text = given.text("text", _LONGEST_READ)
        with self._lock:
            if text is not None:
                # The model that is shown reads it; all else is opened whatever is shown.
                self.require_shown(about)
                source: Source | None = self._read(text)
            else:
                made: dict[str, Callable[[], Source | None]] = {
                    "given": lambda: self._first,
                    "sample": _sample,
                    **{name: partial(shipped_source, name) for name in SHIPPED_MODELS},
                }
                source = made[given.choice("what", tuple(made), "sample")]()
            return {"data": self.show(source, host)}

    def _read(self, text: str) -> Source:
        if self.source is None or self.source.read is None:
            raise UnsupportedError(
                "no model is open that could read another text.",
                action="Choose a model that comes with qkv, or start qkv lab with --model.",
            )
        if not text.strip():
            raise ArgumentError("the text is empty.", action="Write a sentence.")
        return self.source.read(text)

    def _head(self, given: Parameters) -> dict[str, Any]:
        layer, head = self._place(given)
        first = given.integer("first", 0, max(layer.q_len - 1, 0), 0)
        count = given.integer("count", 1, _MOST_QUERIES, 512)
        stop = min(first + count, layer.q_len)
        keys, weights = layer.top(head, first, stop)
        fields = {
            "first": first,
            "count": stop - first,
            "entropy": layer.entropy()[head, first:stop],
            "top_keys": keys,
            "top_weights": weights,
        }
        result: dict[str, Any] = json_data(fields)
        return result

    def _thumbnails(self, given: Parameters) -> Answer:
        layer = self._layer(given)
        count = sum(each.num_heads for each in self.heads().layers)
        return Answer({"queries": queries_drawn(layer, count)}, (thumbnails(layer, count),))

    def _tile(self, given: Parameters) -> Answer:
        layer, head = self._place(given)
        reduce = given.choice("reduce", ("max", "mean"), "max")
        level = given.integer("level", 0, levels_of(layer.q_len, layer.kv_len) - 1, 0)
        side = TILE << level
        row = given.integer("row", 0, max(0, (layer.q_len - 1) // side), 0)
        column = given.integer("column", 0, max(0, (layer.kv_len - 1) // side), 0)
        largest, mean = self._shown.maps.tile(_replay(layer), head, level, row, column)
        return Answer({}, (np.ascontiguousarray(largest if reduce == "max" else mean),))

    def _weight(self, given: Parameters) -> dict[str, Any]:
        layer, head = self._place(given)
        replay = _replay(layer)
        i = given.integer("query", 0, layer.q_len - 1)
        j = given.integer("key", 0, layer.kv_len - 1)
        scores = replay.scores
        one_query, one_key = np.array([i]), np.array([j])
        query, key = scores.query(0, head, one_query)[0], scores.key(0, head, one_key)[0]
        with np.errstate(all="ignore"):
            raw = float(query.astype(np.float64) @ key.astype(np.float64))
            score = float(scores.tile(0, head, one_query, one_key)[0, 0])
        spec = replay.problem.spec
        lse = replay.lse.reshape(spec.batch_size, spec.num_heads, spec.q_len)
        fields = {
            "weight": float(replay.exact(0, head, one_query, one_key)[0, 0]),
            "raw": raw,
            "scaled": raw * replay.problem.operands.scale,
            "score": score,
            "allowed": not np.isneginf(score),
            "lse": float(lse[0, head, i]),
            "query_row": query,
            "key_row": key,
        }
        result: dict[str, Any] = json_data(fields)
        return result

    def _intervene(self, given: Parameters) -> dict[str, Any]:
        source = self.source
        if source is None or source.intervene is None:
            raise UnsupportedError(
                "no model is open that could be run again.",
                action="Start qkv lab with --model.",
            )
        with self._lock:
            result: dict[str, Any] = json_data(source.intervene(given))
        return result

    def _layer(self, given: Parameters) -> HeadLayer:
        heads = self.heads()
        return heads.layer(given.integer("layer", 0, max(len(heads.layers) - 1, 0)))

    def _place(self, given: Parameters) -> tuple[HeadLayer, int]:
        layer = self._layer(given)
        return layer, given.integer("head", 0, layer.num_heads - 1)


def _title(source: Source | None) -> str:
    return "qkv lab" if source is None else f"{source.title}: qkv lab"


def _view(source: Source | None) -> dict[str, str]:
    """What a page opens with: the panel Inspect, and the text that the heads have read."""
    if source is None or source.heads is None:
        return {}
    text, heads = source.text, source.heads
    if text is None and heads.title == LANGUAGE and heads.tokens is not None:
        text = "".join(heads.tokens)
    if text is None:
        return {"panel": "inspect"}
    sentence = " ".join(text.splitlines())
    return {
        "panel": "inspect",
        "text": text[-_LONGEST_READ:],
        "sentence": sentence[-_LONGEST_SENTENCE:],
    }


@cache
def _sample() -> Source:
    return sample_source()


def _replay(layer: HeadLayer) -> Any:
    if layer.replay is None:
        raise MissingError(
            f"layer {layer.index} kept no query and key to compute weights from.",
            action='Record it with keep="weights".',
        )
    return layer.replay
