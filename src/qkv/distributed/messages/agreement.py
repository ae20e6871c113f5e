"""Ranks tell each other what they were called with, before anything is computed or sent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from qkv._version import __version__
from qkv.distributed.messages.links import Links
from qkv.errors import DistributedError, QkvError
from qkv.problem.language import nodes
from qkv.problem.spec import Problem

__all__ = ["compare", "fingerprint", "in_words", "tell"]

_SIZE = 4096
"""Bytes of one description: a dozen texts of the lengths to which they are cut."""
_READ_WHOLE = 2**24
"""Arrays of up to this many bytes are compared whole, larger ones by evenly spaced entries."""


def tell(links: Links, said: Mapping[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """What every rank says, in the order of ranks; messages after it have a number of their own."""
    # What ranks of one dimension of a mesh have said is passed on along the other, but this number.
    said = {**said, "version": __version__, "own last number": Links.last_number}
    written = _written({name: _cut(name, value) for name, value in said.items()})
    buffer = np.zeros(_SIZE, np.uint8)
    buffer[: len(written)] = np.frombuffer(written, np.uint8)
    links.number = 0
    buffers = links.all_to_all(torch.from_numpy(buffer).to(device))
    everyone = [json.loads(bytes(one.cpu().numpy()).rstrip(b"\0")) for one in buffers]
    links.number = Links.last_number = 1 + max(int(of["own last number"]) for of in everyone)
    return everyone


def _cut(name: str, value: Any) -> Any:
    """A long text as its beginning and a digest, so that what differs further on still differs."""
    longest = 480 if name.startswith("own ") else 160
    if not isinstance(value, str) or len(_written(value)) <= longest:
        return value
    kept = value
    while len(_written(kept)) > longest:
        kept = kept[: len(kept) * 3 // 4]
    return f"{kept} ... {blake2b(value.encode(), digest_size=8).hexdigest()}"


def _written(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace")


def compare(everyone: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless all ranks say the same under every name that does not begin with "own".

    What a rank says under "own NAME" explains its NAME in the message.

    Raises
    ------
    DistributedError
        On every rank, if one of them was called with something else, or reports an error.
    """
    failed = [(rank, of["own error"]) for rank, of in enumerate(everyone) if of.get("own error")]
    if failed:
        raise DistributedError(
            f"rank {failed[0][0]} cannot make this call.",
            [(f"rank {rank}", error) for rank, error in failed],
            "Mend the call there; no rank has computed anything.",
        )
    for name in everyone[0]:
        if name.startswith("own"):
            continue
        values = [of.get(name) for of in everyone]
        if any(value != values[0] for value in values):
            raise DistributedError(
                f"{name} differs between ranks.",
                [
                    (f"rank {rank}", f"{of.get(f'own {name}', '')} {of.get(name)}".lstrip())
                    for rank, of in enumerate(everyone)
                ],
                "Make the same call on every rank; no rank has computed anything.",
            )


def fingerprint(problem: Problem) -> str:
    """A digest of what variants and options come to: expressions, arrays, positions, scale."""
    spec, operands = problem.spec, problem.operands
    digest = blake2b(digest_size=16)
    for stage in (*spec.masks, *spec.scores):
        # The formula of messages has six digits of each number, and is cut.
        digest.update(json.dumps(nodes.in_words(stage.node)).encode())
    for table in spec.tables:
        _add(digest, operands.tables[table.name])
    if operands.sinks is not None:
        _add(digest, operands.sinks)
    if operands.angles is not None:
        _add(digest, operands.angles.inv_freq)
        digest.update(str(operands.angles.factor).encode())
    _add(digest, operands.positions.q_shift)
    _add(digest, operands.positions.kv_shift)
    digest.update(repr((operands.scale, spec.rotation)).encode())
    return digest.hexdigest()


def _add(digest: Any, array: Any) -> None:
    digest.update(f"{array.dtype} {array.shape}".encode())
    if array.nbytes > _READ_WHOLE:
        flat = array[tuple(slice(None, None, max(1, size // 64)) for size in array.shape)]
        array = flat
    digest.update(np.ascontiguousarray(array).view(np.uint8).tobytes())


def in_words(error: Exception) -> str:
    """An error as one line."""
    fact = error.fact if isinstance(error, QkvError) else f"{type(error).__name__}: {error}"
    return fact[:300]
