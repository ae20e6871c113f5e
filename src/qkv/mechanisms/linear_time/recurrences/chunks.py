"""Recurrences chunk after chunk of tokens, each of which starts from the state of the last."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from qkv.mechanisms.base.arrays.namespace import array_namespace, certainly_all

__all__ = [
    "blocks_of_rows",
    "causal_product",
    "decays_between",
    "finite_part",
    "in_chunks",
    "state_of_no_tokens",
    "sums_between",
]


def in_chunks(
    function: Callable[..., tuple[Any, Any]], arrays: Sequence[Any], state: Any, size: int
) -> tuple[Any, Any]:
    """Call `function(state, *chunks)` for one chunk after another.

    Parameters
    ----------
    function : callable
        From a state and the rows of a chunk to `(output, state)`. The output has the tokens of
        the chunk on its last axis but one.
    arrays : sequence of arrays (..., n, width)
        Cut along their last axis but one.
    state : any
        Before the first token.
    size : int
        Tokens in a chunk; the last may have fewer.

    Returns
    -------
    output : array (..., n, width)
    state : any
        After the last token.

    Examples
    --------
    >>> import numpy as np
    >>> def running_sum(state, x):
    ...     return state + np.cumsum(x, axis=-2), state + x.sum(axis=-2)
    >>> in_chunks(running_sum, [np.ones((5, 1))], np.zeros(1), 2)[0].T
    array([[1., 2., 3., 4., 5.]])
    """
    outputs = []
    for chunks in zip(*(blocks_of_rows(array, size) for array in arrays), strict=True):
        output, state = function(state, *chunks)
        outputs.append(output)
    if len(outputs) == 1:
        return outputs[0], state
    return array_namespace(arrays[0]).concat(outputs, axis=-2), state


def blocks_of_rows(array: Any, size: int) -> Iterator[Any]:
    """Views of at most `size` rows of `array` (..., n, width) after one another.

    Examples
    --------
    >>> import numpy as np
    >>> [block.shape for block in blocks_of_rows(np.zeros((2, 5, 3)), 2)]
    [(2, 2, 3), (2, 2, 3), (2, 1, 3)]
    """
    for start in range(0, array.shape[-2], size):
        yield array[..., start : start + size, :]


def causal_product(weights: Any, value: Any) -> Any:
    """`tril(weights) @ value`, where no row sees a later one, whatever that holds.

    A plain product would: a weight of zero times NaN or infinity is NaN. Here a number of `value`
    that is not finite makes NaN of its column from its own row on.

    Parameters
    ----------
    weights : array (..., n, n)
    value : array (..., n, width)

    Examples
    --------
    >>> import numpy as np
    >>> causal_product(np.ones((3, 3)), np.array([[1.0, 1.0], [2.0, np.nan], [3.0, 3.0]]))
    array([[ 1.,  1.],
           [ 3., nan],
           [ 6., nan]])
    """
    xp = array_namespace(value)
    finite, spoiled = finite_part(value)
    product = xp.tril(weights) @ finite
    return product if spoiled is None else product + xp.cumulative_sum(spoiled, axis=-2)


def finite_part(array: Any) -> tuple[Any, Any]:
    """`array` with zeros where it is not finite, and zeros with NaN there; None if it is finite.

    Examples
    --------
    >>> import numpy as np
    >>> finite_part(np.array([1.0, np.nan, np.inf]))
    (array([1., 0., 0.]), array([ 0., nan, nan]))
    """
    xp = array_namespace(array)
    finite = xp.isfinite(array)
    if certainly_all(finite):
        return array, None
    zeros = xp.zeros_like(array)
    return xp.where(finite, array, zeros), xp.where(finite, zeros, zeros + math.nan)


def state_of_no_tokens(key: Any, value: Any) -> Any:
    """The sum of `key[j]^T value[j]` over no tokens: zeros of the shape and library of the state.

    Examples
    --------
    >>> import numpy as np
    >>> state_of_no_tokens(np.ones((5, 2)), np.ones((5, 3)))
    array([[0., 0., 0.],
           [0., 0., 0.]])
    """
    return key[..., :0, :].mT @ value[..., :0, :]


def decays_between(log_decay: Any) -> Any:
    """How much is left, at each token of a chunk, of what each earlier one wrote.

    Entry `[i, j]` is the product of the decays of tokens `j + 1` to `i`, and 1 for `j >= i`.

    Parameters
    ----------
    log_decay : array (..., n)

    Returns
    -------
    array (..., n, n)

    Examples
    --------
    >>> import numpy as np
    >>> decays_between(np.log([0.5, 0.5, 0.5]))
    array([[1.  , 1.  , 1.  ],
           [0.5 , 1.  , 1.  ],
           [0.25, 0.5 , 1.  ]])
    """
    return array_namespace(log_decay).exp(sums_between(log_decay))


def sums_between(numbers: Any) -> Any:
    """Sums of consecutive numbers: entry `[i, j]` is that of `j + 1` to `i`, and 0 for `j >= i`.

    Each is taken on its own: the difference of two long sums would lose digits, and of two infinite
    ones be NaN.

    Parameters
    ----------
    numbers : array (..., n)

    Returns
    -------
    array (..., n, n)

    Examples
    --------
    >>> import numpy as np
    >>> sums_between(np.array([5.0, 1.0, 2.0]))
    array([[0., 0., 0.],
           [1., 0., 0.],
           [3., 2., 0.]])
    """
    xp = array_namespace(numbers)
    rows = xp.broadcast_to(numbers[..., :, None], (*numbers.shape, numbers.shape[-1]))
    return xp.cumulative_sum(xp.tril(rows, k=-1), axis=-2)
