"""Records of models of no library, which are added layer by layer, and what is printed of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import qkv
import qkv.samples
from qkv.inspection.heads.head_scores import head_scores

RNG = np.random.default_rng(5)
QUERY = RNG.normal(size=(2, 4, 12, 8))
IDS = RNG.integers(0, 5, (2, 12))


def record_of(query: Any = QUERY, **options: Any) -> qkv.ModelRecord:
    record = qkv.ModelRecord("own")
    record.add(query, query, qkv.Causal(), name="layer 0", **options)
    return record


def first_line(printed: Any) -> str:
    return str(printed).splitlines()[0]


def test_the_tokens_of_layers_are_those_of_the_record() -> None:
    ids = IDS.copy()
    record = record_of(tokens=ids)
    assert first_line(record) == "own, 1 layer, 4 heads, 12 tokens"
    ids[:] = 0
    np.testing.assert_array_equal(record.tokens, IDS)
    assert first_line(record_of()) == "own, 1 layer, 4 heads, tokens unknown"
    assert first_line(record_of(QUERY[:1], tokens=IDS[0])) == first_line(record)
    assert record_of(QUERY[:1], tokens=IDS[0]).tokens.shape == (1, 12)


@pytest.mark.parametrize("name", ["tokens", "real"])
@pytest.mark.parametrize("of", [IDS[0], IDS[:1], IDS[:, :11], IDS[..., None]])
def test_one_entry_for_each_key(name: str, of: Any) -> None:
    with pytest.raises(qkv.ShapeError, match=rf"{name} has shape .*there are \(2, 12\) key rows"):
        record_of(**{name: of})


@pytest.mark.parametrize("unknown_id", [None, 0])
def test_tokens_that_are_no_ids_are_refused(unknown_id: int | None) -> None:
    """Texts reached NumPy's comparison of types, rows of two lengths its message about shapes."""
    texts = [[f"word {n}" for n in row] for row in IDS]
    for tokens, error, fact in (
        (texts, qkv.DTypeError, "tokens has dtype .* and no ids"),
        (np.array(texts, object), qkv.DTypeError, "tokens has dtype object, and no ids"),
        ([[1, 2], [3]], qkv.ShapeError, "the rows of tokens differ in length"),
        (torch.ones(2, 12).bfloat16(), qkv.DTypeError, "tokens has dtype bfloat16, and no ids"),
    ):
        record = qkv.ModelRecord("own", unknown_id=unknown_id)
        with pytest.raises(error, match=fact):
            record.add(QUERY, QUERY, name="layer 0", tokens=tokens)
        assert (record.tokens, len(record)) == (None, 0)
        with pytest.raises(error, match=fact):
            head_scores(QUERY, QUERY, tokens=tokens)


@pytest.mark.parametrize("name", ["real", "real_queries"])
def test_texts_do_not_say_what_is_padding(name: str) -> None:
    """Each text but the empty one counted as True, also "False"; ragged rows were NumPy's error."""
    texts = [["False"] * 12, ["True"] * 12]
    for given, fact in (
        (texts, f"{name} has dtype <U5, and no truth values"),
        (np.array(texts, object), f"{name} has dtype object, and no truth values"),
        ([[True], [True, False]], f"{name}=.* cannot be read as an array"),
    ):
        with pytest.raises(qkv.DTypeError, match=fact):
            record_of(**{name: given})
    mask = torch.ones(2, 12).tril(8)
    expected = record_of(**{name: mask.numpy()}).rows()
    for dtype in (torch.int64, torch.bool, torch.bfloat16):
        assert repr(record_of(**{name: mask.to(dtype)}).rows()) == repr(expected)


def test_rows_of_a_batch_of_one_have_no_batch() -> None:
    whole, one = record_of(QUERY[:1], tokens=IDS[:1]), record_of(QUERY[0], tokens=IDS[0])
    np.testing.assert_array_equal(one[0].rows["duplicate"], whole[0].rows["duplicate"])
    assert np.isfinite(one[0].rows["duplicate"]).any()


@pytest.mark.parametrize(
    ("shapes", "fact"),
    [
        (((2, 4, 12, 8), (2, 3, 12, 8)), "num_heads=4 is not a multiple of num_kv_heads=3"),
        (((2, 4, 12, 8), (2, 4, 12, 6)), "head_dim=8 and key has head_dim=6"),
        (((2, 4, 12, 8), (3, 4, 12, 8)), "query has a batch of 2 and key one of 3"),
    ],
)
def test_sizes_that_do_not_fit_name_no_value(shapes: Any, fact: str) -> None:
    query, key = (np.zeros(shape) for shape in shapes)
    with pytest.raises(qkv.ShapeError, match=fact) as found:
        qkv.ModelRecord("own").add(query, key, name="layer 0")
    assert "value" not in str(found.value)
    assert "layout=" not in str(found.value)


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("name", ["tokens", "real", "real_queries"])
def test_heads_where_rows_should_be_are_named(name: str, tensors: bool) -> None:
    """(batch, length, heads, head_dim) is read as 12 heads of 4 rows, as the entries show."""
    rows = QUERY.swapaxes(1, 2).copy()
    made = pytest.importorskip("torch").from_numpy if tensors else np.asarray
    with pytest.raises(qkv.ShapeError) as found:
        record_of(made(rows), **{name: made(IDS)})
    said = str(found.value)
    which = "query" if name == "real_queries" else "key"
    assert f"{name} has 12 entries, and {which} 4 rows of 12 heads." in said
    assert "(batch, length, heads, head_dim), pass query.swapaxes(-3, -2)" in said
    with pytest.raises(qkv.ShapeError, match=f"{name} has 12 entries, and {which} 4 rows"):
        record_of(rows[0], **{name: IDS[0]})
    with pytest.raises(qkv.KeywordError, match="takes no layout"):
        record_of(rows, layout="blhd")
    right = record_of(rows.swapaxes(-3, -2), **{name: IDS})
    np.testing.assert_array_equal(
        right[0].rows["entropy"], record_of(**{name: IDS})[0].rows["entropy"]
    )


@pytest.mark.parametrize(
    ("given", "action"),
    [
        ({"token": IDS}, "Pass tokens= instead."),
        ({"top": 3}, "Pass only keywords from this list."),
        ({"is_causal": True}, "Write qkv.ModelRecord.add(query, key, qkv.Causal(), name=name)."),
    ],
)
def test_keywords_that_adding_a_layer_does_not_take(given: dict[str, Any], action: str) -> None:
    with pytest.raises(qkv.KeywordError) as found:
        record_of(**given)
    unknown = next(iter(given))
    assert f"ModelRecord.add() got an unexpected keyword argument '{unknown}'" in str(found.value)
    assert action in str(found.value)


@pytest.mark.parametrize("keep", [[-1], (0, -2), np.array([1, -1])])
def test_layers_are_not_kept_by_numbers_from_the_end(keep: Any) -> None:
    with pytest.raises(qkv.ArgumentError) as found:
        qkv.ModelRecord("own", keep=keep)
    assert "counts from the last layer, and which one is the last is known only" in str(found.value)
    assert "keep=[11] for the last of 12 layers" in str(found.value)


def test_a_comparison_says_how_many_tokens_there_are() -> None:
    known, unknown = record_of(tokens=IDS), record_of()
    lines = str(known.compare(unknown)).splitlines()
    assert lines[:2] == ["first   own, 12 tokens", "second  own, tokens unknown"]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["the", "cat", "sat", "."], "4 tokens: the cat sat ."),
        (["the", " cat", " sat", "."], "4 tokens: the cat sat."),
        (["c", "a", "t"], "3 tokens: cat"),
        (["cat"], "1 token: cat"),
    ],
)
def test_a_comparison_says_the_text(texts: list[str], said: str) -> None:
    record = record_of()
    record.texts = texts
    assert first_line(record.compare(record)) == f"first   own, {said}"


def test_differences_that_are_rounded_to_nothing() -> None:
    first, second = record_of(), record_of(QUERY * (1 + 1e-7))
    comparison = first.compare(second)
    assert any(-5e-4 < row["entropy"] < 0 for row in comparison.rows())
    assert "-0.000" not in str(comparison)
    assert "-0.000" not in repr(comparison.rows())


def test_one_is_no_plural() -> None:
    record = qkv.samples.tiny_model().inspect("a")
    assert first_line(record) == "tiny, 2 layers, 8 heads, 1 token"
    x = np.eye(1)
    one = qkv.ModelRecord("own")
    one.add(x[None], x[None], name="layer 0", tokens=[3])
    assert repr(one) == "ModelRecord('own', 1 layer, 1 head)"
    assert repr(one[0]) == "LayerRecord(0, 'layer 0', 1 head, 1 x 1 query, 1 key)"
    assert first_line(one) == "own, 1 layer, 1 head, 1 token"
    assert first_line(qkv.inspect(x, x, x)) == "1 head, 1 token, head_dim 1"
    assert repr(one.compare(one)) == "HeadComparison('own' and 'own', 1 layer, 1 head)"
    assert "1 head, 1 query, 1 key, head_dim 1" in str(qkv.explain(x, x, x))


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 0, 3, 4)])
def test_a_page_of_no_head_is_refused(shape: tuple[int, ...]) -> None:
    """Reading row 0 of nothing was an IndexError."""
    record = record_of(np.zeros(shape))
    with pytest.raises(qkv.ArgumentError, match="there is no head of layer 0 to show"):
        record.to_html()
