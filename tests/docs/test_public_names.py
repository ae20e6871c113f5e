"""Every public function and class has a runnable example, and names the errors that it raises."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

MODULES = (
    "qkv",
    "qkv.cache",
    "qkv.cost",
    "qkv.errata",
    "qkv.exercises",
    "qkv.files",
    "qkv.hf",
    "qkv.jax",
    "qkv.mechanisms",
    "qkv.positions",
    "qkv.testing",
    "qkv.torch",
    "qkv.variants",
)
FRAMEWORKS = {"qkv.hf": ("torch", "transformers"), "qkv.jax": ("jax",), "qkv.torch": ("torch",)}
RAISES = re.compile(r"^Raises$|\berrors are those of `", re.MULTILINE)


def public_callables(module_name: str) -> Iterator[tuple[str, Any]]:
    """The functions and classes of a module's `__all__`, but for exceptions and warnings."""
    module = importlib.import_module(module_name)
    for name in module.__all__:
        thing = getattr(module, name)
        if callable(thing) and not (isinstance(thing, type) and issubclass(thing, Exception)):
            yield name, thing


def _body(function: Callable[..., Any]) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError):  # Made by `dataclass` or `Protocol`, or written in C.
        return None


def _has_raise(function: Callable[..., Any]) -> bool:
    body = _body(function)
    return body is not None and any(isinstance(node, ast.Raise) for node in ast.walk(body))


def raises(function: Callable[..., Any]) -> bool:
    """Whether a function, or a function of this package that it calls by name, can raise."""
    if _has_raise(function):
        return True
    body, names = _body(function), getattr(inspect.unwrap(function), "__globals__", {})
    called = {
        node.func.id
        for node in ast.walk(body or ast.Module([], []))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    functions = [names[name] for name in called if inspect.isfunction(names.get(name))]
    return any(_has_raise(f) for f in functions if f.__module__.startswith("qkv."))


def faults(thing: Any) -> list[str]:
    """What the docstrings of a public function or class lack."""
    text = inspect.getdoc(thing) or ""
    found = [] if re.search(r"^Examples$\n-+\n(.*\n)*?>>> ", text, re.MULTILINE) else ["Examples"]
    if "+SKIP" in text:
        found.append("an example that runs")
    if not isinstance(thing, type):
        return found + (["Raises"] if raises(thing) and not RAISES.search(text) else [])
    members = {name: inspect.unwrap(_function(value)) for name, value in vars(thing).items()
               if callable(_function(value))}  # fmt: skip
    made_by = [members[name] for name in ("__init__", "__post_init__", "__new__")
               if name in members and not getattr(thing, "_is_protocol", False)]  # fmt: skip
    if any(map(raises, made_by)) and not RAISES.search(text):
        found.append("Raises")
    for name, function in members.items():
        own = inspect.getdoc(getattr(thing, name)) or ""
        if not name.startswith("_") and _has_raise(function) and not RAISES.search(own):
            found.append(f"Raises of {name}")
    return found


def _function(value: Any) -> Any:
    """The function of a method, class method, static method or property."""
    return getattr(value, "fget", None) or getattr(value, "__func__", value)


@pytest.mark.parametrize("module", MODULES)
def test_public_names_have_examples_and_name_their_errors(module: str) -> None:
    for framework in FRAMEWORKS.get(module, ()):
        pytest.importorskip(framework, reason=f"{module} needs {framework}")
    lacking = {name: faults(thing) for name, thing in public_callables(module)}
    assert not {name: missing for name, missing in lacking.items() if missing}


def _checked(count: int) -> int:
    if count < 1:
        raise ValueError("count must be positive")
    return count


def _undocumented(count: int) -> int:
    """One more than a count."""
    return _checked(count) + 1


def test_the_gate_sees_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults(_checked) == ["Examples", "Raises"]
    monkeypatch.setattr(_checked, "__module__", "qkv.somewhere")
    assert faults(_undocumented) == ["Examples", "Raises"]
