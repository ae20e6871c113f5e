"""What compiled code finds out about a mask over a block, beside all pairs of the block."""

import ctypes
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

from qkv.backends.cpu.compiler.compile import linked, parsed
from qkv.backends.cpu.decode.tasks import EMPTY, FULL, PARTIAL
from qkv.backends.cpu.emit.argument_block import COMMON_FIELDS, COUNTER_BYTES, WORD
from qkv.backends.cpu.emit.emitter import DOUBLE, INT64, POINTER
from qkv.backends.cpu.emit.expressions.mask_bounds import MaskBounds
from qkv.backends.cpu.emit.frame import Frame
from qkv.backends.cpu.machine.host import host
from qkv.problem.language.bounds import bound
from qkv.problem.language.evaluate import evaluate
from qkv.problem.language.expressions import Const, Load, Node, Var, constant, operation, walk
from qkv.problem.language.intervals import Interval
from qkv.problem.spec import Spec, TableSpec

SIZES = {"batch": 3, "head": 4, "q_index": 5, "kv_index": 200}
UNBOUNDED = {"exp", "log", "tanh"}


def tables(rng) -> dict[str, np.ndarray]:
    """Numbers, one for each head or batch row, and arrays along keys, of many types."""
    batch, head, q_len, kv_len = SIZES.values()
    strided = rng.integers(-50, 50, (2 * kv_len, 3)).astype(np.int16)[::2, 1]
    return {
        "number": np.asarray(rng.integers(-100, 100)),
        "per_head": rng.normal(size=head),
        "per_batch": rng.integers(0, kv_len, batch),
        "keys": rng.random(kv_len) < rng.choice([0.05, 0.5, 0.95]),
        "ids": np.sort(rng.integers(0, 5, kv_len)).astype(np.uint8),
        "strided": strided,
        "pairs": np.broadcast_to(rng.random((batch, 1, q_len, kv_len)) < 0.9,
                                 (batch, head, q_len, kv_len)),
        "slopes": np.append(rng.normal(size=kv_len - 2), [np.nan, np.inf]).astype(
            ml_dtypes.bfloat16
        ),
        "large": np.asarray([2**62, -(2**62), 2**53 + 1], np.int64),
    }  # fmt: skip


AXES = {
    "number": (), "per_head": ("head",), "per_batch": ("batch",), "keys": ("kv_index",),
    "ids": ("kv_index",), "strided": ("kv_index",), "slopes": ("kv_index",),
    "pairs": ("batch", "head", "q_index", "kv_index"), "large": ("batch",),
}  # fmt: skip
KINDS = {"keys": "bool", "pairs": "bool", "per_head": "float", "slopes": "float"}


@dataclass
class Generator:
    """Random expressions: of bounded depth, and reading inside their tables."""

    rng: np.random.Generator

    def pick(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def load(self, name: str) -> Node:
        indices = [Var(axis) for axis in AXES[name]]
        if len(indices) == 1 and self.rng.random() < 0.5:
            last = constant(SIZES[AXES[name][0]] - 1)
            clipped = operation("max", self.number("int", 1), constant(0))
            indices = [operation("min", clipped, last)]
        return Load(name, KINDS.get(name, "int"), tuple(indices))

    def number(self, kind: str, depth: int) -> Node:
        if kind == "float" and depth and self.rng.random() < 0.7:
            name = self.pick("add", "sub", "mul", "div", "min", "max", "where", "sqrt", "neg",
                             "abs", "exp", "tanh", "log")  # fmt: skip
            if name == "where":
                chosen = self.number("float", depth - 1), self.number("int", depth - 1)
                return operation("where", self.condition(depth - 1), *chosen)
            if name in ("sqrt", "neg", "abs", *UNBOUNDED):
                return operation(name, self.number("float", depth - 1))
            return operation(name, self.number("float", depth - 1), self.number("int", depth - 1))
        if kind == "float":
            return self.pick(
                self.load("per_head"), self.load("slopes"), constant(0.1), constant(-2.5),
                constant(float("inf")), operation("div", Var("kv_index"), constant(3)),
            )  # fmt: skip
        if not depth or self.rng.random() < 0.3:
            return self.pick(
                Var("kv_index"), Var("kv_index"), Var("q_index"), Var("head"), Var("batch"),
                self.leaf("number"), self.leaf("per_batch"), constant(int(self.pick(0, 1, 7, 150))),
                self.leaf("ids"), self.leaf("strided"), self.leaf("large"),
            )  # fmt: skip
        name = self.pick("add", "sub", "sub", "mul", "min", "max", "neg", "abs", "floordiv", "mod",
                         "where", "floor")  # fmt: skip
        if name in ("neg", "abs"):
            return operation(name, self.number("int", depth - 1))
        if name == "floor":
            return operation(name, self.number("float", depth - 1))
        if name in ("floordiv", "mod"):
            divisor = operation("max", self.number("int", 0), constant(int(self.pick(1, 7, 64))))
            return operation(name, self.number("int", depth - 1), divisor)
        args = self.number("int", depth - 1), self.number("int", depth - 1)
        if name == "where":
            return operation(name, self.condition(depth - 1), *args)
        return operation(name, *args)

    def leaf(self, name: str) -> Node:
        return Load(name, KINDS.get(name, "int"), tuple(Var(axis) for axis in AXES[name]))

    def condition(self, depth: int) -> Node:
        if depth and self.rng.random() < 0.4:
            name = self.pick("and", "or", "not", "where")
            count = {"not": 1, "where": 3}.get(name, 2)
            return operation(name, *(self.condition(depth - 1) for _ in range(count)))
        if self.rng.random() < 0.2:
            return self.load(self.pick("keys", "pairs"))
        kinds = self.pick(("int", "int"), ("int", "int"), ("float", "int"), ("float", "float"))
        numbers = [self.number(kind, max(depth, 1)) for kind in kinds]
        return operation(self.pick("lt", "le", "le", "eq", "ne"), *numbers)


def compiled(nodes: list[Node], arrays: dict[str, np.ndarray]):
    """`kinds(i, places, most_reads)`: the kind of a block by the i-th condition."""
    specs = tuple(
        TableSpec(name, "", KINDS.get(name, "int"), array.dtype.name, array.ndim)
        for name, array in arrays.items()
    )
    spec = Spec("float32", (), 1, 1, 1, 1, 1, 1, tables=specs)
    frame = Frame("bounds", spec, host().shape, 64, COMMON_FIELDS)
    e = frame.e
    names = [f"kind{i}" for i in range(len(nodes))]
    for name, node in zip(names, nodes, strict=True):
        kinds = [POINTER, *[INT64] * 2 * len(SIZES), DOUBLE]
        with e.function(name, kinds, INT64, public=True) as (_, (arguments, *ends, most_reads)):
            places = dict(zip(SIZES, zip(ends[::2], ends[1::2], strict=True), strict=True))
            found = MaskBounds(e, frame.tables(arguments), places, most_reads).truth(node)
            b = e.builder
            some = b.select(found.possible, e.index(PARTIAL), e.index(EMPTY))
            b.ret(b.select(found.certain, e.index(FULL), some))
    module, machine = parsed(str(e.module), host())
    code = linked([bytes(machine.emit_object(module))], host(), tuple(names))
    words = [0] * (COUNTER_BYTES // WORD + len(COMMON_FIELDS))
    for array in arrays.values():
        words.append(array.__array_interface__["data"][0])
        for size, stride in zip(array.shape, array.strides, strict=True):
            words += [size, stride]
    block = np.asarray(words, np.int64)
    signature = ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int64] * 8, ctypes.c_double
    functions = [ctypes.CFUNCTYPE(*signature)(code.address(name)) for name in names]

    def kind(i: int, places: dict[str, tuple[int, int]], most_reads: int, _keep=code) -> int:
        ends = [end for name in SIZES for end in places[name]]
        return functions[i](block.ctypes.data, *ends, float(most_reads))

    return kind


def block_of(rng) -> dict[str, tuple[int, int]]:
    """One batch row, the heads of a group, all queries, and some neighbouring keys."""
    batch, group = int(rng.integers(3)), int(rng.choice([1, 2, 4]))
    head = group * int(rng.integers(4 // group))
    start = int(rng.integers(200))
    stop = min(200, start + int(rng.choice([1, 16, 64, 200])))
    return {
        "batch": (batch, batch), "head": (head, head + group - 1),
        "q_index": (0, SIZES["q_index"] - 1), "kv_index": (start, stop - 1),
    }  # fmt: skip


def is_known_alike(node: Node) -> bool:
    """Whether NumPy knows no more of it: of functions, and of integers beyond 2**53, it does."""
    unlike = {*UNBOUNDED, "div", "large"}
    return not any(
        getattr(n, "name", "") in unlike
        or getattr(n, "table", "") in unlike
        or (isinstance(n, Const) and abs(n.value) >= 2**53)
        for n in walk(node)
    )


@pytest.mark.sampled("seed", range(3), one_in=3)
def test_random_masks(seed) -> None:
    """Nothing is called empty or full wrongly; with enough reads as much is known as in NumPy."""
    rng = np.random.default_rng(seed)
    arrays = tables(rng)
    nodes = [Generator(rng).condition(3) for _ in range(60)]
    kind = compiled(nodes, arrays)
    decided = 0
    for i, node in enumerate(nodes):
        for _ in range(12):
            block = block_of(rng)
            grid = dict(zip(block, np.ogrid[tuple(slice(a, b + 1) for a, b in block.values())],
                            strict=True))  # fmt: skip
            allowed = np.broadcast_to(
                evaluate(node, grid, arrays, np.dtype(np.float32)),
                [b + 1 - a for a, b in block.values()],
            )
            with np.errstate(all="ignore"):
                known = bound(node, {n: Interval.of(*ends) for n, ends in block.items()}, arrays)
            expected = FULL if known.low >= 1 else PARTIAL if known.high > 0 else EMPTY
            for most_reads in (1, 10**6):
                found = kind(i, block, most_reads)
                assert found != FULL or allowed.all(), node
                assert found != EMPTY or not allowed.any(), node
                assert found in (PARTIAL, expected), node
            if is_known_alike(node):
                assert found == expected, node
                decided += found != PARTIAL
    assert decided > 100


def test_a_window_is_known_without_reading_arrays() -> None:
    """Single numbers are read; an array along the keys is not known until it is read."""
    arrays = tables(np.random.default_rng(0))
    arrays["number"] = np.asarray(30)
    arrays["keys"][:] = False
    distance = operation("sub", Var("kv_index"), Var("q_index"))
    window = operation("lt", distance, Load("number", "int", ()))
    dense = Load("keys", "bool", (Var("kv_index"),))
    kind = compiled([window, operation("and", window, dense)], arrays)
    places = {"batch": (0, 0), "head": (0, 0), "q_index": (0, 4)}
    found = [kind(0, {**places, "kv_index": keys}, 1) for keys in ((0, 29), (0, 63), (34, 63))]
    assert found == [FULL, PARTIAL, EMPTY]
    assert kind(1, {**places, "kv_index": (0, 29)}, 1) == PARTIAL
    assert kind(1, {**places, "kv_index": (0, 29)}, 29) == PARTIAL
    assert kind(1, {**places, "kv_index": (0, 29)}, 30) == EMPTY
