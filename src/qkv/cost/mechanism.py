"""The cost of one mechanism, from its own ledger."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from qkv.arguments.declarations import Size, checked
from qkv.cost.machines import Machine, Roofline
from qkv.ledger import Ledger
from qkv.mechanisms import Mechanism
from qkv.mechanisms.base.operations import item_bytes
from qkv.mechanisms.registry import mechanism_class

__all__ = ["MechanismCost", "mechanism_cost"]


@checked
@dataclass(frozen=True, slots=True)
class MechanismCost:
    """The cost of one call of a mechanism.

    Attributes
    ----------
    name, formula, paper : str
        Those of the mechanism.
    context, batch : int
        Tokens of each sequence, and sequences.
    dtype : str
        The type in which arrays are stored.
    ledger : Ledger
        Operations, parameters and bytes.
    score_bytes : int
        Bytes that the scores of all pairs of tokens would take, for all its heads.

    Examples
    --------
    >>> from qkv.cost import mechanism_cost
    >>> cost = mechanism_cost("scaled-dot-product", 1000, dtype="float64")
    >>> cost.score_bytes
    8000000
    """

    name: str
    formula: str
    paper: str
    context: int
    batch: int
    dtype: str
    ledger: Ledger = field(repr=False)
    score_bytes: int

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: operations for each byte moved."""
        return int(self.ledger.total) / int(self.ledger.bytes_moved)

    def roofline(self, machine: Machine) -> Roofline | None:
        """The least time on a machine; None if it has no peak for the dtype.

        Parameters
        ----------
        machine : Machine
        """
        total, moved = int(self.ledger.total), int(self.ledger.bytes_moved)
        return machine.roofline(total, moved, self.dtype)

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers and text, for JSON."""
        ledger = self.ledger
        return {
            "mechanism": self.name,
            "formula": self.formula,
            "source": self.paper,
            "context": self.context,
            "batch": self.batch,
            "dtype": self.dtype,
            "operations": int(ledger.total),
            "operations_formula": ledger.total.formula,
            "parameters": int(ledger.parameters),
            "bytes_moved": int(ledger.bytes_moved),
            "bytes_moved_formula": ledger.bytes_moved.formula,
            "score_bytes_avoided": self.score_bytes,
            "arithmetic_intensity": self.intensity,
            "steps": {
                name: {
                    "operations": int(count),
                    "formula": count.formula,
                    "space": int(ledger.space[name]) if name in ledger.space else 0,
                    "space_formula": ledger.space[name].formula if name in ledger.space else "0",
                }
                for name, count in ledger.steps.items()
            },
            "by_kind": {kind: int(count) for kind, count in ledger.kinds.items()},
        }


@checked
def mechanism_cost(
    mechanism: Mechanism | str, context: Size = 5, *, batch: Size = 1, dtype: str = "float32"
) -> MechanismCost:
    """The cost of one call of a mechanism.

    Parameters
    ----------
    mechanism : Mechanism or str
        A mechanism of any size, or a name of `qkv.mechanisms.MECHANISMS` for the small one that
        runs the shared example of five tokens.
    context, batch : int
        Tokens of each sequence, and sequences.
    dtype : str
        The type in which arrays are stored: "float64", "float32", "float16" or "bfloat16".

    Raises
    ------
    ArgumentError
        If no mechanism has that name, or a number is not positive.
    DTypeError
        If mechanisms do not compute in the dtype.

    Examples
    --------
    >>> from qkv.cost import mechanism_cost
    >>> int(mechanism_cost("scaled-dot-product").ledger.total)
    495
    """
    if isinstance(mechanism, str):
        mechanism = mechanism_class(mechanism).example()
    size = item_bytes(dtype)
    heads = getattr(mechanism, "num_heads", 1)
    return MechanismCost(
        mechanism.name,
        mechanism.formula,
        mechanism.paper,
        context,
        batch,
        dtype,
        mechanism.cost(context, batch, dtype),
        batch * heads * context * context * size,
    )
