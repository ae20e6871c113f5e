"""Where nobody would see an operator, none is called; whoever looks on sees all of them."""

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import qkv  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")


def operands(dtype=torch.float64):
    made = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, 3, 20, 8, generator=made, dtype=dtype).requires_grad_() for _ in range(3)
    ]


def attend(*tensors):
    return qkv.attention(*tensors, qkv.Causal())


def formula(query, key, value):
    scores = query @ key.mT / query.shape[-1] ** 0.5
    allowed = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    return torch.softmax(scores.masked_fill(~allowed, -torch.inf), -1) @ value


def close(found, right) -> None:
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


class Seen(TorchDispatchMode):
    """Names of the operators called, of qkv."""

    def __init__(self) -> None:
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "qkv":
            self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


def test_modes_see_operators() -> None:
    tensors = operands()
    with Seen() as seen:
        out = attend(*tensors)
        out.sum().backward()
    assert seen.names == ["qkv::attention", "qkv::attention_backward"]


def test_a_mode_around_the_backward_pass_only() -> None:
    tensors = operands()
    out = attend(*tensors)
    with Seen() as seen:
        found = torch.autograd.grad(out.sum(), tensors)
    assert seen.names == ["qkv::attention_backward"]
    close(found, torch.autograd.grad(formula(*tensors).sum(), tensors))


def test_gradients_of_many_steps(watched) -> None:
    """The later ones are recalled."""
    for seed in range(5):
        tensors = [t.detach().mul(1 + seed).requires_grad_() for t in operands()]
        along = torch.randn(2, 3, 20, 8, generator=torch.Generator().manual_seed(seed)).double()
        found = torch.autograd.grad(attend(*tensors), tensors, along)
        close(found, torch.autograd.grad(formula(*tensors), tensors, along))
    assert watched.prepared("gradients")


def test_the_same_graph_twice() -> None:
    tensors = operands(torch.float32)
    out = attend(*tensors)
    found = [torch.autograd.grad(out.sum(), tensors, retain_graph=True) for _ in range(4)]
    for one, other in pairwise(found):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_batch_over_a_graph_made_before() -> None:
    tensors = operands()
    out, right = attend(*tensors), formula(*tensors)
    along = torch.randn(4, *out.shape, generator=torch.Generator().manual_seed(1)).double()

    def back(of):
        return lambda g: torch.autograd.grad(of, tensors, g, retain_graph=True)

    close(torch.func.vmap(back(out))(along), torch.func.vmap(back(right))(along))


def test_tangents_through_a_graph_made_before() -> None:
    tensors = operands()
    out, right = attend(*tensors), formula(*tensors)
    changes = [torch.randn_like(out) for _ in range(2)]
    found = []
    for of in (out, right):
        with torch.autograd.forward_ad.dual_level():
            along = torch.autograd.forward_ad.make_dual(*changes)
            grads = torch.autograd.grad(of, tensors, along, retain_graph=True)
            found.append([torch.autograd.forward_ad.unpack_dual(g).tangent for g in grads])
    close(*found)


class Doubled(torch.Tensor):
    """A tensor with operators of its own: qkv's come out twice as large."""

    @staticmethod
    def __new__(cls, inside):
        return torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)

    def __init__(self, inside) -> None:
        self.inside = inside

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        plain = [a.inside if isinstance(a, Doubled) else a for a in args]
        found = function(*plain, **(kwargs or {}))
        if function.namespace == "qkv":
            return [2 * t for t in found]
        return Doubled(found) if isinstance(found, torch.Tensor) else found


def test_cotangents_with_operators_of_their_own() -> None:
    tensors = operands()
    out = attend(*tensors)
    along = Doubled(torch.ones_like(out).detach())
    found = torch.autograd.grad(out, tensors, along)
    right = torch.autograd.grad(formula(*tensors).sum(), tensors)
    close(found, [2 * t for t in right])


def test_only_one_of_the_results_is_used() -> None:
    tensors = operands()
    _, lse = qkv.attention(*tensors, qkv.Causal(), return_lse=True)
    query, key, value = torch.autograd.grad(lse.sum(), tensors, materialize_grads=True)
    scores = tensors[0] @ tensors[1].mT / 8**0.5
    allowed = torch.ones(20, 20, dtype=torch.bool).tril()
    right = scores.masked_fill(~allowed, -torch.inf).logsumexp(-1).sum()
    close([query, key], torch.autograd.grad(right, tensors[:2]))
    assert not value.any()


def test_second_derivatives_of_a_graph_made_unseen() -> None:
    tensors = operands()
    found = []
    for function in (attend, formula):
        first = torch.autograd.grad(function(*tensors).square().sum(), tensors, create_graph=True)
        found.append(torch.autograd.grad(sum(t.square().sum() for t in first), tensors))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-10)


def test_saved_tensors_may_be_copies() -> None:
    tensors = operands()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        out = attend(*tensors)
    right = torch.autograd.grad(formula(*tensors).sum(), tensors)
    close(torch.autograd.grad(out.sum(), tensors), right)
    again = checkpoint(attend, *tensors, use_reentrant=False)
    close(torch.autograd.grad(again.sum(), tensors), right)


def test_saved_tensors_may_not_change() -> None:
    tensors = operands()
    out = attend(*tensors)
    with torch.no_grad():
        tensors[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_under_autocast() -> None:
    tensors = operands(torch.float32)
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            out = attend(*tensors)
        assert out.dtype is torch.bfloat16
        found = torch.autograd.grad(out.float().sum(), tensors)
    right = torch.autograd.grad(formula(*tensors).sum(), tensors)
    for ours, theirs in zip(found, right, strict=True):
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05)
