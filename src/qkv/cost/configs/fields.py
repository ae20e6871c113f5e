"""Fields of a configuration under their different names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qkv.arguments.declarations import is_integer, shown
from qkv.errors import ArgumentError

__all__ = ["Fields"]

_LARGEST_NUMBER = 2**40
"""The largest number of a configuration: products of a few are exact, and are float64 as well."""


class Fields:
    """Fields of a config under their different names, and what the family adds."""

    def __init__(
        self,
        fields: Mapping[str, Any],
        family: Mapping[str, Any],
        left_out: Mapping[str, Any] | None = None,
    ) -> None:
        self.left_out = left_out or {}
        self.fields = {**self.left_out, **fields}
        self.family = family
        self.assumed: dict[str, int] = {}

    def size(
        self, names: tuple[str, ...] | str, default: int | None = None, least: int = 1,
        most: int = _LARGEST_NUMBER,
    ) -> int:  # fmt: skip
        """The first of some names that is there."""
        names = (names,) if isinstance(names, str) else names
        for name in names:
            value = self.fields.get(name)
            if value is None:
                continue
            if not is_integer(value) or not least <= value <= most:
                raise ArgumentError(
                    f"{name} is {shown(value)} in the config.",
                    action=f"Give an integer of {least} or more, and at most {most}.",
                )
            if name in self.left_out:
                self.assumed[name] = int(value)
            return int(value)
        if default is None:
            raise ArgumentError(
                f"the config has no {names[0]}.",
                [
                    ("looked for", ", ".join(names)),
                    ("model_type", repr(self.fields.get("model_type", ""))[:40]),
                ],
                "Pass the config.json of a transformer with all its fields.",
            )
        return default

    def flag(self, name: str) -> bool:
        """The family's value, or that of the configuration field that it names."""
        value = self.family[name]
        if isinstance(value, str):
            return bool(self.fields.get(value, self.family.get(f"{name}_default", False)))
        return bool(value)

    def unread(self) -> str:
        """A sentence about fields that change the count of this family and are not read, or ""."""
        said = [f"{n} {shown(self.fields[n])}" for n in self.family["unread"] if self.fields.get(n)]
        return f"{', '.join(said)} is not counted: the count may be off" if said else ""
