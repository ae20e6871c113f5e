"""What the kernels of both passes do with a tile: scores, products, dropout, and sums that are not
finite.

`modify`, `allows` and `slope` are functions that `expressions` writes for one mask and score mod.
"""

import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"


@triton.jit
def product(a, b, total, precision: tl.constexpr, widened: tl.constexpr):
    """`a @ b + total`, in float64 if `widened`.

    The interpreter multiplies bfloat16 wrongly, and adds up float32 in an order that depends on
    shapes, so that the backward pass would have other scores than the forward pass.
    """
    if widened:
        found = tl.dot(a.to(tl.float64), b.to(tl.float64)).to(tl.float32)
        return found if total is None else total + found
    return tl.dot(a, b, total, input_precision=precision)


@triton.jit
def rows_of(array, strides, row, column, row_limit, width: tl.constexpr, padded: tl.constexpr):
    """Rows of one head, `(rows, padded)`, 0 beyond their number and width."""
    is_inside = row[:, None] < row_limit
    if padded != width:
        is_inside = is_inside & (column[None, :] < width)
    return tl.load(array + row[:, None] * strides[2] + column[None, :], mask=is_inside, other=0.0)


@triton.jit
def contiguous_rows_of(
    array, first_row, row, column, row_limit, width: tl.constexpr, padded: tl.constexpr
):
    """`rows_of` of a head that starts at `first_row` of an array without gaps."""
    return rows_of(array + first_row * width, (0, 0, width), row, column, row_limit, width, padded)


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
    """Scores after mods, and -inf for what is forbidden; `q_index` and `kv_index` broadcast."""
    raw = products * scale
    scores = raw
    is_row, is_key = q_index < q_len, keys_inside(kv_index, kv_len, is_partial)
    if modifies:
        changed = modify(raw, q_index, kv_index, is_row, is_key, head, batch, tables, table_strides)
        scores = tl.broadcast_to(changed.to(tl.float32), raw.shape)
    if is_partial:
        allowed = tl.broadcast_to(is_key & is_row, raw.shape)
        if masks:
            allowed = allowed & allows(
                raw, q_index, kv_index, is_row, is_key, head, batch, tables, table_strides
            )
        scores = tl.where(allowed, scores, float("-inf"))
    return raw, scores


@triton.jit
def keys_inside(kv_index, kv_len, is_partial: tl.constexpr):
    """Which keys exist: of a full tile all, so that tables along keys are read without a mask."""
    if is_partial:
        is_key = kv_index < kv_len
    else:
        is_key = tl.full([1, 1], True, tl.int1)
    return is_key


@triton.jit
def tile_of(tiles, t, last):
    """The tile at place `t` of a list, or 0 from `last` on.

    Loops read the next one a step before they need it: rows whose address is being read cannot be
    read ahead as far.
    """
    return tl.load(tiles + t, mask=t < last, other=0)


@triton.jit
def dropout_factors(q_index, kv_index, head, batch, shape_of, seed, threshold, kept_factor):
    """0 or `1 / (1 - p)` for each pair: word 0 of Philox4x32-10, as on every backend."""
    zero = tl.zeros(shape_of.shape, tl.int32)
    # Triton passes small numbers as int32, and 1 as a constant.
    wide = tl.full((), 0, tl.int64) + seed
    word, _, _, _ = tl.philox_impl(
        (kv_index + zero).to(tl.uint32), (q_index + zero).to(tl.uint32),
        (head + zero).to(tl.uint32), (batch + zero).to(tl.uint32),
        wide.to(tl.uint32), (wide >> 32).to(tl.uint32), 10,
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

    Only tiles that hold such numbers need it, which are rare.
    """
    wide = rows.to(tl.float32)
    signs = tl.where(tl.abs(wide) == float("inf"), tl.where(wide > 0, 1.0, -1.0), 0.0)
    of_pairs = tl.where(factors > 0, 1.0, tl.where(factors < 0, -1.0, 0.0))
    # One sum holds both, since Blackwell has no room for two: 1024 times how many numbers that are
    # not finite meet an allowed pair, and how many more terms are +inf than -inf.
    both = tl.dot(
        tl.where(allowed, 1024.0, 0.0).to(tl.float16),
        tl.where(_is_finite(rows), 0.0, 1.0).to(tl.float16),
    )
    of_pairs = tl.where(allowed, of_pairs, 0.0)
    both = tl.dot(of_pairs.to(tl.float16), signs.to(tl.float16), both)
    met = tl.floor(both / 1024.0 + 0.5)
    balance = both - met * 1024.0
    sums = tl.where(balance > 0, float("inf"), tl.where(balance < 0, float("-inf"), 0.0))
    # Else one is NaN, or infinity times 0, or there are infinities of both signs.
    return tl.where(met == tl.abs(balance), sums, float("nan"))
