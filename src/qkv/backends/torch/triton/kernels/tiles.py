"""What the kernels of both passes do with a tile: scores, products, dropout, and sums that are not
finite.

`modify`, `allows` and `slope` are functions that `expressions` writes for one mask and score mod.
"""

import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"


@triton.jit
def product(a, b, total, precision: tl.constexpr, widened: tl.constexpr):
    """`a @ b + total`. The interpreter multiplies bfloat16 wrongly; wider factors have the same
    products."""
    if widened:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total, input_precision=precision)


@triton.jit
def rows_of(array, strides, row, column, row_limit, width: tl.constexpr, padded: tl.constexpr):
    """Rows of one head, `(rows, padded)`, 0 beyond their number and width."""
    is_inside = row[:, None] < row_limit
    if padded != width:
        is_inside = is_inside & (column[None, :] < width)
    return tl.load(array + row[:, None] * strides[2] + column[None, :], mask=is_inside, other=0.0)


@triton.jit
def whole_rows_of(array, strides, row, column, width: tl.constexpr, padded: tl.constexpr):
    """`rows_of` where all rows exist."""
    at = array + row[:, None] * strides[2] + column[None, :]
    if padded == width:
        return tl.load(at)
    return tl.load(at, mask=column[None, :] < width, other=0.0)


@triton.jit
def scores_of(
    products, q_index, kv_index, head, batch, q_len, kv_len, scale, tables, table_strides,
    modify: tl.constexpr, allows: tl.constexpr, modifies: tl.constexpr, masks: tl.constexpr,
    is_partial: tl.constexpr,
):  # fmt: skip
    """Scores after mods, and -inf for what is forbidden; `q_index` and `kv_index` broadcast.

    Indices beyond the end read what the last row reads, so that no table is read outside.
    """
    raw = products * scale
    scores = raw
    q_row = tl.minimum(q_index, q_len - 1)
    kv_row = tl.minimum(kv_index, kv_len - 1)
    if modifies:
        changed = modify(raw, q_row, kv_row, head, batch, tables, table_strides)
        scores = tl.broadcast_to(changed.to(tl.float32), raw.shape)
    if is_partial:
        allowed = tl.broadcast_to((kv_index < kv_len) & (q_index < q_len), raw.shape)
        if masks:
            allowed = allowed & allows(raw, q_row, kv_row, head, batch, tables, table_strides)
        scores = tl.where(allowed, scores, float("-inf"))
    return raw, scores


@triton.jit
def dropout_factors(q_index, kv_index, head, batch, shape_of, seed, threshold, kept_factor):
    """0 or `1 / (1 - p)` for each pair: word 0 of Philox4x32-10, as on every backend."""
    zero = tl.zeros(shape_of.shape, tl.int32)
    word, _, _, _ = tl.philox_impl(
        (kv_index + zero).to(tl.uint32), (q_index + zero).to(tl.uint32),
        (head + zero).to(tl.uint32), (batch + zero).to(tl.uint32),
        seed.to(tl.uint32), (seed >> 32).to(tl.uint32), 10,
    )  # fmt: skip
    return tl.where(word.to(tl.int64) >= threshold, kept_factor, 0.0)


@triton.jit
def has_flag(flags, tiles, first, last, STEP: tl.constexpr = 128):
    """Whether one of the tiles from `first` to `last` of a list has a flag that is not 0."""
    found = tl.zeros([STEP], tl.int32)
    for start in range(first, last, STEP):
        place = start + tl.arange(0, STEP)
        tile = tl.load(tiles + place, mask=place < last, other=0)
        found |= tl.load(flags + tile, mask=place < last, other=0)
    return tl.max(found, 0) != 0


@triton.jit
def without_infinities(rows):
    """These rows with 0 for what is not finite."""
    return tl.where(_is_finite(rows), rows, 0.0).to(rows.dtype)


@triton.jit
def _is_finite(rows):
    return tl.abs(rows.to(tl.float32)) < float("inf")


@triton.jit
def sums_not_finite(factors, allowed, rows):
    """NaN and infinite parts of `factors @ rows` over the allowed pairs, and 0 elsewhere.

    Of tiles that hold such numbers, which are rare.
    """
    wide = rows.to(tl.float32)
    is_nan, is_inf = wide != wide, wide == float("inf")
    is_negative_inf = wide == float("-inf")
    above, below = (factors > 0) & allowed, (factors < 0) & allowed
    is_zero = (factors == 0) & allowed
    nan = _counts(allowed, is_nan) + _counts(is_zero, is_inf | is_negative_inf)
    positive = _counts(above, is_inf) + _counts(below, is_negative_inf)
    negative = _counts(above, is_negative_inf) + _counts(below, is_inf)
    sums = tl.where(positive > 0, float("inf"), 0.0) + tl.where(negative > 0, float("-inf"), 0.0)
    return tl.where(nan > 0, float("nan"), sums)


@triton.jit
def _counts(pairs, rows):
    return tl.dot(pairs.to(tl.float16), rows.to(tl.float16))
