"""Kernels for macOS, Windows and ARM use nothing that the system does not have there."""

from __future__ import annotations

import pytest

from platforms.cross_compiled import (
    CALLS_OF_EVERY_KIND,
    KNOWN,
    TARGETS,
    Target,
    expected_symbols,
    modules_of_threads,
    object_file,
)
from platforms.object_files import undefined_symbols

OUTSIDE = """
declare void @outside()
@number = external global i64
define i64 @job() {
 call void @outside()
 %found = load i64, ptr @number
 ret i64 %found
}
"""


@pytest.mark.slow
@pytest.mark.sampled(
    ("call", "target"),
    [(call, target) for target in TARGETS for call in CALLS_OF_EVERY_KIND],
    one_in=54,
    ids=str,
)
def test_kernels_expect_nothing_unknown(call: str, target: Target) -> None:
    assert expected_symbols(call, target) <= KNOWN[target.system]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS[1:5], ids=str)
def test_threads_and_calls_expect_nothing_unknown(target: Target) -> None:
    for made in modules_of_threads(target):
        assert undefined_symbols(object_file(made, target)) <= KNOWN[target.system]


@pytest.mark.parametrize("target", TARGETS[1:5], ids=str)
def test_what_is_missing_is_found(target: Target) -> None:
    """A function and a number of elsewhere; a name of Mach-O has an underscore more."""
    found = undefined_symbols(object_file((lambda: OUTSIDE, ()), target))
    mark = "_" if target.system == "macosx" else ""
    assert found == {f"{mark}outside", f"{mark}number"}


LARGE_FRAME = """
define void @job(ptr %to) {
 %rows = alloca [SIZE x i8]
 store ptr %rows, ptr %to
 ret void
}
"""


@pytest.mark.parametrize(("size", "expected"), [("4000", set()), ("9000", {"__chkstk"})])
def test_a_frame_of_more_than_a_page_is_probed_on_windows(size: str, expected: set[str]) -> None:
    (windows,) = (t for t in TARGETS if t.system == "msvc" and t.isa == "avx2")
    text = LARGE_FRAME.replace("SIZE", size)
    assert undefined_symbols(object_file((lambda: text, ()), windows)) == expected
