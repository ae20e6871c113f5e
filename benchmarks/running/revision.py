"""Another revision beside this one in one run."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import qkv
from benchmarks.contenders import Contender, contenders_of
from benchmarks.problems.workloads import Workload
from benchmarks.running.session import LineUp
from qkv.errors import ArgumentError

__all__ = ["Revision", "beside", "checked_out"]


class Revision(NamedTuple):
    """Another revision of the repository, in a tree of its own.

    Attributes
    ----------
    name : str
        The short name of its commit.
    environment : dict of str to str
        With it a process runs this benchmark with the qkv of that revision, which `PYTHONPATH` puts
        before what is installed.
    """

    name: str
    environment: dict[str, str]


@contextmanager
def beside(revision: str) -> Iterator[LineUp]:
    """A line-up of qkv here and at a revision of its repository.

    A contender that needs what the revision does not have is shown as failed.

    Raises
    ------
    ArgumentError
        If this is no checkout, or has no such revision.
    """
    with checked_out(revision) as there:
        yield lambda workload: _pair(workload, there)


@contextmanager
def checked_out(revision: str) -> Iterator[Revision]:
    """A revision of the repository, for as long as it is needed.

    Raises
    ------
    ArgumentError
        If this is no checkout, or has no such revision.
    """
    root = Path(qkv.__path__[0]).parents[1]
    with tempfile.TemporaryDirectory(prefix="qkv-benchmarks-") as folder:
        tree = Path(folder) / "tree"
        name = _git(root, "rev-parse", "--short", "--verify", f"{revision}^{{commit}}")
        _git(root, "worktree", "add", "--detach", "--quiet", str(tree), name)
        try:
            yield Revision(name, {"PYTHONPATH": str(tree / "src")})
        finally:
            _git(root, "worktree", "remove", "--force", str(tree))


def _pair(workload: Workload, there: Revision) -> Sequence[Contender]:
    own = contenders_of(workload, ("qkv",))
    return [
        *own,
        *(
            replace(
                one,
                name=f"{one.name} at {there.name}",
                environment={**one.environment, **there.environment},
                known_as=one.name,
            )
            for one in own
        ),
    ]


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        text = getattr(error, "stderr", None) or str(error)
        raise ArgumentError(
            f"git {words[0]} did not work here.",
            [("folder", str(root)), ("git", text.strip()[:300])],
            "Name a revision of the checkout that qkv runs from, or two saved runs.",
        ) from error
    return done.stdout.strip()
