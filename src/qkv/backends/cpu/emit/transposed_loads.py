"""Which tables have an entry for every pair, and are transposed block by block."""

from __future__ import annotations

from qkv.problem.language.expressions import Load, Var, walk
from qkv.problem.spec import Spec

_KEY = Var("kv_index")

_FLOATS = ("float32", "float16", "bfloat16")


def transposed_loads(spec: Spec) -> tuple[Load, ...]:
    """Loads whose column is the key and whose row depends on the query, in a fixed order."""
    dtypes = {table.name: table.dtype for table in spec.tables}
    return tuple(
        node
        for node in walk(spec.score, spec.mask)
        if isinstance(node, Load) and _is_transposed(node, dtypes[node.table], spec.dtype)
    )


def _is_transposed(load: Load, stored: str, dtype: str) -> bool:
    *rows, column = load.indices if load.indices else (None,)
    if column != _KEY or not rows:
        return False
    reads = set().union(*(row.variables for row in rows))
    exact = stored in _FLOATS or (stored == "float64" and dtype == "float64")
    return "q_index" in reads and not reads & {"kv_index", "score"} and (exact or stored == "bool")


def transposed_bytes(spec: Spec, block_kv: int, vector_bytes: int) -> int:
    """Bytes of scratch memory for all transposed blocks of one vector of queries."""
    return len(transposed_loads(spec)) * block_kv * vector_bytes
