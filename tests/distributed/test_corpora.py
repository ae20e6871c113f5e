"""Heads of a model over many texts: the same numbers for any number of ranks, and after a kill."""

from __future__ import annotations

import math
import os
import re
import runpy
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qkv.inspection.heads.head_scores import SCORES
from qkv.inspection.models.corpus import CorpusRecord, quantile
from tests.distributed.ranks import LIMIT, Ranks

TEXTS = 7


def model() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=11, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaModel(config).eval()


def texts() -> list[Any]:
    """Texts of several lengths; text 3 is a batch with padding, text 5 has no repeated token."""
    generator = torch.Generator().manual_seed(1)
    found: list[Any] = [
        torch.randint(1, 11, (1, 9 + 3 * n), generator=generator) for n in range(TEXTS)
    ]
    ids = torch.randint(1, 11, (2, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    found[3] = {"input_ids": ids, "attention_mask": mask}
    found[5] = [1, 2, 3, 4, 5]
    return found


def test_dynamic_frequencies_are_those_of_each_text(tmp_path: Path) -> None:
    """transformers keeps those of the longest text so far; a fresh model reads each text alone."""
    import qkv.hf

    def fresh() -> Any:
        import transformers

        made = model()
        config = made.config.to_dict()
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
        config |= {"max_position_embeddings": 8, "rope_parameters": rope}
        other = transformers.LlamaModel(transformers.LlamaConfig(**config)).eval()
        other.load_state_dict({name: 8 * of for name, of in made.state_dict().items()})
        return other

    ids = [torch.arange(length) % 11 for length in (30, 12, 6, 20)]
    record = qkv.hf.inspect_corpus(fresh(), ids, tmp_path)
    entropies = []
    for text in ids:
        eager = fresh()
        eager.set_attn_implementation("eager")
        with torch.no_grad():
            weights = torch.stack(eager(text[None], output_attentions=True).attentions)
        entropies.append(torch.special.entr(weights.double()).sum(-1)[:, 0])
    right = torch.cat(entropies, -1).mean(-1).flatten()
    found = [row["entropy"] for row in record.rows()]
    np.testing.assert_allclose(found, right, rtol=1e-4)


def digits(record: CorpusRecord) -> list[dict[str, Any]]:
    """The table with every bit of its numbers."""
    return [
        {k: v.hex() if isinstance(v, float) else v for k, v in row.items()} for row in record.rows()
    ]


def scored(rank: int, ranks: int, folder: str, chunk: int, dies: str = "") -> Any:
    """The table of a run, and how often this rank called its model."""
    import qkv.hf

    calls, ours = 0, model()

    def watch(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == 2 and dies == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and calls == 4 and dies == "killed":
            while not Path(folder, "go on").exists():
                time.sleep(0.01)
        if rank == 1 and calls == 2 and dies == "fails":
            raise ValueError("this text is bad")

    ours.register_forward_pre_hook(watch)
    torch.distributed.barrier()  # Processes of a busy machine start at very different times.
    try:
        record = qkv.hf.inspect_corpus(
            ours, texts(), folder, chunk=chunk, timeout=15 if dies == "killed" else 60
        )
    except (qkv.QkvError, ValueError) as error:
        return f"{type(error).__name__}: {error}", calls
    return digits(record), calls


@pytest.mark.slow
def test_the_same_bits_for_any_number_of_ranks(group: Any, tmp_path: Path) -> None:
    tables = []
    for ranks, chunk in ((1, 2), (2, 1), (4, 1)):
        found = group(ranks)(scored, str(tmp_path / f"{ranks}"), chunk)
        tables += [table for table, _ in found]
        assert sum(calls for _, calls in found) == TEXTS
    assert all(table == tables[0] for table in tables)
    assert len(tables[0]) == 8


def test_numbers_are_those_of_the_definition(tmp_path: Path) -> None:
    """Means over the queries of all texts; intervals from deviations of each text, in a loop."""
    import qkv.hf

    ours = model()
    corpus = qkv.hf.inspect_corpus(ours, texts(), tmp_path, chunk=3)
    records = []
    for text in texts():
        given = (
            text if isinstance(text, dict) else {"input_ids": torch.as_tensor(text).reshape(1, -1)}
        )
        with torch.no_grad(), qkv.hf.inspect(ours) as record:
            ours(**given)
        records.append(record)
    for row in corpus.rows():
        for score in SCORES:
            of_texts = []
            for record in records:
                scores = record[row["layer"]].scores
                rows, counted = scores.rows[score][:, row["head"]], scores.counted[score]
                of_texts.append([float(x) for x in rows[counted]])
            flat = [x for text in of_texts for x in text]
            if score == "max_logit":
                assert row[score] == max(flat)
                continue
            mean = math.fsum(flat) / len(flat)
            assert row[score] == pytest.approx(mean, rel=1e-12)
            used = [text for text in of_texts if text]
            squares = math.fsum((math.fsum(t) - mean * len(t)) ** 2 for t in used)
            error = math.sqrt(len(used) / (len(used) - 1) * squares) / len(flat)
            factor = {7: 2.446912, 6: 2.570582}[
                len(used)
            ]  # From a table of Student's distribution.
            assert row[f"{score}_within"] == pytest.approx(factor * error, rel=1e-6, abs=1e-12)
            low, high = corpus.interval(score)[row["layer"]][:, row["head"]]
            assert high - low == pytest.approx(2 * factor * error, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("confidence", "degrees", "right"),
    [(0.9, 1, 6.313752), (0.95, 1, 12.706205), (0.95, 2, 4.302653), (0.99, 10, 3.169273),
     (0.95, 120, 1.979930), (0.95, 10**7, 1.959964)],
)  # fmt: skip
def test_quantiles_are_those_of_the_tables(confidence: float, degrees: int, right: float) -> None:
    assert quantile(confidence, degrees) == pytest.approx(right, rel=2e-5)
    assert math.isnan(quantile(0.95, 0))


def test_intervals_hold_the_mean_as_often_as_they_say() -> None:
    """600 corpora of texts of several lengths, each with a level of its own around 0.3."""
    from qkv.inspection.models.corpus import LayerSums

    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(600):
        corpus = []
        for length in rng.integers(5, 40, 20):
            values = 0.3 + 0.1 * rng.standard_normal() + 0.2 * rng.standard_normal(length)
            sums = np.full((len(SCORES), 1), values.sum())
            corpus.append((LayerSums("layer", sums, np.full(len(SCORES), length)),))
        low, high = CorpusRecord.of("made", lambda corpus=corpus: corpus).interval("own", 0.9)[0]
        inside += bool(low[0] <= 0.3 <= high[0])
    assert inside / 600 == pytest.approx(0.9, abs=0.03)


@pytest.mark.slow
def test_a_killed_run_goes_on(group: Any, tmp_path: Path) -> None:
    """Rank 1 is killed in its second text; rank 0 says so; one rank ends what two began."""
    (right, _), *_ = group(2)(scored, str(tmp_path / "whole"), 1)
    ranks = Ranks(2, tmp_path, ends_by_itself=False)
    try:
        ranks.begin(scored, str(tmp_path / "killed"), 1, "killed")
        ranks.processes[1].join(LIMIT)
        assert ranks.processes[1].exitcode == -signal.SIGKILL
        (tmp_path / "killed" / "go on").touch()
        ((returned, (said, calls)),) = ranks.answers([0])
    finally:
        ranks.close()
    assert returned
    assert re.search(r"rank 1 finished no chunk within 15 s", said), said
    assert calls == 4
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("texts-*")}
    assert len(files) == 5  # Four of rank 0, one of rank 1.
    time.sleep(0.01)
    ((table, again),) = group(1)(scored, str(tmp_path / "killed"), 1)
    assert again == 3  # One that was done is computed again.
    assert table == right
    assert all(path.stat().st_mtime_ns == before for path, before in files.items())


@pytest.mark.slow
def test_a_rank_that_fails_is_named_and_what_is_done_is_kept(group: Any, tmp_path: Path) -> None:
    (other, _), (own, _) = group(2)(scored, str(tmp_path), 1, "fails")
    assert own == "ValueError: this text is bad"
    assert "rank 1 could not finish its texts" in other
    assert "ValueError: this text is bad" in other
    found = group(2)(scored, str(tmp_path), 1)
    assert [calls for _, calls in found] == [2, 1]  # Rank 0 computes one that was done again.
    assert found[0][0] == found[1][0]


def differing(rank: int, ranks: int, folder: str, what: str) -> str:
    import qkv.hf

    ours, given, keywords = model(), texts(), {}
    match what:
        case "number of texts":
            given = given[: TEXTS - rank]
        case "another model" if rank:
            ours.embed_tokens.weight.data[0, 0] += 1
        case "training" if rank:
            ours.train()
        case "another folder" if rank:
            folder += "/elsewhere"
    try:
        qkv.hf.inspect_corpus(ours, given, folder, timeout=60, **keywords)
    except qkv.QkvError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("number of texts", "texts differs between ranks"),
        ("another model", "parameters differs between ranks"),
        ("training", "is in training mode"),
        ("another folder", "rank 1 does not see what rank 0 wrote"),
    ],
)
def test_ranks_that_differ_compute_nothing(
    group: Any, tmp_path: Path, what: str, words: str
) -> None:
    for said in group(2)(differing, str(tmp_path), what):
        assert re.search(words, said), said
    assert not list(tmp_path.rglob("texts-*"))


def test_ids_in_an_array_with_negative_strides(tmp_path: Path) -> None:
    import qkv.hf

    backwards = [text.numpy()[..., ::-1].copy()[..., ::-1] for text in texts()[:2]]
    found = qkv.hf.inspect_corpus(model(), backwards, tmp_path / "arrays")
    assert found.rows() == qkv.hf.inspect_corpus(model(), texts()[:2], tmp_path / "tensors").rows()


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    import qkv.hf

    ours = model()
    qkv.hf.inspect_corpus(ours, texts(), tmp_path)
    changed = texts()
    changed[0] = changed[0] + 0
    changed[0][0, 2] = 1 + changed[0][0, 2] % 10
    with pytest.raises(qkv.FileError, match="text 0 is another one"):
        qkv.hf.inspect_corpus(ours, changed, tmp_path)
    with pytest.raises(qkv.FileError, match="chunk differs"):
        qkv.hf.inspect_corpus(ours, texts(), tmp_path, chunk=2)
    for place in range(0, ours.layers[0].self_attn.o_proj.weight.numel(), 37):
        other = model()
        other.layers[0].self_attn.o_proj.weight.data.view(-1)[place] += 1
        with pytest.raises(qkv.FileError, match="parameters differs"):
            qkv.hf.inspect_corpus(other, texts(), tmp_path)
    with qkv.hf.intervene(ours, {(0, 1): "off"}), pytest.raises(qkv.FileError, match="scores of"):
        qkv.hf.inspect_corpus(ours, texts(), tmp_path)
    qkv.hf.inspect_corpus(ours, texts(), tmp_path / "chunks", chunk=3)
    changed = texts()
    changed[1] = changed[1].flip(1)
    with pytest.raises(qkv.FileError, match="text 1 is another one"):
        qkv.hf.inspect_corpus(ours, changed, tmp_path / "chunks", chunk=3)
    next(tmp_path.glob("texts-*")).write_bytes(b"nothing")
    with pytest.raises(qkv.FileError, match="is not a chunk of a corpus"):
        qkv.hf.inspect_corpus(model(), texts(), tmp_path)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32])
def test_ids_of_every_integer_type(tmp_path: Path, dtype: type) -> None:
    import qkv.hf

    ids = np.array([1, 2, 3, 1, 2])
    right = digits(qkv.hf.inspect_corpus(model(), [torch.from_numpy(ids)], tmp_path / "int64"))
    for n, text in enumerate(
        (ids.astype(dtype), {"input_ids": torch.from_numpy(ids.astype(dtype)[None])})
    ):
        assert digits(qkv.hf.inspect_corpus(model(), [text], tmp_path / f"{n}")) == right


@pytest.mark.filterwarnings("ignore:the text has 12 tokens")
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 2,
         "long_factor": [2.0] * 2, "original_max_position_embeddings": 4},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_frequencies_that_change_are_no_other_model(tmp_path: Path, rope: dict[str, Any]) -> None:
    """The model goes on where it was in one process, after a text of another length."""
    import qkv.hf

    ours = model()
    facts = {**ours.config.to_dict(), "max_position_embeddings": 8}
    facts["rope_parameters"] = {"rope_theta": 10000.0, **rope}
    ours = type(ours)(type(ours.config)(**facts)).eval()
    some = [torch.arange(n)[None] % 10 + 1 for n in (12, 3, 12)]
    first = qkv.hf.inspect_corpus(ours, some, tmp_path)
    assert digits(qkv.hf.inspect_corpus(ours, some, tmp_path)) == digits(first)


def test_what_is_no_text_is_said(tmp_path: Path) -> None:
    import qkv.hf

    with pytest.raises(qkv.ArgumentError, match="there is no tokenizer"):
        qkv.hf.inspect_corpus(model(), ["words"], tmp_path / "a")
    with pytest.raises(qkv.ArgumentError, match="text 0 is a float, of no token ids"):
        qkv.hf.inspect_corpus(model(), [0.5], tmp_path / "b")
    with pytest.raises(qkv.ArgumentError, match="there is no text"):
        qkv.hf.inspect_corpus(model(), [], tmp_path / "c")
    with pytest.raises(qkv.ArgumentError, match="texts is one str of 5 characters"):
        qkv.hf.inspect_corpus(model(), "words", tmp_path / "str")
    assert not (tmp_path / "str").exists()
    for n, no_list in enumerate((iter([[1, 2]]), {"input_ids": [1, 2]}, {1, 2})):
        with pytest.raises(qkv.ArgumentError, match=r"texts is a .*, which has no length or no"):
            qkv.hf.inspect_corpus(model(), no_list, tmp_path / f"no list {n}")
    for n, flags in enumerate(([True, False], torch.tensor([True]), np.array([False, True]))):
        with pytest.raises(qkv.ArgumentError, match="of no token ids"):
            qkv.hf.inspect_corpus(model(), [flags], tmp_path / f"flags {n}")
    for n, empty in enumerate(([], torch.zeros((1, 0), dtype=torch.long))):
        with pytest.raises(qkv.ArgumentError, match="text 1 has no tokens"):
            qkv.hf.inspect_corpus(model(), [[1, 2], empty], tmp_path / f"empty {n}")

    def tokenizer(text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        assert return_tensors == "pt"
        return {"input_ids": torch.tensor([[ord(c) % 10 + 1 for c in text]])}

    found = qkv.hf.inspect_corpus(model(), ["some words"], tmp_path / "d", tokenizer=tokenizer)
    assert found.texts == 1
    assert math.isnan(found.rows()[0]["entropy_within"])


def of_the_example(_rank: int, _ranks: int, folder: str) -> Any:
    path = Path(__file__).parents[2] / "examples" / "heads_over_many_texts.py"
    record = runpy.run_path(str(path))["main"](folder, most=5)
    return record.texts, digits(record)


@pytest.mark.slow
def test_the_example_has_the_numbers_of_one_process(group: Any, tmp_path: Path) -> None:
    (alone,) = group(1)(of_the_example, str(tmp_path / "alone"))
    assert group(2)(of_the_example, str(tmp_path / "together")) == [alone, alone]
    assert alone[0] == 5
    assert len(alone[1]) == 8
