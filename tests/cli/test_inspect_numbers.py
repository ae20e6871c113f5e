"""`qkv inspect` says what the definition says: each number against a loop in float64."""

from __future__ import annotations

import base64
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from qkv.cli import main
from qkv.samples import real_sample

Weights = np.ndarray


def weights_by_definition(
    q: np.ndarray, k: np.ndarray, scale: float, start: int = 0, causal: bool = False
) -> Weights:
    """softmax(scale * q . k) over the keys that each query may see; head h reads h // group."""
    heads, q_len, _ = q.shape
    group = heads // len(k)
    weights = np.zeros((heads, q_len, k.shape[1]))
    for h in range(heads):
        for i in range(q_len):
            terms = {
                j: math.exp(scale * math.fsum(map(float, q[h, i] * k[h // group, j])))
                for j in range(k.shape[1])
                if not causal or j <= start + i
            }
            for j, term in terms.items():
                weights[h, i, j] = term / math.fsum(terms.values())
    return weights


def mass_at(weights: Weights, start: int, offset: int) -> float:
    """The weight at position + offset, over the rows of one head that have such a key."""
    q_len, kv_len = weights.shape
    places = [(i, start + i + offset) for i in range(q_len)]
    there = [weights[place] for place in places if 0 <= place[1] < kv_len]
    return math.fsum(there) / len(there)


def entropy(weights: Weights) -> float:
    terms = [-w * math.log(w) for w in weights.ravel() if w > 0]
    return math.fsum(terms) / len(weights)


def check(report: dict[str, Any], weights: Weights, start: int, top: int = 3) -> None:
    """The JSON of all heads against weights by definition."""
    assert [head["head"] for head in report["heads"]] == list(range(len(weights)))
    tokens = report["tokens"]
    for head, w in zip(report["heads"], weights, strict=True):
        assert head["entropy"] == pytest.approx(entropy(w), rel=1e-5)
        expected = {
            "first": float(w[:, 0].mean()),
            "previous": mass_at(w, start, -1),
            "own": mass_at(w, start, 0),
            "next": mass_at(w, start, 1),
        }
        assert head["mass"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
        beyond = w.copy()
        beyond[:, 0] = 0
        for name, all_weights in (("pairs", w), ("pairs_beyond_first", beyond)):
            heaviest = np.sort(all_weights.ravel())[::-1][:top]
            pairs = head[name]
            assert [p["weight"] for p in pairs] == pytest.approx(
                [x for x in heaviest if x > 0], rel=1e-4
            )
            for pair in pairs:
                i, j = pair["q_index"], pair["kv_index"]
                assert pair["weight"] == pytest.approx(all_weights[i, j], rel=1e-4)
                assert pair["kv_token"] == (tokens[j] if tokens else None)
                assert pair["q_token"] == (tokens[start + i] if tokens else None)
            places = [(p["q_index"], p["kv_index"]) for p in pairs]
            assert len(set(places)) == len(places)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["inspect", *words]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found: dict[str, Any] = json.loads(run(capsys, "--json", *words), parse_constant=refuse)
    assert (found["schema"], found["version"]) == ("qkv-inspect", 1)
    return found


@pytest.fixture(scope="module")
def sample_weights() -> Weights:
    sample = real_sample()
    return weights_by_definition(sample.q, sample.k, 32**-0.5)


@pytest.mark.slow
def test_json_of_the_sample(capsys: pytest.CaptureFixture[str], sample_weights: Weights) -> None:
    report = run_json(capsys)
    assert report["tokens"] == list(real_sample().tokens)
    assert (report["q_len"], report["kv_len"], report["head_dim"]) == (106, 106, 32)
    check(report, sample_weights, 0)


def test_table_of_the_sample(
    capsys: pytest.CaptureFixture[str], sample_weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    tokens = real_sample().tokens
    rows = {}
    for line in run(capsys).splitlines():
        found = re.match(r" +(\d+)((?: +\d\.\d\d){5})  (\S.*)", line)
        if found:
            rows[int(found[1])] = [float(x) for x in found[2].split()], found[3]
    assert sorted(rows) == list(range(12))
    for h, (numbers, text) in rows.items():
        w = sample_weights[h]
        expected = [entropy(w), w[:, 0].mean(), *(mass_at(w, 0, d) for d in (-1, 0, 1))]
        np.testing.assert_allclose(numbers, expected, atol=0.00501)
        pairs = re.findall(r"(\S+) (\d+) → (\S+) (\d+) (\d\.\d\d)", text)
        assert len(pairs) >= 2
        beyond = np.sort(w[:, 1:].ravel())[::-1]
        for rank, (q_token, i, k_token, j, weight) in enumerate(pairs):
            assert (q_token, k_token) == (tokens[int(i)], tokens[int(j)])
            assert float(weight) == pytest.approx(w[int(i), int(j)], abs=0.00501)
            assert float(weight) == pytest.approx(beyond[rank], abs=0.00501)


def test_the_summary_below_the_table_is_right(
    capsys: pytest.CaptureFixture[str], sample_weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = run(capsys)
    firsts = [w[:, 0].mean() for w in sample_weights]
    nexts = [mass_at(w, 0, 1) for w in sample_weights]
    first, following = int(np.argmax(firsts)), int(np.argmax(nexts))
    assert f"Head {first} gives {firsts[first]:.0%} of its weight to the first token." in text
    assert f"Head {following} gives {nexts[following]:.0%} of its weight to the next token" in text
    assert "to the previous token" not in text  # no head gives it half
    far = [
        np.sort([w[i, j] for i in range(106) for j in range(1, 106) if abs(i - j) >= 4])[-3:]
        for w in sample_weights
    ]
    head = int(np.argmax([weights[weights >= 0.2].sum() for weights in far]))
    assert f"Head {head} looks 4 or more tokens away: her 18 → anna 14 0.54, " in text
    assert f"Next: qkv inspect --query 18 --head {head}\n" in text
    assert "Attention is not explanation" in text


def test_one_query(capsys: pytest.CaptureFixture[str], sample_weights: Weights) -> None:
    report = run_json(capsys, "--query", "75")
    for head, w in zip(report["heads"], sample_weights[:, 75], strict=True):
        order = np.argsort(-w, kind="stable")[:8]
        assert [pair["kv_index"] for pair in head["pairs"]] == order.tolist()
        assert [pair["weight"] for pair in head["pairs"]] == pytest.approx(list(w[order]), rel=1e-4)
        assert {pair["q_index"] for pair in head["pairs"]} == {75}
        assert head["entropy"] == pytest.approx(entropy(w[None]), rel=1e-5)
    assert run_json(capsys, "--query", "-31") == report
    one = run_json(capsys, "--query", "75", "--head", "3", "--top", "2")
    assert one["heads"][0]["pairs"] == report["heads"][3]["pairs"][:2]
    text = run(capsys, "--query", "75", "--head", "3")
    assert "but [he] could" in text
    assert f" 71   policeman   {sample_weights[3, 75, 71]:.4f}   " in re.sub(" +", "   ", text)


def test_one_head_is_that_head(capsys: pytest.CaptureFixture[str]) -> None:
    whole = run_json(capsys)
    for head in ("0", "7", "-1"):
        report = run_json(capsys, "--head", head)
        assert report["heads"] == [whole["heads"][int(head)]]


@pytest.fixture
def grouped(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray], list[str]]:
    """Four query heads over two key heads, three batch rows, more keys than queries."""
    rng = np.random.default_rng(3)
    arrays = {
        "q": rng.standard_normal((3, 4, 6, 8)).astype("f4"),
        "k": rng.standard_normal((3, 2, 9, 8)).astype("f4"),
        "v": rng.standard_normal((3, 2, 9, 5)).astype("f4"),
    }
    tokens = [f"t{i}" for i in range(9)]
    save_file(arrays, tmp_path / "g", {"tokens": json.dumps(tokens)})
    return tmp_path / "g", arrays, tokens


@pytest.mark.parametrize(("report", "start"), [("end", 3), ("start", 0), ("2", 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_groups_batches_and_offsets(
    capsys: pytest.CaptureFixture[str],
    grouped: tuple[Path, dict[str, np.ndarray], list[str]],
    report: str,
    start: int,
    causal: bool,
) -> None:
    path, arrays, _ = grouped
    flags = ["--causal"] if causal else []
    for batch in range(3):
        found = run_json(
            capsys, str(path), "--q-offset", report, "--batch", str(batch), "--top", "4", *flags
        )
        assert (found["batch"], found["batch_size"], found["q_offset"]) == (batch, 3, start)
        weights = weights_by_definition(
            arrays["q"][batch], arrays["k"][batch], 8**-0.5, start, causal
        )
        check(found, weights, start, top=4)
    row = run_json(capsys, str(path), "--q-offset", report, "--query", "2", *flags)
    first = weights_by_definition(arrays["q"][0], arrays["k"][0], 8**-0.5, start, causal)
    for head, w in zip(row["heads"], first, strict=True):
        assert head["entropy"] == pytest.approx(entropy(w[2:3]), rel=1e-5, abs=1e-6)
        assert [p["q_token"] for p in head["pairs"]] == [f"t{start + 2}"] * len(head["pairs"])


def test_the_page_has_the_weights_of_the_chosen_row(
    capsys: pytest.CaptureFixture[str],
    grouped: tuple[Path, dict[str, np.ndarray], list[str]],
    tmp_path: Path,
) -> None:
    path, arrays, tokens = grouped
    page = tmp_path / "page.html"
    words = ["--q-offset", "end", "--causal", "--batch", "1", "--head", "2", "--query", "1"]
    assert run(capsys, str(path), *words, "--html", str(page)).endswith(f"Written: {page}\n")
    text = page.read_text(encoding="utf-8")
    data = json.loads(text.partition('id="qkv-data">')[2].partition("</script>")[0])
    assert data["view"] == {"panel": "inspect", "head": 2, "query": 1}
    results = data["results"]
    assert results["model"]["tokens"] == tokens
    weights = weights_by_definition(arrays["q"][1], arrays["k"][1], 8**-0.5, 3, causal=True)
    for head, w in enumerate(weights):
        found = results[f'head:{{"head":{head},"layer":0}}']
        np.testing.assert_allclose(found["top_weights"], -np.sort(-w)[:, :4], atol=1e-6)
        (tile,) = (
            value["buffers"][0]
            for name, value in results.items()
            if name.startswith(f'tile:{{"column":0,"head":{head},')
        )
        drawn = np.frombuffer(base64.b64decode(tile["base64"]), "<f4").reshape(tile["shape"])
        np.testing.assert_allclose(drawn, w, atol=1e-6)


def test_the_page_of_the_sample_says_where_it_is_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    run(capsys, "--html", str(page))
    data = json.loads(
        page.read_text(encoding="utf-8").partition('id="qkv-data">')[2].partition("</script>")[0]
    )
    sample = real_sample()
    assert sample.title in data["results"]["model"]["model"]
    assert sample.source in data["results"]["model"]["about"]
    heads = [name for name in data["results"] if name.startswith("head:")]
    assert len(heads) == len(sample.q)


def test_the_first_batch_row_is_named(
    capsys: pytest.CaptureFixture[str], grouped: tuple[Path, dict[str, np.ndarray], list[str]]
) -> None:
    assert "batch 0 of 0..2" in run(capsys, str(grouped[0]), "--q-offset", "end")


def test_heads_of_groups_alone(
    capsys: pytest.CaptureFixture[str], grouped: tuple[Path, dict[str, np.ndarray], list[str]]
) -> None:
    words = (str(grouped[0]), "--q-offset", "end")
    whole = run_json(capsys, *words)
    for head in range(4):
        report = run_json(capsys, *words, "--head", str(head))
        assert [h["head"] for h in report["heads"]] == [head]
        assert report["heads"][0]["mass"] == pytest.approx(whole["heads"][head]["mass"], rel=1e-5)


def test_a_far_key_behind_heavier_near_ones(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The scores are q, since k = I: three near keys of row 12 weigh more than the far one."""
    weights = np.full((16, 16), 1 / 16)
    weights[12] = 1e-6
    weights[12, [11, 12, 13, 4]] = [0.3, 0.26, 0.22, 0.2199]
    path = tmp_path / "a.npz"
    np.savez(path, q=np.log(weights), k=np.eye(16), v=np.eye(16))
    text = run(capsys, str(path), "--top", "1", "--scale", "1")
    assert "Head 0 looks 4 or more tokens away: 12 → 4 0.22." in text
    assert text.rstrip().splitlines()[-2].endswith(f"{path} --scale 1.0 --query 12 --head 0")


def test_layouts_and_files_agree(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    grouped: tuple[Path, dict[str, np.ndarray], list[str]],
) -> None:
    path, arrays, tokens = grouped
    turned = {name: np.ascontiguousarray(a.swapaxes(1, 2)) for name, a in arrays.items()}
    np.savez(tmp_path / "t.npz", **turned, tokens=np.array(tokens))
    words = ("--q-offset", "end", "--causal", "--batch", "1", "--scale", "0.7")
    one = run_json(capsys, str(path), *words)
    other = run_json(capsys, str(tmp_path / "t.npz"), "--layout", "blhd", *words)
    assert one["heads"] == other["heads"]
    assert one["scale"] == 0.7
    check(one, weights_by_definition(arrays["q"][1], arrays["k"][1], 0.7, 3, True), 3)


def test_two_dimensions_are_one_head(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((5, 4))
    np.savez(tmp_path / "a.npz", q=x, k=x, v=x)
    report = run_json(capsys, str(tmp_path / "a.npz"))
    check(report, weights_by_definition(x[None], x[None], 0.5), 0)
    assert report["tokens"] is None
    assert re.search(r"\d → \d 0\.\d\d", run(capsys, str(tmp_path / "a.npz")))


def test_the_page_of_the_sample_opens_where_there_is_something_to_see(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    assert "Next: qkv inspect --query 18 --head 3\n" in run(capsys, "--html", str(page))
    text = page.read_text(encoding="utf-8")
    data = json.loads(text.partition('id="qkv-data">')[2].partition("</script>")[0])
    assert data["view"] == {"panel": "inspect", "head": 3, "query": 18, "kkey": 14}
    assert data["results"]["model"]["tokens"][14] == "anna"


def test_one_token(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    x = np.ones((1, 1), "f4")
    np.savez(tmp_path / "a.npz", q=x, k=x, v=x)
    head = run_json(capsys, str(tmp_path / "a.npz"))["heads"][0]
    assert head["entropy"] == 0.0
    assert head["mass"] == {"first": 1.0, "previous": None, "own": 1.0, "next": None}
    assert head["pairs_beyond_first"] == []
    assert "Head 0 gives 100% of its weight to the first token." in run(
        capsys, str(tmp_path / "a.npz")
    )


def test_not_a_number_is_null(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    x = np.full((3, 2), np.nan, "f4")
    np.savez(tmp_path / "a.npz", q=x, k=x, v=x)
    head = run_json(capsys, str(tmp_path / "a.npz"))["heads"][0]
    assert head["entropy"] is None
    assert head["mass"]["own"] is None
    text = run(capsys, str(tmp_path / "a.npz"))
    assert "query holds NaN first at" in text.replace("\n", " ")
    assert "nan" not in text
    assert "Next:" not in text


@pytest.mark.parametrize("variant", [[], ["--lengths", "6"]], ids=["uniform", "of each row"])
def test_json_says_which_rows_are_not_finite_and_why(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, variant: list[str]
) -> None:
    q, k, v = np.random.default_rng(0).normal(size=(3, 4, 6, 8)).astype("f4")
    q[2, 3, 1] = np.inf
    k[1, 0, 5] = np.nan
    path = str(tmp_path / "a.npz")
    np.savez(path, q=q, k=k, v=v)
    data = run_json(capsys, path, *variant)
    assert [head["non_finite_rows"] for head in data["heads"]] == [[], [0, 1, 2, 3, 4, 5], [3], []]
    of_query, of_key = data["non_finite"]
    assert of_query.startswith("query holds infinity first at head 2, row 3, dim 1")
    assert of_key.startswith("key holds NaN first at head 1, row 0, dim 5")
    one = run_json(capsys, path, *variant, "--query", "3", "--head", "2")
    assert [head["non_finite_rows"] for head in one["heads"]] == [[3]]
    assert "head 2, row 3" in one["non_finite"][0]
    fine = run_json(capsys, path, *variant, "--head", "0")
    assert fine["heads"][0]["non_finite_rows"] == []


def test_more_pairs_than_there_are_take_no_longer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "a.npz"
    np.savez(path, **{n: rng.random((1, 2, 6, 8), np.float32) for n in "qkv"})
    tried = []
    monkeypatch.setattr(
        "qkv.inspection.summaries.heads_text.cell_len", lambda text: tried.append(text) or len(text)
    )
    assert main(["inspect", str(path), "--top", "36"]) == 0
    all_pairs, texts = capsys.readouterr().out, len(tried)
    tried.clear()
    assert main(["inspect", str(path), "--top", str(10**9)]) == 0
    assert capsys.readouterr().out == all_pairs.replace("--top 36", f"--top {10**9}")
    assert len(tried) == texts < 20_000
