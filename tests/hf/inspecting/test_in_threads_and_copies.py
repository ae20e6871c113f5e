"""What a `with` does to a model ends with it, and is not seen by copies and other threads."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

REASON = "inspecting models of transformers needs it: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from families import SIZES, VOCABULARY  # noqa: E402

import qkv  # noqa: E402
import qkv.hf  # noqa: E402
from qkv.hf.attention import change_outputs  # noqa: E402

IDS = torch.randint(3, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(3))
OTHERS = IDS[:, :5].flip(1)


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


def logits(model: Any, ids: Any = IDS) -> Any:
    with torch.no_grad():
        return model(ids).logits


def in_a_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def open_with(model: Any, kind: str) -> Any:
    if kind == "inspect":
        return qkv.hf.inspect(model)
    return qkv.hf.intervene(model, {(0, 1): "off"})


@pytest.mark.parametrize("first", ["inspect", "intervene"])
@pytest.mark.parametrize("second", ["inspect", "intervene"])
def test_one_thread_at_a_time_changes_a_model(first: str, second: str) -> None:
    """Two threads read each other's changes, and left the model switched for ever."""
    model = llama()
    before = model.config._attn_implementation

    opened = open_with(model, second)

    def other() -> None:
        with pytest.raises(qkv.UnsupportedError, match="another thread inspects or changes"):
            opened.__enter__()

    with open_with(model, first):
        logits(model)
        in_a_thread(other)
    with open_with(model, "intervene"), open_with(model, second):  # in one thread, both
        logits(model)
    assert model.config._attn_implementation == before
    assert "forward" not in vars(model)
    pickle.dumps(model)


def test_a_record_is_of_the_thread_that_opened_it() -> None:
    """A call of another thread was recorded in its place, or told that it was the second one."""
    model = llama()
    expected = logits(model, OTHERS)
    for order in ("before", "after"):
        with warnings.catch_warnings(), qkv.hf.inspect(model) as record:
            warnings.simplefilter("error", qkv.hf.NotUsedWarning)
            if order == "before":
                seen = in_a_thread(lambda: logits(model, OTHERS))
            logits(model)
            if order == "after":
                seen = in_a_thread(lambda: logits(model, OTHERS))
        torch.testing.assert_close(seen, expected)
        assert record.tokens.tolist() == IDS.tolist()
        assert len(record) == SIZES["num_hidden_layers"]
    with (
        pytest.raises(qkv.ArgumentError, match="by the thread that opened it"),
        qkv.hf.inspect(model),
    ):
        in_a_thread(lambda: logits(model))


@pytest.mark.parametrize("kind", ["inspect", "intervene"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_a_model_of_its_own(kind: str, copied: Callable[[Any], Any]) -> None:
    """A copy computed with the weights of the model that it was copied from."""
    model = llama()
    expected = logits(model)
    with open_with(model, kind):
        own = copied(model)
        logits(model)
    torch.testing.assert_close(logits(own), expected)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.zero_()
    assert not logits(own).any()
    torch.testing.assert_close(logits(model), expected)


def test_torch_compiles_again_after_two_threads() -> None:
    """The last of them to leave kept the compiler off."""
    models = llama(), llama()
    compiled = []
    function = torch.compile(lambda x: x + 1, backend=lambda graph, _: compiled.append(1) or graph)
    first, second = (qkv.hf.intervene(model, {(0, 1): "off"}) for model in models)
    with ThreadPoolExecutor(1) as pool:
        first.__enter__()
        pool.submit(second.__enter__).result()
        logits(models[0])
        first.__exit__(None, None, None)
        function(torch.ones(2))
        assert not compiled
        pool.submit(logits, models[1]).result()
        pool.submit(second.__exit__, None, None, None).result()
    function(torch.ones(2))
    assert compiled


def test_what_ends_in_another_thread_meanwhile_hides_nothing() -> None:
    """While a layer went through the observers, one that ended made it leave out the next."""
    model, calls = llama(), []
    expected = logits(model)
    ended: list[Any] = []

    def end(*_: Any) -> None:
        if ended:
            in_a_thread(ended.pop().close)

    def end_and_give(_: Any, output: Any) -> Any:
        end()
        return output

    qkv.hf.enable()
    model.set_attn_implementation("qkv")
    with ExitStack() as first:
        ended.append(first)
        first.enter_context(qkv.hf.observe(end))
        with qkv.hf.observe(calls.append):
            logits(model)
    assert not ended
    assert len(calls) == SIZES["num_hidden_layers"]

    with ExitStack() as first:
        ended.append(first)
        first.enter_context(change_outputs(end_and_give))
        with qkv.hf.intervene(model, {(0, 1): "off"}):
            changed = logits(model)
    with qkv.hf.intervene(model, {(0, 1): "off"}):
        torch.testing.assert_close(changed, logits(model))
    assert not torch.allclose(changed, expected)
