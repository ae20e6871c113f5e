"""Every causal model type of transformers with "qkv" beside its own eager attention.

    python tests/hf/sweep.py                      # all types, a line for each, and a table
    python tests/hf/sweep.py llama gemma3_text    # some
    python tests/hf/sweep.py --lines FILE         # keep lines, and go on where they end

Models are tiny, random, wide and in float64. A cell is the largest difference of logits, relative
to the largest logit; of weights, the largest difference. Each type runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from families import InDouble, padding
from model_types import CAUSAL, model_of_type

import qkv
import qkv.hf

BOUND = 1e-9
SECONDS = 180
LENGTH = 14
COLUMNS = ("logits", "generate", "cache", "pages", "weights")
UNLIKE = {
    "granite_swa": ("weights",),  # Eager gives weights without the sink, which its output has.
    "granitemoe_swa": ("weights",),
    "minimax": (
        "cache",
        "pages",
        "weights",
    ),  # Takes its own cache; some weights are not attention.
}
"""Columns in which a model's own code explains a difference."""
LARGE = ("fuyu", "gemma4_unified_assistant", "got_ocr2", "moss_transcribe_diarize")
"""Types with parts that stay large, so that nothing comes within the time."""
UNUSED, UNBUILT, REFUSED = "never calls qkv", "not built", "refused"


def compared(model_type: str) -> dict[str, Any]:
    """The cells of a row: numbers, or why there is none."""
    qkv.hf.enable()
    try:
        model = model_of_type(model_type)
        with InDouble(), torch.no_grad():
            return _row(model)
    except Exception as error:  # The size of a field that is not known here, for instance.
        return {"logits": f"{UNBUILT}: {_short(error)}"}


def _row(model: Any) -> dict[str, Any]:
    ids = torch.randint(3, 100, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": padding("left")}
    real = inputs["attention_mask"].bool()

    def run(name: str, **more: Any) -> Any:
        model.set_attn_implementation(name)
        return model(**inputs, use_cache=False, **more)

    def generated(name: str, **more: Any) -> Any:
        model.set_attn_implementation(name)
        output = model.generate(
            **inputs, max_new_tokens=8, do_sample=False, return_dict_in_generate=True,
            output_logits=True, disable_compile=True, pad_token_id=0, eos_token_id=None, **more,
        )  # fmt: skip
        return torch.stack(output.logits)

    expected = run("eager").logits[real]
    model.set_attn_implementation("qkv")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qkv.hf.NotUsedWarning)
        try:
            if not qkv.hf.check(model, **inputs, use_cache=False).calls:
                return {"logits": UNUSED}
        except qkv.QkvError as error:
            return {"logits": f"{REFUSED}: {_short(error)}"}
    row = {"logits": _cell(lambda: _difference(run("qkv").logits[real], expected))}
    try:
        steps = generated("eager")
    except Exception as error:
        row["generate"] = f"eager raises: {_short(error)}"
    else:
        row["generate"] = _cell(lambda: _difference(generated("qkv"), steps))
        for column, options in (("cache", {}), ("pages", {"page_size": 4})):

            def through_cache(options: dict[str, Any] = options) -> float:
                cache = qkv.hf.Cache(model.config, **options)
                return _difference(generated("qkv", cache=cache), steps)

            row[column] = _cell(through_cache)
    dense = run("eager", output_attentions=True).attentions
    if dense is not None and any(weights is not None for weights in dense):
        row["weights"] = _cell(lambda: _weights(dense, run("qkv", output_attentions=True), real))
    return row


def _weights(dense: Any, output: Any, real: Any) -> float:
    worst = 0.0
    for expected, found in zip(dense, output.attentions, strict=True):
        if expected is not None:
            rows = (torch.as_tensor(found[...]) - expected).abs().amax((1, 3))
            worst = max(worst, float(rows[real].max()))
    return worst


def _difference(found: Any, expected: Any) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-9))


def _cell(compute: Callable[[], float]) -> Any:
    try:
        return float(f"{compute():.0e}")
    except qkv.QkvError as error:
        return f"{REFUSED}: {_short(error)}"
    except Exception as error:
        return f"error: {_short(error)}"


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:120]


def failed(model_type: str, row: dict[str, Any]) -> list[str]:
    """The columns that are wrong: a difference, or an error that is not a refusal of qkv."""
    return [
        column
        for column, cell in row.items()
        if column not in UNLIKE.get(model_type, ())
        and ((isinstance(cell, float) and not cell < BOUND) or str(cell).startswith("error"))
    ]


def _write(model_type: str, place: Any) -> None:
    torch.set_num_threads(1)
    place.send(compared(model_type))


def _in_process(model_type: str) -> dict[str, Any]:
    """A type may need much memory or time, or end its process."""
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_write, args=(model_type, sender))
    process.start()
    sender.close()
    row: dict[str, Any] = {"logits": f"error: nothing after {SECONDS} s"}
    try:
        if receiver.poll(SECONDS):
            row = receiver.recv()
    except EOFError:
        row = {"logits": "error: the process ended"}
    process.kill()
    process.join()
    return row


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown: a line for each type that was compared, then those that were not, by reason."""
    lines = [f"| model type | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    others: dict[str, list[str]] = {}
    for model_type, row in sorted(rows.items()):
        if isinstance(row["logits"], float):
            cells = [_in_table(row.get(column)) for column in COLUMNS]
            lines.append(f"| {model_type} | {' | '.join(cells)} |")
        else:
            others.setdefault(row["logits"].partition(":")[0], []).append(model_type)
    rest = [f"{reason} ({len(names)}): {', '.join(names)}." for reason, names in others.items()]
    return "\n".join([*lines, *(f"\n{line[0].upper()}{line[1:]}" for line in rest)])


def _in_table(cell: Any) -> str:
    if cell is None:
        return "-"
    return f"{cell:.0e}" if isinstance(cell, float) else str(cell).partition(":")[0]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("types", nargs="*", help="model types, all unless given")
    parser.add_argument("--lines", type=Path, help="a file of JSON lines to add to")
    options = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    rows: dict[str, dict[str, Any]] = {}
    if options.lines and options.lines.exists():
        for line in options.lines.read_text(encoding="utf-8").splitlines():
            rows.update(json.loads(line))
    for model_type in options.types or CAUSAL:
        if model_type in rows:
            continue
        rows[model_type] = _in_process(model_type)
        line = json.dumps({model_type: rows[model_type]})
        print(line, flush=True)
        if options.lines:
            with options.lines.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
    print(table(rows))
    return int(any(failed(name, row) for name, row in rows.items() if name not in LARGE))


if __name__ == "__main__":
    sys.exit(main())
