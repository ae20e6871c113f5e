"""Compiled functions that Python calls: they read arrays or addresses into a block of arguments."""

import gc
import threading
import weakref

import numpy as np
import pytest

from qkv.arrays.addresses import address_of
from qkv.backends.cpu.emit.argument_block import ArgumentBlock
from qkv.backends.cpu.python_calls import filled_block
from qkv.backends.cpu.python_calls.filled_block import Axis, FilledBlock, Operand
from qkv.backends.cpu.python_calls.layout import CALL_WORDS


def normal(*shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


PLACES = {"kv_len": 5, "q_shift": 6, "not_finite": 7, "results": 2}
"""Words of a block, and how many results a call has; those stand in words 3 and 4."""


def _filled(query, *arrays, is_step=False, **words):
    """A block for this query, keys of any number and strides, and arrays with an entry for each
    key, or for every 2 keys."""
    block = ArgumentBlock(np.zeros(40, np.int64))
    axes = [Axis(-1 if n == 2 else size, 0, 10 + n) for n, size in enumerate(query.shape)]
    of_query = [Axis(size, 0, 14 + n) for n, size in enumerate(query.shape)]
    operands = [Operand(0, query.dtype, of_query), *(Operand(n, query.dtype, axes) for n in (1, 2))]
    operands += [Operand(3), Operand(4)]
    for array, (keys, place) in zip(arrays, [(1, 20), (2, 30)], strict=False):
        own = [Axis(array.shape[0], 0, place + 2), Axis(array.shape[1], 0, place + 4, keys)]
        operands.append(Operand(place, array.dtype, own))
    told = {**PLACES, "longest": 50, "arrays": len(arrays), **words}
    return FilledBlock.of(block, operands, told, is_step=is_step)


@pytest.mark.parametrize("at_end", [0, 1])
def test_any_number_of_keys_is_read(at_end) -> None:
    query, out, rows = normal(2, 3, 4, 5), normal(2), normal(2, 3, 60, 5)
    filled = _filled(query, at_end=at_end, q_len=4)
    words = filled.block.words
    for keys in (1, 3, 5, 50):
        key, value = rows[..., :keys, :], rows[:, ::-1, 60 - keys :]
        assert filled.read(None, query, key, value, out, None) == keys
        places = [*map(address_of, (query, key, value, out)), 0]
        assert list(words[:7]) == [*places, keys, keys - 4 if at_end else 0]
        assert tuple(words[10:14]) == value.strides
        assert filled.read(None, query, key, value[..., 1:, :], out, None) == 0
        assert filled.read(None, query, key, value, out, out) == keys
        assert words[4] == address_of(out)
    for keys in (0, 4, 51):
        assert filled.read(None, query, rows[..., :keys, :], rows[..., :keys, :], out, None) == 0


def _first_repeated(bias):
    """The first key in the place of one key more than there are."""
    return np.broadcast_to(bias[:, :1], (1, bias.shape[1] + 1))


UNLIKE_ARRAYS = {
    "rows": lambda bias, blocks: (np.repeat(bias, 2, 0), blocks),
    "a key more": lambda bias, blocks: (np.repeat(bias, 2, 1), blocks),
    "keys repeated": lambda bias, blocks: (
        np.broadcast_to(bias[:, :1], (1, bias.shape[1] + 1)),
        blocks,
    ),
    "three rows": lambda bias, blocks: (bias, blocks[:3]),
    "rows repeated": lambda bias, blocks: (bias, np.broadcast_to(blocks[:1], (5, blocks.shape[1]))),
    "a block more": lambda bias, blocks: (bias, np.concatenate([blocks, blocks[:, :1]], 1)),
}
"""Two arrays, each of which is as expected, changed so that one is not."""


def _two_arrays(keys):
    blocks = -(-keys // 2)
    return normal(1, 60)[:, 60 - keys :], normal(4, 60)[::-1, 2 : 2 + blocks]


@pytest.mark.parametrize("keys", [1, 2, 3, 50])
def test_arrays_of_variants_are_read(keys) -> None:
    query, rows, out = normal(2, 3, 1, 5), normal(2, 3, 60, 5), normal(2)
    filled = _filled(query, normal(1, 9), normal(4, 9), q_len=4)
    words, key, arrays = filled.block.words, rows[..., :keys, :], _two_arrays(keys)
    assert filled.read(None, query, key, key, out, None, *arrays) == keys
    for place, array in zip((20, 30), arrays, strict=True):
        assert words[place] == address_of(array)
        assert (words[place + 2], words[place + 4]) == array.strides
        assert words[place + 3] == array.shape[1]
    # One row that is repeated is as good as one row.
    repeated_rows = np.broadcast_to(arrays[0], (7, keys))
    assert filled.read(None, query, key, key, out, None, repeated_rows, arrays[1]) == keys
    for others in ((), arrays[:1], (*arrays, arrays[1])):
        assert filled.read(None, query, key, key, out, None, *others) == 0
    for changed in UNLIKE_ARRAYS.values():
        assert filled.read(None, query, key, key, out, None, *changed(*arrays)) == 0
    bias, blocks = arrays
    for unlike in (bias.astype(np.float64), bias[0], bias[None], bias.astype(np.int32)):
        assert filled.read(None, query, key, key, out, None, unlike, blocks) == 0


def _filled_pages(query, pages, **words):
    """A block for keys and values in pages, with one table of pages for each batch row."""
    block = ArgumentBlock(np.zeros(60, np.int64))
    sizes = pages.shape[1], -1, pages.shape[3]
    operands = [Operand(0, query.dtype, [Axis(n, 0, 9) for n in query.shape])]
    for n in (1, 2):
        axes = [Axis(size, 0, 10 * n + i) for i, size in enumerate(sizes)]
        operands.append(Operand(n, pages.dtype, axes, pages.strides[0], pages.shape[2]))
    table = [Axis(len(query), 0, 40), Axis(-1, 0, 42, pages.shape[2])]
    operands += [Operand(3), Operand(4), Operand(30, np.dtype(np.int64), table)]
    told = {**PLACES, "longest": 50, "arrays": 1, "q_len": 1, **words}
    return FilledBlock.of(block, operands, told)


def test_a_table_of_pages_says_how_many_keys_there_are() -> None:
    query, pages, out = normal(2, 3, 1, 5), normal(9, 3, 4, 5), normal(2)
    filled = _filled_pages(query, pages, at_end=1)
    words = filled.block.words
    for slots in (1, 2, 12):
        table = np.zeros((2, slots), np.int64)
        turned = pages.swapaxes(1, 3).copy().swapaxes(1, 3)[:5]
        for value in (pages, pages[:5], turned):
            assert filled.read(None, query, pages, value, out, None, table) == 4 * slots
            assert tuple(words[20:23]) == value.strides[1:]
        assert tuple(words[10:13]) == pages.strides[1:]
        assert (words[1], words[2], words[30]) == tuple(map(address_of, (pages, turned, table)))
        assert (words[5], words[6], words[41]) == (4 * slots, 4 * slots - 1, slots)
    unlike = (pages[::2], pages[:, :2], pages[:, :, :3], pages[..., :4], pages[0], pages[None])
    for other in (*unlike, pages.astype(np.float64), np.concatenate([pages, pages], 2)):
        assert filled.read(None, query, other, pages, out, None, table) == 0
        assert filled.read(None, query, pages, other, out, None, table) == 0
    for other in (table[:1], table[0], table.astype(np.int32), np.zeros((2, 13), np.int64)):
        assert filled.read(None, query, pages, pages, out, None, other) == 0
    for none in (np.zeros((2, 0), np.int64), np.zeros((0, 3), np.int64)):
        assert filled.read(None, query, pages, pages, out, None, none) == 0


def test_a_table_of_pages_has_all_keys() -> None:
    """Other operands have an entry for each key, and no page is there in part."""
    query, pages, rows, out = normal(2, 3, 1, 5), normal(9, 3, 4, 5), normal(2, 3, 60, 5), normal(2)
    block = ArgumentBlock(np.zeros(60, np.int64))
    sizes = [Axis(-1 if n == 2 else size, 0, 20 + n) for n, size in enumerate(rows.shape)]
    of_page = [Axis(3, 0, 10), Axis(-1, 0, 11), Axis(5, 0, 12)]
    table = [Axis(2, 0, 40), Axis(-1, 0, 42, 4)]
    operands = [
        Operand(0, query.dtype, [Axis(n, 0, 9) for n in query.shape]),
        Operand(1, pages.dtype, of_page, pages.strides[0], 4), Operand(2, rows.dtype, sizes),
        Operand(3), Operand(4), Operand(30, np.dtype(np.int64), table),
    ]  # fmt: skip
    filled = FilledBlock.of(block, operands, {**PLACES, "longest": 50, "arrays": 1, "q_len": 1})
    for keys in range(5, 13):
        found = filled.read(
            None, query, pages, rows[..., :keys, :], out, None, np.zeros((2, -(-keys // 4)), int)
        )
        assert found == (0 if keys % 4 else keys)


def test_a_position_may_be_given() -> None:
    query, out, rows = normal(2, 3, 4, 5), normal(2), normal(2, 3, 40, 5)
    filled = _filled(query, at_end=1, q_len=4)
    for shift, found in [(None, 36), (0, 0), (-50, -50), (50, 50), (7, 7)]:
        assert filled.read(shift, query, rows, rows, out, None) == 40
        assert filled.block.words[6] == found
    for shift in (51, -51, 2**40):
        assert filled.read(shift, query, rows, rows, out, None) == 0


def _strides(array, in_elements):
    return tuple([stride // (array.itemsize if in_elements else 1) for stride in array.strides])


def _described(*arrays, results=(8, 9), in_elements=True):
    """Addresses, then sizes and strides, as `step` is told of them."""
    addresses = list(map(address_of, arrays))
    layouts = []
    for array in arrays:
        layouts += array.shape, _strides(array, in_elements)
    return [*addresses[:3], *results, *addresses[3:], *layouts]


@pytest.mark.parametrize("in_elements", [True, False])
def test_a_step_is_told_sizes_and_strides(in_elements) -> None:
    query, rows = normal(2, 3, 1, 5)[:, ::-1], normal(2, 3, 60, 5)
    filled = _filled(query, is_step=True)
    words = filled.block.words

    def step(shift, *arrays):
        return filled.write(shift, in_elements, *_described(*arrays, in_elements=in_elements))

    for keys in (1, 2, 50):
        key, value = rows[..., :keys, :], rows[:, ::-1, 60 - keys :]
        assert step(-50, query, key, value) == keys
        places = [*map(address_of, (query, key, value)), 8, 9, keys, -50]
        assert list(words[:7]) == places
        assert tuple(words[10:14]) == value.strides
        assert tuple(words[14:18]) == query.strides
        for unlike in (
            (query, key, value[..., :-1, :]),
            (query, key[:1], value),
            (query, key, value[..., 1:]),
            (np.broadcast_to(query[:, :1], query.shape)[:, :2], key, value),
            (query[:1], key[:1], value[:1]),
            (query[0], key, value),
            (query[None], key, value),
            (np.broadcast_to(query, (2, 3, 5, 5)), key, value),
        ):
            assert step(0, *unlike) == 0
        for place in (0, 1, 2):
            numbers = _described(query, key, value, in_elements=in_elements)
            numbers[place] = 0  # Memory that has been freed.
            assert filled.write(0, in_elements, *numbers) == 0
        for shift in (51, -51):
            assert step(shift, query, key, value) == 0
    for keys in (0, 51):
        assert step(0, query, rows[..., :keys, :], rows[..., :keys, :]) == 0


@pytest.mark.parametrize("keys", [1, 2, 3, 50])
def test_a_step_is_told_of_the_arrays_of_variants(keys) -> None:
    query, rows = normal(2, 3, 1, 5), normal(2, 3, 60, 5)
    filled = _filled(query, normal(1, 9), normal(4, 9), is_step=True)
    words, key, arrays = filled.block.words, rows[..., :keys, :], _two_arrays(keys)
    assert filled.write(0, True, *_described(query, key, key, *arrays)) == keys
    for place, array in zip((20, 30), arrays, strict=True):
        assert words[place] == address_of(array)
        assert (words[place + 2], words[place + 4]) == array.strides
        assert words[place + 3] == array.shape[1]
    # One row that is repeated is as good as one row, but one of four rows is not.
    repeated_rows = np.broadcast_to(arrays[0], (7, keys))
    assert filled.write(0, True, *_described(query, key, key, repeated_rows, arrays[1])) == keys
    for others in ((), arrays[:1], (*arrays, arrays[1])):
        assert filled.write(0, True, *_described(query, key, key, *others)) == 0
    for changed in UNLIKE_ARRAYS.values():
        assert filled.write(0, True, *_described(query, key, key, *changed(*arrays))) == 0


def test_every_word_has_a_place() -> None:
    assert len(set(CALL_WORDS)) == len(CALL_WORDS)


def test_threads_that_come_first_keep_the_code_of_their_own(monkeypatch) -> None:
    """Only one of them has the code that is remembered."""
    build, codes, blocks = filled_block.build, [], []
    query, start = normal(2, 3, 4, 5), threading.Barrier(4)
    filled_block._can_read()

    def slow_build(*arguments):
        start.wait()  # Until all four are here.
        made = build(*arguments)
        codes.append(weakref.ref(made))
        return made

    monkeypatch.setattr(filled_block, "build", slow_build)
    filled_block._code.cache_clear()
    threads = [threading.Thread(target=lambda: blocks.append(_filled(query))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert [code() is None for code in codes] == [False] * 4
    for filled in blocks:
        assert filled.write(1, 2, 3, 4, 5) == 1


def test_addresses_are_written_as_they_are() -> None:
    array = normal(2, 3, 4, 5)
    filled = _filled(array)
    assert filled.write(2**47, 1, 2, 2**62, 4) == 1
    assert list(filled.block.words[:5]) == [2**47, 1, 2, 2**62, 4]
