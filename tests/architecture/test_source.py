"""What every file and every public name owes its reader."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import benchmarks
import qkv
import qkv.mechanisms
import qkv.testing

SOURCE, BENCHMARKS = (Path(package.__file__).parent for package in (qkv, benchmarks))
FILES = sorted([*SOURCE.rglob("*.py"), *BENCHMARKS.rglob("*.py")])
MODULES = sorted(
    info.name
    for package in (qkv, benchmarks)
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if "__main__" not in info.name
)
PACKAGES = [qkv, qkv.mechanisms, qkv.testing]
NAMES = [(package, name) for package in PACKAGES for name in package.__all__ if name[0] != "_"]


def shown(path: Path) -> str:
    return str(path.relative_to(BENCHMARKS.parent))


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_a_file_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    limit = 800 if "cpu" in path.parts else 400
    assert len(text.splitlines()) <= limit
    if path.name != "_version.py":
        assert ast.get_docstring(ast.parse(text)), "a module says in its first line what it holds"
    assert path.stem not in {"utils", "common", "helpers", "misc", "util", "base_utils"}


FRAGMENTS = (
    "Above", "After", "Against", "Along", "Also", "And", "As", "At", "Before", "Below", "Beside",
    "Beyond", "By", "Else", "For", "From", "In", "It", "Its", "Like", "Nor", "Not", "Of", "On",
    "Over", "So", "That of", "Their", "Then", "They", "Those", "To", "With", "Within", "Without",
)  # fmt: skip
"""Words that begin documentation which only its neighbours explain, such as "Of the keys."."""


@pytest.mark.parametrize("folder", ["src/qkv", "benchmarks", "tests", "tools", "examples"])
def test_documentation_names_what_it_is_about(folder: str) -> None:
    """Docstrings, and strings after what they document, are read without their neighbours."""
    begins = re.compile(rf"\s*({'|'.join(FRAGMENTS)})[\s,:]")
    found = []
    for path in sorted((BENCHMARKS.parent / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Expr(ast.Constant(str(text))) if begins.match(text):
                    found.append(f"{shown(path)}:{node.lineno} {text.strip().splitlines()[0]}")
    assert found == [], "begin with the thing, or with what a function does"


FUZZ = BENCHMARKS.parent / "tests/hardening/fuzz"
FOLDERS = sorted(
    file.parent for root in (SOURCE, BENCHMARKS, FUZZ) for file in root.rglob("__init__.py")
)


@pytest.mark.parametrize("folder", FOLDERS, ids=shown)
def test_a_map_of_a_package_names_all_of_its_files(folder: Path) -> None:
    """A docstring that begins lines with names of three files or more is a map."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    files = {path.stem for path in folder.glob("[!_]*.py")}
    if len(files & set(re.findall(r"^ *(\w+)", text, re.MULTILINE))) >= 3:
        words = set(re.findall(r"\w+", text))
        assert files - words == set()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.__name__)
def test_all_is_what_is_public(package: ModuleType) -> None:
    assert sorted(package.__all__) == sorted(set(package.__all__))
    public = {
        name
        for name in dir(package)
        if not name.startswith("_") and not inspect.ismodule(getattr(package, name))
    }
    assert public == {name for name in package.__all__ if not name.startswith("_")}


@pytest.mark.parametrize(("package", "name"), NAMES, ids=lambda v: getattr(v, "__name__", v))
def test_a_public_name_is_documented(package: ModuleType, name: str) -> None:
    thing = getattr(package, name)
    if not callable(thing):
        return
    text = inspect.getdoc(thing)
    assert text, "no docstring"
    assert text.splitlines()[0].rstrip().endswith("."), "the first line is one sentence"
    if isinstance(thing, type) and issubclass(thing, Exception):
        return
    formula = re.search(r"`[^`]*[-+*/<=|&%(][^`]*`|^    \S.* = ", text, re.MULTILINE)
    assert ">>>" in text or formula, "neither an example nor a formula"


@pytest.mark.parametrize(("package", "name"), NAMES, ids=lambda v: getattr(v, "__name__", v))
def test_public_parameters_are_documented(package: ModuleType, name: str) -> None:
    thing = getattr(package, name)
    if not callable(thing) or (isinstance(thing, type) and issubclass(thing, Exception)):
        return
    if isinstance(thing, type) and inspect.isabstract(thing):
        return
    text = inspect.getdoc(thing) or ""
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD and parameter.name[0] != "_":
            assert re.search(rf"\b{parameter.name}\b", text), f"{parameter.name} is not documented"


@pytest.mark.parametrize(("package", "name"), NAMES, ids=lambda v: getattr(v, "__name__", v))
def test_public_methods_are_documented(package: ModuleType, name: str) -> None:
    thing = getattr(package, name)
    if not isinstance(thing, type):
        return
    for method, value in vars(thing).items():
        if method.startswith("_") or not (callable(value) or isinstance(value, property)):
            continue
        assert inspect.getdoc(getattr(thing, method)), f"{name}.{method} has no docstring"


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_every_error_names_one_thing_to_do() -> None:
    """Every error of `qkv.errors` is raised with an action, except in `lab/messages.py`.

    That file is about what a page of the lab sends, which no reader writes.
    """
    silent = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            called, keywords = node.exc, [keyword.arg for keyword in node.exc.keywords]
            kind = ast.unparse(called.func).removeprefix("qkv.")
            if kind in qkv.errors.__all__ and len(called.args) < 3 and "action" not in keywords:
                silent.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert [place for place in silent if not place.startswith("lab/messages.py")] == []


def test_a_sentence_of_errors_is_written_once() -> None:
    """A sentence of 60 characters or more that several modules raise is in one function."""
    sentences: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        raised = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Raise)]
        for node in [inner for one in raised for inner in ast.walk(one)]:
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join([str(p.value) if isinstance(p, ast.Constant) else "{}" for p in parts])
            if len(text) >= 60:
                sentences.setdefault(text, set()).add(str(path.relative_to(SOURCE)))
    assert {text: paths for text, paths in sentences.items() if len(paths) > 1} == {}


def test_values_in_messages_are_shown_without_fail() -> None:
    """`shown` cuts a value and does not fail; a format of `repr` fails where the value has none."""
    cut = re.compile(r"!r:\.\d")
    places = {
        f"{path.relative_to(SOURCE)}:{number}"
        for path in sorted(SOURCE.rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if cut.search(line)
    }
    assert places == set()


def test_the_package_is_typed_and_has_a_version() -> None:
    assert (SOURCE / "py.typed").exists()
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", qkv.__version__)
