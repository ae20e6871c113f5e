"""The error for a keyword that a function does not take, with the call to write instead.

torch, JAX, flash-attn and xformers name in keywords what is a variant here. Which of them a caller
had in mind is known from the name, so the message has the whole call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from typing import Any, TypeVar

from qkv.arguments.declarations import is_integer
from qkv.errors import KeywordError

__all__ = ["drop_in_error", "keyword_error", "with_signature_of_theirs"]

Function = TypeVar("Function", bound=Callable[..., Any])


def keyword_error(
    function: str,
    given: Mapping[str, Any],
    known: Sequence[str],
    required: Sequence[str] = (),
    *,
    called: Sequence[str] = ("q", "k", "v"),
    name: str | None = None,
) -> KeywordError:
    """What to raise for the keywords of a call, of which at least one is not known.

    `called` and `name` are what the call to write begins with.
    """
    unknown = [key for key in given if key not in known]
    fact = _fact(function, unknown)
    if not all(key in _MEANINGS for key in unknown):
        strange = next(key for key in unknown if key not in _MEANINGS)
        close = get_close_matches(strange, known, 1)
        action = f"Pass {close[0]}= instead." if close else "Pass only keywords from this list."
        return KeywordError(fact, [("keywords", ", ".join(known))], action)
    meanings = {**_MEANINGS, **_OF_MODULE} if name else _MEANINGS
    arguments = [word for word in [meanings[key](key, given[key]) for key in unknown] if word]
    options = [word for word in arguments if _is_keyword(word)]
    variants = list(dict.fromkeys(word for word in arguments if not _is_keyword(word)))
    options += [f"{key}={_short(key, given[key])}" for key in given if key in known]
    options += [f"{key}={key}" for key in required]
    remarks = {**_REMARKS, **_REMARKS_OF_MODULE} if name else _REMARKS
    seen = [(key, remarks[key]) for key in unknown if key in remarks]
    call = f"{name or f'qkv.{function}'}({', '.join([*called, *variants, *options])})"
    return KeywordError(fact, seen, f"Write {call}.")


def drop_in_error(
    function: str, unknown: Mapping[str, Any], given: Mapping[str, Any], known: Sequence[str]
) -> KeywordError:
    """What to raise for keywords that a stand-in for a function of torch or JAX does not take.

    `known` are those that it takes, and `given` what the call to `qkv.attention` says besides.
    """
    if not all(key in _MEANINGS for key in unknown):
        return keyword_error(function, unknown, known)
    said = {key: value for key, value in given.items() if value is not None and value is not False}
    written = keyword_error("attention", {**said, **unknown}, ("scale", "layout"))
    return KeywordError(_fact(function, list(unknown)), written.seen, written.action)


def with_signature_of_theirs(function: Function) -> Function:
    """Leave out of the signature the `**unknown` of a stand-in, which is there to refuse it."""
    own = signature(function)
    kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    described: Any = function
    described.__signature__ = own.replace(parameters=kept)
    return function


def _fact(function: str, unknown: Sequence[str]) -> str:
    if len(unknown) > 1:
        names = ", ".join(map(repr, unknown))
        return f"{function}() got unexpected keyword arguments {names}."
    return f"{function}() got an unexpected keyword argument {unknown[0]!r}."


def _is_keyword(word: str) -> bool:
    return word.partition("=")[0].isidentifier() and "=" in word


def _short(name: str, value: Any) -> str:
    """A number or a word as it was given; the name of the caller's variable for anything else."""
    return repr(value) if isinstance(value, int | float | str | None) else name


Meaning = Callable[[str, Any], str]
"""The argument that stands for a keyword and its value; empty if nothing has to be passed."""


def _flag(variant: str) -> Meaning:
    return lambda name, value: "" if value is None or value is False else variant


def _array(wrapped: str = "{}") -> Meaning:
    return lambda name, value: "" if value is None else wrapped.format(name)


def _number(written: str, nothing: float | None = None) -> Meaning:
    def argument(name: str, value: Any) -> str:
        is_nothing = value is None or (isinstance(value, int | float) and value == nothing)
        return "" if is_nothing else written.format(_short(name, value))

    return argument


def _window(name: str, value: Any) -> str:
    """flash-attn's `(left, right)`, in which -1 is unbounded."""
    if not (isinstance(value, tuple | list) and len(value) == 2):
        return "qkv.SlidingWindow(left, right)"
    left, right = (None if side == -1 else side for side in value)
    return "" if left is right is None else f"qkv.SlidingWindow({left!r}, {right!r})"


def _one_window(name: str, value: Any) -> str:
    """A window as one number (transformers counts the query itself), or as two."""
    if is_integer(value):
        before = value - 1 if name == "sliding_window" else value
        return f"qkv.SlidingWindow({before}, 0)"
    if name == "sliding_window":
        return "" if value is None or value is False else "qkv.SlidingWindow(sliding_window - 1, 0)"
    return "" if value is None else _window(name, value)


def _nothing(name: str, value: Any) -> str:
    return ""


_WEIGHTS = "the matrix is never made here; qkv.inspect(q, k, v).weights computes what is sliced"
_SEGMENTS = "qkv.Segments.from_cu_seqlens(cu_seqlens_q, cu_seqlens_k)"
_MEANINGS: Mapping[str, Meaning] = {
    "is_causal": _flag("qkv.Causal()"),
    "causal": _flag("qkv.Causal()"),
    "attn_mask": _array(),
    "attention_mask": _array(),
    "mask": _array(),
    "bias": _array(),
    "attn_bias": _array(),
    "dropout_p": _number("qkv.Dropout({}, seed=0)", nothing=0),
    "dropout": _number("qkv.Dropout({}, seed=0)", nothing=0),
    "enable_gqa": _nothing,
    "sm_scale": _number("scale={}"),
    "softmax_scale": _number("scale={}"),
    "softcap": _number("qkv.Softcap({})", nothing=0),
    "logits_soft_cap": _number("qkv.Softcap({})", nothing=0),
    "logit_softcap": _number("qkv.Softcap({})", nothing=0),
    "p": _number("qkv.Dropout({}, seed=0)", nothing=0),
    "window_size": _window,
    "local_window_size": _one_window,
    "sliding_window": _one_window,
    "sinks": _array("qkv.Sinks({})"),
    "s_aux": _array("qkv.Sinks({})"),
    "learnable_sink": _array("qkv.Sinks({})"),
    "key_padding_mask": _array("qkv.Mask(~{}[:, None, None, :])"),
    "block_mask": lambda name, value: _array(
        "qkv.Mask({}.mask_mod)"
        if hasattr(value, "mask_mod")
        else "qkv.BlockSparse({}, block_q, block_kv)"
    )(name, value),
    "mask_mod": _array("qkv.Mask({})"),
    "cu_seqlens": _array("qkv.Segments.from_cu_seqlens({})"),
    "cu_seqlens_q": _array(_SEGMENTS),
    "cu_seqlens_k": _array(_SEGMENTS),
    "cu_seqlens_kv": _array(_SEGMENTS.replace("_k)", "_kv)")),
    "max_seqlen_q": _nothing,
    "max_seqlen_k": _nothing,
    "kv_lens": _array("qkv.KeyLengths({})"),
    "key_value_seq_lengths": _array("qkv.KeyLengths({})"),
    "seqused_k": _array("qkv.KeyLengths({})"),
    "cache_seqlens": _array("qkv.KeyLengths({})"),
    "need_weights": _nothing,
    "return_weights": _nothing,
    "output_attentions": _nothing,
    "return_attn_probs": _nothing,
    "average_attn_weights": _nothing,
    "deterministic": _nothing,
    "alibi_slopes": _array("qkv.ALiBi({})"),
    "score_mod": _array("qkv.ScoreMod({})"),
}

_REMARKS = {
    "need_weights": _WEIGHTS,
    "return_weights": _WEIGHTS,
    "output_attentions": _WEIGHTS,
    "return_attn_probs": _WEIGHTS,
    "key_padding_mask": "True is padding in torch; here True may attend, so it is inverted",
    "block_mask": "of FlexAttention: pass its mask_mod, its blocks as a boolean array, or a mask "
    "such as qkv.Causal() & qkv.SlidingWindow(left, right)",
    "sliding_window": "a window of W tokens in transformers counts the query: left is W - 1",
    "deterministic": "results always are",
    "max_seqlen_q": "not needed: lengths are read from the segments",
    "max_seqlen_k": "not needed: lengths are read from the segments",
    "cu_seqlens_q": 'rows of all sequences lie one after another; heads last is layout="blhd"',
    "sinks": "one logit for each query head, in the denominator alone",
    "s_aux": "one logit for each query head, in the denominator alone",
    "attn_mask": "a boolean array is a mask (True = may attend), a floating one is added",
    "attention_mask": "a boolean array is a mask (True = may attend), a floating one is added",
    "mask": "a boolean array is a mask (True = may attend), a floating one is added",
    "enable_gqa": "not needed: query heads are grouped by the number of heads of key and value",
    "dropout_p": "a seed says which weights are dropped; choose a new one for each step",
    "dropout": "a seed says which weights are dropped; choose a new one for each step",
}

_OF_MODULE: Mapping[str, Meaning] = {"attn_mask": _array("qkv.Mask(~{})")}
"""What `torch.nn.MultiheadAttention` means where its function means something else."""

_REMARKS_OF_MODULE = {
    "attn_mask": "a boolean one is inverted: True is masked out in torch's module, and may attend "
    "here; pass a floating one, which is added to the scores, as it is",
}
