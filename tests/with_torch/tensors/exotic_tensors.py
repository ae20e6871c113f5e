"""Run by test_exotic_tensors.py in a process of its own: calls with tensors that are not dense.

Writes one line for each call that neither works nor raises an error of qkv's.
"""

import warnings
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

import qkv
from qkv.errors import QkvError
from watched import forget_prepared_calls

warnings.simplefilter("ignore")
BASE = torch.randn(2, 3, 16, 8, generator=torch.Generator().manual_seed(0))


class Subclass(torch.Tensor):
    pass


class Wrapper(torch.Tensor):
    """Hands every operation on to a tensor inside it."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        opened = tree_map(lambda t: t.inner if isinstance(t, cls) else t, (args, kwargs or {}))
        found = function(*opened[0], **opened[1])
        return tree_map(lambda t: cls(t) if isinstance(t, torch.Tensor) else t, found)


class Duck:
    """No tensor, but torch's functions take it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return function(*[BASE if isinstance(a, cls) else a for a in args], **(kwargs or {}))


def freed():
    tensor = BASE.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def ragged():
    rows = [BASE[0].transpose(0, 1), BASE[1, :, :9].transpose(0, 1)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)


TENSORS: dict[str, Callable[[], object]] = {
    "nested": lambda: torch.nested.nested_tensor([BASE[0], BASE[1, :, :9]]),
    "nested of one length": lambda: torch.nested.nested_tensor([BASE[0], BASE[1]]),
    "jagged": ragged,
    "coo": BASE.to_sparse,
    "hybrid coo": lambda: BASE.to_sparse(2),
    "csr": lambda: BASE[0, 0].to_sparse_csr(),
    "csc": lambda: BASE[0, 0].to_sparse_csc(),
    "bsr": lambda: BASE[0, 0].to_sparse_bsr((2, 2)),
    "quantised": lambda: torch.quantize_per_tensor(BASE, 0.1, 0, torch.qint8),
    "mkldnn": BASE.to_mkldnn,
    "subclass": lambda: BASE.as_subclass(Subclass),
    "wrapper": lambda: Wrapper(BASE),
    "duck": Duck,
    "meta": lambda: BASE.to("meta"),
    "fake": lambda: FakeTensorMode().from_tensor(BASE),
    "complex": lambda: BASE.to(torch.complex64),
    "conjugate": lambda: torch.view_as_complex(torch.zeros(2, 3, 16, 8, 2)).conj().imag,
    "negative": lambda: torch.ops.aten._neg_view(BASE),
    "zero": lambda: torch._efficientzerotensor(BASE.shape),
    "uninitialised": torch.nn.parameter.UninitializedParameter,
    "functional": lambda: torch._to_functional_tensor(BASE),
    "float8": lambda: BASE.to(torch.float8_e4m3fn),
    "no dimensions": lambda: torch.tensor(1.0),
    "freed": freed,
    "masked": lambda: torch.masked.masked_tensor(BASE, BASE > 0),
    "inference": lambda: torch.inference_mode()(BASE.clone)(),
}


def three():
    return [BASE.clone(), BASE.clone(), BASE.clone()]


def in_place_of(number: int, tensor: object) -> list[object]:
    given: list[object] = three()
    given[number] = tensor
    return given


Call = Callable[[], object]


def calls(tensor: object) -> dict[str, tuple[Call, Call]]:
    """An ordinary call, and one that is like it but for the tensor."""
    mask, causal = torch.ones(16, 16) > 0, qkv.Causal()
    last = BASE[..., -1:, :]
    blhd = {"layout": "blhd"}
    return {
        "query": (lambda: qkv.attention(*three()), lambda: qkv.attention(*in_place_of(0, tensor))),
        "key": (lambda: qkv.attention(*three()), lambda: qkv.attention(*in_place_of(1, tensor))),
        "all": (lambda: qkv.attention(*[BASE] * 3), lambda: qkv.attention(*[tensor] * 3)),
        "causal": (
            lambda: qkv.attention(*three(), causal),
            lambda: qkv.attention(*in_place_of(2, tensor), causal),
        ),
        "blhd": (
            lambda: qkv.attention(*three(), causal, **blhd),
            lambda: qkv.attention(*in_place_of(1, tensor), causal, **blhd),
        ),
        "decoding": (
            lambda: qkv.attention(last, BASE, BASE),
            lambda: qkv.attention(last, tensor, tensor),
        ),
        "mask": (
            lambda: qkv.attention(*three(), mask),
            lambda: qkv.attention(*three(), tensor),
        ),
        "bias": (
            lambda: qkv.attention(*three(), qkv.Bias(mask.float())),
            lambda: qkv.attention(*three(), qkv.Bias(tensor)),
        ),
        "relative": (
            lambda: qkv.attention(*three(), qkv.RelativeBias(torch.ones(8, 3))),
            lambda: qkv.attention(*three(), qkv.RelativeBias(tensor)),
        ),
        "scale": (lambda: qkv.attention(*three()), lambda: qkv.attention(*three(), scale=tensor)),
        "merge": (
            lambda: qkv.merge((BASE, BASE[..., 0]), (BASE, BASE[..., 0])),
            lambda: qkv.merge((BASE, BASE[..., 0]), (tensor, BASE[..., 0])),
        ),
        "inspect": (lambda: qkv.inspect(*three()), lambda: qkv.inspect(*[tensor] * 3)),
    }  # fmt: skip


def raised(call: Call) -> str | None:
    """An error that is not qkv's."""
    try:
        call()
    except QkvError:
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def main() -> None:
    torch.backends.quantized.engine = torch.backends.quantized.supported_engines[-1]
    for name, make in TENSORS.items():
        tensor = make()
        for place, (ordinary, call) in calls(tensor).items():
            forget_prepared_calls()
            seen = {"cold": raised(call)}
            for _ in range(4):
                ordinary()
            seen["warm"] = raised(call) or raised(call)
            for state, error in seen.items():
                if error:
                    print(name, place, state, error, sep=", ", flush=True)
    print("finished")


if __name__ == "__main__":
    main()
