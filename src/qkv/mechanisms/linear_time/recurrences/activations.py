"""Activation functions on arrays of any library, with finite values and gradients everywhere."""

from __future__ import annotations

from typing import Any

from qkv.mechanisms.base.arrays.namespace import array_namespace

__all__ = ["elu_plus_one", "sigmoid", "silu", "softplus"]


def sigmoid(x: Any) -> Any:
    """`1 / (1 + exp(-x))`, to a few units in the last place of every x, without overflow.

    Examples
    --------
    >>> import numpy as np
    >>> sigmoid(np.array([-1000.0, 0.0, 1000.0]))
    array([0. , 0.5, 1. ])
    """
    xp = array_namespace(x)
    # Below zero this is exp(x) / (1 + exp(x)), so that no exponential overflows. The absolute value
    # is written out, because the gradient of `abs` at zero is 0 in torch and 1 in JAX.
    small = xp.exp(xp.where(x < 0, x, -x))
    return xp.where(x < 0, small, xp.ones_like(x)) / (1 + small)


def silu(x: Any) -> Any:
    """`x * sigmoid(x)`, also called swish.

    Examples
    --------
    >>> import numpy as np
    >>> silu(np.array([0.0, 1000.0]))
    array([   0., 1000.])
    """
    return x * sigmoid(x)


def softplus(x: Any) -> Any:
    """`log(1 + exp(x))`, without overflow.

    Examples
    --------
    >>> import numpy as np
    >>> softplus(np.array([-1000.0, 0.0, 1000.0])).round(4)
    array([0.000e+00, 6.931e-01, 1.000e+03])
    """
    xp = array_namespace(x)
    return xp.logaddexp(x, xp.zeros_like(x))


def elu_plus_one(x: Any) -> Any:
    """`elu(x) + 1`: `x + 1` above zero, `exp(x)` below; positive everywhere.

    Examples
    --------
    >>> import numpy as np
    >>> elu_plus_one(np.array([-1000.0, 0.0, 2.0]))
    array([0., 1., 3.])
    """
    xp = array_namespace(x)
    # exp sees no positive number, whose overflow would turn the gradient into NaN.
    below = xp.where(x > 0, xp.zeros_like(x), x)
    return xp.where(x > 0, x + 1, xp.exp(below))
