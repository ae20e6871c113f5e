"""qkv: exact scaled dot-product attention that you can look into.

_api            `attention`, `inspect`, `plan`, `merge`; prepared has `prepare`, planning `Plan`
variants        masks, changes of scores and others, which say what attention computes
cache           keys and values of earlier tokens
torch, jax, hf, distributed
                attention for torch, JAX, Hugging Face transformers, and over many machines
mechanisms      the family of attention mechanisms; positions: embeddings and rotation
inspection      records, weights, traces, scores of heads; interventions change heads
cost            what attention and models cost; ledger and count have the counting itself
lab, cli        the page in a browser, and the command line
teaching, exercises, errata, samples
                what texts teach, to be run; small inputs and a small model
files           arrays read from untrusted files
testing         the conformance suite, for backends of other packages

One call goes down through these:

call            from a public function to a backend and back
arrays, bridges arrays of any library as NumPy views; operations of a library's own
problem         the problem to compute, and what it means in NumPy
backends        what runs it: compiled, readable, or torch's; partial joins their results
arguments       checks of arguments; errors: all exceptions; extras: how to install what is optional
process         forks and threads; _dynamo: what torch's compiler may read; _imports: what is done
                when another library is imported
"""

# isort: off
import sys as _sys

# `python -m qkv` imports this package before the program begins; until then its path is `-m`.
if getattr(_sys, "argv", [])[:1] == ["-m"] and _sys.orig_argv[-len(_sys.argv)] == "qkv":
    from qkv_command import leave_on_interrupt as _leave_on_interrupt

    _leave_on_interrupt()
# isort: on

from collections.abc import Sequence as _Sequence
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from qkv._api import attention, inspect, merge, plan
from qkv._dynamo import watch as _watch
from qkv._imports import when_imported as _when_imported
from qkv._version import __version__
from qkv.call.derivatives.jvp import Tangents, jvp
from qkv.call.derivatives.vjp import Gradients, Pullback, vjp
from qkv.errors import (
    AmbiguityError,
    ArgumentError,
    DistributedError,
    DTypeError,
    FileError,
    KernelBuildError,
    KernelCacheWarning,
    KeywordError,
    MaskLooksBooleanWarning,
    QkvError,
    ShapeError,
    UnsupportedError,
)
from qkv.extras import missing as _missing
from qkv.inspection.rendering.pages import write_pages_with as _write_pages_with
from qkv.positions import LearnedPositions, SinusoidalPositions
from qkv.prepared import ArrayForm, CallForm, PreparedAttention, prepare
from qkv.problem.stored_rows import Paged, Quantized
from qkv.process.threads import get_num_threads, set_num_threads
from qkv.variants import ALL as _ALL
from qkv.variants import (
    ALiBi,
    Bias,
    BlockSparse,
    Causal,
    Dropout,
    GlobalTokens,
    KeyLengths,
    Mask,
    MaskVariant,
    Prefix,
    RandomBlocks,
    RelativeBias,
    RoPE,
    ScoreMod,
    Segments,
    Sinks,
    SlidingWindow,
    Softcap,
    Strided,
    Variant,
)

if _TYPE_CHECKING:
    from qkv.inspection.models.model_record import LayerRecord, ModelRecord
    from qkv.inspection.records.record import Record
    from qkv.inspection.traces.explain import explain
    from qkv.inspection.traces.trace import Trace
    from qkv.inspection.traces.trace_fields import Projections
    from qkv.inspection.weights.lazy_weights import LazyWeights
    from qkv.planning import Plan
    from qkv.teaching.classical import ScaledDotProductAttention
    from qkv.teaching.saturation import ScalingCurve, ScalingPoint, scaling_curve

__all__ = [
    "ALiBi",
    "AmbiguityError",
    "ArgumentError",
    "ArrayForm",
    "Bias",
    "BlockSparse",
    "CallForm",
    "Causal",
    "DTypeError",
    "DistributedError",
    "Dropout",
    "FileError",
    "GlobalTokens",
    "Gradients",
    "KernelBuildError",
    "KernelCacheWarning",
    "KeyLengths",
    "KeywordError",
    "LayerRecord",
    "LazyWeights",
    "LearnedPositions",
    "Mask",
    "MaskLooksBooleanWarning",
    "MaskVariant",
    "ModelRecord",
    "Paged",
    "Plan",
    "Prefix",
    "PreparedAttention",
    "Projections",
    "Pullback",
    "QkvError",
    "Quantized",
    "RandomBlocks",
    "Record",
    "RelativeBias",
    "RoPE",
    "ScaledDotProductAttention",
    "ScalingCurve",
    "ScalingPoint",
    "ScoreMod",
    "Segments",
    "ShapeError",
    "Sinks",
    "SinusoidalPositions",
    "SlidingWindow",
    "Softcap",
    "Strided",
    "Tangents",
    "Trace",
    "UnsupportedError",
    "Variant",
    "__version__",
    "attention",
    "explain",
    "get_num_threads",
    "inspect",
    "jvp",
    "merge",
    "plan",
    "prepare",
    "scaling_curve",
    "set_num_threads",
    "vjp",
]

_WHEN_USED = {
    "LayerRecord": "inspection.models.model_record",
    "LazyWeights": "inspection.weights.lazy_weights",
    "ModelRecord": "inspection.models.model_record",
    "Plan": "planning",
    "Projections": "inspection.traces.trace_fields",
    "Record": "inspection.records.record",
    "ScaledDotProductAttention": "teaching.classical",
    "ScalingCurve": "teaching.saturation",
    "ScalingPoint": "teaching.saturation",
    "Trace": "inspection.traces.trace",
    "explain": "inspection.traces.explain",
    "scaling_curve": "teaching.saturation",
}
"""What looks into attention or plans it, and the module of each. It is imported when it is first
used, because a third of the time of `import qkv` would be spent on it."""

_LAZY = {
    "cache": "",
    "cost": "",
    "distributed": "torch",
    "errata": "",
    "exercises": "",
    "files": "",
    "hf": "hf",
    "jax": "jax",
    "lab": "",
    "mechanisms": "",
    "samples": "",
    "torch": "torch",
}
"""Modules that are imported when they are first used, and the extra that installs what each needs,
empty if it needs none."""


def _page(shown: _Any, tokens: _Sequence[str] | None) -> str:
    """The page of a result, by the lab, which is imported when the first page is written."""
    page: str = _import_module("qkv.lab").to_html(shown, tokens)
    return page


def _register_pytrees(tree_util: _Any) -> None:
    """Let JAX take variants apart, by code that is imported when JAX is."""
    kinds = *_ALL, _import_module("qkv.variants.scores.score_mod").ExpressedScoreMod
    _import_module("qkv.bridges.jax.pytrees").register(tree_util, kinds)


_watch()
_when_imported("jax.tree_util", _register_pytrees)
_write_pages_with(_page)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHEN_USED, *_LAZY})


def __getattr__(name: str) -> _Any:
    if name in _WHEN_USED:
        return getattr(_import_module(f"qkv.{_WHEN_USED[name]}"), name)
    if name not in _LAZY:
        raise AttributeError(f"module 'qkv' has no attribute {name!r}")
    try:
        return _import_module(f"qkv.{name}")
    except ModuleNotFoundError as error:
        extra = _LAZY[name]
        if not extra or (error.name or "qkv").partition(".")[0] == "qkv":
            raise
        raise _missing(f"qkv.{name}", error.name, extra) from error
