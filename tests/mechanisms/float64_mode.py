"""transformers' own code in float64, where it says float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Float64Mode(TorchFunctionMode):
    """Turns `.float()` and every float32 argument of torch functions into float64.

    The modules of transformers compute recurrences in float32 whatever their weights are. To
    compare with them to 1e-10, they run under this mode.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wide = [torch.float64 if arg is torch.float32 else arg for arg in args]
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*wide, **named)
