"""Parallel workers, one kernel cache for all of them, sampled suites, and shared fixtures."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import qkv
from forced import as_it_runs, instruction_sets
from installed import missing
from qkv.process.threads import usable_cores
from sampling import is_turn_of, sample

if TYPE_CHECKING:
    from watched import Watched

MOST_WORKERS = 8
"""Each holds torch, JAX and transformers, about 1 GiB."""


def pytest_addoption(parser: pytest.Parser) -> None:
    long = parser.getgroup("sampled suites and long runs")
    long.addoption(
        "--sample-seed",
        type=int,
        default=0,
        metavar="N",
        help="which cases of the sampled suites run (default: 0)",
    )
    long.addoption(
        "--every-case", action="store_true", help="all cases of the suites that are sampled"
    )
    long.addoption(
        "--fuzz", type=int, default=75, metavar="N", help="random problems (default: 75)"
    )
    long.addoption("--fuzz-seed", type=int, default=0, metavar="N", help="their seed (default: 0)")
    long.addoption(
        "--installed-only",
        action="store_true",
        help="leave out test files that need a package that is not installed",
    )
    long.addoption(
        "--hostile", type=int, default=400, metavar="N", help="hostile calls (default: 400)"
    )
    long.addoption(
        "--hostile-seed", type=int, default=0, metavar="N", help="their seed (default: 0)"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "sampled(names, cases, one_in, ids=None): like parametrize, with one in so many of the "
        "cases; --sample-seed says which, --every-case takes all.",
    )
    config.addinivalue_line(
        "markers",
        "one_in(n): of all cases of a test one in n runs, chosen likewise.",
    )
    config.addinivalue_line(
        "markers",
        "slow: takes some seconds, all cases together; a run takes a twelfth of such tests, chosen "
        "likewise, and all of those whose file is named on the command line.",
    )
    config.addinivalue_line(
        "markers",
        "large: computes so much that QEMU takes many minutes; tools/aarch64 leaves it out.",
    )
    if hasattr(config, "workerinput"):
        return  # a worker has the environment of the process that started it
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    only = config.getoption("installed_only")
    if whole and not only and importlib.util.find_spec("torch") is None:
        raise pytest.UsageError('the tests need torch: pip install "torch==2.13.0"')
    cache = getattr(config, "cache", None)  # none with -p no:cacheprovider
    if cache is not None:
        os.environ["QKV_CACHE_DIR"] = str(cache.mkdir("kernels"))
    for name in ("QKV_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # every core has a worker already
    # Kernels for GPUs run in Triton's interpreter; with 0 in place of 1, on the GPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The workers for `-n auto`: one for each core, and none for single files, which is sooner."""
    folders = any((config.invocation_params.dir / name).is_dir() for name in config.args)
    return min(usable_cores(), MOST_WORKERS) if folders else 0


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption("every_case"):
        return "sampled suites: every case"
    seed = config.getoption("sample_seed")
    return f"sampled suites: --sample-seed {seed}; all cases with --every-case"


def machine_lines() -> list[str]:
    """What this run was of: the platform, and the instruction sets that kernels are run with."""
    python = f"{platform.python_implementation()} {platform.python_version()}"
    lock = "" if getattr(sys, "_is_gil_enabled", lambda: True)() else ", without a global lock"
    lines = [f"platform: {sys.platform} {platform.machine()}, {python}{lock}"]
    if importlib.util.find_spec("llvmlite") is None:
        return [*lines, "instruction sets: none, llvmlite is not installed"]
    emulated = [isa for isa in instruction_sets() if "emulated" in isa]
    real = [isa for isa in instruction_sets() if isa not in emulated]
    lines.append(f"instruction sets: {', '.join(real)}")
    lines.append(f"emulated instruction sets: {', '.join(emulated) or 'none'}")
    if os.environ.get("QKV_ISA"):
        lines.append(f"where a test chooses none: {os.environ['QKV_ISA']}")
    return lines


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what cannot be imported, if that is asked for."""
    is_test = collection_path.name.startswith("test_") or collection_path.is_dir()
    if not config.getoption("installed_only") or not is_test:
        return None
    packages = missing(collection_path)
    if not packages:
        return None
    _left_out[packages[0]] += len(list(collection_path.rglob("test_*.py"))) or 1
    return True


_left_out: Counter[str] = Counter()
"""Test files that were left out, by a package that each needs."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end too what ran, where it can be read beside the reasons of what was skipped."""
    for line in machine_lines():
        terminalreporter.write_line(line)
    for name, count in sorted(_left_out.items()):
        terminalreporter.write_line(f"{count} test files left out: {name} is not installed")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for mark in metafunc.definition.iter_markers("sampled"):
        names, cases = mark.args
        chosen = sample(metafunc.config, cases, mark.kwargs["one_in"])
        metafunc.parametrize(names, chosen, ids=mark.kwargs.get("ids"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases of tests that are marked with `one_in`, and slow tests of other runs."""
    cases: dict[str, list[pytest.Item]] = {}
    left_out: set[pytest.Item] = set()
    for item in items:
        if item.get_closest_marker("slow") is not None and not is_turn_of(item):
            left_out.add(item)
        if item.get_closest_marker("one_in") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_test in cases.values():
        (one_in,) = next(of_test[0].iter_markers("one_in")).args
        left_out.update(set(of_test) - set(sample(config, of_test, one_in)))
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def no_prepared_calls() -> Iterator[None]:
    """What was prepared for earlier calls is forgotten, before and afterwards."""
    from watched import forget_prepared_calls

    forget_prepared_calls()
    yield
    forget_prepared_calls()


@pytest.fixture
def watched(no_prepared_calls: None) -> Iterator[Watched]:
    """The backend "cpu", which counts what it is asked."""
    from qkv.backends import register, unregister
    from watched import Watched

    backend = Watched()
    register(backend)
    yield backend
    unregister(backend.name)


@pytest.fixture(autouse=True)
def same_torch_seed() -> None:
    """Every test draws from torch's generator, if torch is loaded, as from a new one."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit JAX for one test; it is never switched on for the process."""
    import jax

    with jax.enable_x64(True):
        yield


@pytest.fixture
def every_task_a_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tasks are shared out however small they are: one thread would do most tests' problems."""
    from qkv.backends.cpu.passes import workers

    monkeypatch.setattr(workers, "_WORTH_A_THREAD", 1.0)
    yield
    qkv.set_num_threads(None)


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code may use two threads; where tests run side by side, it uses one."""
    monkeypatch.setenv("QKV_NUM_THREADS", "2")


@pytest.fixture
def masks_of_few_pairs_are_read(monkeypatch: pytest.MonkeyPatch, no_prepared_calls: None) -> None:
    """Masks are read for the tiles that they leave empty, however few pairs a problem has."""
    from qkv.backends.cpu.plan import schedule

    monkeypatch.setattr(schedule, "CHEAP_OPERATIONS", 0)


@pytest.fixture(params=["masks unread", "masks read"])
def masks_unread_and_read(request: pytest.FixtureRequest) -> None:
    """A test twice: the problems of most are so small that their masks would not be read."""
    if request.param == "masks read":
        request.getfixturevalue("masks_of_few_pairs_are_read")


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bfloat16 tiles are used, emulated where the processor has none."""
    monkeypatch.setenv("QKV_ISA", as_it_runs("amx"))


@pytest.fixture
def splits_operands(monkeypatch: pytest.MonkeyPatch, no_prepared_calls: None) -> None:
    """Products of parts, and of tiles in the backward pass, wherever there can be any: the problems
    of most tests are too small.
    """
    from qkv.backends.cpu.passes import backward as backward_pass
    from qkv.backends.cpu.passes import gradient
    from qkv.backends.cpu.split_bf16 import choice

    monkeypatch.setattr(choice, "LEAST_SIZES", dict.fromkeys(choice.LEAST_SIZES, (1, 1)))
    monkeypatch.setattr(backward_pass, "_LEAST_QUERIES", 1)
    monkeypatch.setattr(gradient, "_MOST_QUERIES", 0)
