"""What is called with hostile arguments: constructors, functions, and methods of objects."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any

import qkv
import qkv.cache
import qkv.cost
import qkv.hf
import qkv.lab
import qkv.mechanisms
import qkv.torch
from qkv.mechanisms.base.projected import Options

from .good import good, heads, rows, tensor

__all__ = ["Subject", "subjects"]

MODULES = (
    "qkv", "qkv.cache", "qkv.cost", "qkv.errata", "qkv.exercises", "qkv.files", "qkv.hf", "qkv.jax",
    "qkv.lab", "qkv.mechanisms", "qkv.positions", "qkv.samples", "qkv.torch", "qkv.variants",
)  # fmt: skip

HOOKS = frozenset({
    # Called by `Mechanism` with what it has checked; a subclass defines them.
    "sequences", "initial_weight", "linear", "numbers_moved", "operations", "steps",
    "steps_after", "steps_before", "weight", "widths", "heads", "join", "more_shapes", "pairs",
    "pairs_of_heads", "problem_of", "norm_cost", "position_cost", "score_cost", "variants",
    "feature_cost", "operations_between", "query_or_key", "projected", "project_back",
    "featured", "key_features", "keys_and_values", "next_tokens", "queries", "query_features",
    "check", "mix", "mixing", "project", "options_of", "example_arguments", "difference",
    "weight_of_second_map",
    # Called by the library with a checked problem.
    "lower", "naive", "naive_rows", "examples", "tree_flatten", "tree_unflatten", "length_key",
    "draws", "blocks",
    # With what a loader reads of a module.
    "from_transformers", "from_torch", "for_example",
})  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """Something to call.

    Attributes
    ----------
    name : str
    parameters : tuple of str
        Places that a hostile value can take.
    call : callable (hostile)
        Calls it with hostile values by parameter, and with good ones elsewhere.
    """

    name: str
    parameters: tuple[str, ...]
    call: Callable[[dict[str, Any]], Any]


def _arguments(
    name: str, function: Callable[..., Any], hostile: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    positional: list[Any] = []
    named: dict[str, Any] = {}
    by_place = True
    for parameter in inspect.signature(function).parameters.values():
        given = parameter.name in hostile
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += [hostile[parameter.name]] if given else []
            by_place = False
        elif parameter.kind is parameter.VAR_KEYWORD:
            named |= {"colour": hostile[parameter.name]} if given else {}
        elif given or parameter.default is parameter.empty:
            value = hostile[parameter.name] if given else good(name, parameter.name)
            if by_place and parameter.kind is not parameter.KEYWORD_ONLY:
                positional.append(value)
            else:
                named[parameter.name] = value
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            by_place = by_place and parameter.kind is parameter.POSITIONAL_ONLY
            if by_place:
                positional.append(parameter.default)
    known = set(inspect.signature(function).parameters)
    return positional, named | {k: v for k, v in hostile.items() if k not in known}


def _exhausted(result: Any) -> Any:
    """Run what begins only when it is entered, or asked for the next."""
    if isinstance(result, contextlib.AbstractContextManager) and inspect.isgenerator(
        getattr(result, "gen", None)
    ):
        with result:
            return None
    return list(islice(result, 3)) if isinstance(result, Iterator) else result


def _subject(
    name: str,
    function: Callable[..., Any],
    more: tuple[str, ...] = (),
    use: Callable[[Any], Any] = _exhausted,
    bound: Callable[[], Any] | None = None,
) -> Subject:
    """A function, or the method of that name of what `bound` makes."""

    def call(hostile: dict[str, Any]) -> Any:
        called = function if bound is None else getattr(bound(), function.__name__)
        positional, named = _arguments(name, called, hostile)
        return use(called(*positional, **named))

    own = [p for p in inspect.signature(function).parameters if p != "self" or bound is None]
    return Subject(name, (*own, *more), call)


# What is made is used, as a number may be refused later than where it is given.


def _use_mechanism(layer: Any) -> None:
    unprojected = isinstance(layer, qkv.mechanisms.DotProduct.__mro__[1])
    width = layer.head_dim if unprojected else layer.embed_dim
    if width > 2**20:  # Rows of such a layer are not made here, which has no weights.
        return
    x = rows(5, width)
    given = (x, x) if isinstance(layer, qkv.mechanisms.Cross) else (x,)
    layer(*given)
    layer.token_mixing(*given)
    layer.cost(5)


def _use_variant(variant: Any) -> None:
    qkv.attention(heads(), heads(), heads(), variant)


def _use_cache(made: Any) -> None:
    made.append(heads(), heads())


USES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (lambda: qkv.mechanisms.Mechanism, _use_mechanism),
    (lambda: qkv.Variant, _use_variant),
    (lambda: qkv.torch.Cache, lambda made: made.append(tensor(), tensor())),
    (lambda: (qkv.cache.ContiguousCache, qkv.cache.RollingCache, qkv.cache.PagedCache), _use_cache),
    (lambda: qkv.torch.MultiHeadAttention, lambda made: made(tensor()[:, 0, :, : made.embed_dim])),
    (lambda: (qkv.LearnedPositions, qkv.SinusoidalPositions), lambda made: made(rows(5, 8))),
    (lambda: (qkv.Paged, qkv.Quantized), lambda made: qkv.attention(heads(), made, made)),
    (lambda: qkv.Tangents, lambda t: qkv.jvp(heads(), heads(), heads(), tangents=t)),
)


def _use_of(kind: type) -> Callable[[Any], Any]:
    for bases, use in USES:
        if issubclass(kind, bases()):
            return use
    return _exhausted


def _made(name: str, kind: type) -> Any:
    return kind(*(a := _arguments(name, kind, {}))[0], **a[1])


def _filled(made: Any) -> Any:
    made.append(heads(), heads())
    return made


@cache
def _session() -> Any:
    return qkv.lab.Session()


RESULTS = frozenset({"qkv.Gradients", "qkv.Pullback", "qkv.hf.LayerWeights"})
"""Classes that the library alone makes."""

OBJECTS: dict[str, Callable[[], Any]] = {
    "qkv.cache.ContiguousCache": lambda: _filled(qkv.cache.ContiguousCache()),
    "qkv.cache.PagedCache": lambda: _filled(qkv.cache.PagedCache(2, dtype="int8")),
    "qkv.cache.RollingCache": lambda: _filled(qkv.cache.RollingCache(4, 1)),
    "qkv.cache.PageAllocator": lambda: _taken(),
    "qkv.cache.Rows": lambda: _filled(qkv.cache.PagedCache()).read(),
    "qkv.Record": lambda: qkv.inspect(heads(), heads(), heads(), qkv.Causal()),
    "qkv.LazyWeights": lambda: qkv.inspect(heads(), heads(), heads()).weights,
    "qkv.Trace": lambda: qkv.explain(rows(5, 8), rows(5, 8), rows(5, 8)),
    "qkv.Pullback": lambda: qkv.vjp(heads(), heads(), heads())[1],
    "qkv.Gradients": lambda: qkv.vjp(heads(), heads(), heads())[1](heads()),
    "qkv.ScalingCurve": lambda: qkv.scaling_curve([1, 2], draws=20),
    "qkv.ModelRecord": lambda: qkv.ModelRecord("m"),
    "qkv.cost.Machine": lambda: qkv.cost.machine(qkv.cost.machine_names()[0]),
    "qkv.cost.MechanismCost": lambda: qkv.cost.mechanism_cost("causal"),
    "qkv.cost.ModelCost": lambda: qkv.cost.model_cost(qkv.cost.model_names()[0]),
    "qkv.cost.Norm": lambda: qkv.cost.Norm(),
    "qkv.lab.Session": _session,
    "qkv.samples.LanguageModel": lambda: qkv.samples.language_model(),
    "qkv.samples.TinyModel": lambda: qkv.samples.tiny_model(),
    "qkv.torch.Cache": lambda: qkv.torch.Cache(16),
    "qkv.hf.LayerCall": lambda: _layer_call(),
    "qkv.hf.LayerWeights": lambda: qkv.hf.LayerWeights(_layer_call()),
    "qkv.hf.Cache": lambda: qkv.hf.Cache(),
    "qkv.mechanisms.Comparison": lambda: qkv.mechanisms.compare(["causal"]),
    "qkv.mechanisms.Explanation": lambda: qkv.mechanisms.Causal(8).explain(rows(5, 8)),
}
"""Objects that are made by other means than their constructor with good arguments."""


def _taken() -> Any:
    allocator = qkv.cache.PageAllocator(4)
    allocator.take(2)
    return allocator


def _layer_call() -> Any:
    import torch

    t = tensor()
    return qkv.hf.LayerCall(torch.nn.Identity(), t, t, t, (qkv.Causal(),), None, 0, 0)


def _public_methods(kind: type) -> Iterator[tuple[str, Any]]:
    for name in sorted(
        {n for c in kind.__mro__ if c.__module__.startswith("qkv") for n in vars(c)}
    ):
        member = getattr(kind, name, None)
        public = name == "__call__" or not name.startswith("_")
        if (
            public
            and name not in HOOKS
            and (inspect.isfunction(member) or inspect.ismethod(member))
        ):
            yield name, member


@cache
def subjects() -> tuple[Subject, ...]:
    """Everything that is public."""
    found: dict[str, Subject] = {}
    classes: set[type] = set()
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            thing = getattr(module, name)
            label = f"{module_name}.{name}"
            if inspect.isfunction(thing):
                found[label] = _subject(label, thing)
            elif isinstance(thing, type) and _is_tried(thing) and thing not in classes:
                classes.add(thing)
                found |= {s.name: s for s in _of_class(label, thing)}
    return tuple(found.values())


def _is_tried(kind: type) -> bool:
    return not issubclass(kind, Exception | Warning) and not getattr(kind, "_is_protocol", False)


def _of_class(label: str, kind: type) -> Iterator[Subject]:
    if inspect.isabstract(kind):
        return
    signature = inspect.signature(kind)
    options = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    projected = options and issubclass(kind, qkv.mechanisms.Mechanism)
    more = tuple(sorted(Options.__optional_keys__)) if projected else ()
    try:
        if label in RESULTS:
            raise KeyError
        _arguments(label, kind, {})
        yield _subject(label, kind, more, _use_of(kind))
    except KeyError:  # A result: what it is made of is not written by hand.
        if label not in OBJECTS:
            return
    maker = OBJECTS.get(label) or partial(_made, label, kind)
    for name, member in _public_methods(kind):
        if inspect.ismethod(member) or isinstance(inspect.getattr_static(kind, name), staticmethod):
            yield _subject(f"{label}.{name}", member, use=_use_of(kind))
        else:
            yield _subject(f"{label}.{name}", member, bound=maker)
