"""What the lab answers, beside numbers that were not computed by it."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.inspection.models.model_record import ModelRecord
from qkv.inspection.weights.weight_blocks import reduced
from qkv.lab.document import export_data, to_html
from qkv.lab.messages import key_of
from qkv.lab.parameters import Parameters
from qkv.lab.session import Session
from qkv.lab.sources.source import open_file, source_of
from qkv.lab.sources.weight_map import TILE, WeightMaps, levels_of
from qkv.mechanisms.registry import mechanism_class
from qkv.samples import shared_example

GOLDENS = json.loads(
    (Path(__file__).parents[1] / "golden" / "goldens.json").read_text(encoding="utf-8")
)


def ask(session: Session, method: str, **params: Any) -> Any:
    """An answer as a page would get it."""
    return json.loads(json.dumps(session.answer(method, params).result, allow_nan=False))


def dense(q: Any, k: Any, causal: bool = False) -> Any:
    """Weights from the definition, in float64."""
    scores = q.astype(float) @ k.astype(float).swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    exp = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def test_the_language_model_is_in_a_page_whole() -> None:
    stored = (Path(qkv.__file__).parent / "samples" / "language.safetensors").read_bytes()
    assert base64.b64decode(ask(Session(), "language")["file"]) == stored
    data = export_data(Session())
    assert "language" in data["panels"]
    assert base64.b64decode(data["results"]["language"]["file"]) == stored


def test_the_scaling_curve_has_the_numbers_of_the_texts() -> None:
    points = ask(Session(), "scaling")["curve"]["points"]
    # Products of shorter rows are not the normal numbers that the texts take for them.
    for point in (point for point in points if point["d_k"] >= 64):
        expected = GOLDENS["saturation"]["unscaled"].get(str(point["d_k"]))
        if point["scaled"]:
            expected = GOLDENS["saturation"]["scaled_any_d_k"]
        if expected:
            assert point["max_weight"] == pytest.approx(expected["max_weight"], abs=0.003)
            assert point["entropy_nats"] == pytest.approx(expected["entropy_nats"], abs=0.003)


LISTINGS = {
    "scaled-dot-product": "attention",
    "self": "SelfAttention",
    "causal": "causal_attention",
    "cross": "CrossAttention",
    "multi-head": "MultiHeadAttention",
}


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("name", LISTINGS)
def test_the_code_that_is_shown_computes_what_is_shown_beside_it(library: str, name: str) -> None:
    """The code computes what the mechanism of that name does, which holds other code."""
    module = pytest.importorskip(library)
    mechanism: Any = mechanism_class(name).example()
    found = ask(Session(), "code")["listings"][name]
    scope = {"np": np, library: module}
    exec("\n".join(line for line in found[library] if line is not None), scope)
    called = scope[LISTINGS[name]]
    rows = mechanism.example_arguments()
    expected = np.asarray(mechanism(*rows))
    if isinstance(called, type):
        weights = [mechanism.weights[f"{side}_proj.weight"].T for side in "qkv"]
        more = [np.eye(4), 2] if name == "multi-head" else []
        given = [module.asarray(x) if np.ndim(x) else x for x in (*weights, *more)]
        called = called(*given)
    else:
        example = shared_example()
        rows = example.q, example.k, example.v
    out = called(*map(module.asarray, rows))
    out = out.detach().numpy() if library == "torch" else out
    np.testing.assert_allclose(out, expected, atol=1e-12)
    shown = [[float(n) for n in text.split(", ")] for text in found["values"][-1]]
    np.testing.assert_allclose(shown, expected, atol=5.1e-5)
    for line, note, shows, values in zip(
        found[library], found["note"], found["shows"], found["values"], strict=True
    ):
        assert bool(note) is (line != ""), "every line says what it does"
        assert (shows is None) is (values is None)


def test_the_rows_of_a_causal_mask_are_shown() -> None:
    found = ask(Session(), "code")["listings"]["causal"]
    line = found["shows"].index("seen")
    assert found["values"][line][2] == "1, 1, 1, 0, 0"
    assert found["values"][line + 1][1].endswith("0.0000, -inf, -inf, -inf")


def test_the_class_of_every_mechanism_can_be_read() -> None:
    known = ask(Session(), "code")["mechanisms"]
    assert set(LISTINGS) < set(known)
    for name in known:
        lines = ask(Session(), "code", mechanism=name)["lines"]
        assert lines[0] == f"class {mechanism_class(name).__name__}(" + lines[0].partition("(")[2]


def test_every_mechanism_has_sentences_a_family_and_a_formula_that_is_set() -> None:
    found = ask(Session(), "mechanisms")
    for each in found["mechanisms"]:
        assert each["family"] in found["families"], each["mechanism"]
        assert all(re.search(r"[a-z]{2}.*\.$", text) for text in each["about"]), each["about"]
        assert not any("Parameters" in text or "---" in text for text in each["about"])
    names = {each["mechanism"] for each in found["mechanisms"]}
    source = Path(__file__).parents[2] / "lab" / "src" / "panels" / "formulas.json"
    formulas = json.loads(source.read_text(encoding="utf-8"))
    assert set(formulas) == names
    assert all(re.fullmatch(r"\d{4}\.\d{4,5}", each["arxiv"]) for each in formulas.values())


@pytest.fixture(scope="module")
def model() -> Session:
    """Two layers of random rows with grouped heads, 300 tokens, one head's weights known."""
    rng = np.random.default_rng(0)
    record = ModelRecord("two layers", keep="weights")
    record.texts = ["<b>", "\x1b[31m", *("t" for _ in range(298))]
    for layer in range(2):
        q = rng.normal(size=(1, 4, 300, 8)).astype(np.float32) * 2
        k = rng.normal(size=(1, 2, 300, 8)).astype(np.float32) * 2
        record.add(q, k, qkv.Causal(), name=f"layer {layer}")
        last = dense(q[0], k[0].repeat(2, axis=0), causal=True)
    session = Session(source_of(record))
    session.exact = last  # type: ignore[attr-defined]
    return session


def test_words_and_emoji_keep_their_joiners() -> None:
    family, persian = (
        "\U0001f469\u200d\U0001f467",
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
    )
    tokens = [family, persian, "a\nb", "\u202e\u200d", "\u200d".join("x" * 60)]
    x = np.eye(5, dtype=np.float32)
    session = Session(source_of(qkv.inspect(x, x, x), tokens=tokens))
    shown = session.answer("model").result["tokens"]
    assert shown[:4] == [family, persian, r"a\nb", "\\u202e\u200d"]
    assert len(shown[4]) == 40


def test_heads_of_a_model(model: Session) -> None:
    exact = model.exact  # type: ignore[attr-defined]
    found = ask(model, "model")
    assert found["tokens"][:3] == ["<b>", "", "t"]
    layer = found["layers"][1]
    assert (layer["num_heads"], layer["num_kv_heads"], layer["levels"]) == (4, 2, 2)
    assert [head["kv_head"] for head in layer["heads"]] == [0, 0, 1, 1]
    head = ask(model, "head", layer=1, head=3, first=200, count=10)
    order = np.argsort(-exact[3, 200:210], axis=1)[:, :4]
    np.testing.assert_array_equal(head["top_keys"], order)
    entropy = -np.sum(exact * np.log(np.where(exact > 0, exact, 1)), axis=-1)
    np.testing.assert_allclose(head["entropy"], entropy[3, 200:210], atol=1e-5)
    weight = ask(model, "weight", layer=1, head=2, query=20, key=30)
    assert (weight["weight"], weight["allowed"], weight["score"]) == (0.0, False, None)
    weight = ask(model, "weight", layer=1, head=2, query=30, key=20)
    assert weight["weight"] == pytest.approx(exact[2, 30, 20], rel=1e-4)
    assert weight["scaled"] == pytest.approx(
        np.dot(weight["query_row"], weight["key_row"]) / 8**0.5
    )


def blocks(exact: Any, block: int) -> tuple[Any, Any]:
    """Maximum and mean of blocks, by a loop."""
    if block == 1:
        return exact, exact
    rows, columns = (range(0, n, block) for n in exact.shape)
    parts = [[exact[i : i + block, j : j + block] for j in columns] for i in rows]
    return (
        np.array([[part.max() for part in line] for line in parts]),
        np.array([[part.mean() for part in line] for line in parts]),
    )


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_tiles_of_a_model(model: Session, level: int, reduce: str) -> None:
    exact = model.exact[1]  # type: ignore[attr-defined]
    expected = blocks(exact, 1 << level)[reduce == "mean"]
    for row in range(2 - level):
        for column in range(2 - level):
            answer = model.answer(
                "tile",
                {"layer": 1, "head": 1, "level": level, "row": row, "column": column,
                 "reduce": reduce},
            )  # fmt: skip
            (found,) = answer.arrays
            part = expected[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
            np.testing.assert_allclose(found, part, atol=1e-6)


def record_of(q_len: int, kv_len: int, *variants: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(q_len)
    q, k = (rng.normal(size=(length, 8)).astype(np.float32) for length in (q_len, kv_len))
    record = qkv.inspect(q * 2, k, k, *variants, q_offset="end")
    scores = 2 * q.astype(float) @ k.astype(float).T / np.sqrt(8)
    if variants:
        scores = np.where(np.tri(q_len, kv_len, kv_len - q_len, dtype=bool), scores, -np.inf)
    exp = np.exp(scores - scores.max(axis=1, keepdims=True))
    return record, exp / exp.sum(axis=1, keepdims=True)


@pytest.mark.slow
def test_the_pyramid_of_an_uneven_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small base level, so that upper levels come from it."""
    monkeypatch.setattr("qkv.lab.sources.weight_map.FIRST_BASE", 1)
    monkeypatch.setattr("qkv.lab.sources.weight_map.BASE", 1 << 16)
    record, exact = record_of(700, 1111, qkv.Causal())
    maps = WeightMaps()
    for level in range(levels_of(700, 1111)):
        largest, mean = blocks(exact, 1 << level)
        most = 1e-7 if level == 0 else 2e-6
        for row in range(-(-largest.shape[0] // TILE)):
            for column in range(-(-largest.shape[1] // TILE)):
                tile = maps.tile(record.weights.replay, 0, level, row, column)
                place = (
                    slice(row * TILE, (row + 1) * TILE),
                    slice(column * TILE, (column + 1) * TILE),
                )
                np.testing.assert_allclose(tile[0], largest[place], atol=most)
                np.testing.assert_allclose(tile[1], mean[place], rtol=2e-5, atol=1e-9)


def test_a_map_keeps_a_bounded_number_of_bytes() -> None:
    record, _ = record_of(600, 600)
    maps = WeightMaps(most_bytes=1 << 20)
    for row in range(3):
        for column in range(3):
            maps.tile(record.weights.replay, 0, 0, row, column)
            assert maps.nbytes <= 1 << 20


@pytest.mark.parametrize("n", [40, 5000])
def test_no_weight_is_more_than_one(n: int) -> None:
    """Scores near 100, whose lse has a rounding of 4e-6 in float32."""
    rng = np.random.default_rng(5)
    q, k = rng.normal(size=(2, n, 4)).astype(np.float32)
    q[:, 0], k[:, 0] = 20, 10 + rng.normal(size=n).astype(np.float32) / 20
    k[7, 0] = 13
    exact = dense(q[:40], k)
    assert np.log(np.exp(q[:40].astype(float) @ k.T / 2).sum(axis=1)).min() > 90
    session = Session(source_of(qkv.inspect(q, k, k)))
    for level in range(levels_of(n, n)):
        tile = session.answer("tile", {"layer": 0, "head": 0, "level": level}).arrays[0]
        assert tile.max() <= 1
    for query in (0, 11, 39):
        found = ask(session, "weight", layer=0, head=0, query=query, key=7)
        assert found["weight"] == pytest.approx(exact[query, 7], abs=6e-7)
    head = ask(session, "head", layer=0, head=0, count=40)
    np.testing.assert_allclose(head["top_weights"], -np.sort(-exact)[:, :4], atol=6e-7)


def test_a_single_bright_key_shows_at_every_level() -> None:
    q, k = np.zeros((600, 4), np.float32), np.zeros((600, 4), np.float32)
    q[417], k[123] = 8, 8
    record = qkv.inspect(q, k, k)
    maps = WeightMaps()
    for level in range(3):
        place = 0, level, 417 >> (8 + level), 123 >> (8 + level)
        largest, _ = maps.tile(record.weights.replay, *place)
        assert largest[(417 >> level) % TILE, (123 >> level) % TILE] > 0.99
    largest, mean = reduced(record.weights.replay, 0, (0, 600), (0, 600), 600)
    assert (largest[0, 0] > 0.99, mean[0, 0]) == (True, pytest.approx(1 / 600, rel=1e-5))


def test_an_export_answers_from_its_data(model: Session) -> None:
    data = export_data(model)
    assert data["host"] == "export"
    json.dumps(data, allow_nan=False)
    assert data["results"]["model"]["can_intervene"] is False
    place = {"layer": 1, "head": 2}
    first = {**place, "first": 0, "count": 512}
    assert key_of("head", place) in data["results"]
    assert key_of("head", first) not in data["results"]
    small, exact = record_of(40, 40)
    found = export_data(Session(source_of(small)))["results"]
    tile = found[
        key_of("tile", {"layer": 0, "head": 0, "level": 0, "row": 0, "column": 0, "reduce": "max"})
    ]
    (buffer,) = tile["buffers"]
    array = np.frombuffer(base64.b64decode(buffer["base64"]), "<f4").reshape(buffer["shape"])
    np.testing.assert_allclose(array, exact, atol=1e-7)


def test_files_of_one_page_ask_for_nothing() -> None:
    example = shared_example()
    hostile = ["</script><img src=x onerror=alert(1)>", "\u2028", "<!--", "&amp;", "x"]
    trace = qkv.explain(example.q, example.k, example.v, tokens=hostile)
    record = qkv.inspect(example.q, example.k, example.v)
    models = ModelRecord(hostile[0], keep="weights")
    models.texts = hostile
    models.add(example.q[None], example.k[None], name="<b>")
    for page in (trace.to_html(), record.to_html(hostile), models.to_html(), to_html()):
        policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
        assert policy is not None
        assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
        assert "connect-src" not in policy[1]
        assert "unsafe" not in policy[1]
        assert "<img" not in page
        data = page.partition('id="qkv-data">')[2].partition("</script>")[0]
        assert json.loads(data)["host"] == "export"
        assert not re.search(
            r'(src|href)="(?!data:)', page.replace(data, "").partition("<style")[0]
        )
    shown = json.loads(trace.to_html().partition('id="qkv-data">')[2].partition("</script>")[0])
    given = shown["results"]["example"]["examples"][0]
    assert (given["name"], given["trace"]) == ("trace", trace.to_dict())


def test_a_saved_record_opens(tmp_path: Path) -> None:
    record = ModelRecord("saved")
    x = np.eye(4, dtype=np.float32)[None]
    record.add(x, x, name="layer 0")
    record.save(tmp_path / "r.safetensors")
    session = Session(open_file(tmp_path / "r.safetensors"))
    assert ask(session, "model")["model"] == "saved"
    with pytest.raises(qkv.ArgumentError, match="kept no query and key"):
        session.answer("tile", {"layer": 0, "head": 0})


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(qkv.ArgumentError, match="cannot show dict"):
        to_html({})


def test_halves_of_characters_are_replaced() -> None:
    """JSON may hold unpaired surrogates, which UTF-8 may not."""
    assert Parameters({"text": "x\ud800"}).text("text") == "x\ufffd"


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 3), (3, 0)])
def test_a_trace_without_rows_is_refused(q_len: int, kv_len: int) -> None:
    query, key = np.zeros((q_len, 4)), np.zeros((kv_len, 4))
    with pytest.raises(qkv.ArgumentError, match="no row to show"):
        to_html(qkv.explain(query, key, key))
