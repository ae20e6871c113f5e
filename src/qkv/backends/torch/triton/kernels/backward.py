"""The backward pass: gradients of queries, then of keys and values, without atomic additions.

    dv[j] = sum_i w[i, j] do[i]
    ds[i, j] = w[i, j] (do[i] . v[j] - delta[i]) ds'/ds,   delta[i] = out[i] . do[i] - dlse[i]
    dq[i] = scale sum_j ds[i, j] k[j],   dk[j] = scale sum_i ds[i, j] q[i]

Each program adds up what is its own in one order, so that the same call has the same bits.
"""

import triton
import triton.language as tl

from qkv.backends.torch.triton.kernels.tiles import (
    contiguous_rows_of,
    dropout_factors,
    has_flag,
    keys_inside,
    product,
    rows_of,
    scores_of,
    sums_not_finite,
    tile_of,
    without_infinities,
)

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def deltas(
    out, grad_out, grad_lse, delta, rows, has_lse: tl.constexpr, v_head_dim: tl.constexpr,
    padded_v_dim: tl.constexpr, widened: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`delta` of each row, added up in the order in which `do . v` of float32 is.

    Where one key has all the weight, the gradient of its score is then exactly 0.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v_dim = tl.arange(0, padded_v_dim)
    o = contiguous_rows_of(out, 0, row, v_dim, rows, v_head_dim, padded_v_dim)
    do = contiguous_rows_of(grad_out, 0, row, v_dim, rows, v_head_dim, padded_v_dim)
    products = product(do.to(tl.float32), tl.trans(o), None, "ieee", widened)
    found = tl.sum(tl.where(row[:, None] == row[None, :], products, 0.0), 1)
    is_row = row < rows
    if has_lse:
        found -= tl.load(grad_lse + row, mask=is_row, other=0.0)
    tl.store(delta + row, found, mask=is_row)


@triton.jit
def _gradients_of_scores(
    products, weight_products, row_max, scale_of_row, delta, q_index, kv_index, head, batch,
    q_len, kv_len, scale, tables, table_strides, seed, threshold, kept_factor,
    modify: tl.constexpr, allows: tl.constexpr, slope: tl.constexpr, modifies: tl.constexpr,
    masks: tl.constexpr, has_dropout: tl.constexpr, is_partial: tl.constexpr,
):  # fmt: skip
    """Weights after dropout, gradients of the products `q . k` times scale, and allowed pairs."""
    raw, scores = scores_of(
        products, q_index, kv_index, head, batch, q_len, kv_len, scale, tables, table_strides,
        modify, allows, modifies, masks, is_partial,
    )  # fmt: skip
    weights = tl.exp2((scores - row_max) * LOG2_E) * scale_of_row
    dropped = weights
    if has_dropout:
        factors = dropout_factors(
            q_index, kv_index, head, batch, scores, seed, threshold, kept_factor
        )
        weight_products = weight_products * factors
        dropped = weights * factors
    gradients = weights * (weight_products - delta)
    if modifies:
        is_row, is_key = q_index < q_len, keys_inside(kv_index, kv_len, is_partial)
        change = slope(raw, q_index, kv_index, is_row, is_key, head, batch, tables, table_strides)
        gradients = gradients * tl.broadcast_to(change.to(tl.float32), raw.shape)
    allowed = scores != float("-inf")
    if is_partial or modifies:
        # Weights and gradients of rows that are not finite are NaN, at forbidden pairs too.
        dropped = tl.where(allowed, dropped, 0.0)
        gradients = tl.where(allowed, gradients, 0.0)
    return dropped, gradients, allowed


@triton.jit
def gradients_of_queries(
    query, key, value, grad_out, grad_query, row_max, row_sum, delta, spoiled, counts, tiles,
    tables, table_strides, q_strides, k_strides, v_strides, schedule_strides,
    scale, q_len, kv_len, num_heads, q_blocks, seed, threshold, kept_factor,
    modify: tl.constexpr, allows: tl.constexpr, slope: tl.constexpr, modifies: tl.constexpr,
    masks: tl.constexpr, has_dropout: tl.constexpr, selects: tl.constexpr,
    group_size: tl.constexpr, head_dim: tl.constexpr, v_head_dim: tl.constexpr,
    padded_dim: tl.constexpr, padded_v_dim: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    precision: tl.constexpr, widened: tl.constexpr, factor_type: tl.constexpr,
    index_type: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of queries; `grad_out` and `grad_query` are contiguous."""
    program = tl.program_id(0)
    block = q_blocks - 1 - program % q_blocks
    unit = program // q_blocks
    batch, head = unit // num_heads, unit % num_heads
    kv_head = head // group_size
    wide_batch = batch.to(tl.int64)

    q_index = (block * BLOCK_Q + tl.arange(0, BLOCK_Q)).to(index_type)
    dim, v_dim = tl.arange(0, padded_dim), tl.arange(0, padded_v_dim)
    queries = query + wide_batch * q_strides[0] + head.to(tl.int64) * q_strides[1]
    q = rows_of(queries, q_strides, q_index, dim, q_len, head_dim, padded_dim)
    is_row = q_index < q_len
    first_row = (wide_batch * num_heads + head) * q_len
    do = contiguous_rows_of(grad_out, first_row, q_index, v_dim, q_len, v_head_dim, padded_v_dim)
    shift = tl.load(row_max + first_row + q_index, mask=is_row, other=0.0)[:, None]
    sums = tl.load(row_sum + first_row + q_index, mask=is_row, other=1.0)
    scale_of_row = (1.0 / sums)[:, None]
    of_row = tl.load(delta + first_row + q_index, mask=is_row, other=0.0)[:, None]
    keys = key + wide_batch * k_strides[0] + kv_head.to(tl.int64) * k_strides[1]
    values = value + wide_batch * v_strides[0] + kv_head.to(tl.int64) * v_strides[1]
    kv_blocks = tl.cdiv(kv_len, BLOCK_KV)
    flags = spoiled + (wide_batch * (num_heads // group_size) + kv_head) * kv_blocks
    place_of_block = batch * schedule_strides[0] + head * schedule_strides[1] + block
    own_tiles = tiles + place_of_block.to(tl.int64) * kv_blocks
    full = tl.load(counts + place_of_block * 2)
    partial = tl.load(counts + place_of_block * 2 + 1)
    if selects:
        if not has_flag(flags, own_tiles, 0 if modifies else full, full + partial):
            full, partial = 0, 0
            is_row = is_row & False

    acc = tl.zeros([BLOCK_Q, padded_dim], tl.float32)
    next_tile = tile_of(own_tiles, 0, full + partial)
    for is_partial in tl.static_range(1 if selects else 0, 2):
        start = 0 if selects else full * is_partial
        for t in tl.range(start, full + partial * is_partial, num_stages=stages):
            tile = next_tile
            next_tile = tile_of(own_tiles, t + 1, full + partial)
            kv_index = (tile * BLOCK_KV + tl.arange(0, BLOCK_KV)).to(index_type)
            k = rows_of(keys, k_strides, kv_index, dim, kv_len, head_dim, padded_dim)
            v = rows_of(values, v_strides, kv_index, v_dim, kv_len, v_head_dim, padded_v_dim)
            products = product(q, tl.trans(k), None, precision, widened)
            weight_products = product(do, tl.trans(v), None, precision, widened)
            _, gradients, allowed = _gradients_of_scores(
                products, weight_products, shift, scale_of_row, of_row, q_index[:, None],
                kv_index[None, :], head, batch, q_len, kv_len, scale, tables, table_strides, seed,
                threshold, kept_factor, modify, allows, slope, modifies, masks, has_dropout,
                is_partial == 1,
            )  # fmt: skip
            if selects and (is_partial == 1 or modifies):
                if tl.load(flags + tile) != 0:
                    acc += sums_not_finite(gradients, allowed, k)
                    k = without_infinities(k)
            acc = product(gradients.to(factor_type), k.to(factor_type), acc, precision, widened)
    tl.store(
        grad_query + first_row * head_dim + q_index[:, None] * head_dim + dim[None, :],
        (acc * scale).to(grad_query.dtype.element_ty),
        mask=is_row[:, None] & (dim[None, :] < head_dim),
    )


@triton.jit
def gradients_of_keys(
    query, key, value, grad_out, grad_key, grad_value, row_max, row_sum, delta,
    spoiled_queries, spoiled_gradients, counts, tiles,
    tables, table_strides, q_strides, k_strides, v_strides, schedule_strides,
    scale, q_len, kv_len, num_heads, kv_blocks, seed, threshold, kept_factor,
    modify: tl.constexpr, allows: tl.constexpr, slope: tl.constexpr, modifies: tl.constexpr,
    masks: tl.constexpr, has_dropout: tl.constexpr, selects: tl.constexpr,
    group_size: tl.constexpr, head_dim: tl.constexpr, v_head_dim: tl.constexpr,
    padded_dim: tl.constexpr, padded_v_dim: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    precision: tl.constexpr, widened: tl.constexpr, factor_type: tl.constexpr,
    index_type: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys and values, over all query heads that read it.

    Scores stand with keys before queries here, so that the products over queries read them as
    they are.
    """
    program = tl.program_id(0)
    block, unit = program % kv_blocks, program // kv_blocks
    kv_heads = num_heads // group_size
    batch, kv_head = unit // kv_heads, unit % kv_heads
    wide_batch = batch.to(tl.int64)
    kv_index = (block * BLOCK_KV + tl.arange(0, BLOCK_KV)).to(index_type)
    dim, v_dim = tl.arange(0, padded_dim), tl.arange(0, padded_v_dim)
    keys = key + wide_batch * k_strides[0] + kv_head.to(tl.int64) * k_strides[1]
    values = value + wide_batch * v_strides[0] + kv_head.to(tl.int64) * v_strides[1]
    k = rows_of(keys, k_strides, kv_index, dim, kv_len, head_dim, padded_dim)
    v = rows_of(values, v_strides, kv_index, v_dim, kv_len, v_head_dim, padded_v_dim)
    q_blocks = tl.cdiv(q_len, BLOCK_Q)
    is_key = kv_index < kv_len
    members = group_size
    if selects:
        is_spoiled = False
        for member in range(group_size):
            head = kv_head * group_size + member
            flags = (wide_batch * num_heads + head) * q_blocks
            place = batch * schedule_strides[0] + head * schedule_strides[1] + block
            own_tiles = tiles + place.to(tl.int64) * q_blocks
            full, partial = tl.load(counts + place * 2), tl.load(counts + place * 2 + 1)
            first, last = 0 if modifies else full, full + partial
            is_spoiled |= has_flag(spoiled_gradients + flags, own_tiles, first, last)
            is_spoiled |= has_flag(spoiled_queries + flags, own_tiles, first, last)
        is_key = is_key & is_spoiled
        members = tl.where(is_spoiled, group_size, 0)

    dk = tl.zeros([BLOCK_KV, padded_dim], tl.float32)
    dv = tl.zeros([BLOCK_KV, padded_v_dim], tl.float32)
    for member in range(members):
        head = kv_head * group_size + member
        queries = query + wide_batch * q_strides[0] + head.to(tl.int64) * q_strides[1]
        first_row = (wide_batch * num_heads + head) * q_len
        flags = (wide_batch * num_heads + head) * q_blocks
        place = batch * schedule_strides[0] + head * schedule_strides[1] + block
        own_tiles = tiles + place.to(tl.int64) * q_blocks
        full, partial = tl.load(counts + place * 2), tl.load(counts + place * 2 + 1)
        next_tile = tile_of(own_tiles, 0, full + partial)
        for is_partial in tl.static_range(1 if selects else 0, 2):
            start = 0 if selects else full * is_partial
            for t in tl.range(start, full + partial * is_partial, num_stages=stages):
                tile = next_tile
                next_tile = tile_of(own_tiles, t + 1, full + partial)
                q_index = (tile * BLOCK_Q + tl.arange(0, BLOCK_Q)).to(index_type)
                is_row = q_index < q_len
                q = rows_of(queries, q_strides, q_index, dim, q_len, head_dim, padded_dim)
                do = contiguous_rows_of(
                    grad_out, first_row, q_index, v_dim, q_len, v_head_dim, padded_v_dim
                )
                shift = tl.load(row_max + first_row + q_index, mask=is_row, other=0.0)[None, :]
                sums = tl.load(row_sum + first_row + q_index, mask=is_row, other=1.0)
                scale_of_row = (1.0 / sums)[None, :]
                of_row = tl.load(delta + first_row + q_index, mask=is_row, other=0.0)[None, :]
                products = product(k, tl.trans(q), None, precision, widened)
                weight_products = product(v, tl.trans(do), None, precision, widened)
                weights, gradients, allowed = _gradients_of_scores(
                    products, weight_products, shift, scale_of_row, of_row, q_index[None, :],
                    kv_index[:, None], head, batch, q_len, kv_len, scale, tables, table_strides,
                    seed, threshold, kept_factor, modify, allows, slope, modifies, masks,
                    has_dropout, is_partial == 1,
                )  # fmt: skip
                if selects and (is_partial == 1 or modifies):
                    if tl.load(spoiled_gradients + flags + tile) != 0:
                        dv += sums_not_finite(weights, allowed, do)
                        do = without_infinities(do)
                    if tl.load(spoiled_queries + flags + tile) != 0:
                        dk += sums_not_finite(gradients, allowed, q)
                        q = without_infinities(q)
                dv = product(weights.to(factor_type), do.to(factor_type), dv, precision, widened)
                dk = product(gradients.to(factor_type), q.to(factor_type), dk, precision, widened)
    first_key = (wide_batch * kv_heads + kv_head) * kv_len
    tl.store(
        grad_key + first_key * head_dim + kv_index[:, None] * head_dim + dim[None, :],
        (dk * scale).to(grad_key.dtype.element_ty),
        mask=is_key[:, None] & (dim[None, :] < head_dim),
    )
    tl.store(
        grad_value + first_key * v_head_dim + kv_index[:, None] * v_head_dim + v_dim[None, :],
        dv.to(grad_value.dtype.element_ty),
        mask=is_key[:, None] & (v_dim[None, :] < v_head_dim),
    )
