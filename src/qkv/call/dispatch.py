"""Check a call where its arrays are: in main memory, or on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qkv.call.bound import bind
from qkv.call.checked import CheckedCall, check_call
from qkv.call.device_call import DeviceCall, check_device_call, is_device_call
from qkv.call.options import DEFAULTS, OptionValues

__all__ = ["checked", "checked_on_host"]


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


def checked_on_host(
    query: Any,
    key: Any,
    value: Any,
    variants: Sequence[Any],
    options: OptionValues = DEFAULTS,
) -> CheckedCall:
    """Bind and check a call whose values will be read; tensors on a device are copied."""
    call = checked(query, key, value, variants, options)
    return call.on_host() if isinstance(call, DeviceCall) else call
