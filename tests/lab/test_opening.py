"""What the panel Inspect shows: a sample where nothing was opened, and what the reader chooses."""

from __future__ import annotations

import json
from dataclasses import replace
from threading import Thread
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.cli import main
from qkv.errors import QkvError
from qkv.files import Arrays
from qkv.lab.session import Session
from qkv.lab.small_examples.small_methods import SmallMethods
from qkv.lab.sources.source import open_arrays, source_of
from qkv.samples import language_model, real_sample, tiny_model


def ask(session: Session, method: str, **params: Any) -> Any:
    return json.loads(json.dumps(session.answer(method, params).result, allow_nan=False))


def test_without_a_file_the_sample_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session()
    model = ask(session, "model")
    assert model["tokens"] == list(real_sample().tokens)
    assert session.data("server")["view"] == {}
    assert "inspect" in session.panels("server")
    assert "inspect" not in session.panels("export")
    # The command's next step is the same head and query; the weights are from the definition.
    assert main(["inspect"]) == 0
    place = model["notable"]
    assert f"--query {place['query']} --head {place['head']}" in capsys.readouterr().out
    sample = real_sample()
    q, k = sample.q[place["head"]].astype(float), sample.k[place["head"]].astype(float)
    scores = q[place["query"]] @ k.T / np.sqrt(q.shape[-1])
    assert place["kkey"] == scores.argmax()


def test_another_source_is_chosen_in_the_page() -> None:
    x = np.random.default_rng(0).normal(size=(5, 3))
    session = Session(source_of(qkv.inspect(x, x, x), list("abcde")))
    others = [each["what"] for each in ask(session, "model")["others"]]
    assert others == ["given", "sample", "tiny", "language"]
    data = ask(session, "open", what="tiny")["data"]
    assert data["view"] == {"panel": "inspect"}
    model = ask(session, "model")
    assert (model["model"], model["can_read"], model["can_intervene"]) == ("tiny", True, True)
    head = model["layers"][1]["heads"][model["notable"]["head"]]
    assert head["kind"] == "induction"
    ask(session, "open", what="given")
    assert ask(session, "model")["tokens"] == list("abcde")
    assert not ask(session, "model")["can_read"]
    with pytest.raises(QkvError, match="no model is open that could read"):
        session.answer("open", {"text": "another"})


def test_a_page_is_told_that_another_one_opened_something_else() -> None:
    """Never a head of something else than what the page shows."""
    session = Session()
    first = session.data("server")["shown"]
    session.answer("head", {"layer": 0, "head": 0}, about=first)
    second = ask(session, "open", what="tiny")["data"]["shown"]
    for method in ("model", "head", "thumbnails", "tile", "weight", "intervene"):
        with pytest.raises(QkvError, match="another page of this lab has opened something else"):
            session.answer(method, {}, about=first)
    session.answer("head", {"layer": 1, "head": 0}, about=second)
    assert session.answer("errata", {}, about=first).result["errata"]
    assert "shown" not in session.data("export")


def test_what_is_opened_while_a_question_is_answered_is_told_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = Session()
    heads, other = session.heads, source_of(qkv.inspect(np.eye(3), np.eye(3), np.eye(3)))

    def after_another() -> Any:
        session.open(other)
        return heads()

    shown = session.data("server")["shown"]
    monkeypatch.setattr(session, "heads", after_another)
    for head in (0, 5):  # The other one has a head 0 and no head 5.
        with pytest.raises(QkvError, match="has opened something else"):
            session.answer("head", {"layer": 0, "head": head}, about=shown)
        shown = session.data("server")["shown"]


def test_two_pages_that_open_at_once_show_all_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).normal(size=(5, 3))
    one = source_of(qkv.inspect(x, x, x), list("abcde"))
    two = replace(one, title="two")
    session, threads = Session(), []

    def while_another_opens(examples: Any) -> SmallMethods:
        monkeypatch.setattr("qkv.lab.session.SmallMethods", SmallMethods)
        threads.append(Thread(target=session.open, args=(two,)))
        threads[0].start()
        threads[0].join(0.2)
        return SmallMethods(examples)

    monkeypatch.setattr("qkv.lab.session.SmallMethods", while_another_opens)
    data = session.show(one, "server")
    assert (data["title"], data["shown"]) == (f"{one.title}: qkv lab", 2)
    threads[0].join()
    data = session.data("server")
    assert (data["title"], data["shown"]) == ("two: qkv lab", 3)


def test_the_language_model_is_opened_reads_and_is_changed() -> None:
    session = Session()
    ask(session, "open", what="language")
    assert ask(session, "model")["tokens"][:3] == ["It", " is", " a"]
    text = "She was very happy"
    ask(session, "open", text=text)
    model = ask(session, "model")
    assert "".join(model["tokens"]) == text
    assert [len(layer["heads"]) for layer in model["layers"]] == [4] * 4
    own = language_model()
    ids = own.encode(text)
    off: dict[tuple[int, int], str] = {(1, 1): "off"}
    answer = ask(session, "intervene", changes=[{"layer": 1, "head": 1, "what": "off"}])
    for side, changes in (("before", {}), ("after", off)):
        assert answer[side]["loss"] == pytest.approx(own.loss(ids, changes).mean())
        p = own.next_probabilities(ids, changes=changes)
        best = np.argsort(-p)[:5]
        assert [each["token"] for each in answer[side]["prediction"]] == own.tokens(best.tolist())


def test_heads_of_arrays_that_read_the_next_token_have_a_kind() -> None:
    place = 9 * np.eye(12)
    ahead = np.stack([np.roll(place, 1, axis=1), place])
    key = np.stack([np.eye(12)] * 2)
    model = ask(Session(source_of(qkv.inspect(ahead, key, key))), "model")
    heads = model["layers"][0]["heads"]
    assert [head["kind"] for head in heads] == ["next", "own"]
    # From the definition: the last query has no next token.
    scores = np.roll(place, 1, axis=1) / np.sqrt(12)
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    assert heads[0]["next"] == pytest.approx(np.diagonal(weights, 1).mean(), abs=1e-6)
    assert model["layers"][0]["counted"]["next"] == 11
    assert model["meanings"]["next"] == "the token after"
    causal = ask(Session(source_of(qkv.inspect(ahead, key, key, qkv.Causal()))), "model")
    assert "next" not in causal["scores"]


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)], ids=["heads alone", "batch", "two"])
def test_the_share_of_learned_sinks_is_that_of_each_head(leading: tuple[int, ...]) -> None:
    query, key, value = np.random.default_rng(0).normal(size=(3, *leading, 2, 6, 4))
    sinks = np.array([-2.0, 3.0])
    record = qkv.inspect(query, key, value, qkv.Sinks(sinks))
    heads = ask(Session(source_of(record)), "model")["layers"][0]["heads"]
    of_row_0 = query.reshape(-1, 2, 6, 4)[0] @ key.reshape(-1, 2, 6, 4)[0].mT / 2
    exp, learned = np.exp(of_row_0), np.exp(sinks)[:, None]
    shares = (exp[:, :, 0] + learned) / (exp.sum(axis=2) + learned)
    assert [head["sink"] for head in heads] == pytest.approx(shares.mean(axis=1), abs=1e-6)


def test_keys_at_a_distance_are_named_only_where_queries_are_placed() -> None:
    rng = np.random.default_rng(2)
    query, key = rng.normal(size=(2, 4)), rng.normal(size=(6, 4))

    def opened(*variants: Any, **options: Any) -> Any:
        source = open_arrays(Arrays(query, key, key, None, {}), "a", *variants, **options)
        return ask(Session(source), "model")

    model = opened()
    assert model["scores"] == ["entropy", "max_weight", "sink"]
    assert model["about"].startswith("Where 2 queries stand among 6 keys is not said")
    exp = np.exp(query @ key.T / 2)
    own = [exp[i, 4 + i] / exp[i].sum() for i in (0, 1)]
    for placed in (opened(q_offset="end"), opened(q_offset=4)):
        assert placed["layers"][0]["heads"][0]["own"] == pytest.approx(np.mean(own))
        assert not placed["about"]
    assert "own" in opened(qkv.Causal("end"))["scores"]


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4)], ids=["no batch row", "no head"])
def test_a_record_without_heads_is_refused(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape)
    with pytest.raises(qkv.ArgumentError, match="there is no head to show"):
        qkv.inspect(x, x, x).to_html()


SENTENCES = (
    "Elizabeth could not help smiling at her",
    "She was present at the present moment, and the moment was pleasant",
    "A man and a woman, a man and a dog, a man and a horse went over the hill to the sea",
    "yes yes yes no",
    "The present moment is pleasant, and so was the present of a friend",
    "He went",
)


@pytest.mark.parametrize("name", ["language", "tiny"])
@pytest.mark.parametrize("text", SENTENCES)
def test_a_sentence_opens_where_its_picture_shows_what_the_badge_says(text: str, name: str) -> None:
    session = Session()
    ask(session, "open", what=name)
    ask(session, "open", text=text)
    model = ask(session, "model")
    place = model["notable"]
    layer, head, query, key = (place[each] for each in ("layer", "head", "query", "kkey"))
    kind = model["layers"][layer]["heads"][head]["kind"]
    tile = session.answer("tile", {"layer": layer, "head": head}).arrays[0]
    if kind is None:  # There is no badge; the head reads what is further away.
        assert query - key >= 4
        assert tile[query, key] >= 0.2
        return
    ids = (language_model() if name == "language" else tiny_model()).encode(text)
    same = [j for j in range(query) if ids[j] == ids[query]]
    keys = {
        "induction": [j + 1 for j in same], "duplicate": same, "previous": [query - 1],
        "own": [query], "sink": [0],
    }[kind]  # fmt: skip
    assert key in keys
    assert tile[query, keys].sum() >= 0.4


def test_a_text_of_the_reader_changes_everything() -> None:
    session = Session()
    session.answer("open", {"what": "tiny"})
    text = "the cat sat. the cat sat."
    data = ask(session, "open", text=text, host="widget")["data"]
    assert data["host"] == "widget"
    assert "".join(ask(session, "model")["tokens"]) == text
    assert (data["view"]["text"], data["view"]["sentence"]) == (text, text)
    _, (query, key, _, _) = tiny_model().attention_inputs(tiny_model().encode(text))
    scores = query[2].astype(float) @ key[2].astype(float).T / np.sqrt(query.shape[-1])
    exp = np.exp(np.where(np.tri(len(text), dtype=bool), scores - scores.max(), -np.inf))
    weights = exp / exp.sum(axis=1, keepdims=True)
    tile = session.answer(
        "tile", {"layer": 1, "head": 2, "reduce": "max", "level": 0, "row": 0, "column": 0}
    )
    np.testing.assert_allclose(tile.arrays[0], weights, atol=1e-5)
    off = [{"layer": 1, "head": 2, "what": "off"}]
    assert len(ask(session, "intervene", changes=off)["tokens"]) == len(text)
    with pytest.raises(QkvError, match="the text is empty"):
        session.answer("open", {"text": " "})
