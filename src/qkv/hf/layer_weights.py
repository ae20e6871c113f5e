"""What `output_attentions=True` gives: a tensor of weights that is computed where it is read."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_any, tree_map_only

import qkv
from qkv._dynamo import ends_graph
from qkv.arguments.declarations import checked, shown
from qkv.call.binding.bound import bind
from qkv.call.binding.options import OptionValues
from qkv.call.inspected import attend_for_inspection
from qkv.errors import ArgumentError, UnsupportedError
from qkv.hf.layer_call import LayerCall
from qkv.inspection.records.record import Record
from qkv.inspection.weights.lazy_weights import index_per_axis, require_small

__all__ = ["LayerWeights", "weights_of"]

_Tensor = torch.Tensor
_PROPERTIES = (
    "shape", "dtype", "device", "ndim", "layout", "itemsize", "nbytes", "requires_grad", "is_leaf",
    "grad", "grad_fn", "is_cpu", "is_cuda", "is_meta", "is_nested", "is_quantized", "is_sparse",
)  # fmt: skip
_DESCRIBE = frozenset({
    _Tensor.size, _Tensor.dim, _Tensor.ndimension, _Tensor.numel, _Tensor.nelement, torch.numel,
    _Tensor.is_floating_point, _Tensor.is_complex, torch.is_floating_point, torch.is_complex,
    _Tensor.element_size, _Tensor.get_device, _Tensor.__len__, _Tensor.__format__, _Tensor.__dir__,
    *[getattr(_Tensor, name).__get__ for name in _PROPERTIES],
})  # fmt: skip
"""What is answered without weights."""

_OF_WEIGHTS = frozenset({torch.autograd.grad, _Tensor.retain_grad, _Tensor.register_hook})
"""What asks for a gradient with respect to the weights, if they are its input."""


@checked
class LayerWeights(torch.Tensor):
    """Attention weights (batch, num_heads, q_len, kv_len) of one layer, computed where read.

    What `output_attentions=True` collects. To a program it is a tensor of float32, or of float64 in
    float64 models: whatever reads values gets the weights, before dropout. Slices compute only what
    they show, `sum`, `mean`, `amax` and `argmax` along one axis go tile by tile, and all other
    functions of torch compute the whole matrix first, which is refused above qkv's reference limit,
    with its size.

    In a forward pass with gradients, weights that are read while gradients are recorded are
    differentiable with respect to query and key, as a loss on attention needs. They are then
    computed as the attention of values that are the identity, at `kv_len / head_dim` times
    the cost of the layer. The output of the layer does not depend on them, since it is
    computed without them: a gradient with respect to the weights is refused.

    Keeps copies of query, key and value of the layer, since a cache writes over its own:
    O(length) memory. The first slice costs one forward pass, every slice `2 head_dim` operations
    for each weight read.

    Raises
    ------
    UnsupportedError
        `torch.autograd.grad(..., weights)`, `retain_grad` and `register_hook`.

    Examples
    --------
    >>> import torch, qkv, qkv.hf
    >>> x = torch.zeros(1, 2, 3, 4)
    >>> call = qkv.hf.LayerCall(torch.nn.Identity(), x, x, x, (qkv.Causal(),), None, 0, 0)
    >>> weights = qkv.hf.LayerWeights(call)
    >>> weights[0, 0, 1]
    tensor([0.5000, 0.5000, 0.0000])
    >>> weights.mean(dim=(0, 1)).shape
    torch.Size([3, 3])
    """

    _call: LayerCall
    _differentiable: LayerCall | None
    _record: Record | None

    @staticmethod
    def __new__(cls, call: LayerCall) -> LayerWeights:
        """A tensor without storage of its own."""
        dense = call.dense()
        wanted = torch.is_grad_enabled() and (dense.query.requires_grad or dense.key.requires_grad)
        wide = call.query.dtype is torch.float64
        made: LayerWeights = torch.Tensor._make_wrapper_subclass(
            cls,
            (*dense.query.shape[:3], dense.key.shape[2]),
            dtype=torch.float64 if wide else torch.float32,
            device=call.query.device,
            requires_grad=wanted,
        )
        made._call, made._differentiable = call.kept(), dense if wanted else None
        made._record = None
        return made

    def __init__(self, call: LayerCall) -> None:
        pass

    @property
    def record(self) -> Record:
        """The layer's `qkv.inspect`: entropy, top(k), received weight and more."""
        if self._record is None:
            call = self._call
            operands = call.query, call.key, call.value
            self._record = Record(
                attend_for_inspection(bind(*operands, call.variants, OptionValues(**call.options)))
            )
        return self._record

    def dense(self) -> torch.Tensor:
        """The whole matrix as a plain tensor; with its gradient while gradients are recorded."""
        if self._recording():
            return self._with_gradient()
        self._require_small()
        return self._read(...)

    # torch passes `tensor_contents` by name, which its type stubs do not declare.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LayerWeights(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._with_gradient()[index] if self._recording() else self._read(index)

    def sum(self, dim: Any = None, keepdim: bool = False, **options: Any) -> torch.Tensor:
        """`torch.sum`; along one axis tile by tile, in float64."""
        return self._reduced("sum", "sum", dim, keepdim, options)

    def mean(self, dim: Any = None, keepdim: bool = False, **options: Any) -> torch.Tensor:
        """`torch.mean`; along one axis tile by tile, in float64."""
        return self._reduced("mean", "mean", dim, keepdim, options)

    def amax(self, dim: Any = None, keepdim: bool = False, **options: Any) -> torch.Tensor:
        """`torch.amax`; along one axis tile by tile."""
        return self._reduced("amax", "max", dim, keepdim, options)

    def argmax(self, dim: Any = None, keepdim: bool = False, **options: Any) -> torch.Tensor:
        """`torch.argmax`; along one axis tile by tile."""
        return self._reduced("argmax", "argmax", dim, keepdim, options)

    def numpy(self, *, force: bool = False) -> NDArray[Any]:
        """The whole matrix, without gradient."""
        with torch.no_grad():
            return self.dense().cpu().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self.numpy(), dtype)

    # torch's stubs declare the type of torch.Tensor's own method, which is the class's too.
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Whatever torch does with weights it does with the matrix, computed at that moment."""
        kwargs = kwargs or {}
        if func in _DESCRIBE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _OF_WEIGHTS and _differentiates(func, args, kwargs):
            raise UnsupportedError(
                "a gradient with respect to attention weights is wanted; the layer computes its "
                "output without making them.",
                action='Call model.set_attn_implementation("eager") for such gradients; a loss on '
                "weights is differentiated with respect to query and key.",
            )
        args, kwargs = tree_map_only(LayerWeights, LayerWeights.dense, (args, kwargs))
        return func(*args, **kwargs)

    # torch calls this on the class, which its type stubs do not declare.
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """The same, below autograd: where torch functions of subclasses are switched off."""
        with torch.no_grad():
            args, kwargs = tree_map_only(LayerWeights, LayerWeights.dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _recording(self) -> bool:
        return self._differentiable is not None and torch.is_grad_enabled()

    def _require_small(self, index: Any = ...) -> None:
        """Refuse the whole, or a slice, if it is too large, before the record is computed.

        Index arrays count as one entry here; the record has what they read counted exactly.
        """
        dtype = np.dtype(str(self.dtype).removeprefix("torch."))
        shape = tuple(self.shape)
        axes = [e for e in index_per_axis(index, shape) if e is not None and e is not Ellipsis]
        counts = [
            len(range(size)[entry]) if isinstance(entry, slice) else 1
            for entry, size in zip(axes, shape, strict=True)
        ]
        require_small(prod(counts), shape, dtype)

    def _read(self, index: Any) -> torch.Tensor:
        self._require_small(index)
        found = _in_order_of_torch(self.record.weights[index], index, tuple(self.shape))
        return torch.as_tensor(found, device=self._call.query.device)

    def _with_gradient(self) -> torch.Tensor:
        """Attention of values that are rows of the identity is the matrix of weights."""
        call = self._differentiable
        assert call is not None
        self._require_small()
        batch, heads, kv_len, _ = call.key.shape
        identity = torch.eye(kv_len, dtype=self.dtype, device=self.device)
        variants = [v for v in call.variants if not isinstance(v, qkv.Dropout)]
        with torch.autocast(self.device.type, enabled=False):
            weights: torch.Tensor = qkv.attention(
                call.query.to(self.dtype),
                call.key.to(self.dtype),
                identity.expand(batch, heads, kv_len, kv_len),
                *variants,
                **call.options,
            )
        return weights

    def _reduced(
        self, name: str, by_tiles: str, dim: Any, keepdim: bool, options: dict[str, Any]
    ) -> torch.Tensor:
        # torch knows both by the names of NumPy too.
        dim = options.pop("axis") if dim is None and "axis" in options else dim
        keepdim = options.pop("keepdims", keepdim)
        if options or self._recording() or not (dim is None or type(dim) is int):
            # All dimensions are None to torch, but for amax.
            every = () if name == "amax" else None
            dense = self.dense()
            try:
                weights: torch.Tensor = getattr(dense, name)(
                    every if dim is None else dim, keepdim, **options
                )
            except (TypeError, ValueError, IndexError) as error:
                raise ArgumentError(
                    f"torch's {name} does not take dim={shown(dim)} and these options.",
                    [("torch says", (str(error).splitlines() or [""])[0])],
                    "Pass a dimension and what torch names.",
                ) from error
            return weights
        by_tile = getattr(self.record.weights, by_tiles)(dim, keepdims=keepdim)
        return torch.as_tensor(by_tile, device=self._call.query.device)


def _in_order_of_torch(found: Any, index: Any, shape: tuple[int, ...]) -> Any:
    """What NumPy reads at an index, with its axes where torch has them.

    To NumPy an integer beside index arrays is one of them, and `...` separates them even if it
    stands for no axis. Arrays that are not neighbours put their axes first. torch takes integers
    and `...` out before it looks.
    """
    entries = index_per_axis(index, shape)
    arrays = [entry for entry in entries if isinstance(entry, np.ndarray)]
    if not arrays:
        return found
    kept = [entry for entry in entries if entry is not Ellipsis and not isinstance(entry, int)]
    width = np.broadcast(*arrays).ndim
    numpy_axes, torch_axes = (
        range(first, first + width) for first in map(_first_axis_of_arrays, (entries, kept))
    )
    return np.moveaxis(found, numpy_axes, torch_axes)


def _first_axis_of_arrays(entries: list[Any]) -> int:
    """The axis of a result at which those of index arrays begin."""
    kept = [entry is None or entry is Ellipsis or isinstance(entry, slice) for entry in entries]
    first, stop = kept.index(False), len(kept) - kept[::-1].index(False)
    before = [entry for entry in entries[:first] if entry is not Ellipsis]
    return 0 if any(kept[first:stop]) else len(before)


def _weights_of(call: LayerCall) -> LayerWeights:
    return LayerWeights(call)


weights_of = ends_graph(
    _weights_of,
    reason="output_attentions=True collects weights that are computed where they are read, which "
    "no graph holds. Compile without fullgraph=True, or call the model without output_attentions",
)
"""The weights of a call, between two graphs of torch's compiler."""


def _differentiates(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether weights are what is differentiated by, rather than part of what is differentiated."""
    by = kwargs.get("inputs", args[1:2]) if func is torch.autograd.grad else args[:1]
    return tree_any(lambda given: isinstance(given, LayerWeights), by)
