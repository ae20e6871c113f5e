"""The weights of `output_attentions=True` in the hands of code that was written for tensors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

REASON = "the Hugging Face plug-in needs transformers: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
pytest.importorskip("transformers", reason=REASON)

from families import attending, inputs_of, model_of  # noqa: E402

import qkv.hf  # noqa: E402
from qkv.hf import layer_weights  # noqa: E402

qkv.hf.enable()

BOUND = 1e-10
INPUTS = inputs_of("bert")


def attentions(implementation: str) -> Any:
    with attending(model_of("bert"), implementation) as model:
        return model(**INPUTS, output_attentions=True).attentions


USES: dict[str, Callable[[Any], Any]] = {
    "torch.stack": lambda layers: torch.stack(tuple(layers)),
    "torch.cat": lambda layers: torch.cat(tuple(layers)),
    "permute": lambda layers: layers[0].permute(0, 2, 1, 3),
    "reshape": lambda layers: layers[0].reshape(layers[0].size(0), -1),
    "mean over batch and heads": lambda layers: layers[1].mean(dim=(0, 1)),
    "mean over heads": lambda layers: layers[1].mean(1),
    "sum of all": lambda layers: layers[1].sum(),
    "topk": lambda layers: layers[0].topk(3).values,
    "max with indices": lambda layers: layers[0].max(-1).values,
    "rollout": lambda layers: (layers[0].mean(1) + torch.eye(layers[0].size(-1))) @ layers[1][:, 0],
    "product": lambda layers: 2 * layers[0] * layers[1],
    "einsum": lambda layers: torch.einsum("bhij->bij", layers[0]),
    "interpolate": lambda layers: torch.nn.functional.interpolate(layers[0], size=(4, 4)),
    "detach, cpu, numpy": lambda layers: torch.from_numpy(layers[0].detach().cpu().numpy()),
    "np.asarray": lambda layers: torch.from_numpy(np.asarray(layers[0].detach())),
    "to another type": lambda layers: layers[0].to(torch.float64).float().double(),
    "loop over rows": lambda layers: torch.stack([rows[0] for rows in layers[0]]),
    "pickle": lambda layers: pickle.loads(pickle.dumps(layers[0].detach())),
    "deepcopy": lambda layers: copy.deepcopy(layers[0].detach()),
    "out of torch functions": lambda layers: _below_functions(layers[0]),
}


def _below_functions(weights: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return weights + 1


@pytest.mark.parametrize("use", list(USES))
@pytest.mark.parametrize("gradients", [False, True])
def test_what_people_do_with_weights(use: str, gradients: bool) -> None:
    with torch.set_grad_enabled(gradients):
        found, expected = (USES[use](attentions(name)).detach() for name in ("qkv", "eager"))
    assert found.shape == expected.shape
    bound = 1e-6 if use == "to another type" else BOUND
    assert float((found - expected).abs().max()) < bound


INDICES = [
    (0, slice(None), [0, 2]),
    (0, slice(None), slice(None), torch.tensor([0, 2])),
    (slice(None), [0, 1], 0, [0, 1]),
    (slice(None), [0, 1], ..., [0, 1], slice(None)),
    (0, None, [0, 1], None, 1),
    (0, ..., [[0, 1, 2]], 1),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("gradients", [False, True])
def test_integers_beside_index_arrays_are_taken_out_first_as_in_torch(
    index: Any, gradients: bool
) -> None:
    """NumPy counts an integer among the arrays; axes stood in its order without gradients."""
    with torch.set_grad_enabled(gradients):
        weights = attentions("qkv")[0]
        found, expected = weights[index], weights.dense()[index]
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, atol=BOUND, rtol=BOUND)


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "argmax"])
@pytest.mark.parametrize("gradients", [False, True])
def test_reductions_take_the_names_that_numpy_gives_dimensions(name: str, gradients: bool) -> None:
    with torch.set_grad_enabled(gradients):
        weights = attentions("qkv")[0]
        for options in ({"axis": 1}, {"axis": -1, "keepdims": True}, {"dim": 1, "keepdims": True}):
            found = getattr(weights, name)(**options)
            expected = getattr(weights.dense(), name)(**options)
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, atol=BOUND, rtol=BOUND)


def test_what_they_say_of_themselves() -> None:
    weights, dense = attentions("qkv")[0], attentions("eager")[0]
    assert torch.is_tensor(weights)
    for name in ("shape", "dtype", "device", "ndim", "requires_grad"):
        assert getattr(weights, name) == getattr(dense, name), name
    assert (weights.dim(), weights.numel(), len(weights)) == (4, dense.numel(), len(dense))
    with torch.no_grad():
        assert not attentions("qkv")[0].requires_grad


@pytest.mark.parametrize("gradients", [False, True])
def test_to_be_described_and_printed_they_are_not_computed(
    gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text with them in braces, their length or the names in them computed the whole matrix."""
    monkeypatch.setattr(layer_weights, "attend_for_inspection", None)
    x = torch.zeros(1, 2, 100_000, 4, requires_grad=gradients)
    weights = qkv.hf.LayerWeights(
        qkv.hf.LayerCall(torch.nn.Identity(), x, x, x, (qkv.Causal(),), None, 0, 0)
    )
    assert f"{weights}" == str(weights) == repr(weights)
    assert "record" in dir(weights)
    assert len(weights) == 1
    assert torch.numel(weights) == 2 * 100_000**2
    assert (weights.itemsize, weights.nbytes) == (4, 8 * 100_000**2)
    assert torch.is_floating_point(weights)
    assert not torch.is_complex(weights)
    assert weights.grad is None
    assert weights.grad_fn is None
    for kind in ("meta", "nested", "quantized", "sparse", "cuda"):
        assert not getattr(weights, f"is_{kind}")


def test_a_loss_on_weights_reaches_the_parameters() -> None:
    """Such a loss once gave neither an error nor a gradient."""
    found, expected = (_gradients_of_loss(name) for name in ("qkv", "eager"))
    assert max(float(g.abs().max()) for g in expected) > 1e-3
    for got, want in zip(found, expected, strict=True):
        assert float((got - want).abs().max()) < BOUND


def _gradients_of_loss(implementation: str) -> list[Any]:
    layers = attentions(implementation)
    loss = sum((weights[..., 1:] ** 2).sum() for weights in layers) + layers[1].mean(1).amax()
    layer = model_of("bert").bert.encoder.layer[0].attention.self
    return list(torch.autograd.grad(loss, [layer.query.weight, layer.key.weight]))


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", ["sum", "mean", "amax", "argmax"])
def test_reductions_over_all_keep_dimensions(name: str, gradients: bool) -> None:
    with torch.set_grad_enabled(gradients):
        weights = attentions("qkv")[0]
        for keepdim in (True, False):
            found = getattr(weights, name)(keepdim=keepdim)
            every = () if name == "amax" else None
            expected = getattr(weights.dense(), name)(dim=every, keepdim=keepdim)
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, atol=BOUND, rtol=BOUND)
            assert found.requires_grad == (gradients and name != "argmax")


def test_gradients_with_respect_to_weights_are_refused() -> None:
    weights = attentions("qkv")[0]
    loss = (weights**2).sum()
    uses: list[Callable[[], Any]] = [
        lambda: torch.autograd.grad(loss, weights),
        lambda: torch.autograd.grad(loss, [weights]),
        weights.retain_grad,
        lambda: weights.register_hook(print),
    ]
    for use in uses:
        with pytest.raises(qkv.UnsupportedError, match=r'set_attn_implementation\("eager"\)'):
            use()


def test_one_graph_of_a_model_that_collects_them_is_refused() -> None:
    with attending(model_of("bert"), "qkv") as model, torch.no_grad():
        whole = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="weights that are computed where they are read"):
            whole(**INPUTS, output_attentions=True)


def test_an_error_of_reading_weights_is_not_one_of_the_dimension() -> None:
    x = torch.zeros(1, 1, 3, 4)
    call = qkv.hf.LayerCall(torch.nn.Identity(), x, x, x.bfloat16(), (), None, 0, 0)
    with pytest.raises(qkv.DTypeError, match="query, key and value have different dtypes"):
        qkv.hf.LayerWeights(call).sum(dim=(0, 1))


@pytest.mark.parametrize("gradients", [False, True])
def test_a_matrix_that_is_too_large_is_refused_before_anything_is_computed(
    gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_weights, "attend_for_inspection", None)
    x = torch.zeros(1, 1, 100_000, 4, requires_grad=gradients)
    weights = qkv.hf.LayerWeights(
        qkv.hf.LayerCall(torch.nn.Identity(), x, x, x, (qkv.Causal(),), None, 0, 0)
    )
    uses: list[Callable[[], Any]] = [
        lambda: weights.sum(dim=(0, 1)), weights.dense, weights.numpy, lambda: weights * 2,
        lambda: weights[...], lambda: weights[:, :], lambda: weights[0, None, torch.tensor([0])],
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(qkv.UnsupportedError, match=r"holds 37\.3 GiB \(limit 2\.0 GiB\)"):
            use()
