"""How many threads, and what becomes of them in other processes and at the end of this one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

import qkv
from qkv.backends.cpu.passes import forward as forward_pass
from qkv.backends.cpu.passes import workers
from qkv.backends.cpu.threads import jobs as cpu_threads
from qkv.errors import ArgumentError
from qkv.process.threads import quota_of, usable_cores

pytestmark = pytest.mark.usefixtures("two_threads")
FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells and limits here")

PROBLEM = """
import contextlib, os, sys, threading, warnings
import numpy as np, qkv
from qkv.backends.cpu.threads import jobs as threads
warnings.simplefilter("ignore")  # Python 3.12 warns of forking with threads
x = np.random.default_rng(0).normal(size=(8, 400, 64)).astype("float32")
def attend():
    return qkv.attention(x, x, x, qkv.Causal(), backend="cpu").tobytes()
def exit_code(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
@contextlib.contextmanager
def more_memory(mebibytes):  # at most so much, for what is done meanwhile
    import resource
    lines = open("/proc/self/status").read().splitlines()
    used = 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmSize")))
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (mebibytes << 20), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
"""


def in_a_process(script: str, **environment: str) -> str:
    """What a script prints that ends well within a minute, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PROBLEM + textwrap.dedent(script)],
        env={**os.environ, "QKV_NUM_THREADS": "3", **environment},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert not done.stderr
    return done.stdout


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def run(*args):
    return qkv.attention(*args, backend="cpu", return_lse=True)


@pytest.fixture(autouse=True)
def default_threads():
    qkv.set_num_threads(None)
    yield
    qkv.set_num_threads(None)


# How many


@pytest.mark.parametrize("setting", ["0", "-1", "two", "1.5", "10000", "²"])
def test_a_wrong_number_in_the_environment(setting, monkeypatch) -> None:
    monkeypatch.setenv("QKV_NUM_THREADS", setting)
    with pytest.raises(ArgumentError, match="QKV_NUM_THREADS"):
        qkv.get_num_threads()


@pytest.mark.parametrize("setting", [0, -1, 4097, 2.0, "2", True, [1]])
def test_a_wrong_number(setting) -> None:
    qkv.set_num_threads(5)
    with pytest.raises(ArgumentError, match="is not a number of threads"):
        qkv.set_num_threads(setting)
    assert qkv.get_num_threads() == 5


def test_what_was_set_goes_before_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("QKV_NUM_THREADS", "7")
    assert qkv.get_num_threads() == 7
    qkv.set_num_threads(np.int64(3))
    assert qkv.get_num_threads() == 3
    qkv.set_num_threads(None)
    assert qkv.get_num_threads() == 7
    monkeypatch.delenv("QKV_NUM_THREADS")
    assert qkv.get_num_threads() == usable_cores() >= 1


def test_what_was_set_is_what_runs(monkeypatch) -> None:
    asked = []

    def count(kernel, arguments, threads, *seconds, run_=cpu_threads.run):
        asked.append(threads)
        run_(kernel, arguments, threads, *seconds)

    monkeypatch.setattr(cpu_threads, "run", count)
    monkeypatch.setattr(workers, "_WORTH_A_THREAD", 1.0)
    x = normal(8, 260, 32)
    for number in (1, 3, 2):
        qkv.set_num_threads(number)
        run(x, x, x)
    assert asked == [1, 3, 2]


@LINUX
def test_the_affinity_of_the_process() -> None:
    in_a_process(
        """
        del os.environ["QKV_NUM_THREADS"]
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        assert qkv.get_num_threads() == 1
        """
    )


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, np.inf),
        ("0::/\n", {}, np.inf),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/a/b\n", {"a/b/cpu.max": "100000 100000\n", "a/cpu.max": "300000 100000\n"}, 1.0),
        ("0::/elsewhere\n", {"cpu.max": "150000 100000\n"}, 1.5),
        (
            "9:memory:/x\n4:cpu,cpuacct:/docker/1\n",
            {
                "cpu/docker/1/cpu.cfs_quota_us": "400000\n",
                "cpu/docker/1/cpu.cfs_period_us": "100000\n",
                "cpu/cpu.cfs_quota_us": "-1\n",
                "cpu/cpu.cfs_period_us": "100000\n",
            },
            4.0,
        ),
    ],
)
def test_the_quota_of_a_control_group(membership, files, quota, tmp_path) -> None:
    (tmp_path / "cgroup").write_text(membership)
    for name, content in files.items():
        path = tmp_path / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert quota_of(tmp_path / "cgroup", tmp_path / "sys") == quota
    assert quota_of(Path("/nowhere"), tmp_path / "sys") == np.inf


def test_threadpoolctl_sees_and_limits_them(monkeypatch) -> None:
    import threadpoolctl

    x = normal(1, 4, 4)
    run(x, x, x)  # what is not loaded yet cannot be limited
    monkeypatch.setenv("QKV_NUM_THREADS", "3")
    (told,) = [lib for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "qkv"]
    assert told["num_threads"] == 3
    assert told["version"] == qkv.__version__
    with threadpoolctl.threadpool_limits(1):
        assert qkv.get_num_threads() == 1
    assert qkv.get_num_threads() == 3
    monkeypatch.setenv("QKV_NUM_THREADS", "4")
    assert qkv.get_num_threads() == 4, "the limit has left nothing behind"
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        assert qkv.get_num_threads() == 4
    qkv.set_num_threads(2)
    with threadpoolctl.threadpool_limits({"qkv": 5}):
        assert qkv.get_num_threads() == 5
    monkeypatch.setenv("QKV_NUM_THREADS", "4")
    assert qkv.get_num_threads() == 2


# The same bits


def test_bits_do_not_depend_on_threads(monkeypatch) -> None:
    query, key, value = normal(8, 260, 32), normal(4, 300, 32), normal(4, 300, 32)
    found = set()
    monkeypatch.setattr(workers, "_WORTH_A_THREAD", 1.0)
    for threads in (1, 2, 3, 5, 2):
        qkv.set_num_threads(threads)
        for _ in range(10):
            out, lse = run(query, key, value, qkv.Causal("end"))
            found.add(out.tobytes() + lse.tobytes())
    monkeypatch.setattr(workers, "_SLICE_SECONDS", 1e-9)
    out, lse = run(query, key, value, qkv.Causal("end"))
    found.add(out.tobytes() + lse.tobytes())
    assert len(found) == 1


def in_threads(callers: int, call) -> None:
    """`call(i)` in so many threads at once; what goes wrong in one is raised here."""
    failed: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            call(i)
        except BaseException as error:
            failed.append(error)

    started = [threading.Thread(target=guarded, args=(i,)) for i in range(callers)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if failed:
        raise failed[0]


def test_many_callers_at_once(monkeypatch) -> None:
    monkeypatch.setattr(workers, "_WORTH_A_THREAD", 1.0)
    problems = [(normal(4, 130 + i, 16, seed=i), normal(2, 90, 16, seed=i)) for i in range(16)]
    expected = [run(q, k, k, qkv.Causal("end"))[0].tobytes() for q, k in problems]

    def repeat(i: int) -> None:
        qkv.set_num_threads(1 + i % 4)
        q, k = problems[i]
        for _ in range(20):
            assert run(q, k, k, qkv.Causal("end"))[0].tobytes() == expected[i]

    in_threads(16, repeat)


@pytest.mark.slow
def test_many_kernels_at_once(monkeypatch, tmp_path) -> None:
    """Sixteen threads and six kernels that nobody has compiled."""
    monkeypatch.setattr(workers, "_WORTH_A_THREAD", 1.0)
    monkeypatch.setenv("QKV_CACHE_DIR", str(tmp_path))
    qkv.set_num_threads(2)
    x = normal(4, 130, 16)
    mods = [
        qkv.ScoreMod(lambda s, b, h, q, k, i=i: s * (1 + i / 16) if i % 2 else s + i * k)
        for i in range(6)
    ]

    def attend(i: int) -> None:
        found[i] = run(x, x, x, mods[i % 6])[0].tobytes()

    found: dict[int, bytes] = {}
    forward_pass._kernel.cache_clear()
    in_threads(16, attend)
    q_blocks_per_task = dict(found)
    forward_pass._kernel.cache_clear()
    monkeypatch.setenv("QKV_CACHE_DIR", "")
    for i in (1, 2):
        attend(i)
    assert found == q_blocks_per_task
    assert len(set(found.values())) == 6
    forward_pass._kernel.cache_clear()


# Children


@pytest.mark.slow
@FORKS
@pytest.mark.parametrize("leave", ["os._exit(0)", "sys.exit(0)"])
def test_a_forked_child_has_workers_of_its_own(leave) -> None:
    setting = in_a_process(
        f"""
        before = attend()
        parent = threads._workers
        child = os.fork()
        if child == 0:
            assert threads._workers is None
            assert attend() == before
            assert threads._workers is not parent
            assert threads._workers.size == 2
            grandchild = os.fork()
            assert attend() == before
            if grandchild:
                assert exit_code(grandchild) == 0
            {leave}
        assert attend() == before
        assert threads._workers is parent
        assert exit_code(child) == 0
        print("the end")
        """
    )
    assert setting == "the end\n"


@FORKS
def test_forks_while_others_compute() -> None:
    in_a_process(
        """
        expected = attend()
        stop = threading.Event()
        wrong = []
        def repeat():
            while not stop.is_set():
                if attend() != expected:
                    wrong.append(1)
        callers = [threading.Thread(target=repeat) for _ in range(3)]
        for caller in callers:
            caller.start()
        for _ in range(20):
            child = os.fork()
            if child == 0:
                os._exit(0 if attend() == expected else 3)
            assert exit_code(child) == 0
        stop.set()
        for caller in callers:
            caller.join()
        assert not wrong
        """
    )


@pytest.mark.slow
@FORKS
def test_forks_while_another_thread_is_in_llvm() -> None:
    """A child that inherits a lock of LLVM's would wait for it for ever."""
    in_a_process(
        """
        from qkv.backends.cpu.compiler.compile import EmitFunction, build
        from qkv.backends.cpu.machine.host import host
        kept, stop = [], threading.Event()
        def compile_():
            source = "define void @job(ptr %arguments, i64 %number) { ret void }"
            kept.append(build(EmitFunction("builtins", "str"), (source,), host()))
        def repeat():
            while not stop.is_set():
                compile_()
        others = threading.Thread(target=repeat)
        others.start()
        for _ in range(40):
            child = os.fork()
            if child == 0:
                compile_()
                os._exit(0)
            assert exit_code(child) == 0
        stop.set()
        others.join()
        """,
        QKV_CACHE_DIR="",
    )


@FORKS
def test_a_fork_after_ctrl_c_in_a_compilation() -> None:
    """The thread that compiles goes on without anybody waiting for it."""
    in_a_process(
        """
        import signal, time
        import llvmlite.binding as llvm
        from llvmlite.binding.ffi import lib
        from qkv.backends.cpu.compiler import compile as cpu_compile
        from qkv.backends.cpu.machine.host import host
        def compile_():
            source = "define void @job(ptr %arguments, i64 %number) { ret void }"
            function = cpu_compile.EmitFunction("builtins", "str")
            cpu_compile.build(function, (source,), host())
        parsed = cpu_compile.parsed
        def interrupting(source, host):
            with lib._lock:  # as llvmlite holds it in each of its functions
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
            return parsed(source, host)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cpu_compile.parsed = interrupting
        try:
            compile_()
        except KeyboardInterrupt:
            cpu_compile.parsed = parsed
            child = os.fork()
            if child == 0:
                signal.alarm(150)  # ends a child that waits
                # Not in a new thread, which may have the number of the one that held the lock.
                llvm.parse_assembly("")
                os._exit(0)
            assert exit_code(child) == 0
            compile_()
        else:
            raise AssertionError("Ctrl-C was not answered")
        """,
        QKV_CACHE_DIR="",
    )


@pytest.mark.slow
@FORKS
@pytest.mark.parametrize("leave", ["os._exit(0)", "sys.exit(0)"])
def test_a_fork_while_another_thread_holds_our_locks(leave) -> None:
    in_a_process(
        f"""
        from qkv.call.repeated.cache import CALLS
        from qkv.problem.language.expressions import constant
        from qkv.problem.language.nodes import _EXCLUSIVE
        attend()
        ours = _EXCLUSIVE.lock, CALLS._exclusive.lock, threads._lock, threads._workers._lock
        for lock in ours:
            lock.acquire()  # as another thread might have
        child = os.fork()
        if child == 0:
            for _ in range(3):
                attend()
            assert threads._workers.size == 2
            constant(0.123)
            {leave}
        for lock in ours:
            lock.release()
        assert exit_code(child) == 0
        """
    )


@FORKS
def test_a_fork_while_another_thread_writes_a_kernel() -> None:
    """The fork waits until the kernel is made, which takes expressions that are new."""
    in_a_process(
        """
        import signal, time
        from qkv.backends.cpu.compiler.compile import EmitFunction, build
        from qkv.backends.cpu.machine.host import host
        from qkv.problem.language.expressions import constant
        inside = threading.Event()
        def emit():
            inside.set()
            time.sleep(0.5)
            constant(0.123)
            return "define void @job(ptr %arguments, i64 %number) { ret void }"
        function = EmitFunction("__main__", "emit")
        caller = threading.Thread(target=build, args=(function, (), host()))
        caller.start()
        inside.wait()
        signal.alarm(150)  # ends a process that waits
        child = os.fork()
        if child == 0:
            constant(0.456)
            os._exit(0)
        caller.join()
        assert exit_code(child) == 0
        """,
        QKV_CACHE_DIR="",
    )


@pytest.mark.slow
@FORKS
@pytest.mark.parametrize("module", ["passes.gradient", "threads.pool"])
def test_a_fork_while_another_thread_calls_for_the_first_time(module) -> None:
    """What it imports meanwhile would stay locked in the child."""
    in_a_process(
        f"""
        import importlib, sys
        from importlib.abc import MetaPathFinder
        qkv.set_num_threads(1)
        attend()
        qkv.set_num_threads(3)
        inside, go = threading.Event(), threading.Event()
        class Slow(MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name == "qkv.backends.cpu.{module}":
                    inside.set()
                    go.wait(2)
        sys.meta_path.insert(0, Slow())
        small = np.ones((1, 40, 8), np.float32)
        def first():
            out, pullback = qkv.vjp(small, small, small)
            pullback(out)
            attend()
        caller = threading.Thread(target=first)
        caller.start()
        assert inside.wait(150)
        child = os.fork()
        if child == 0:
            first()
            os._exit(0)
        caller.join()
        assert exit_code(child) == 0
        """
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_of_multiprocessing(method, tmp_path) -> None:
    import multiprocessing

    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system has no {method}")
    script = tmp_path / "main.py"
    script.write_text(
        PROBLEM
        + textwrap.dedent(
            f"""
            def work(_):
                return attend()
            if __name__ == "__main__":
                import multiprocessing
                before = attend()
                with multiprocessing.get_context("{method}").Pool(2) as pool:
                    assert pool.map(work, range(6)) == [before] * 6
                print("the end")
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "QKV_NUM_THREADS": "3"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr


# The end


@pytest.mark.slow
def test_the_end_after_a_call() -> None:
    in_a_process("attend()")
    in_a_process("attend(); sys.exit(0)")
    in_a_process("attend(); os._exit(0)")


@pytest.mark.slow
def test_the_end_while_a_thread_computes() -> None:
    """A daemon thread is cut off; the workers that have joined it are not left inside code that
    is about to go."""
    in_a_process(
        """
        attend()
        def repeat():
            while True:
                attend()
        for _ in range(3):
            threading.Thread(target=repeat, daemon=True).start()
        for _ in range(20):
            attend()
        """
    )


@pytest.mark.slow
def test_the_end_while_a_thread_compiles() -> None:
    """The end waits: LLVM does not survive that the process goes away around it."""
    setting = in_a_process(
        """
        import time
        from qkv.backends.cpu.compiler import compile as cpu_compile
        compiling, parsed = threading.Event(), cpu_compile.parsed
        def slow(source, host):
            compiling.set()
            time.sleep(0.5)
            found = parsed(source, host)
            os.write(1, b"compiled")
            return found
        attend()
        cpu_compile.parsed = slow
        os.environ["QKV_CACHE_DIR"] = ""
        x = np.ones((1, 40, 8), np.float32)
        attend = lambda: qkv.attention(x, x, x, qkv.Softcap(7.0), qkv.Causal())
        threading.Thread(target=attend, daemon=True).start()
        assert compiling.wait(150)
        """
    )
    assert setting == 3 * "compiled", "its own module, and two that it shares with others"


def test_a_call_after_the_workers_have_gone() -> None:
    setting = in_a_process(
        """
        import atexit
        def last():
            assert attend() == before
            assert threads._workers.size == 0
            print("the end")
        atexit.register(last)  # before the workers start: it runs after they have ended
        before = attend()
        assert threads._workers.size == 2
        """
    )
    assert setting == "the end\n"


@LINUX
def test_a_system_without_memory_for_threads() -> None:
    """Each takes 8 MiB of addresses for its stack."""
    in_a_process(
        """
        from qkv.backends.cpu.compiler.compile import EmitFunction, Kernel, build
        from qkv.backends.cpu.machine.host import host
        source = "define void @job(ptr %arguments, i64 %number) { ret void }"
        job = Kernel(build(EmitFunction("builtins", "str"), (source,), host()))
        class Nothing:
            address = 0
        qkv.set_num_threads(1)
        before = attend()
        pool = threads._start_workers()
        with more_memory(40):
            assert pool.run(job, Nothing, 64) <= pool.size
        assert 0 < pool.size < 6
        qkv.set_num_threads(64)
        assert attend() == before
        """
    )


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize("room", [1, 8, 60])
def test_a_kernel_that_finds_no_memory_to_be_compiled_in(room, tmp_path) -> None:
    """LLVM would end the process."""
    in_a_process(
        f"""
        before = attend()
        with more_memory({room}):
            refused = 0
            for variant in qkv.Softcap(3.0), qkv.SlidingWindow(2, 2):
                try:
                    qkv.attention(x, x, x, variant, backend="cpu")
                except MemoryError as error:
                    refused += "64 MiB" in str(error)
        assert refused == 2
        assert attend() == before
        qkv.attention(x, x, x, qkv.Softcap(3.0), backend="cpu")
        """,
        QKV_CACHE_DIR=str(tmp_path),
    )


@LINUX
def test_a_process_without_memory_for_llvm_itself(tmp_path) -> None:
    """The first kernels come from the disk, so that LLVM is loaded only for another one."""
    in_a_process("attend()", QKV_CACHE_DIR=str(tmp_path))
    in_a_process(
        """
        before = attend()
        with more_memory(90):
            for _ in range(2):
                try:
                    qkv.attention(x, x, x, qkv.Softcap(3.0), backend="cpu")
                except MemoryError as error:
                    assert "ulimit" in str(error)
                else:
                    raise AssertionError("LLVM had room")
        assert attend() == before
        qkv.attention(x, x, x, qkv.Softcap(3.0), backend="cpu")
        """,
        QKV_CACHE_DIR=str(tmp_path),
    )


@LINUX
def test_a_result_that_does_not_fit_leaves_nothing_broken() -> None:
    in_a_process(
        """
        before = attend()
        long = np.broadcast_to(x[:1, :1], (64, 20000, 64))
        with more_memory(64):
            for _ in range(3):
                try:
                    qkv.attention(long, long[:, :100], long[:, :100], backend="cpu")
                except MemoryError:
                    print("does not fit")
        assert attend() == before
        """
    )
