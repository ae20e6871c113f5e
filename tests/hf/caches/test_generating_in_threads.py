"""`generate` of transformers on forks of one prompt, each fork in a thread of its own."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

REASON = "the Hugging Face plug-in needs transformers: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from families import VOCABULARY, attending, model_of  # noqa: E402

import qkv.hf  # noqa: E402

qkv.hf.enable()

THREADS, TOKENS, PROMPT = 5, 10, 7


@pytest.fixture
def eager_switches() -> Any:
    """Threads of Python take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.slow
def test_each_thread_generates_what_it_does_alone(eager_switches: None) -> None:
    """Pages of two rows: the storage of every layer grows while other threads write to it."""
    torch.manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (THREADS, PROMPT + 2))
    ids[:, :PROMPT] = ids[:1, :PROMPT]
    found: dict[int, list[int]] = {}

    with attending(model_of("llama"), "qkv") as model, torch.no_grad():
        prompt = qkv.hf.Cache(model.config, page_size=2)
        model(input_ids=ids[:1, :PROMPT], cache=prompt)

        def generate(request: int, cache: Any) -> list[int]:
            with torch.no_grad():
                output = model.generate(
                    input_ids=ids[request : request + 1],
                    cache=cache,
                    max_new_tokens=TOKENS,
                    min_new_tokens=TOKENS,
                    do_sample=False,
                )
            return output[0].tolist()

        alone = [generate(n, None) for n in range(THREADS)]
        for _ in range(2):
            barrier = threading.Barrier(THREADS)

            def run(request: int, barrier: threading.Barrier = barrier) -> None:
                cache = prompt.fork()
                barrier.wait()
                found[request] = generate(request, cache)

            threads = [threading.Thread(target=run, args=(n,)) for n in range(THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert [found.pop(n, None) for n in range(THREADS)] == alone
