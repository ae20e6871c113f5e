"""Compiled functions that Python calls: they read arrays or addresses into a block of arguments."""

import gc
import threading
import weakref

import numpy as np
import pytest

from qkv.backends.cpu.emit.argument_block import ArgumentBlock
from qkv.backends.cpu.machine.addresses import address_of
from qkv.backends.cpu.python_calls import filled_block
from qkv.backends.cpu.python_calls.code import CALL_WORDS
from qkv.backends.cpu.python_calls.filled_block import Axis, FilledBlock, Operand, operand_of


def normal(*shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def _filled(query, **words):
    """A block for this query, and for keys of any number and strides."""
    block = ArgumentBlock(np.zeros(20, np.int64))
    axes = [Axis(-1 if n == 2 else size, 0, 10 + n) for n, size in enumerate(query.shape)]
    operands = [operand_of(0, query), *(Operand(n, query.dtype, axes) for n in (1, 2))]
    operands += [Operand(3), Operand(4)]
    places = {"out": 3, "lse": 4, "kv_len": 5, "q_shift": 6, "not_finite": 7}
    return FilledBlock.of(block, operands, {**places, "q_len": 4, "longest": 50, **words})


@pytest.mark.parametrize(("at_end", "shift"), [(0, 7), (1, 0)])
def test_any_number_of_keys_is_read(at_end, shift) -> None:
    query, out, rows = normal(2, 3, 4, 5), normal(2), normal(2, 3, 60, 5)
    filled = _filled(query, at_end=at_end, shift=shift)
    words = filled.block.words
    for keys in (1, 3, 5, 50):
        key, value = rows[..., :keys, :], rows[:, ::-1, 60 - keys :]
        assert filled.read(query, key, value, out) == keys
        places = [*map(address_of, (query, key, value, out)), 0]
        assert list(words[:7]) == [*places, keys, keys - 4 if at_end else 7]
        assert tuple(words[10:14]) == value.strides
        assert filled.read(query, key, value[..., 1:, :], out) == 0
        assert filled.read(query, key, value, out, out) == keys
        assert words[4] == address_of(out)
    for keys in (0, 4, 51):
        assert filled.read(query, rows[..., :keys, :], rows[..., :keys, :], out) == 0


def _described(*arrays):
    """Addresses, sizes, and strides in elements, as tensors tell them."""
    found = []
    for array in arrays:
        strides = tuple([stride // array.itemsize for stride in array.strides])
        found += [address_of(array), array.shape, strides]
    return found


def _step(query, *arrays):
    """A block for steps of this query, and arrays with an entry for each key, or every 2 keys."""
    block = ArgumentBlock(np.zeros(40, np.int64))
    axes = [Axis(-1 if n == 2 else size, 0, 10 + n) for n, size in enumerate(query.shape)]
    of_query = [Axis(size, 0, 14 + n) for n, size in enumerate(query.shape)]
    operands = [Operand(0, query.dtype, of_query), *(Operand(n, query.dtype, axes) for n in (1, 2))]
    for array, (keys, place) in zip(arrays, [(1, 20), (2, 30)], strict=False):
        own = [Axis(array.shape[0], 0, place + 2), Axis(array.shape[1], 0, place + 4, keys)]
        operands.append(Operand(place, array.dtype, own))
    places = {"out": 3, "lse": 4, "kv_len": 5, "q_shift": 6, "not_finite": 7}
    return FilledBlock.of(block, operands, {**places, "longest": 50, "arrays": len(arrays)})


def test_a_step_is_told_sizes_and_strides() -> None:
    query, rows = normal(2, 3, 1, 5)[:, ::-1], normal(2, 3, 60, 5)
    filled = _step(query)
    words = filled.block.words
    for keys in (1, 2, 50):
        key, value = rows[..., :keys, :], rows[:, ::-1, 60 - keys :]
        assert filled.step(8, 9, -50, *_described(query, key, value)) == keys
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
        ):
            assert filled.step(8, 9, 0, *_described(*unlike)) == 0
        for place in (0, 3, 6):
            numbers = _described(query, key, value)
            numbers[place] = 0  # Memory that has been freed.
            assert filled.step(8, 9, 0, *numbers) == 0
        for shift in (51, -51):
            assert filled.step(8, 9, shift, *_described(query, key, value)) == 0
    for keys in (0, 51):
        assert (
            filled.step(8, 9, 0, *_described(query, rows[..., :keys, :], rows[..., :keys, :])) == 0
        )


def test_a_step_is_told_of_the_arrays_of_variants() -> None:
    query, rows = normal(2, 3, 1, 5), normal(2, 3, 60, 5)
    filled = _step(query, normal(1, 9), normal(4, 9))
    words = filled.block.words
    for keys, blocks in ((1, 1), (2, 1), (3, 2), (50, 25)):
        key = rows[..., :keys, :]
        arrays = normal(1, 60)[:, 60 - keys :], normal(4, 60)[::-1, 2 : 2 + blocks]
        assert filled.step(8, 9, 0, *_described(query, key, key, *arrays)) == keys
        for place, array, size in zip((20, 30), arrays, (keys, blocks), strict=True):
            assert words[place] == address_of(array)
            assert (words[place + 2], words[place + 4]) == array.strides
            assert words[place + 3] == size
        # One row that is repeated is as good as one row, but one of four rows is not.
        repeated_rows = np.broadcast_to(arrays[0], (7, keys))
        assert filled.step(8, 9, 0, *_described(query, key, key, repeated_rows, arrays[1])) == keys
        for unlike in (
            (normal(2, keys), arrays[1]),
            (normal(1, keys + 1), arrays[1]),
            (np.broadcast_to(normal(1, 1), (1, keys + 1)), arrays[1]),
            (arrays[0], arrays[1][:3]),
            (arrays[0], np.broadcast_to(arrays[1][:1], (5, blocks))),
            (arrays[0], normal(4, blocks + 1)),
        ):
            assert filled.step(8, 9, 0, *_described(query, key, key, *unlike)) == 0


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
