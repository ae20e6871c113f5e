"""Check a call where its arrays are: in main memory, or on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qkv.call.binding.bound import bind
from qkv.call.binding.options import DEFAULTS, OptionValues
from qkv.call.checked import CheckedCall, check_call
from qkv.call.device_call import check_device_call, is_device_call

__all__ = ["checked"]


def checked(
    query: Any,
    key: Any,
    value: Any,
    variants: Sequence[Any],
    options: OptionValues = DEFAULTS,
) -> CheckedCall:
    """Bind and check a call."""
    bound = bind(query, key, value, variants, options)
    if is_device_call(bound):
        return check_device_call(bound, variants)
    return check_call(bound, variants)
