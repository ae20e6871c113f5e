"""A backend from another package: found by entry point, or registered by hand."""

import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

import qkv
from qkv.backends import Refusal, backends, register, unregister
from qkv.backends.reference import ReferenceBackend
from qkv.partial import Partial
from qkv.testing import cases, check_case

PACKAGE = '''
import numpy as np

from qkv.backends import Refusal
from qkv.partial import Partial


class Uniform:
    """Runs what has no scores to compute: scale 0 and no variants."""

    name = "uniform"
    priority = 1000

    def refusals(self, spec):
        if spec.scores or spec.masks or spec.rotation or spec.dropout or spec.dtype != "float64":
            return (Refusal("variants or dtype", "plain float64"),)
        return ()

    def blocks(self, spec):
        return 1, 1

    def scratch_bytes(self, spec):
        return 0

    def run(self, problem):
        spec, operands = problem.spec, problem.operands
        mean = np.repeat(operands.value.mean(axis=-2, keepdims=True), spec.group_size, axis=-3)
        shape = (*spec.batch_shape, spec.num_heads, spec.q_len, spec.v_head_dim)
        lse = np.full(shape[:-1], np.log(spec.kv_len))
        return Partial(np.broadcast_to(mean, shape).copy(), lse)
'''

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np, qkv
x = np.random.default_rng(0).normal(size=(2, 5, 4))
found = qkv.plan(x, x, x, scale=0.0)
assert found.backend == "uniform", found
np.testing.assert_allclose(
    qkv.attention(x, x, x, scale=0.0), np.broadcast_to(x.mean(1, keepdims=True), x.shape)
)
other = qkv.plan(x, x, x, qkv.Causal())
assert other.backend != "uniform", other
refused = dict(other.refusals)
assert "variants or dtype" in str(refused["uniform"][0]), refused
try:
    qkv.attention(x, x, x, qkv.Causal(), backend="uniform")
except qkv.UnsupportedError as error:
    print(dict(error.seen)["uniform"])
"""


def install(folder: Path, module: str) -> None:
    """A package with an entry point."""
    (folder / "uniform_attention.py").write_text(module)
    info = folder / "uniform_attention-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: uniform-attention\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[qkv.backends]\nuniform = uniform_attention:Uniform\n")


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(folder)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )


def test_a_backend_is_found_through_its_entry_point(tmp_path: Path) -> None:
    install(tmp_path, PACKAGE)
    ran = run(PROGRAM, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "variants or dtype (accepts plain float64)"


ALONE_PROGRAM = """
import sys
before = "importlib.metadata" in sys.modules
import numpy as np, qkv
x = np.ones((2, 40, 4))
qkv.attention(x, x, x)
print(before, "importlib.metadata" in sys.modules)
"""


def test_a_package_in_an_archive_is_found(tmp_path: Path) -> None:
    """What lies in an archive is not looked into without `importlib.metadata`."""
    install(tmp_path, PACKAGE)
    archive = tmp_path / "packages.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for file in tmp_path.rglob("*"):
            if file.is_file() and file != archive:
                packed.write(file, file.relative_to(tmp_path))
    ran = run(PROGRAM, archive)
    assert ran.returncode == 0, ran.stderr


def test_entry_points_are_read_only_where_a_package_names_the_group() -> None:
    ran = run(ALONE_PROGRAM, Path())
    is_named = bool(metadata.entry_points(group="qkv.backends"))
    assert ran.stdout.split() == ["False", str(is_named)], ran.stderr


BROKEN_PROGRAM = """
import sys, warnings
sys.path.insert(0, sys.argv[1])
import numpy as np, qkv
from qkv.backends import BrokenBackendWarning
x = np.random.default_rng(0).normal(size=(2, 5, 4))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        found = qkv.attention(x, x, x, scale=0.0)
        plan = qkv.plan(x, x, x)
assert [w.category for w in caught] == [BrokenBackendWarning], caught
np.testing.assert_allclose(found, np.broadcast_to(x.mean(1, keepdims=True), x.shape))
try:
    qkv.attention(x, x, x, backend="uniform")
except qkv.ArgumentError as error:
    assert "no backend" in str(error)
print(caught[0].message)
from qkv.cli import main
with warnings.catch_warnings():
    warnings.simplefilter("error")
    main(["info"])
"""


def one_line(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("import no_such_library", "No module named 'no_such_library'"),
        ("Uniform = None", "'NoneType' object is not callable"),
        ("raise OSError('no such device')", "no such device"),
        (
            "class Uniform: name, priority = 'uniform', 1",
            "Uniform lacks a part of the backend protocol. Give it name, priority",
        ),
        (
            "class Uniform: name, priority = 'cpu', 1; refusals=blocks=scratch_bytes=run = id",
            "there is another backend of the name cpu. Give it a name of its own.",
        ),
    ],
)
def test_a_broken_entry_point_is_left_out_with_one_warning(
    module: str, reason: str, tmp_path: Path
) -> None:
    install(tmp_path, module)
    ran = run(BROKEN_PROGRAM, tmp_path)
    assert ran.returncode == 0, ran.stderr
    warning, *info = ran.stdout.splitlines()
    assert "'uniform' (uniform_attention:Uniform)" in warning
    assert reason in warning
    # The reason may be on several lines of the table.
    assert f"uniform cannot be loaded: {warning.partition('left out: ')[2]}" in one_line(info)


class Counting(ReferenceBackend):
    """The reference, under another name, that knows how often it ran."""

    name = "counting"
    priority = 1000

    def __init__(self):
        self.runs = 0

    def refusals(self, spec):
        return () if spec.head_dim == 8 else (Refusal(f"head_dim={spec.head_dim}", "8"),)

    def run(self, problem):
        self.runs += 1
        return super().run(problem)


@pytest.fixture
def counting():
    backend = Counting()
    register(backend)
    yield backend
    unregister(backend.name)


def test_a_registered_backend_is_chosen_by_priority(counting) -> None:
    x = np.random.default_rng(0).normal(size=(2, 5, 8))
    assert backends()[0] is counting
    qkv.attention(x, x, x)
    assert counting.runs == 1
    qkv.attention(x[..., :4], x[..., :4], x)
    assert counting.runs == 1, "it refuses head_dim 4"
    qkv.attention(x, x, x, backend="blocked")
    assert counting.runs == 1


def test_a_backend_is_gone_after_unregister() -> None:
    backend = Counting()
    register(backend)
    unregister(backend.name)
    unregister(backend.name)
    assert "counting" not in [b.name for b in backends()]
    x = np.ones((3, 8))
    with pytest.raises(qkv.ArgumentError, match="no backend 'counting'"):
        qkv.attention(x, x, x, backend="counting")


def test_the_conformance_suite_takes_a_backend_object() -> None:
    backend = Counting()
    outcomes = {check_case(backend, case, "float64") for case in cases()[:200:20]}
    assert backend.runs > 0
    assert True in outcomes


def test_what_lacks_a_part_of_the_protocol_is_refused() -> None:
    class Half:
        name = "half"
        priority = 1

        def run(self, problem):
            raise NotImplementedError

    with pytest.raises(qkv.ArgumentError, match="protocol") as caught:
        register(Half())
    assert "refusals" in caught.value.action


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": 5}, "has the name 5"),
        ({"name": "auto"}, "by which no call could choose it"),
        ({"priority": "high"}, "priority 'high', not a number"),
        ({"priority": float("nan")}, "priority nan, not a number"),
    ],
)
def test_what_would_break_the_choice_of_all_backends_is_refused(change, words) -> None:
    """Every call sorts backends by priority and name."""
    before = backends()
    with pytest.raises(qkv.ArgumentError, match=words):
        register(type("Mine", (Counting,), change)())
    with pytest.raises(qkv.ArgumentError, match="Counting is a class, not a backend"):
        register(Counting)
    assert backends() == before


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (lambda out, lse: None, qkv.ArgumentError, "gives NoneType"),
        (lambda out, lse: (out, lse), qkv.ArgumentError, "gives tuple"),
        (
            lambda out, lse: Partial(out[0], lse[0]),
            qkv.ShapeError,
            r"\(2, 5, 8\), not \(1, 2, 5, 8\)",
        ),
        (lambda out, lse: Partial(out.swapaxes(1, 2), lse), qkv.ShapeError, "of other shapes"),
        (lambda out, lse: Partial(out, lse[..., None]), qkv.ShapeError, r"\(1, 2, 5, 1\), not"),
        (lambda out, lse: Partial(out, lse.astype("f4")), qkv.DTypeError, "gives lse as float32"),
    ],
)
@pytest.mark.parametrize("call", [qkv.attention, qkv.vjp, qkv.inspect])
def test_results_that_do_not_fit_the_problem_are_refused(call, wrong, error, words) -> None:
    class Wrong(ReferenceBackend):
        name = "wrong"

        def run(self, problem):
            found = super().run(problem)
            return wrong(found.out, found.lse)

    x = np.random.default_rng(0).normal(size=(1, 2, 5, 8))
    register(Wrong())
    try:
        with pytest.raises(error, match=words):
            call(x, x, x, backend="wrong")
    finally:
        unregister("wrong")
