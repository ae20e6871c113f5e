"""Pictures of the record of one call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from qkv.backends import Backend, Progress
from qkv.errors import ArgumentError
from qkv.inspection.rendering.pictures import (
    LONGEST,
    draw_tiles,
    draw_weights,
    picture,
    save_picture,
)
from qkv.inspection.rendering.tokens import require_names
from qkv.inspection.weights.replay import Replay
from qkv.inspection.weights.weight_blocks import reduced
from qkv.problem.spec import Spec

__all__ = ["picture_of_tiles", "picture_of_weights"]


def picture_of_weights(
    replay: Replay,
    path: str | os.PathLike[str] | None,
    ax: Any,
    head: int,
    batch: int,
    tokens: Sequence[str] | None,
    progress: Progress | None,
) -> Any:
    """The weights of one head; see `Record.plot`."""
    # rich, which draws the bar, is imported when the first picture is asked for.
    from qkv.inspection.rendering.progress_bar import Bar

    spec = replay.problem.spec
    _require_head(spec, head, batch)
    require_names(tokens, spec.kv_len)
    longest = max(spec.q_len, spec.kv_len)
    block = 1 << max(0, (-(-longest // LONGEST) - 1).bit_length())
    whole = (0, spec.q_len), (0, spec.kv_len)
    with Bar("reading the weights", passes=1) as bar:
        weights, _ = reduced(replay, head, *whole, block, batch, progress or bar)
    title = f"head {head}" + (f" of batch row {batch}" if spec.batch_size > 1 else "")
    drawn = weights, title, tokens, block
    return picture(path, ax, (7, 6), lambda axes: draw_weights(axes, *drawn))


def picture_of_tiles(
    replay: Replay, path: str | os.PathLike[str], head: int, batch: int, backend: Backend, name: str
) -> None:
    """Which tiles of one head a backend skips; `name` is that of the one that ran."""
    spec = replay.problem.spec
    _require_head(spec, head, batch)
    grid = replay.scores.grid(*backend.blocks(spec))
    about = batch, head, f"{spec.summary}, {name}"
    save_picture(path, (6, 6.5), lambda figure: draw_tiles(figure, grid, *about))


def _require_head(spec: Spec, head: int, batch: int) -> None:
    there = 0 <= head < spec.num_heads and 0 <= batch < spec.batch_size
    if not there or not (spec.q_len and spec.kv_len):
        raise ArgumentError(
            f"there is nothing to draw of head {head} and batch {batch}.",
            [("num_heads", str(spec.num_heads)), ("batch_size", str(spec.batch_size))],
            "Choose from 0 on, of arrays with queries and keys.",
        )
