"""Operations of expressions that Triton does not have, or has with another meaning."""

import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"


@triton.jit
def block_of(x):
    """A number without dimensions as a block of one; blocks as they are."""
    return tl.full((1, 1), x, x.dtype) if len(x.shape) == 0 else x


@triton.jit
def floored_quotient(a, b):
    """`a // b` of integers, rounded down; the divisor is 1 or more."""
    quotient = a // b
    return tl.where(a - quotient * b < 0, quotient - 1, quotient)


@triton.jit
def floored_remainder(a, b):
    """`a % b` of integers, 0 or more; the divisor is 1 or more."""
    remainder = a % b
    return tl.where(remainder < 0, remainder + b, remainder)


@triton.jit
def floored(x, index_type: tl.constexpr):
    """The whole number below; NaN gives 0, and what is too large saturates at 2^62."""
    if index_type == tl.int64:
        whole = tl.minimum(tl.maximum(tl.floor(x), -4611686018427387904.0), 4611686018427387904.0)
    else:
        whole = tl.floor(x)
    return tl.where(x == x, whole, 0.0).to(index_type)


@triton.jit
def exp(x):
    """`2^n exp(r)` with a small r, since the error of `tl.exp` on a GPU grows with x.

    The constants are ln 2 in two parts, the first with 9 bits, as in `expf` of Cephes.
    """
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 0.693359375) + n * 2.12194440e-4
    return tl.where(tl.abs(x) < 87.0, tl.exp(r) * tl.exp2(n), tl.exp(x))


@triton.jit
def tanh(x):
    """A polynomial near 0, where `1 - 2 / (exp(2 x) + 1)` would lose digits.

    The coefficients are those of `tanhf` in Cephes, for |x| < 0.625.
    """
    square = x * x
    near = -5.70498872745e-3 * square + 2.06390887954e-2
    near = near * square - 5.37397155531e-2
    near = near * square + 1.33314422036e-1
    near = near * square - 3.33332819422e-1
    near = near * square * x + x
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    return tl.where(size < 0.625, near, tl.where(x < 0, -far, far))
