"""One implementation's process: it builds a model, keeps its result, and runs it in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.models.rows import Row, row_of
from benchmarks.running.worker import answered, fall_asleep, serve

__all__ = ["Clock", "Worker", "clocked"]

_SPREAD = 1.2
"""Standard deviation of a product with unit inputs: wide enough that attention is not uniform."""


@dataclass(slots=True)
class Clock:
    """Where the time of one run went.

    Attributes
    ----------
    calls : list of (query rows, number of the module, beginning, seconds)
        Of the attention interface.
    products : list of (beginning, seconds)
        Of `torch.nn.Linear`.
    """

    calls: list[tuple[int, int, float, float]] = field(default_factory=list)
    products: list[tuple[float, float]] = field(default_factory=list)

    def parts(self, began: float, ended: float, *, steps: bool) -> dict[str, float]:
        """Seconds of the whole run, and of its parts.

        With `steps`, parts are those of decoding: what comes from the first call with one query
        row on. "interface" is the mean over modules of the median of their calls, since modules
        differ: self and cross attention, or layers with and without a window. "first layer" is
        that of the module that is called first. "products" and "outside" are the sums of matrix
        products and of all that is not in the interface.
        """
        found = {"total": ended - began}
        start = began
        if steps:
            start = next(at for rows, _, at, _ in self.calls if rows == 1)
            found["decoding"] = ended - start
        inside: dict[int, list[float]] = {}
        for _, module, at, seconds in self.calls:
            if at >= start:
                inside.setdefault(module, []).append(seconds)
        medians = [median(calls) for calls in inside.values()]
        found["interface"], found["first layer"] = mean(medians), medians[0]
        found["products"] = sum(seconds for at, seconds in self.products if at >= start)
        found["outside"] = ended - start - sum(map(sum, inside.values()))
        return found


@contextmanager
def clocked() -> Iterator[Clock]:
    """Time every call of the attention interface and of `torch.nn.Linear`."""
    import torch
    from transformers.modeling_utils import AttentionInterface

    clock = Clock()
    find, product = AttentionInterface.get_interface, torch.nn.Linear.forward

    def timed_interface(self: Any, *names: Any) -> Callable[..., Any]:
        attend = find(self, *names)

        def timed(module: Any, query: Any, *rest: Any, **inputs: Any) -> Any:
            began = time.perf_counter()
            result = attend(module, query, *rest, **inputs)
            seconds = time.perf_counter() - began
            clock.calls.append((query.shape[2], id(module), began, seconds))
            return result

        return timed

    def timed_product(self: Any, array: Any) -> Any:
        began = time.perf_counter()
        result = product(self, array)
        clock.products.append((began, time.perf_counter() - began))
        return result

    patched: Any = AttentionInterface
    layer: Any = torch.nn.Linear
    patched.get_interface, layer.forward = timed_interface, timed_product
    try:
        yield clock
    finally:
        patched.get_interface, layer.forward = find, product


class Worker:
    """The model of one row at a time, and the answers to messages."""

    def __init__(self) -> None:
        self._row: Row | None = None
        self._run: Callable[[], Any] = lambda: None

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one message; what goes wrong is an answer too."""
        tasks: dict[str, Callable[..., dict[str, Any]]] = {
            "prepare": self.prepare,
            "turn": self.turn,
        }
        return answered(tasks[message["do"]], message["with"])

    def prepare(self, row: str, implementation: str, threads: int, result: str) -> dict[str, Any]:
        """Build the model, run it once and write what came out to a file."""
        import torch
        import transformers

        import qkv.hf

        qkv.hf.enable()
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(threads)
        self._row = None
        gc.collect()
        what = row_of(row)
        self._run = _run(what, _model(what, implementation))
        np.savez(result, **_read(what, self._run()))
        self._row = what
        fall_asleep()
        return {"state": "ready", "detail": ""}

    def turn(self, seconds: float) -> dict[str, Any]:
        """Parts of the time of each run, after one that nobody times.

        "processor" is what all threads used of it, waiting in loops included.
        """
        what = self._row
        assert what is not None
        runs: list[dict[str, float]] = []
        self._run()
        gc.collect()
        until = time.perf_counter() + seconds
        while not runs or time.perf_counter() < until:
            with clocked() as clock:
                busy, began = time.process_time(), time.perf_counter()
                self._run()
                ended, worked = time.perf_counter(), time.process_time() - busy
            parts = clock.parts(began, ended, steps=what.does == "generate")
            runs.append({**parts, "processor": worked})
        fall_asleep()
        return {"runs": runs}


def _model(row: Row, implementation: str) -> Any:
    """The same weights in every process."""
    import torch
    import transformers

    torch.manual_seed(1)
    config = getattr(transformers, row.model.config)(**row.model.settings)
    config._attn_implementation = implementation
    model = getattr(transformers, row.model.model)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                fan_in = parameter.shape[-1] if "embed" not in name else 1
                parameter.normal_(0, _SPREAD / fan_in**0.5)
            elif "norm" not in name.lower():
                parameter.normal_(0, 0.5)
    return model.train(row.does == "train")


def _run(row: Row, model: Any) -> Callable[[], Any]:
    import torch

    draw = torch.Generator().manual_seed(2)
    tokens = torch.randint(2, row.model.settings["vocab_size"], (row.batch, row.length),
                           generator=draw)  # fmt: skip
    inputs = {"input_ids": tokens}
    if row.padded:
        starts = torch.arange(row.batch) * row.length // (2 * max(row.batch - 1, 1))
        inputs["attention_mask"] = (torch.arange(row.length) >= starts[:, None]).long()
    if row.does == "train":
        return lambda: _trained(model, inputs)
    passed = _generated if row.does == "generate" else _forward

    def run() -> Any:
        with torch.no_grad():
            return passed(row, model, inputs)

    return run


def _forward(row: Row, model: Any, inputs: dict[str, Any]) -> Any:
    return model(**inputs)


def _generated(row: Row, model: Any, inputs: dict[str, Any]) -> Any:
    import torch

    kept = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    return model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=kept,
        max_new_tokens=row.new,
        min_new_tokens=row.new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        disable_compile=True,
        **({"cache_implementation": "static"} if row.static else {}),
    )


def _trained(model: Any, inputs: dict[str, Any]) -> Any:
    model.zero_grad()
    result = model(**inputs, labels=inputs["input_ids"])
    result.loss.backward()
    return model


def _read(row: Row, result: Any) -> dict[str, Any]:
    """What is compared, by name; logits of generated tokens are (step, batch, vocabulary)."""
    if row.does == "train":
        return {
            name: parameter.grad.numpy()
            for name, parameter in result.named_parameters()
            if name.endswith(("q_proj.weight", "v_proj.weight"))
        }
    if row.does == "generate":
        logits = [step.float().numpy() for step in result.logits]
        return {"logits": np.stack(logits), "tokens": result.sequences[:, -row.new :].numpy()}
    out = result.logits if hasattr(result, "logits") else result.last_hidden_state
    return {"out": out.numpy()}


if __name__ == "__main__":
    serve(Worker().answer)
