"""`python -m benchmarks`: attention by qkv and by other libraries on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import command
from benchmarks.contenders import CONTENDERS
from benchmarks.latency.front_ends import FRONT_ENDS
from qkv.cli import Parser, exit_code

__all__ = ["main"]

_PROGRAM = "python -m benchmarks"

_DESCRIPTION = (
    "Runs attention by qkv and by whichever of torch, ONNX Runtime, OpenVINO and JAX are "
    "installed, in turns, beside the machine's own peaks. A library that computes something else "
    "is not timed. Ratios say how many times as long as the first one another takes."
)


_PACKAGES = sorted({*(one.package for one in CONTENDERS), *(one.package for one in FRONT_ENDS)})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        The words after `python -m benchmarks`; those of the process by default.
    """
    return exit_code(lambda: _run(argv), _PROGRAM)


def _run(argv: Sequence[str] | None) -> str:
    parser = Parser(prog=_PROGRAM, description=_DESCRIPTION, allow_abbrev=False, add_help=False)
    _add_arguments(parser)
    options = parser.parse_args(argv)
    return parser.format_help() if options.help else command.run(options)


def _add_arguments(parser: Parser) -> None:
    # Help is returned as all other output is, not printed on the way.
    parser.add_argument("-h", "--help", action="store_true", help="show this")
    parser.add_argument(
        "workloads", nargs="*", metavar="NAME", help="workloads, or how their names begin"
    )
    parser.add_argument("--list", action="store_true", help="name the workloads and run none")
    parser.add_argument("--quick", action="store_true", help="a few workloads, fewer rounds")
    parser.add_argument(
        "--latency", action="store_true", help="what a small call costs, for every variant"
    )
    parser.add_argument(
        "--models", action="store_true", help="whole transformers models, beside torch's attention"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of each (default 7)")
    parser.add_argument("--threads", type=int, metavar="N", help="of everybody (default: qkv's)")
    parser.add_argument("--details", action="store_true", help="every contender in a row")
    parser.add_argument("--json", action="store_true", help="strict JSON, with every time")
    parser.add_argument("--save", metavar="FILE", help="also write that JSON to a file")
    parser.add_argument("--load", metavar="FILE", help="show a saved run instead of running")
    parser.add_argument(
        "--markdown", metavar="FILE", help="also write the table to a page, between its marks"
    )
    parser.add_argument("--picture", metavar="FILE", help="also draw it, as SVG")
    parser.add_argument(
        "--only",
        action="append",
        choices=_PACKAGES,
        metavar="PACKAGE",
        help=f"beside the first, only this one; may be repeated: {', '.join(_PACKAGES)}",
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        metavar="RUN",
        help="two saved runs; or a git revision, run beside this one in turns",
    )


if __name__ == "__main__":
    sys.exit(main())
