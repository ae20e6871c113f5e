"""Calls of tensors in a forked child, in which torch waits for ever for threads of its parent."""

from __future__ import annotations

import os

import pytest

from processes import in_a_process

CALLS = {
    "blhd": "[qkv.attention(*turned, layout='blhd') for _ in range(3)][2].transpose(1, 2)",
    "autocast": "in_bfloat16()",
    "negated": "qkv.attention(negated, key, value)",
    "array beside": "qkv.attention(learned, key.numpy(), value).detach()",
    "torch": "qkv.attention(query, key, value, backend='torch')",
    "inspect": "qkv.inspect(query, key, value).output",
}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("kind", list(CALLS))
def test_large_tensors_do_not_wait_for_threads_of_torch(kind: str) -> None:
    """An alarm ends a child that waits: copies and conversions of so many numbers are torch's."""
    printed = in_a_process(
        f"""
        import os, signal, torch, qkv
        torch.set_num_threads(2)
        query, key, value = torch.randn(3, 1, 8, 200, 64, generator=torch.manual_seed(0))
        turned = [x.transpose(1, 2).contiguous() for x in (query, key, value)]
        negated = torch.complex(query, -query).conj().imag
        learned = query.clone().requires_grad_()
        def in_bfloat16():
            with torch.autocast("cpu", torch.bfloat16):
                return qkv.attention(query, key, value)
        wide = [x.double() for x in (query, key, value)]
        expected = (wide[0] @ wide[1].mT / 8).softmax(-1) @ wide[2]
        if not os.fork():
            signal.alarm(150)
            found = {CALLS[kind]}
            # A few rows, since torch would wait; the bound is that of one rounding to bfloat16.
            error = float((found[:, :, ::70].double() - expected[:, :, ::70]).abs().max())
            bound = {0.03 if kind == "autocast" else 1e-5}
            print(error < bound, torch.get_num_threads(), flush=True)
            os._exit(0)
        os.wait()
        """
    )
    assert printed == "True 2\n"
