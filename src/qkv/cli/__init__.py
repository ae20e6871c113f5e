"""The command line: `qkv inspect`, `explain`, `plan`, `compare`, `cost` and others.

A command makes its whole output before the first byte of it is written. Exit codes: 0, 1 if the
output could not be written or memory ran out, 2 for bad input, 130 for Ctrl-C.

commands       what each command prints, one module for each
inputs         what commands are given: arrays, texts and models
parser         the commands and their options
variants       variants as options
model_options  a model, and what it reads, as options
given          which options have a value
enter_key      what Enter does while a command runs
meant          which command may be meant by a word that is not one
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence

from qkv._version import __version__
from qkv.arguments.declarations import shown
from qkv.arguments.spelling import did_you_mean
from qkv.cli.parser import Parser, make_parser
from qkv.cli.variants import words
from qkv.errors import ArgumentError, QkvError
from qkv.inspection.rendering.tokens import printable

__all__ = ["Parser", "exit_code", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        The words after `qkv`; those of the process by default.
    """
    return exit_code(lambda: _run(argv))


def exit_code(output: Callable[[], str], program: str = "qkv") -> int:
    """Write what a command returns, or say on standard error why there is nothing.

    Parameters
    ----------
    output : callable ()
        Runs the command and returns its whole output.
    program : str
        Begins what is said on standard error.
    """
    try:
        _write(output())
    except QkvError as error:
        return _complain(program, str(error), 2)
    except BrokenPipeError:
        # The reader closed the pipe. The interpreter would flush once more at exit and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _complain(program, f"the output could not be written: {error.strerror or error}.", 1)
    except MemoryError:
        return _complain(program, "there is not enough memory for this.", 1)
    except KeyboardInterrupt:
        return 130
    return 0


def _run(argv: Sequence[str] | None) -> str:
    parser = make_parser()
    options, unknown = parser.parse_known_args(words(sys.argv[1:] if argv is None else argv))
    if unknown:
        raise _unknown_option(unknown[0], getattr(options, "parser", parser))
    if options.version:
        return f"qkv {__version__}\n"
    if options.command is None or options.overview:
        return parser.format_help()
    if options.help:
        return str(options.parser.format_help())
    command: Callable[[argparse.Namespace], str] = options.command
    return command(options)


def _unknown_option(word: str, parser: Parser) -> ArgumentError:
    """The error for a word that no option takes."""
    flag = word.partition("=")[0]
    if not flag.startswith("-"):
        return ArgumentError(
            f"there is no place for {shown(word, 80)} here.", action=f"See {parser.prog} --help."
        )
    action = f"{did_you_mean(flag, parser.flags)}See {parser.prog} --help."
    return ArgumentError(f"{parser.prog} has no option {shown(flag, 80)}.", action=action)


def _write(text: str) -> None:
    if sys.stdout is None:
        raise OSError("standard output is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.stdout.write(text)
    sys.stdout.flush()


def _complain(program: str, message: str, code: int) -> int:
    lines = (printable(line, len(line)) for line in message.splitlines())
    print(f"{program}: " + "\n".join(lines), file=sys.stderr)
    return code
