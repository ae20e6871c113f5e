"""`qkv inspect --model`: which kind of head each head of a model is, as a map."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from qkv.arguments.declarations import shown
from qkv.cli.commands.inspect import require_top, run_layer
from qkv.cli.commands.inspect_json import finite
from qkv.cli.commands.lab import require_place, require_room, write_page
from qkv.cli.given import is_given
from qkv.cli.inputs.arrays import checked_index
from qkv.cli.inputs.model import about, inspect_model
from qkv.cli.inputs.model_layer import model_layer, saved_layer
from qkv.cli.variants import command_line_of
from qkv.errors import ArgumentError
from qkv.inspection.models.model_file import is_model_record
from qkv.inspection.models.model_record import ModelRecord, load
from qkv.inspection.rendering.progress_bar import Bar
from qkv.inspection.summaries.terminal import Page

__all__ = ["refuse_with_model", "refuse_without_model", "run", "run_saved"]

SCHEMA, VERSION = "qkv-inspect-model", 1

_FILE_OPTIONS = {
    "q_offset": "--q-offset", "scale": "--scale", "batch": "--batch",
}  # fmt: skip
_MODEL_OPTIONS = {
    "layer": "--layer", "text": "--text", "download": "--download", "tokens": "--tokens",
    "save": "--save",
}  # fmt: skip
_LAYER_OPTIONS = {"query": "--query", "head": "--head", "top": "--top"}


def run(options: argparse.Namespace) -> str:
    """The output of the command."""
    refuse_with_model(options)
    _require_layer(options, f"--model {Page().token(options.model, 80)}")
    require_top(options)
    # The run takes minutes, so this is checked first.
    if options.save:
        require_room(options.save, is_model_record, "a record of a model")
    if options.html:
        require_place(options.html)
    if options.layer is not None and not (options.save or options.html):
        return run_layer(options, model_layer(options))
    with Bar(f"inspecting {Page().token(options.model, 40)}", passes=1) as bar:
        # The page draws maps of the weights, and a saved layer can be looked into later.
        layers = () if options.layer is None else (options.layer,)
        every = options.html or min(layers, default=0) < 0
        record = inspect_model(options, bar, "weights" if every else layers)
    return _output(record, options, about(options))


def run_saved(options: argparse.Namespace) -> str:
    """The output of the command for a file that `ModelRecord.save` wrote."""
    of_layer = options.layer is not None and not options.html
    taken = ("layer", "batch") if of_layer else ("layer",)
    for known, what in ((_FILE_OPTIONS, "a file of arrays"), (_MODEL_OPTIONS, "--model")):
        refused = {name: flag for name, flag in known.items() if name not in taken}
        _refuse(options, refused, f"goes with {what}, not with a record of a model that was saved")
    _refuse_variants(options, "a record of a model")
    _require_layer(options, f"the record {Page().token(options.file, 80)}")
    require_top(options)
    if options.html:
        require_place(options.html)
    record = load(options.file)
    if of_layer:
        return run_layer(options, saved_layer(record, options))
    return _output(record, options, "")


def _require_layer(options: argparse.Namespace, what: str) -> None:
    """Complain of an option about one layer where none is chosen."""
    for attribute, flag in _LAYER_OPTIONS.items():
        if options.layer is None and getattr(options, attribute) is not None:
            raise ArgumentError(
                f"{flag} is about one layer, and {what} shows all.",
                action="Say which with --layer N; without, the map lists them.",
            )


def _output(record: ModelRecord, options: argparse.Namespace, about: str) -> str:
    """A map of the heads of a record or JSON, and the files that were asked for."""
    view = _view(record, options)
    if options.html:
        from qkv.lab.session import Session
        from qkv.lab.sources.heads import heads_of_model
        from qkv.lab.sources.notable import notable_place
        from qkv.lab.sources.source import Source

        heads = heads_of_model(record, about)
        if list(view) == ["layer"]:
            view = notable_place(replace(heads, layers=[heads.layers[view["layer"]]]))
        write_page(options.html, Session(Source(record.model, heads=heads)), view)
    if options.save:
        record.save(options.save)
    if options.json:
        return _json(record)
    page = Page()
    written = f"Written: {page.token(options.html, 300)}" if options.html else ""
    return record.summary(written) + "\n"


def _view(record: ModelRecord, options: argparse.Namespace) -> dict[str, int]:
    """Where a page opens: at what was asked for, or where the page itself finds something."""
    if options.layer is None:
        return {}
    layer = record[checked_index(options.layer, len(record), "layer")]
    counts = {"head": layer.num_heads, "query": layer.rows["entropy"].shape[-1]}
    asked = {name: getattr(options, name) for name in counts}
    return {"layer": layer.index} | {
        name: checked_index(asked[name], count, name)
        for name, count in counts.items()
        if asked[name] is not None
    }


def refuse_with_model(options: argparse.Namespace) -> None:
    """Complain of an option that says something of arrays, where a model has them."""
    if options.file is not None:
        raise ArgumentError(
            f"the file {shown(options.file, 80)} and --model {Page().token(options.model, 80)} are "
            "two inputs.",
            action="Leave one of them out.",
        )
    _refuse(options, _FILE_OPTIONS, "goes with a file of arrays, not with --model")
    _refuse_variants(options, "--model", *["--layout"] * (options.layout != "bhld"))
    if options.tokens is not None and options.tokens < 1:
        raise ArgumentError(f"--tokens {options.tokens} reads nothing.", action="Pass 1 or more.")


def refuse_without_model(options: argparse.Namespace) -> None:
    """Complain of an option that says something of a model, where there is none."""
    _refuse(options, _MODEL_OPTIONS, "goes with --model")


def _refuse_variants(options: argparse.Namespace, what: str, *others: str) -> None:
    """Complain of the first variant, or other option, that only arrays of a file take."""
    for word in (*command_line_of(options.variants), *others)[:1]:
        raise ArgumentError(
            f"{word} goes with a file of arrays, not with {what}.",
            action="Leave it out, or pass a file of arrays.",
        )


def _refuse(options: argparse.Namespace, names: dict[str, str], reason: str) -> None:
    for attribute, flag in names.items():
        if is_given(getattr(options, attribute, None)):
            raise ArgumentError(f"{flag} {reason}.", action=f"See {options.parser.prog} --help.")


# --- JSON ----------------------------------------------------------------------------------------


def _json(record: ModelRecord) -> str:
    data = {
        "schema": SCHEMA,
        "version": VERSION,
        "model": record.model,
        "tokens": None if record.texts is None else list(record.texts),
        "ids": None if record.tokens is None else record.tokens[0].tolist(),
        "layers": [{"layer": x.index, "name": x.name, "num_heads": x.num_heads} for x in record],
        "notes": record.sentences(),
        "heads": [{name: finite(value) for name, value in row.items()} for row in record.rows()],
    }
    return json.dumps(data, indent=2, allow_nan=False) + "\n"
