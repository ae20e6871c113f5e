"""The forward pass: one block of queries goes over its tiles with an online softmax."""

import triton
import triton.language as tl

from qkv.backends.torch.triton.kernels.tiles import (
    dropout_factors,
    has_flag,
    product,
    rows_of,
    scores_of,
    sums_not_finite,
    tile_of,
    whole_rows_of,
    without_infinities,
)

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def forward(
    query, key, value, out, lse, row_max, row_sum, sinks, spoiled, counts, tiles,
    tables, table_strides, q_strides, k_strides, v_strides, schedule_strides,
    scale, q_len, kv_len, num_heads, q_blocks, splits, seed, threshold, kept_factor,
    modify: tl.constexpr, allows: tl.constexpr, modifies: tl.constexpr, masks: tl.constexpr,
    has_sinks: tl.constexpr, has_dropout: tl.constexpr, is_split: tl.constexpr,
    selects: tl.constexpr, group_size: tl.constexpr, packed_heads: tl.constexpr,
    head_dim: tl.constexpr, v_head_dim: tl.constexpr,
    padded_dim: tl.constexpr, padded_v_dim: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    precision: tl.constexpr, widened: tl.constexpr, index_type: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    """Output, lse and what the backward pass needs of one block of queries.

    A number that is not finite, times the weight 0 of a forbidden pair, is NaN. The loops do not
    look for such numbers, which would cost them registers. With `selects` the kernel is run again
    for the blocks of queries that have met one, and chooses what it adds up. It is compiled for
    every mask and rarely works, so that all its tiles go through one loop, as partial ones.

    A row of the block is a query of one head, or of `packed_heads` heads that read the same keys.
    With `is_split` a program sees one of `splits` parts of the tiles, and writes sums that are not
    divided yet, which `combine` puts together.
    """
    program = tl.program_id(0)
    split = program % splits
    program = program // splits
    block = q_blocks - 1 - program % q_blocks  # The last blocks of a causal call take longest.
    unit = program // q_blocks
    units = num_heads // packed_heads
    batch, first_head = unit // units, unit % units * packed_heads
    kv_head = first_head // group_size

    row = tl.arange(0, BLOCK_Q)
    QUERIES: tl.constexpr = BLOCK_Q // packed_heads
    q_index = (block * QUERIES + row // packed_heads).to(index_type)
    head = first_head + row % packed_heads
    is_row = (row < QUERIES * packed_heads) & (q_index < q_len)
    dim, v_dim = tl.arange(0, padded_dim), tl.arange(0, padded_v_dim)
    wide_batch = batch.to(tl.int64)
    at = query + wide_batch * q_strides[0] + head[:, None].to(tl.int64) * q_strides[1]
    q = tl.load(
        at + q_index[:, None] * q_strides[2] + dim[None, :],
        mask=is_row[:, None] & (dim[None, :] < head_dim),
        other=0.0,
    )
    keys = key + wide_batch * k_strides[0] + kv_head.to(tl.int64) * k_strides[1]
    values = value + wide_batch * v_strides[0] + kv_head.to(tl.int64) * v_strides[1]
    kv_blocks = tl.cdiv(kv_len, BLOCK_KV)
    flags = spoiled + (wide_batch * (num_heads // group_size) + kv_head) * kv_blocks

    place = batch * schedule_strides[0] + first_head // packed_heads * schedule_strides[1] + block
    full, partial = tl.load(counts + place * 2), tl.load(counts + place * 2 + 1)
    own_tiles = tiles + place.to(tl.int64) * kv_blocks
    share = tl.cdiv(full + partial, splits)
    first, last = split * share, tl.minimum((split + 1) * share, full + partial)
    if selects:
        if not has_flag(flags, own_tiles, 0 if modifies else full, full + partial):
            first, last = 0, 0
            is_row = is_row & False

    largest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, padded_v_dim], tl.float32)
    next_tile = tile_of(own_tiles, first, last)
    for is_partial in tl.static_range(1 if selects else 0, 2):
        start = first if selects else tl.maximum(full * is_partial, first)
        stop = last if is_partial == 1 else tl.minimum(full, last)
        for t in tl.range(start, stop, num_stages=stages):
            tile = next_tile
            next_tile = tile_of(own_tiles, t + 1, last)
            largest, total, acc = _over_tile(
                largest, total, acc, q, keys, values, flags, tile,
                tables, table_strides, k_strides, v_strides, q_index, head, batch, q_len, kv_len,
                scale, seed, threshold, modify, allows, modifies, masks, has_dropout,
                selects, head_dim, v_head_dim, dim, v_dim, padded_dim, padded_v_dim, BLOCK_KV,
                precision, widened, index_type, is_partial == 1,
            )  # fmt: skip

    if has_dropout:  # With this factor weights may be too large for float16.
        acc *= kept_factor

    # Parts, output and rows are contiguous: (splits, batch, heads, queries, dim).
    place_of_row = (wide_batch * num_heads + head) * q_len + q_index
    if is_split:
        batches = tl.num_programs(0) // (splits * q_blocks * units)
        place_of_row += split.to(tl.int64) * batches * num_heads * q_len
    else:
        largest, total, acc = _with_sink(largest, total, acc, sinks, head, is_row, has_sinks)
        found = _lse(largest, total, sinks, head, is_row, has_sinks)
        tl.store(lse + place_of_row, found, mask=is_row)
        total = tl.where(total == 0.0, 1.0, total)
        acc = acc / total[:, None]
        largest = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(row_max + place_of_row, largest, mask=is_row)
    tl.store(row_sum + place_of_row, total, mask=is_row)
    tl.store(
        out + place_of_row[:, None] * v_head_dim + v_dim[None, :],
        acc.to(out.dtype.element_ty),
        mask=is_row[:, None] & (v_dim[None, :] < v_head_dim),
    )


@triton.jit
def _over_tile(
    largest, total, acc, q, keys, values, flags, tile,
    tables, table_strides, k_strides, v_strides, q_index, head, batch, q_len, kv_len,
    scale, seed, threshold, modify: tl.constexpr, allows: tl.constexpr,
    modifies: tl.constexpr, masks: tl.constexpr, has_dropout: tl.constexpr, selects: tl.constexpr,
    head_dim: tl.constexpr, v_head_dim: tl.constexpr, dim, v_dim,
    padded_dim: tl.constexpr, padded_v_dim: tl.constexpr, BLOCK_KV: tl.constexpr,
    precision: tl.constexpr, widened: tl.constexpr, index_type: tl.constexpr,
    is_partial: tl.constexpr,
):  # fmt: skip
    """Largest score, sum of weights and sum of weighted values, one tile of keys further."""
    kv_index = (tile * BLOCK_KV + tl.arange(0, BLOCK_KV)).to(index_type)
    if is_partial:
        k = rows_of(keys, k_strides, kv_index, dim, kv_len, head_dim, padded_dim)
        v = rows_of(values, v_strides, kv_index, v_dim, kv_len, v_head_dim, padded_v_dim)
    else:
        k = whole_rows_of(keys, k_strides, kv_index, dim, head_dim, padded_dim)
        v = whole_rows_of(values, v_strides, kv_index, v_dim, v_head_dim, padded_v_dim)
    products = product(q, tl.trans(k), None, precision, widened)
    _, scores = scores_of(
        products, q_index[:, None], kv_index[None, :], head[:, None], batch, q_len, kv_len, scale,
        tables, table_strides, modify, allows, modifies, masks, is_partial,
    )  # fmt: skip
    next_largest = tl.maximum(largest, tl.max(scores, 1))
    shift = tl.where(next_largest == float("-inf"), 0.0, next_largest)
    weights = tl.exp2((scores - shift[:, None]) * LOG2_E)
    decay = tl.exp2((largest - shift) * LOG2_E)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    if has_dropout:  # The factor of what is kept comes last.
        weights *= dropout_factors(
            q_index[:, None], kv_index[None, :], head[:, None], batch, scores, seed, threshold, 1.0
        )  # fmt: skip
    if selects and (is_partial or modifies):
        if tl.load(flags + tile) != 0:
            acc += sums_not_finite(weights, scores != float("-inf"), v)
            v = without_infinities(v)
    return next_largest, total, product(weights.to(v.dtype), v, acc, precision, widened)


@triton.jit
def _with_sink(largest, total, acc, sinks, head, is_row, has_sinks: tl.constexpr):
    """The sums, with the weight that the sink takes."""
    if has_sinks:
        sink = tl.load(sinks + head, mask=is_row, other=float("-inf"))
        # A sink of infinity takes all weight, as the largest number does; inf - inf would be NaN.
        sink = tl.where(sink == float("inf"), 3.4028234663852886e38, sink)
        next_largest = tl.maximum(largest, sink, propagate_nan=tl.PropagateNan.ALL)
        shift = tl.where(next_largest == float("-inf"), 0.0, next_largest)
        decay = tl.exp2((largest - shift) * LOG2_E)
        total = total * decay + tl.exp2((sink - shift) * LOG2_E)
        return next_largest, total, acc * decay[:, None]
    return largest, total, acc


@triton.jit
def _lse(largest, total, sinks, head, is_row, has_sinks: tl.constexpr):
    is_empty = total == 0.0
    found = tl.where(is_empty, float("-inf"), largest + tl.log(tl.where(is_empty, 1.0, total)))
    if has_sinks:
        sink = tl.load(sinks + head, mask=is_row, other=float("-inf"))
        found = tl.where(sink == float("inf"), sink, found)
    return found


@triton.jit
def combine(
    parts, part_max, part_sum, out, lse, row_max, row_sum, sinks,
    rows, q_len, num_heads, splits,
    has_sinks: tl.constexpr, v_head_dim: tl.constexpr, padded_v_dim: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Output and lse from what the parts of the tiles gave, in the order of the parts."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < rows
    v_dim = tl.arange(0, padded_v_dim)
    is_inside = is_row[:, None] & (v_dim[None, :] < v_head_dim)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, padded_v_dim], tl.float32)
    for split in range(splits):
        place = split * rows + row
        of_part = tl.load(part_max + place, mask=is_row, other=float("-inf"))
        next_largest = tl.maximum(largest, of_part)
        shift = tl.where(next_largest == float("-inf"), 0.0, next_largest)
        before = tl.exp2((largest - shift) * LOG2_E)
        now = tl.exp2((of_part - shift) * LOG2_E)
        total = total * before + tl.load(part_sum + place, mask=is_row, other=0.0) * now
        part = tl.load(
            parts + place[:, None] * v_head_dim + v_dim[None, :], mask=is_inside, other=0.0
        )
        acc = acc * before[:, None] + part * now[:, None]
        largest = next_largest
    head = (row // q_len % num_heads).to(tl.int32)
    largest, total, acc = _with_sink(largest, total, acc, sinks, head, is_row, has_sinks)
    tl.store(lse + row, _lse(largest, total, sinks, head, is_row, has_sinks), mask=is_row)
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(row_max + row, tl.where(largest == float("-inf"), 0.0, largest), mask=is_row)
    tl.store(row_sum + row, total, mask=is_row)
    tl.store(
        out + row[:, None] * v_head_dim + v_dim[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty),
        mask=is_inside,
    )


@triton.jit
def spoiled_blocks(
    rows, strides, spoiled, length, heads, width: tl.constexpr, padded: tl.constexpr,
    BLOCK: tl.constexpr, index_type: tl.constexpr,
):  # fmt: skip
    """1 for each block of rows that holds a number that is not finite, else 0."""
    blocks = tl.cdiv(length, BLOCK)
    block, unit = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = (unit // heads).to(tl.int64), (unit % heads).to(tl.int64)
    row = (block * BLOCK + tl.arange(0, BLOCK)).to(index_type)
    start = rows + batch * strides[0] + head * strides[1]
    found = rows_of(start, strides, row, tl.arange(0, padded), length, width, padded)
    is_finite = tl.abs(found.to(tl.float32)) < float("inf")
    per_row = tl.max(tl.where(is_finite, 0, 1), 1)
    tl.store(spoiled + tl.program_id(0), tl.max(per_row, 0))
