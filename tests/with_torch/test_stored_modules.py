"""Modules stored, copied and replicated: what torch does with every module."""

import copy
import io
import pickle
import threading

import pytest
import torch
from torch.testing import assert_close

import qkv
from qkv.torch import MultiHeadAttention

KINDS = {
    "plain": {},
    "no bias": {"bias": False},
    "grouped": {"num_kv_heads": 2},
    "rotated, causal": {"rope": qkv.RoPE(), "causal": True},
    "slopes": {"alibi": True},
}
ROWS = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))


def made(kind: str = "plain", **more) -> MultiHeadAttention:
    return MultiHeadAttention(32, 4, **KINDS[kind], **more)


def saved_and_loaded(thing, weights_only: bool):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def through_state(module: MultiHeadAttention, kind: str) -> MultiHeadAttention:
    other = made(kind)
    other.load_state_dict(saved_and_loaded(module.state_dict(), True), strict=True)
    return other


def from_meta(module: MultiHeadAttention, kind: str) -> MultiHeadAttention:
    other = made(kind, device="meta")
    assert other(ROWS.to("meta")).is_meta
    other.load_state_dict(module.state_dict(), assign=True)
    return other


WAYS = {
    "state": through_state,
    "meta": from_meta,
    "deepcopy": lambda module, kind: copy.deepcopy(module),
    "pickle": lambda module, kind: pickle.loads(pickle.dumps(module)),
    "save": lambda module, kind: saved_and_loaded(module, False),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_stored_module_is_the_same(kind: str, way: str) -> None:
    module = made(kind)
    again = WAYS[way](module, kind)
    assert repr(again) == repr(module)
    assert torch.equal(again(ROWS), module(ROWS))
    assert list(again.state_dict()) == list(module.state_dict())


def test_what_does_not_fit_a_state_is_named() -> None:
    module, state = made(), made().state_dict()
    state["extra"] = state.pop("q_proj.weight")
    with pytest.raises(RuntimeError, match=r'(?s)Missing.*"q_proj.weight".*Unexpected.*"extra"'):
        module.load_state_dict(state)
    found = module.load_state_dict(state, strict=False)
    assert found == (["q_proj.weight"], ["extra"])


def test_a_state_of_torch_inside_of_a_larger_module() -> None:
    """The given dictionary stays as it is, and so does what torch calls it."""
    theirs = torch.nn.Sequential(torch.nn.MultiheadAttention(32, 4, batch_first=True))
    ours = torch.nn.Sequential(made())
    state = theirs.state_dict()
    names = list(state)
    ours.load_state_dict(state, strict=True)
    assert list(state) == names
    expected, _ = theirs[0](ROWS, ROWS, ROWS, need_weights=False)
    assert_close(ours(ROWS), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_state_is_loaded_in_another_type(dtype: torch.dtype) -> None:
    module, other = made(), made().to(dtype)
    other.load_state_dict(module.state_dict())
    out = other(ROWS.to(dtype))
    assert out.dtype is dtype
    room = 4 * torch.finfo(dtype).eps if dtype is not torch.float64 else 1e-6
    assert_close(out.float(), module(ROWS), atol=room, rtol=room)


def test_data_parallel_passes_gradients_through() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module, rows = made("rotated, causal").to(device), ROWS.to(device)
    parallel = torch.nn.DataParallel(module)
    assert next(iter(parallel.state_dict())) == "module.q_proj.weight"
    found = []
    for called in (module, parallel):
        module.zero_grad()
        called(rows).square().sum().backward()
        found.append([p.grad.clone() for p in module.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_replicas_of_data_parallel_run_at_once() -> None:
    """Replicas on devices are shallow copies in threads, whose parameters are no parameters."""
    module = made("rotated, causal")
    expected = module(ROWS)

    def replica() -> torch.nn.Module:
        top = module._replicate_for_data_parallel()
        for name, part in module.named_children():
            top._modules[name] = part._replicate_for_data_parallel()
            for key, parameter in part.named_parameters():
                setattr(top._modules[name], key, parameter.clone())
        return top

    found: list[torch.Tensor] = []

    def run(copy: torch.nn.Module) -> None:
        found.extend(copy(ROWS) for _ in range(20))

    threads = [threading.Thread(target=run, args=(replica(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert all(torch.equal(out, expected) for out in found)
