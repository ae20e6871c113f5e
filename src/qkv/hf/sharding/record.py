"""Every head of a model whose sequence is spread over ranks."""

from __future__ import annotations

import os
from typing import Any, NoReturn

import numpy as np
import torch

from qkv.arguments.declarations import shown
from qkv.distributed.inspection.head_scores import shard_head_scores
from qkv.errors import UnsupportedError
from qkv.hf.sharding.layers import Sharding
from qkv.inspection.heads.head_scores import HeadScores
from qkv.inspection.models.model_record import Keep, ModelRecord

__all__ = ["ShardRecord"]


class ShardRecord(ModelRecord):
    """A record of the rows of one rank, whose means are those of all rows.

    Raises
    ------
    UnsupportedError
        If weights are to be kept, or it is to be written or drawn as a whole record is.
    """

    def __init__(self, model: str, sharding: Sharding, *, top: int, keep: Keep) -> None:
        if keep is not None:
            raise UnsupportedError(
                f"keep={shown(keep)} asks for weights of a sequence that no rank holds.",
                action="Leave keep out; qkv.distributed.inspect(...).tile(queries, keys) gives "
                "weights of one layer.",
            )
        super().__init__(model, top=top)
        self._sharding = sharding

    def save(self, path: str | os.PathLike[str]) -> None:
        """Refuse to write the record: see `Raises`.

        Raises
        ------
        UnsupportedError
            Always.
        """
        self._refuse("written")

    def to_html(self) -> str:
        """Refuse to draw the record: see `Raises`.

        Raises
        ------
        UnsupportedError
            Always.
        """
        self._refuse("shown as a page")

    def _scores(self, query: Any, key: Any, *variants: Any, **options: Any) -> HeadScores:
        sharding = self._sharding
        own = {
            name: None if given is None else torch.as_tensor(np.asarray(given), device=query.device)
            for name in ("tokens", "real", "real_queries")
            for given in [options.pop(name)]
        }
        whole: dict[str, Any] = {
            name: None if given is None else sharding.inputs.gathered(given).cpu().numpy()
            for name, given in own.items()
        }
        for name in ("q_offset", "kv_offset"):
            options.pop(name)  # Rows of the whole begin at 0.
        return shard_head_scores(
            query, key, *variants, order=sharding.inputs.order, **whole, **options,
            **sharding.options,
        )  # fmt: skip

    def _refuse(self, done: str) -> NoReturn:
        raise UnsupportedError(
            f"this record has the rows of rank {self._sharding.inputs.links.rank} alone, and "
            f"cannot be {done} as that of a whole sequence.",
            action="Use heads(), best(score) and summary(), which are of all rows; unshard "
            "record[layer].rows with the order.",
        )
