"""qkv where Python has no more names than on Windows."""

import os

from processes import in_a_process

WITHOUT_POSIX = """
    import os, signal, sys, time

    for name in ("fcntl", "grp", "pwd", "resource", "termios", "tty"):
        sys.modules[name] = None

    # What other packages import is imported while this is still Linux for them.
    import ctypes, multiprocessing, pathlib, subprocess, tempfile, threading
    import llvmlite.binding, ml_dtypes, numpy as np, rich.console, rich.progress, rich.table
    from types import SimpleNamespace

    for module, names in {
        os: "fork forkpty getuid geteuid getgid getegid getpgid getppid kill killpg mkfifo nice "
            "register_at_fork sched_getaffinity sched_setaffinity sched_yield setsid statvfs "
            "sysconf uname wait wait3 wait4 O_NONBLOCK O_CLOEXEC RTLD_LAZY RTLD_NOLOAD RTLD_NOW "
            "RTLD_GLOBAL fchmod chown fchown getloadavg confstr pread pwrite",
        signal: "SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGUSR1 SIGUSR2 "
            "pthread_sigmask pthread_kill sigwait alarm setitimer SIG_BLOCK SIG_SETMASK",
        time: "CLOCK_MONOTONIC clock_gettime",
    }.items():
        for name in names.split():
            vars(module).pop(name, None)
    sys.platform = "win32"
    # Linux needs no probe of the stack; its address is only registered.
    ctypes.WinDLL = lambda name: SimpleNamespace(**{"__chkstk": ctypes.pythonapi.Py_IsInitialized})

    # What reads os.name in qkv finds that of Windows; pathlib would make Windows' paths of it.
    class Windows:
        name = "nt"
        def __getattr__(self, name):
            return getattr(os, name)

    import qkv
    import qkv.backends.cpu.threads.jobs as jobs
    jobs.os = Windows()
"""

CALLS = """
    from qkv.cli import main
    from qkv.backends.cpu.threads.python_threads import PythonThreads

    x = np.random.default_rng(0).normal(size=(3, 8, 300, 16)).astype(np.float32)
    q, k, v = x
    scores = np.einsum("hid,hjd->hij", q.astype(float), k) / 4
    scores[:, ~np.tri(300, dtype=bool)] = -np.inf
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    os.environ.pop("QKV_NUM_THREADS", None)
    assert qkv.get_num_threads() == os.cpu_count()
    qkv.set_num_threads(2)
    from qkv.backends.cpu.passes import workers
    workers._WORTH_A_THREAD = 1.0
    for _ in range(3):  # The second call is prepared.
        out, pullback = qkv.vjp(q, k, v, qkv.Causal(), backend="cpu")
        assert np.allclose(out, weights @ v, atol=1e-5)
        assert np.allclose(pullback(np.ones_like(out)).value[..., 0], weights.sum(1), atol=1e-4)
    assert isinstance(jobs._workers, PythonThreads), jobs._workers
    record = qkv.inspect(q, k, v, qkv.Causal(), backend="cpu")
    assert np.allclose(record.received, weights.sum(1), atol=1e-4)
    assert main(["inspect"]) == 0
    assert main(["info"]) == 0
    del os.environ["QKV_CACHE_DIR"]
    print(f"kernels in {qkv.backends.cpu.machine.stored_files.cache_folder()}")
"""


def test_everything_runs_with_the_names_of_windows_alone(tmp_path) -> None:
    printed = in_a_process(
        WITHOUT_POSIX + CALLS,
        LOCALAPPDATA=str(tmp_path),
        QKV_CACHE_DIR=os.environ.get("QKV_CACHE_DIR", ""),
    )
    assert "head  entropy" in printed
    assert f"kernels in {tmp_path / 'qkv' / 'cache'}" in printed
