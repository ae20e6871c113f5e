"""The latest call of tensors is tried first, steps too: results and gradients stay right."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import qkv  # noqa: E402
from qkv.backends import register  # noqa: E402
from qkv.errors import QkvError, ShapeError  # noqa: E402
from watched import Watched, python_calls  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_prepared_calls")

sdpa = torch.nn.functional.scaled_dot_product_attention


def operands(q_len, kv_len, *, seed=0, heads=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, heads, length, 8, generator=generator).to(dtype)
        for length in (q_len, kv_len, kv_len)
    ]


def near(tensors, *variants, **keywords) -> None:
    """A call gives what torch gives in float64."""
    exact = [tensor.double() for tensor in tensors]
    scores = exact[0] @ exact[1].mT / exact[0].shape[-1] ** 0.5
    lengths = scores.shape[-2:]
    allowed = torch.ones(lengths, dtype=torch.bool)
    if variants:  # The last query stands at the last key.
        allowed = allowed.tril(lengths[1] - lengths[0])
    expected = sdpa(*exact, attn_mask=allowed)
    scores = scores.masked_fill(~allowed, -torch.inf)
    out, lse = qkv.attention(*tensors, *variants, return_lse=True, **keywords)
    again = qkv.attention(*tensors, *variants, **keywords)
    atol = 3e-2 if out.dtype is torch.bfloat16 else 3e-6
    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=0)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=atol, rtol=0)
    assert torch.equal(out, again)


LENGTHS = [(1, 1), (1, 100), (2, 3000), (16, 16), (64, 64)]
"""Steps and whole passes, brief and not."""


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("variants", [(), (qkv.Causal("end"),)])
def test_a_repeated_call_is_the_first_one_tried(watched, lengths, variants) -> None:
    for seed in range(5):
        near(operands(*lengths, seed=seed), *variants)
    computed = watched.computed
    for seed in range(5, 9):
        near(operands(*lengths, seed=seed), *variants)
    assert watched.computed == computed


@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_repeated_call_looks_nothing_up(lengths) -> None:
    """A call after one of another type is looked up, which takes some 24 functions more."""
    one, other = operands(*lengths), operands(*lengths, dtype=torch.float64)
    for tensors in (one, other) * 4:
        qkv.attention(*tensors)
    looked_up, *repeated = (python_calls(lambda: qkv.attention(*one)) for _ in range(4))
    assert max(repeated) + 15 < looked_up


def turned(tensor):
    """Rows rotated by their positions, in float64: pair i is entries i and i + dim / 2."""
    first, second = tensor.double().chunk(2, -1)
    pairs = first.shape[-1]
    frequencies = 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    angle = torch.arange(tensor.shape[-2])[:, None] * frequencies
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("length", [16, 64, 300])
def test_rotation_and_sinks(watched, length, with_sinks) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    variants = (qkv.Causal(), qkv.RoPE(), *([qkv.Sinks(sinks)] if with_sinks else []))
    for seed in range(8):
        if seed == 5:
            computed = watched.computed
        query, key, value = operands(length, length, seed=seed)
        out, lse = qkv.attention(query, key, value, *variants, return_lse=True)
        scores = turned(query) @ turned(key).mT / query.shape[-1] ** 0.5
        allowed = torch.ones(length, length, dtype=torch.bool).tril()
        scores = scores.masked_fill(~allowed, -torch.inf)
        if with_sinks:
            own = sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, own], -1)
        expected = scores.softmax(-1)[..., :length] @ value.double()
        torch.testing.assert_close(out.double(), expected, atol=3e-6, rtol=0)
        torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=3e-6, rtol=0)
    assert watched.computed == computed


class NotesRefusals(Watched):
    """Notes whether prepared calls refused what they were told, so that it was computed anew."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = []

    def prepare(self, problem, passes, **given):
        made = super().prepare(problem, passes, **given)

        def run(*told):
            done = made.run(*told)
            self.refused.append(not done)
            return done

        return replace(made, run=run)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_steps_are_rotated_at_their_own_position(watched, with_sinks) -> None:
    """Keys are rows of one buffer, which grows, so that strides are not those of dense tensors."""
    backend = NotesRefusals()
    register(backend)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    variants = (qkv.Causal("end"), qkv.RoPE(), *([qkv.Sinks(sinks)] if with_sinks else []))
    query, *buffers = operands(60, 60)
    for length in range(20, 60):
        if length == 25:
            computed = backend.computed
        key, value = (buffer[:, :, :length] for buffer in buffers)
        found = qkv.attention(query[:, :, length - 1 : length], key, value, *variants)
        scores = turned(query)[:, :, length - 1 : length] @ turned(key).mT / key.shape[-1] ** 0.5
        if with_sinks:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(2, 4, 1, 1)], -1)
        expected = scores.softmax(-1)[..., :length] @ value.double()
        torch.testing.assert_close(found.double(), expected, atol=3e-6, rtol=0)
    assert backend.computed == computed
    assert backend.refused
    assert not any(backend.refused)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_steps_and_calls_take_turns(dtype) -> None:
    lengths = [*LENGTHS, (1, 101), (1, 101), (1, 101), (1, 100), (1, 100), (16, 17)]
    for seed in range(3):
        for pair in lengths:
            for kind in (dtype, torch.float32):
                tensors = operands(*pair, seed=seed, dtype=kind)
                near(tensors)
                near([tensor.mT.contiguous().mT for tensor in tensors])


def test_steps_of_one_length_may_have_other_strides() -> None:
    query, key, value = operands(1, 200)
    for keys in (50, 50, 50, 51, 51, 51):
        near([query, key[:, :, :keys], value[:, :, :keys]])
        near([query, key[:, :, :keys].contiguous(), value[:, :, 200 - keys :]])


@pytest.mark.parametrize("keys", [50, 3000])
@pytest.mark.parametrize("variants", [(), (qkv.Causal("end"),)])
def test_steps_over_as_many_keys_again_and_again(keys, variants) -> None:
    """Steps are prepared for this very length, and others are still right."""
    for turn in range(80):
        near(operands(2, keys, seed=turn), *variants)
    query, key, value = operands(2, keys + 9)
    for _ in range(3):
        near([query, key[:, :, 9:], value[:, :, :keys]], *variants)
        near([query, key, value], *variants)
        near([query.mT.contiguous().mT, key[:, :, 9:], value[:, :, 9:]], *variants)
        near(operands(2, keys), *variants)


@pytest.mark.parametrize("repeats", range(58, 72))
def test_the_first_step_of_another_size_after_many(repeats) -> None:
    """Nothing is prepared for it by the step that is tried first, however often that one came."""
    known = operands(1, 50)
    others = [torch.cat([t, t[:1] + 1]) for t in operands(1, 50, seed=1)]
    for tensors in [*[known] * repeats, *[others] * 4, known]:
        found = qkv.attention(*tensors)
        torch.testing.assert_close(found, sdpa(*tensors), atol=3e-6, rtol=0)


def test_positions_of_a_step_are_part_of_it() -> None:
    query, key, value = operands(1, 40)
    for _ in range(4):
        for q_offset in (20, 39, "end", "start"):
            last = {"end": 39, "start": 0}.get(q_offset, q_offset)
            found = qkv.attention(query, key, value, qkv.Causal(), q_offset=q_offset)
            expected = sdpa(query, key[:, :, : last + 1], value[:, :, : last + 1])
            torch.testing.assert_close(found, expected, atol=3e-6, rtol=0)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_gradients_of_a_known_call_are_not_lost(lengths) -> None:
    for _ in range(4):
        near(operands(*lengths))
    for place in range(3):
        tensors = operands(*lengths)
        tensors[place].requires_grad_()
        qkv.attention(*tensors).sum().backward()
        exact = [tensor.detach().double() for tensor in tensors]
        exact[place].requires_grad_()
        sdpa(*exact).sum().backward()
        found, expected = tensors[place].grad.double(), exact[place].grad
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("lengths", LENGTHS)
def test_what_is_unlike_a_known_call(lengths) -> None:
    tensors = operands(*lengths)
    for _ in range(4):
        near(tensors)
    mapped = torch.vmap(qkv.attention)(*[torch.stack([t, t]) for t in tensors])
    torch.testing.assert_close(mapped[1], sdpa(*tensors), atol=3e-6, rtol=0)
    assert qkv.attention(*[tensor.to("meta") for tensor in tensors]).device.type == "meta"
    for others in (
        (tensors[0], tensors[1].double(), tensors[2]),
        (tensors[0], tensors[1], torch.nested.nested_tensor(list(tensors[2]))),
        (tensors[0], tensors[1].to_sparse(), tensors[2]),
        (tensors[0], None, tensors[2]),
    ):
        with pytest.raises(QkvError):
            qkv.attention(*others)
    near(tensors)


@pytest.mark.parametrize("lengths", [(1, 100), (2, 3000), (16, 16), (64, 64)])
def test_sums_that_overflow_are_found(lengths) -> None:
    tensors = operands(*lengths)
    for _ in range(4):
        near(tensors)
    tensors[2].fill_(3e38)
    for _ in range(2):
        found = qkv.attention(*tensors)
        torch.testing.assert_close(found, torch.full_like(found, 3e38), rtol=1e-5, atol=0)
    near(operands(*lengths))


def test_many_threads_take_the_same_steps() -> None:
    def call(seed) -> None:
        for turn in range(30):
            near(operands(*LENGTHS[(seed + turn // 5) % len(LENGTHS)], seed=seed))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(call, range(6)))


def test_steps_and_other_calls_of_one_structure_take_turns(watched) -> None:
    """A guard of steps takes any sizes, also those of calls that are not steps."""
    shapes = [(1, 1), (1, 9), (16, 16), (1, 30), (2, 9)]
    for seed in range(3):
        for lengths in shapes:
            near(operands(*lengths, seed=seed))
    computed = watched.computed
    for seed in range(3, 6):
        for lengths in shapes:
            near(operands(*lengths, seed=seed))
    for seed in range(70):  # Steps over as many keys again and again, and others then.
        near(operands(1, 9, seed=seed % 3))
    for lengths in shapes:
        near(operands(*lengths))
    assert watched.computed == computed


class AskedForRows(Watched):
    """Notes whether lse was asked for: by a flag, or by an address that is not 0."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = []

    def prepare(self, problem, passes, **given):
        made = super().prepare(problem, passes, **given)

        def noting(function, asks):
            def run(*given):
                self.asked.append(bool(asks(*given)))
                return function(*given)

            return run

        of_arrays = noting(made.if_alike, lambda query, key, value, rows, arrays: rows)
        return replace(
            made,
            run=noting(made.run, lambda addresses, *_: addresses[4]),
            if_alike=of_arrays if made.if_alike else None,
        )


@pytest.mark.parametrize("arrays", [torch.Tensor.numpy, torch.Tensor.clone])
@pytest.mark.parametrize("length", [16, 100])
@pytest.mark.parametrize("masked", [False, True])
def test_lse_that_is_not_asked_for_is_not_written(watched, arrays, length, masked) -> None:
    backend = AskedForRows()
    register(backend)
    given = list(map(arrays, operands(length, length)))
    given.append(arrays(torch.ones(length, length) > 0) if masked else qkv.Causal())
    for _ in range(3):
        out, lse = qkv.attention(*given, return_lse=True)
    backend.asked.clear()
    for rows in (False, True, True, False):
        found = qkv.attention(*given, return_lse=rows)
        assert ((found[0] if rows else found) == out).all()
        assert not rows or (found[1] == lse).all()
    assert backend.asked == [False, True, True, False]


def test_steps_with_numbers_of_keys(watched) -> None:
    """Each step has its own, also of other types, and refuses those that cannot be."""

    def step(seed, lens):
        tensors = operands(1, 20 + seed, seed=seed)
        return qkv.attention(*tensors, qkv.Causal(), qkv.KeyLengths(lens), q_offset="end")

    def near_torch(seed, lens):
        query, key, value = (tensor.double() for tensor in operands(1, 20 + seed, seed=seed))
        seen = torch.arange(20 + seed) < torch.as_tensor(lens)[:, None, None, None]
        expected = sdpa(query, key, value, attn_mask=seen)
        torch.testing.assert_close(step(seed, lens).double(), expected, atol=3e-6, rtol=0)

    for seed in range(6):
        near_torch(seed, np.array([seed + 1, 20]))
    assert watched.computed == 2
    for lens in (np.array([3, 7], np.int32), torch.tensor([5, 20]), np.array([20, 1])):
        near_torch(0, lens)
    for wrong in (np.array([-1, 5]), np.array([5, 99]), np.array([5, 6, 7])):
        with pytest.raises(ShapeError):
            step(0, wrong)
    near_torch(7, np.array([1, 27]))
