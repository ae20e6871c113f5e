"""65,536 tokens in a process of its own: bounded memory, and right where dense is possible."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

SCRIPT = """
import os, resource, sys
import numpy as np, qkv
n = 65_536
rng = np.random.default_rng(0)
q, k, v = (rng.normal(size=(n, 16)).astype(np.float32) for _ in range(3))
record = qkv.inspect(q, k, v)
entropy, (indices, weights) = record.entropy, record.top(8)
rows = np.array([0, 1, 511, 512, 40_000, n - 1])
scores = q[rows].astype(np.float64) @ k.T.astype(np.float64) / 4
dense = np.exp(scores - scores.max(1, keepdims=True))
dense /= dense.sum(1, keepdims=True)
order = np.argsort(-dense, axis=1)[:, :8]
assert (indices[rows] == order).all()
np.testing.assert_allclose(weights[rows], np.take_along_axis(dense, order, 1), rtol=2e-5)
np.testing.assert_allclose(entropy[rows], -(dense * np.log(dense)).sum(1), rtol=2e-6)
np.testing.assert_allclose(record.weights[rows[2]], dense[2], rtol=3e-5)
assert np.isfinite(entropy).all() and (indices >= 0).all()
if os.path.exists("/proc/self/status"):
    # On Linux ru_maxrss starts from the parent's pages: read the process's own high-water mark.
    with open("/proc/self/status") as status:
        (peak,) = (int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    print(peak / 1024)
else:
    unit = 2**20 if sys.platform == "darwin" else 2**10
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit)
"""


@pytest.mark.slow
@pytest.mark.large
def test_65536_tokens_stay_under_400_megabytes() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 400
    assert np.isfinite(float(done.stdout))
