"""The commands of `qkv` and their options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from importlib import import_module
from typing import NoReturn, TypeAlias

from qkv.arguments.declarations import shown
from qkv.arguments.spelling import did_you_mean
from qkv.cli.meant import command_meant
from qkv.cli.model_options import add_model_options
from qkv.cli.variants import add_variants
from qkv.errors import ArgumentError

__all__ = ["Parser", "make_parser"]

_EXAMPLES = """\
examples:
  qkv inspect                          a layer of a real model, every head in a row
  qkv inspect --query 75 --head 3      where one token looks
  qkv inspect "a sentence"             every head of a small language model reads it
  qkv inspect FILE --causal            arrays q, k, v from a safetensors or npz file
  qkv inspect --model tiny             a map of a whole model: which kind each head is
  qkv inspect --model tiny --layer 1   the heads of one layer; --head and --query look closer
  qkv explain --query 1                attention step by step, with every number
  qkv explain "a sentence"             the same for a head of a small language model
  qkv explain --window 1,0 --softcap 5 every variant has an option, as in inspect and plan
  qkv plan --q-len 8192 --causal       what would run, how much it skips and what it takes
  qkv cost --model llama-3-8b          operations, bytes, cache and least time of a model
  qkv compare                          every mechanism on the same five tokens
  qkv lab --model tiny                 all of it as a page to explore
  qkv info                             what this machine can run
"""


_COMMANDS = {
    "cost": "what a model or a mechanism costs",
    "scaling": "why scores are divided by sqrt(d_k)",
    "errata": "what the classical teaching texts print wrongly",
    "lab": "a page that shows attention happen",
}
"""Commands that describe themselves and their options in a module of their own."""


class Parser(argparse.ArgumentParser):
    """A parser whose usage errors are `ArgumentError`."""

    @property
    def flags(self) -> list[str]:
        """Every option by name."""
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        wrong = re.fullmatch(
            r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message
        )
        if wrong is not None:
            argument, given, choices = wrong.groups()
            names = choices.replace("'", "").split(", ")
            what = "command" if argument == "COMMAND" else argument
            meant = command_meant if argument == "COMMAND" else did_you_mean
            raise ArgumentError(
                f"{self.prog} has no {what} {shown(given, 80)}.",
                [("there are", ", ".join(names))],
                f"{meant(given, names)}See {self.prog} --help.",
            )
        for kind, name in (("int", "an integer"), ("float", "a number")):
            message = re.sub(rf"invalid {kind} value: ('.*')", rf"\1 is not {name}", message)
        raise ArgumentError(f"{message}.", action=f"See {self.prog} --help.")


_Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def _run_inspect(options: argparse.Namespace) -> str:
    from qkv.cli.commands import inspect, inspect_model
    from qkv.cli.inputs.text import sentence_is_text
    from qkv.inspection.models.model_file import is_model_record

    sentence_is_text(options)
    if options.model is not None:
        return inspect_model.run(options)
    if options.file is not None and is_model_record(options.file):
        return inspect_model.run_saved(options)
    inspect_model.refuse_without_model(options)
    return inspect.run(options)


def _run_explain(options: argparse.Namespace) -> str:
    from qkv.cli.inputs.text import sentence_is_text

    if options.mechanism is None:
        sentence_is_text(options)
    if "query" not in options:  # In a causal model the first token sees only itself.
        options.query = 0 if options.model is None else -1
    name = "explain" if options.mechanism is None else "explain_mechanism"
    return _run_of(name)(options)


def _run_of(name: str) -> Callable[[argparse.Namespace], str]:
    """The function `run` of a module of commands, which is imported when the command runs."""

    def run(options: argparse.Namespace) -> str:
        text: str = import_module(f"qkv.cli.commands.{name}").run(options)
        return text

    return run


def make_parser() -> Parser:
    """The parser of `qkv`, with all commands."""
    parser = Parser(
        prog="qkv",
        description="Exact scaled dot-product attention that you can look into.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    # Help and version are returned as text, like all other output, instead of being printed.
    parser.add_argument("-h", "--help", action="store_true", dest="overview", help="show this")
    parser.add_argument("--version", action="store_true", help="show the version")
    parser.set_defaults(command=None, help=False)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")

    _add_inspect(commands)
    _add_explain(commands)
    _add_compare(commands)
    _add_plan(commands)
    for name, summary in _COMMANDS.items():
        module = import_module(f"qkv.cli.commands.{name}")
        module.add_arguments(_add_command(commands, name, module.run, summary, module.DESCRIPTION))
    _add_info(commands)
    return parser


def _add_inspect(commands: _Commands) -> None:
    inspect = _add_command(
        commands,
        "inspect",
        _run_inspect,
        "where each head of an attention layer looks",
        "Entropy (-sum w log w, in nats: natural logarithms), the share of weight on the first, "
        "previous, own and next token, and the strongest pairs (query -> key) of each head: means "
        "over queries. Pairs with the first key, where many heads rest, are in the JSON only. "
        "Without FILE: a layer of all-MiniLM-L6-v2. With --model: every head of a model; a "
        "sentence in place of FILE is what it reads, a small language model if none is named.",
    )
    _add_problem(inspect)
    inspect.add_argument(
        "--query", type=_to_row, metavar="N", help="query row, or all: means (default all)"
    )
    inspect.add_argument("--head", type=int, metavar="H", help="only query head H")
    inspect.add_argument("--batch", type=int, metavar="B", help="flat leading index (default 0)")
    inspect.add_argument(
        "--top", type=int, metavar="K", help="pairs, or keys, to show of each head"
    )
    inspect.add_argument(
        "--html",
        type=_to_file,
        metavar="FILE",
        help="also write a page of all heads, which works offline",
    )
    kinds = "Which kind each head is: induction, duplicate, previous, own or sink."
    model = _add_model(inspect, "a whole model, or one layer with --layer", kinds)
    model.add_argument(
        "--save", type=_to_file, metavar="FILE", help="also write all numbers, as safetensors"
    )


def _add_explain(commands: _Commands) -> None:
    explain = _add_command(
        commands,
        "explain",
        _run_explain,
        "attention step by step, with every number",
        "Dot products, scaling, mask, softmax and weighted sum of chosen rows. Without FILE: five "
        "tokens with head_dim 4, small enough to follow by hand. A sentence in place of FILE is "
        "read by a model, a small language model if none is named; if neither --layer nor --head "
        "is given, the head of such a model that is most clearly of one kind is explained.",
    )
    _add_problem(explain)
    row = "query row, or all (default 0, of a model the last)"
    explain.add_argument("--query", type=_to_row, default=argparse.SUPPRESS, metavar="N", help=row)
    explain.add_argument("--head", type=int, metavar="H", help="query head (default 0)")
    explain.add_argument("--batch", type=int, metavar="B", help="flat leading index (default 0)")
    explain.add_argument(
        "--top", type=int, metavar="K", help="keys to show, those with most weight (all up to 32)"
    )
    explain.add_argument("--grad", action="store_true", help="add the step back, for dO = ones")
    explain.add_argument(
        "--mechanism", metavar="NAME", help="another mechanism on the five tokens; see qkv compare"
    )
    _add_model(explain, "one layer of a model", "The arithmetic of a head of a real model.")


def _add_compare(commands: _Commands) -> None:
    compare = _add_command(
        commands,
        "compare",
        _run_of("compare"),
        "every attention mechanism on the same five tokens",
        "Weights, or the effective token-mixing matrix, and output of each mechanism, and how far "
        "the output is from that of full attention.",
    )
    compare.add_argument("mechanisms", nargs="*", metavar="NAME", help="only these (default: all)")
    compare.add_argument("--json", action="store_true", help="strict JSON, with every matrix")
    compare.add_argument(
        "--plot", metavar="FILE", help="also draw every matrix: png, svg or pdf (needs matplotlib)"
    )


def _add_plan(commands: _Commands) -> None:
    plan = _add_command(
        commands,
        "plan",
        _run_of("plan"),
        "what would run, and what it would take",
        "The backend that runs and why others do not, skipped tiles, operations, bytes. "
        "Nothing is computed, and without FILE no arrays are needed: the sizes below will do.",
    )
    _add_problem(plan, record=False)
    _add_sizes(plan)


def _add_info(commands: _Commands) -> None:
    info = _add_command(
        commands,
        "info",
        _run_of("info"),
        "version, machine, backends, cache",
        "What this machine is, what it can run, and what qkv keeps on it.",
    )
    info.add_argument("--json", action="store_true", help="strict JSON")


def _add_command(
    commands: _Commands,
    name: str,
    run: Callable[[argparse.Namespace], str],
    summary: str,
    description: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=summary, description=description, allow_abbrev=False, add_help=False
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this")
    parser.set_defaults(command=run, parser=parser)
    return parser


def _add_problem(parser: argparse.ArgumentParser, record: bool = True) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="safetensors or npz with q, k, v and optional tokens" + ", or a saved record" * record,
    )
    parser.add_argument("--json", action="store_true", help="strict JSON")
    parser.add_argument(
        "--layout", choices=("bhld", "blhd"), default="bhld", help="order of heads and length"
    )
    parser.add_argument(
        "--q-offset", type=_to_offset, metavar="X", help="position of query 0: integer, start, end"
    )
    parser.add_argument("--scale", type=float, metavar="S", help="default: head_dim ** -0.5")
    add_variants(parser)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    sizes = parser.add_argument_group("sizes, instead of FILE")
    for flag, text in (
        ("--batch-size", "batch rows (default 1)"),
        ("--heads", "query heads (default 8)"),
        ("--kv-heads", "key heads (default: as many)"),
        ("--q-len", "queries (default 1024)"),
        ("--kv-len", "keys (default: as many)"),
        ("--head-dim", "entries of a row (default 64)"),
    ):
        sizes.add_argument(flag, type=int, metavar="N", help=text)
    sizes.add_argument(
        "--dtype", choices=("float64", "float32", "float16", "bfloat16"), help="default: float32"
    )


def _add_model(parser: argparse.ArgumentParser, title: str, about: str) -> argparse._ArgumentGroup:
    model = parser.add_argument_group(title, about)
    add_model_options(model)
    model.add_argument("--layer", type=int, metavar="L", help="one layer, in the order of calls")
    return model


def _to_offset(text: str) -> int | str:
    if text in ("start", "end"):
        return text
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError("give an integer, start or end") from error


def _to_file(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("give the name of a file")
    return text


def _to_row(text: str) -> int | None:
    try:
        return None if text == "all" else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError("give a row, or all") from error
