"""Where tensors of tests lie that are for a backend of a device."""

import os

DEVICE = "cuda" if os.environ.get("TRITON_INTERPRET") == "0" else "cpu"
"""`TRITON_INTERPRET=0 pytest` runs kernels for GPUs on a GPU, not in Triton's interpreter."""
