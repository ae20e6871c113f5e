"""The compiled backend: what it takes, and one call of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends import Passes, Progress, Refusal, WeightBlocks, ensure_residuals
from qkv.backends.cpu.machine import executable_memory
from qkv.partial import Partial, RowStatistics, finish, identity, without_keys
from qkv.problem.backward import BackwardInputs, OperandGradients
from qkv.problem.overflow import recomputed
from qkv.problem.second_derivatives.passes import Cotangents, SecondDerivatives
from qkv.problem.second_derivatives.tangents import OperandTangents
from qkv.problem.spec import Problem, Spec
from qkv.process.forks import importing
from qkv.process.threads import get_num_threads

Array = NDArray[Any]

DTYPES = ("float32", "float64", "float16", "bfloat16")

NO_EXECUTABLE_MEMORY = "the system refuses this process executable memory"


class CpuBackend:
    """Attention in machine code made for this processor, on all its cores."""

    name = "cpu"
    priority = 100
    stored_rows = True

    def refusals(self, spec: Spec) -> tuple[Refusal, ...]:
        if spec.dtype not in DTYPES:
            return (Refusal(f"the dtype is {spec.dtype}", ", ".join(DTYPES)),)
        refusal = executable_memory.refusal()
        if refusal:
            fact = f"{NO_EXECUTABLE_MEMORY}: {refusal}"
            return (Refusal(fact, "processes that may run code made in memory"),)
        try:
            with importing():
                from qkv.backends.cpu.machine.host import host

            host()
            get_num_threads()  # Raises now, and not in the first call that needs several.
        except (ImportError, OSError) as error:
            return (Refusal(f"llvmlite cannot be loaded: {error}", "platforms that have it"),)
        return ()

    def blocks(self, spec: Spec) -> tuple[int, int]:
        with importing():
            from qkv.backends.cpu.machine.host import host
            from qkv.backends.cpu.plan.schedule import TILE_KV

        return host().shape_of(spec.compute_dtype).block_q, TILE_KV

    def scratch_bytes(self, spec: Spec) -> int:
        with importing():
            from qkv.backends.cpu.machine.host import host
            from qkv.backends.cpu.passes.decode import decode_bytes
            from qkv.backends.cpu.passes.forward import forward_shape, scratch_of
            from qkv.backends.cpu.plan.kernel_choice import is_decode

        shape, item = host().shape_of(spec.compute_dtype), spec.compute_dtype.itemsize
        if is_decode(spec, shape):
            size = decode_bytes(spec, shape, get_num_threads())
        else:
            worker = scratch_of(spec, forward_shape(spec, host()))
            size = get_num_threads() * worker + spec.gathered_bytes
        if spec.rotation is not None:
            rows = spec.num_heads * spec.q_len + spec.num_kv_heads * spec.kv_len
            size += spec.batch_size * rows * spec.head_dim * item
        return size

    def notes(self, spec: Spec) -> tuple[str, ...]:
        with importing():
            from qkv.backends.cpu.machine.host import withheld_tiles

        withheld = withheld_tiles()
        if not withheld:
            return ()
        bits = "the last bits of results differ from those of a process that uses them"
        return (f"matrix tiles (amx) are not used, because {withheld}; {bits}",)

    def run(self, problem: Problem) -> Partial:
        return self._run(problem, is_decode=_is_decode(problem.spec))

    def run_with_statistics(self, problem: Problem) -> tuple[Partial, RowStatistics]:
        """Entropy, largest score and largest weight in the same pass."""
        spec = problem.spec
        shape = (*spec.batch_shape, spec.num_heads, spec.q_len)
        statistics = without_keys(shape, spec.compute_dtype)
        return self._run(problem, _is_decode(spec), statistics), statistics

    def top(
        self,
        problem: Problem,
        lse: Array,
        k: int,
        progress: Progress | None = None,
        *,
        of_part: bool = False,
    ) -> tuple[Array, Array] | None:
        """The k best keys of each row, by one pass over the scores."""
        with importing():
            from qkv.backends.cpu.passes.replay import top

        return top(problem.gathered(), lse, k, progress, of_part)

    def received(
        self,
        problem: Problem,
        lse: Array,
        progress: Progress | None = None,
        *,
        of_part: bool = False,
    ) -> Array:
        """The weight that each key takes in all, by one pass over the scores."""
        with importing():
            from qkv.backends.cpu.passes.replay import received

        return received(problem.gathered(), lse, progress, of_part)

    def weight_blocks(self, problem: Problem, lse: Array) -> WeightBlocks:
        """Reductions of blocks of weights, by passes over the scores that they need."""
        with importing():
            from qkv.backends.cpu.passes import weight_blocks

        return weight_blocks.WeightBlocks(problem.gathered(), lse)

    def prepare(
        self,
        problem: Problem,
        passes: Passes = "forward",
        *,
        any_length: bool = False,
        arrays: tuple[Array, ...] = (),
        inputs: BackwardInputs | None = None,
    ) -> Any:
        """A call for operands and `arrays` like these, and the same constants.

        None if which pairs are computed would depend on values.
        """
        with importing():
            from qkv.backends.cpu.prepared.choice import prepare

        return prepare(problem, passes, any_length=any_length, arrays=arrays, inputs=inputs)

    def add_sinks(self, problem: Problem, partial: Partial) -> Partial:
        """The sinks' share by the compiled pass that prepared calls end with."""
        sinks = problem.operands.sinks
        assert sinks is not None
        if not partial.out.size:
            return finish(partial, sinks)
        with importing():
            from qkv.arrays.addresses import address_of
            from qkv.backends.cpu.rows.sinks import Sinks

        dtype = partial.out.dtype
        out, lse, rest = address_of(partial.out), address_of(partial.lse), partial.lse_rest
        add = Sinks(sinks, partial.out.shape, dtype, dtype)
        add(out, lse, 0 if rest is None else address_of(rest), out, lse, partial)
        return partial

    def run_for_backward(self, problem: Problem) -> Partial:
        return self._run(problem, is_decode=_is_decode(problem.spec), backward=True)

    def backward(self, problem: Problem, inputs: BackwardInputs) -> OperandGradients:
        """Gradients in one pass over recomputed weights."""
        with importing():
            from qkv.backends.cpu.passes.gradient import backward, recomputes_lse

        if not recomputes_lse(problem):
            inputs = ensure_residuals(
                problem, inputs, partial(self._run, is_decode=False, backward=True)
            )
        return backward(problem, inputs)

    def second_derivatives(
        self, problem: Problem, tangents: OperandTangents, cotangents: Cotangents | None
    ) -> SecondDerivatives | None:
        """Tangents of output and lse, and of all gradients."""
        with importing():
            from qkv.backends.cpu.passes.tangents import second_derivatives

        return second_derivatives(problem, tangents, cotangents)

    def _run(
        self,
        problem: Problem,
        is_decode: bool,
        statistics: RowStatistics | None = None,
        backward: bool = False,
    ) -> Partial:
        # Stored rows are read where they lie, or gathered.
        problem = problem if is_decode else problem.gathered()
        whole, is_finite = self._compute(problem, is_decode, statistics, backward)
        if is_finite:
            return whole

        def recompute(name: str) -> Array:
            return recomputed(
                problem,
                getattr(whole, name),
                lambda p: getattr(self._compute(p, is_decode, backward=backward)[0], name),
            )

        out, unrounded = recompute("out"), whole.unrounded
        if unrounded is not None:
            unrounded = out if unrounded is whole.out else recompute("unrounded")
        return replace(whole, out=out, unrounded=unrounded)

    def _compute(
        self,
        problem: Problem,
        is_decode: bool,
        statistics: RowStatistics | None = None,
        backward: bool = False,
    ) -> tuple[Partial, bool]:
        """The result, and whether its output is known to be finite."""
        spec = problem.spec
        shape = (*spec.batch_shape, spec.num_heads, spec.q_len, spec.v_head_dim)
        compute = spec.compute_dtype
        if 0 in (spec.batch_size, spec.num_heads, spec.q_len, spec.kv_len):
            return identity(shape, compute), True
        # Sinks scale the output afterwards: round to the type of storage only then.
        out_dtype = compute if spec.sinks else np.dtype(spec.dtype)
        out, rest, unrounded = np.empty(shape, out_dtype), None, None
        if backward and not is_decode:
            rest = np.empty(shape[:-1], compute)
            if spec.dtype != compute.name:
                unrounded = out if out_dtype == compute else np.empty(shape, compute)
        whole = Partial(out, np.empty(shape[:-1], compute), rest, unrounded)
        compute_into = _run_decode if is_decode else _run_forward
        return whole, compute_into(problem, whole, statistics)


def _is_decode(spec: Spec) -> bool:
    with importing():
        from qkv.backends.cpu.machine.host import host
        from qkv.backends.cpu.plan.kernel_choice import is_decode
    return is_decode(spec, host().shape_of(spec.compute_dtype))


def _run_decode(problem: Problem, result: Partial, statistics: RowStatistics | None) -> bool:
    """Few queries: lanes along head_dim, keys in chunks; whether the output is finite."""
    with importing():
        from qkv.backends.cpu.prepared.decode import run_decode

    return run_decode(problem, result, statistics)


def _run_forward(problem: Problem, result: Partial, statistics: RowStatistics | None) -> bool:
    """Many queries: lanes along queries; whether the output is finite."""
    with importing():
        from qkv.backends.cpu.passes.forward import ForwardPass
        from qkv.backends.cpu.passes.forward_arguments import ForwardArguments

    forward = ForwardPass(problem, statistics=statistics is not None)
    workers = forward.workers()
    arguments = ForwardArguments(problem, forward, workers, result, statistics)
    forward.launch(arguments, workers)
    return arguments.is_finite()


def describe_host() -> dict[str, str]:
    """This machine as the backend sees it, for `qkv info`.

    Raises
    ------
    ArgumentError
        If `QKV_ISA` or `QKV_NUM_THREADS` is set to what cannot be.
    """
    from qkv.backends.cpu.machine.host import host, withheld_tiles
    from qkv.backends.cpu.machine.stored_files import kernel_files, private_folder

    here, (folder, fault) = host(), private_folder()
    cache = f"unusable: {fault}" if fault else "off, because QKV_CACHE_DIR is empty"
    if folder is not None and not fault:
        try:
            sizes = [f.stat().st_size for f in kernel_files(folder)]
        except OSError:
            sizes = []
        cache = f"{folder} ({len(sizes)} kernels, {sum(sizes) / 1024:.0f} KiB)"
    shape, withheld, refusal = here.shape, withheld_tiles(), executable_memory.refusal()
    none = {"compiled code": f"none: {NO_EXECUTABLE_MEMORY}: {refusal}"} if refusal else {}
    tiles = {"matrix tiles (amx)": f"not used, because {withheld}"} if withheld else {}
    return {
        **none,
        "processor": here.cpu,
        "instruction set": f"{here.isa}, for tests" if here.emulated_on else here.isa,
        **tiles,
        "vector width": f"{32 * shape.lanes} bits, {shape.lanes} float32",
        "tile": f"{shape.block_q} queries",
        "threads": str(get_num_threads()),
        "kernel cache": cache,
    }
