"""`qkv lab`: the page that shows attention happen, served on this machine or written as a file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.cli.enter_key import is_interactive, on_enter
from qkv.cli.given import is_given
from qkv.cli.model_options import add_model_options
from qkv.cli.variants import add_variants, command_line_of, variants_of
from qkv.errors import AmbiguityError, ArgumentError, UnsupportedError
from qkv.extras import install_command

if TYPE_CHECKING:
    from qkv.lab.session import Session

__all__ = [
    "DESCRIPTION", "add_arguments", "require_place", "require_room", "run", "write_page",
]  # fmt: skip

DESCRIPTION = (
    "Serves a page on 127.0.0.1 and prints its address: every step of attention on small examples, "
    "and with FILE or --model every head, with a map of the weights at any length. The address "
    "opens the page once. Enter prints a new one; Ctrl-C ends it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="safetensors or npz with q, k, v, or a saved record; or a sentence that the language "
        "model reads, - for standard input",
    )
    parser.add_argument("--port", type=int, metavar="N", help="default: a free one")
    parser.add_argument("--no-open", action="store_true", help="do not open a browser")
    parser.add_argument("--export", metavar="FILE", help="write the page as one file instead")
    add_model_options(parser)
    add_variants(parser)


def run(options: argparse.Namespace) -> str:
    """The output of the command: empty after serving, whose address was printed at once."""
    if options.port is not None and options.export is not None:
        raise ArgumentError(
            f"--port {options.port} is of a page that is served, and --export writes a file.",
            action="Leave one of them out.",
        )
    if options.port is not None and not 0 <= options.port < 1 << 16:
        raise ArgumentError(f"--port {options.port} is not a port.", action="Pass 0 to 65535.")
    from qkv.cli.inputs.text import sentence_is_text

    sentence_is_text(options)
    if options.model is None:
        for name in ("text", "tokens", "download"):
            if is_given(getattr(options, name)):
                raise ArgumentError(f"--{name} goes with --model.", action="See qkv lab --help.")
    elif options.file is not None:
        raise ArgumentError("FILE and --model are two things to show.", action="Pass one of them.")
    if options.file is None and command_line_of(options.variants):
        raise ArgumentError(
            f"{command_line_of(options.variants)[0]} goes with a file of arrays.",
            action="Leave it out, or pass a file of arrays.",
        )
    if options.export is not None:
        return _export(options)
    try:
        from qkv.lab.serving.server import serve
    except ImportError as error:
        raise UnsupportedError(
            f"the page needs a server, and {error.name} is not installed.",
            action=f"{install_command('lab')}, or write a file with --export page.html.",
        ) from error
    serve(
        _session(options),
        options.port or 0,
        lambda url: _ready(url, options.no_open),
        renewing=lambda new_address: on_enter(lambda: print(new_address(), flush=True)),
    )
    return ""


def _session(options: argparse.Namespace) -> Session:
    from qkv.lab.session import Session
    from qkv.lab.sources.source import open_file

    if options.model is not None:
        from qkv.cli.inputs.model import lab_source
        from qkv.inspection.rendering.progress_bar import Bar
        from qkv.inspection.summaries.terminal import Page

        with Bar(f"inspecting {Page().token(options.model, 40)}", passes=1) as bar:
            return Session(lab_source(options, bar))
    if options.file is None:
        return Session()
    try:
        return Session(open_file(options.file, *variants_of(options.variants)))
    except AmbiguityError as error:
        raise error.with_action(
            "Use qkv inspect FILE with --q-offset start or end, whose --html PAGE writes the page."
        ) from None


def _export(options: argparse.Namespace) -> str:
    require_place(options.export)
    session = _session(options)
    write_page(options.export, session)
    written = f"Written: {options.export}\n"
    if "inspect" in session.panels("export"):
        return written
    return (
        f"{written}It has no panel Inspect, since there are no heads to show. With --model "
        "language, a sentence or FILE it has one.\n"
    )


def require_place(path: str) -> None:
    """Raise an error if a page cannot be written there, before minutes of work."""
    from qkv.lab.document import asset

    require_room(path, _is_page, "a page")
    asset("lab.js")


def _is_page(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(15).lower() == b"<!doctype html>"


def require_room(path: str, is_alike: Callable[[str], bool], what: str) -> None:
    """Raise an error if a file cannot be written there, or would take the place of another kind.

    An option whose value was forgotten takes FILE for it, so that arrays would be lost.
    """
    if os.path.isfile(path) and os.path.getsize(path):
        with suppress(OSError):
            if not is_alike(path):
                raise ArgumentError(
                    f"{path!r} is there already, and it is not {what}, which would replace it.",
                    action="Name another file.",
                )
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ArgumentError(
            f"{path!r} cannot be written: there is no folder {str(folder)!r}.",
            action="Make the folder first.",
        )


def write_page(path: str, session: Session, view: Mapping[str, Any] | None = None) -> None:
    """Write what a session shows as one file; `view` is what the page opens with."""
    from qkv.files.writing import replace_file
    from qkv.lab.document import export_data, offline_page

    page = offline_page(export_data(session, view))
    replace_file(path, page.encode("utf-8"))


def _ready(url: str, stay: bool) -> None:
    """Print the address on one line, and open it."""
    print(url, flush=True)
    if is_interactive() and sys.stderr is not None and sys.stderr.isatty():
        print("Enter prints a new address, Ctrl-C ends.", file=sys.stderr)
    if not stay and sys.stdout.isatty():
        import webbrowser

        webbrowser.open(url)
