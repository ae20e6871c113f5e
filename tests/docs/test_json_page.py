"""The tables of docs/inspect-json.md have the fields and types that the commands print."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkv.cli import main
from qkv.files import write_arrays

PAGE = (Path(__file__).parents[2] / "docs" / "inspect-json.md").read_text(encoding="utf-8")
TABLES = {
    section.partition("\n")[0]: re.findall(r"^\| `([\w.\[\]]+)` \| ([^|]+) \|", section, re.M)
    for section in PAGE.split("\n## ")[1:]
}
"""Fields and their types by the schema."""

COMMANDS = {
    "qkv-inspect": [["inspect"], ["inspect", "FILE", "--causal"]],
    "qkv-inspect-model": [["inspect", "the cat sat. the cat"], ["inspect", "--model", "tiny"]],
    "qkv-mechanism-explanation": [
        ["explain", "--mechanism", name] for name in ("linear", "multi-head", "mamba")
    ],
    "qkv-plan": [["plan", "--causal"]],
    "qkv-compare": [["compare"]],
}


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def fields(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each field that holds no other ones, as the page writes it, and what it holds."""
    if isinstance(value, dict):
        for name, each in value.items():
            name = "NAME" if path == "refusals" else name
            yield from fields(each, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        for each in value:
            yield from fields(each, path and path + "[]")
    else:
        yield path, value


def is_list(kinds: type | tuple[type, ...], value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, kinds) for each in value)


def are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(
        are_numbers(each) or isinstance(each, int | float) for each in value
    )


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


IS = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: is_number(value) and isinstance(value, int),
    "number": is_number,
    "boolean": lambda value: isinstance(value, bool),
    "list of strings": lambda value: is_list(str, value),
    "list of integers": lambda value: is_list(int, value),
    "lists of numbers": are_numbers,
    "number, or lists of numbers": lambda value: is_number(value) or are_numbers(value),
}


@pytest.mark.parametrize("schema", COMMANDS)
def test_fields_are_those_that_are_printed(
    schema: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.safetensors"
    rows = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    rows[0, 1] = rows[1] = np.nan
    write_arrays(path, rows, rows, rows)
    said = TABLES[schema]
    types = {name: kind.strip().removesuffix(" or null") for name, kind in said}
    may_be_null = {name for name, kind in said if kind.strip().endswith(" or null")}
    assert len(types) == len(said)
    for words in COMMANDS[schema]:
        found = printed([str(path) if word == "FILE" else word for word in words], capsys)
        for document in found if isinstance(found, list) else [found]:
            assert (document["schema"], document["version"]) == (schema, version_of(schema))
            there = list(fields(document))
            # An empty list shows no fields of the objects that it may hold.
            empty = {name for name, value in there if value == [] and name not in types}
            seen = {name for name, _ in there} - empty
            assert seen <= set(types)
            assert all(name.rpartition("[].")[0] in empty for name in set(types) - seen)
            for name, value in there:
                if value is None:
                    assert name in may_be_null
                elif name not in empty:
                    assert IS[types[name]](value), (name, value)


def version_of(schema: str) -> int:
    [version] = re.findall(rf"^\| \[`{schema}`\]\(#{schema}\) \| (\d+) \|", PAGE, re.M)
    return int(version)


def test_one_query_has_fewer_fields(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(["inspect", "--query", "5"], capsys)
    said = {name for name, _ in TABLES["qkv-inspect"]}
    left_out = {name for name in said if re.search(r"\.mass\.|\.pairs_beyond_first", name)}
    assert {name for name, _ in fields(found)} == said - left_out


def test_every_schema_has_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    listed = re.findall(r"^\| \[`(qkv-[\w-]+)`\]", PAGE, re.M)
    assert listed == list(TABLES)
    assert set(listed) - set(COMMANDS) == {"qkv-trace"}
    document = printed(["explain"], capsys)
    assert (document["schema"], document["version"]) == ("qkv-trace", version_of("qkv-trace"))
