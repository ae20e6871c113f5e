"""`qkv explain --mechanism NAME`: a mechanism step by step on the shared five tokens."""

from __future__ import annotations

import argparse
import json

from qkv.cli.given import is_given
from qkv.cli.inputs.arrays import checked_index
from qkv.errors import ArgumentError
from qkv.mechanisms import example_tokens
from qkv.mechanisms.registry import mechanism_class

__all__ = ["run"]

_OWN = {"mechanism", "query", "json"}
"""Options of the command that go with a mechanism. The others say something of arrays."""


def run(options: argparse.Namespace) -> str:
    """The output of the command."""
    for name, value in vars(options).items():
        if is_given(value) and name not in _OWN and value != options.parser.get_default(name):
            shown = {"file": "FILE"}.get(name, "--" + name.replace("_", "-"))
            if name == "variants":
                shown = value[0].option.flag
            raise ArgumentError(
                f"{shown} does not go with --mechanism, which runs on the shared example.",
                action="Leave it out, or use the class in qkv.mechanisms.",
            )
    cls = mechanism_class(options.mechanism)
    mechanism, arguments = cls.example(), cls.example_arguments()
    tokens = example_tokens()
    every = range(len(tokens)) if options.query is None else [options.query]
    others = dict(zip(("key", "value"), arguments[1:], strict=False))
    explanations = [
        mechanism.explain(
            arguments[0], tokens, checked_index(index, len(tokens), "query"), **others
        )
        for index in every
    ]
    if options.json:
        all_data = [one.to_dict() for one in explanations]
        data = all_data if options.query is None else all_data[0]
        return json.dumps(data, indent=2, allow_nan=False) + "\n"
    text = "\n\n".join(map(str, explanations))
    return f"{text}\n\n{cls.paper}\n"
